"""Time and memory of cutloss beside other ways to compute the same loss: `python -m cutloss.bench --help`."""
