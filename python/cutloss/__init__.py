"""cutloss: the training loss of a language model's head, ``loss(E @ C.T, labels)``, and its gradients, without ever
storing the tokens x vocabulary logits.

``cutloss.linear_cross_entropy`` takes NumPy and DLPack arrays on CPU; ``cutloss.jax.linear_cross_entropy`` is the same
function for JAX programs. Importing this package imports neither JAX nor any other framework.
"""

from ._core import BudgetError, FilterReport, Plan, available_targets
from ._core import version as _version
from ._numpy import LossResult, learn_vocab_order, linear_cross_entropy

__version__: str = _version()
BudgetError.__module__ = "cutloss"

__all__ = ["BudgetError", "FilterReport", "LossResult", "Plan", "__version__", "available_targets", "learn_vocab_order",
           "linear_cross_entropy"]
