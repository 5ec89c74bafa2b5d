"""What a loss changes in whole train steps: planned memory by the TPU's own compiler on a CPU, parity and quality by training.

The command `cutloss-evidence` (cli.py) is the way in; docs/evidence.md says how to read what it writes. Data flows one way:
sweeps.py (which points) -> process.py (one process for each) -> worker.py (compiles one) -> records.py (one line for each)
-> tables.py and report.py. Nothing here is imported by the rest of the package.
"""
