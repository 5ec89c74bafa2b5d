"""Drop-in for Tunix: the default SFT loss of `PeftTrainer` without the tokens x vocabulary logits.

    import cutloss.tunix

    with cutloss.tunix.patched():                 # or install() / uninstall()
        trainer = PeftTrainer(model, optimizer, config)
        trainer.train(dataset)

Only the default loss changes. The model keeps returning its true logits, so generation, DPO and RL see no difference,
and a trainer that was given a loss with `with_loss_fn` keeps it. `docs/tunix.md` lists the models, settings and limits.
A model cutloss does not know trains with Tunix's own loss, with a warning, or is refused with strict=True.

The loss is Tunix's own, to the last rule: on Tunix 0.1.7 that includes gradient accumulation by the mean of the
micro-batches' means, which weights a micro-batch of few targets like one of many. One thing differs: a target id
outside the vocabulary, of which Tunix makes a loss of 0, makes the loss NaN here. Importing this module does not import Tunix.
"""

from .adapters import UnsupportedModelError
from .auto import autopatch
from .loss import CutLossWarning
from .patch import install, is_installed, loss_fn, patched, uninstall, with_cut_loss
from .selfcheck import SelfCheckError
from .settings import PRESETS, Settings

__all__ = [
    "PRESETS",
    "CutLossWarning",
    "SelfCheckError",
    "Settings",
    "UnsupportedModelError",
    "autopatch",
    "install",
    "is_installed",
    "loss_fn",
    "patched",
    "uninstall",
    "with_cut_loss",
]
