"""Drop-in for Tunix: the default SFT loss of `PeftTrainer` without the tokens x vocabulary logits.

    import cutloss.tunix

    with cutloss.tunix.patched():                 # or install() / uninstall()
        trainer = PeftTrainer(model, optimizer, config)
        trainer.train(dataset)

Only the default loss changes. The model keeps returning its true logits, so generation, DPO and RL see no difference,
and a trainer that was given a loss with `with_loss_fn` keeps it. Supported models are listed in `adapters.py`; any
other is refused with `UnsupportedModelError`.

The loss is Tunix's own, to the last rule: on Tunix 0.1.7 that includes gradient accumulation by the mean of the
micro-batches' means, which weights a micro-batch of few targets like one of many. One thing differs: a target id outside
the vocabulary, of which Tunix makes a loss of 0, makes the loss NaN here. Importing this module does not import Tunix.
"""

from .adapters import UnsupportedModelError
from .patch import install, is_installed, patched, uninstall, with_cut_loss
from .selfcheck import SelfCheckError

__all__ = [
    "SelfCheckError",
    "UnsupportedModelError",
    "install",
    "is_installed",
    "patched",
    "uninstall",
    "with_cut_loss",
]
