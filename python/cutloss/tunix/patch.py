"""Puts the loss into Tunix and takes it out again.

Two names of `tunix.sft.peft_trainer` change: `_default_loss_fn`, which `PeftTrainer.__init__` reads, and
`PeftTrainer.train`, which gains the self-check. Everything is restored by `uninstall`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref

from . import selfcheck
from .loss import cut_loss_fn

_lock = threading.RLock()
_originals: dict[str, object] = {}
_checked: weakref.WeakSet = weakref.WeakSet()
_bodies = 0  # of `with patched()` that are open
_installed_by_body = False


def install() -> None:
    """Makes cutloss the default loss of every `PeftTrainer` built from now on. A second call does nothing.

    Trainers that exist already keep their loss: `with_cut_loss` changes those. Subclasses that set a loss of their own
    (DPO, ORPO, distillation, RL) are not affected.
    """
    from tunix.sft import peft_trainer

    with _lock:
        if _originals:
            return
        _originals["loss"] = peft_trainer._default_loss_fn
        _originals["train"] = peft_trainer.PeftTrainer.train
        peft_trainer._default_loss_fn = cut_loss_fn
        peft_trainer.PeftTrainer.train = _checking(peft_trainer.PeftTrainer.train)


def uninstall() -> None:
    """Gives Tunix its own objects back. Trainers built meanwhile keep the loss they were built with."""
    with _lock:
        if not _originals:
            return
        from tunix.sft import peft_trainer

        peft_trainer._default_loss_fn = _originals.pop("loss")
        peft_trainer.PeftTrainer.train = _originals.pop("train")


def is_installed() -> bool:
    """Returns whether the patch is in place."""
    return bool(_originals)


@contextlib.contextmanager
def patched():
    """Installs for the body, then uninstalls, unless it was installed before. Build the trainer and train in the body.

    Bodies may nest or overlap, in one thread or several: the last to end uninstalls. A trainer built in the body and
    trained after it has the loss, but not the self-check.
    """
    global _bodies, _installed_by_body
    with _lock:
        if not is_installed():
            install()
            _installed_by_body = True
        _bodies += 1
    try:
        yield
    finally:
        with _lock:
            _bodies -= 1
            if _bodies == 0 and _installed_by_body:
                _installed_by_body = False
                uninstall()


def with_cut_loss(trainer):
    """Gives one existing trainer the loss, checks it at once, and returns the trainer. Needs no installation.

    Raises:
        UnsupportedModelError, SelfCheckError: the trainer is left as it was.
    """
    _check_once(trainer)
    return trainer.with_loss_fn(cut_loss_fn)


def _checking(train):
    @functools.wraps(train)
    def wrapper(self, *args, **kwargs):
        if self.loss_fn is cut_loss_fn:
            _check_once(self)
        return train(self, *args, **kwargs)

    return wrapper


def _check_once(trainer) -> None:
    from tunix.sft import peft_trainer

    if trainer not in _checked:
        selfcheck.check(trainer.model, _originals.get("loss", peft_trainer._default_loss_fn))
        _checked.add(trainer)
