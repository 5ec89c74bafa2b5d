"""What gradient filters would keep and cost on a model's own hidden states: `cutloss analyze` from Python.

`analyze(e, c, labels)` measures arrays; `python -m cutloss.analysis` takes them from a model and draws the figures.
"""

from ._tool import AnalysisError, analyze

__all__ = ["AnalysisError", "analyze"]
