"""Puts the loss into Tunix and takes it out again.

Two names of each trainer module change: `_default_loss_fn`, which `PeftTrainer.__init__` reads, and
`PeftTrainer.train`, which gains the checks. Everything is restored by `uninstall`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
import warnings
import weakref

from . import adapters, loss, meshes, selfcheck
from .settings import DATA_SHARDING_AXIS, Settings, read

# The second came after 0.1.7 and is a copy of the first with a default loss of its own.
MODULES = ("tunix.sft.peft_trainer", "tunix.experimental.train.peft_trainer_v2")

_lock = threading.RLock()
_originals: list[tuple[object, str, object]] = []  # (owner, name, value)
_installed: Settings | None = None
_checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_bodies = 0  # of `with patched()` that are open
_installed_by_body = False


def install(**options) -> None:
    """Makes cutloss the default loss of every `PeftTrainer` built from now on. A second call does nothing.

    Trainers that exist already keep their loss: `with_cut_loss` changes those. Subclasses that set a loss of their own
    (DPO, ORPO, distillation, RL) are not affected.

    Args:
        options: preset, token_chunk, vocab_chunk, budget, strict, mode, filter, ...: see `settings.read`.

    Raises:
        ValueError or TypeError: an option or a CUTLOSS_ variable is out of range.
        RuntimeError: it is installed with other options.
    """
    install_settings(read(**options))


def install_settings(settings: Settings) -> None:
    """`install` with the options read already."""
    global _installed
    with _lock:
        if settings.disabled:
            return
        if _installed is not None:
            if settings != _installed:
                raise RuntimeError(f"cutloss is installed with {_installed}, not {settings}: call uninstall() first")
            return
        for module in _trainer_modules():
            _replace(module, "_default_loss_fn", loss.make(settings))
            _replace(module.PeftTrainer, "train", _checking(module.PeftTrainer.train))
        _installed = settings


def uninstall() -> None:
    """Gives Tunix its own objects back. Trainers built meanwhile keep the loss they were built with."""
    global _installed
    with _lock:
        while _originals:
            setattr(*_originals.pop())
        _installed = None


def is_installed() -> bool:
    """Returns whether the patch is in place."""
    return _installed is not None


@contextlib.contextmanager
def patched(**options):
    """Installs for the body, then uninstalls, unless it was installed before. Build the trainer and train in the body.

    Bodies may nest or overlap, in one thread or several: the last to end uninstalls. A trainer built in the body and
    trained after it has the loss, but not the self-check. Options and errors are those of `install`.
    """
    global _bodies, _installed_by_body
    with _lock:
        was_installed = is_installed()
        install(**options)
        _installed_by_body = _installed_by_body or not was_installed
        _bodies += 1
    try:
        yield
    finally:
        with _lock:
            _bodies -= 1
            if _bodies == 0 and _installed_by_body:
                _installed_by_body = False
                uninstall()


def with_cut_loss(trainer, **options):
    """Gives one existing trainer the loss, checks it at once, and returns the trainer. Needs no installation.

    Options are those of `install`.

    Raises:
        UnsupportedModelError: with strict, or SelfCheckError: the trainer is left as it was.
    """
    settings = _as_split(trainer, read(**options))
    if settings.disabled:
        return trainer
    _check_once(trainer, settings)
    return trainer.with_loss_fn(loss.make(settings))


def _as_split(trainer, settings: Settings) -> Settings:
    """The settings with the trainer's own way to split the batch, unless another was asked for."""
    axis = getattr(trainer.config, "data_sharding_axis", DATA_SHARDING_AXIS)
    if settings.data_sharding_axis != DATA_SHARDING_AXIS or axis == DATA_SHARDING_AXIS:
        return settings
    return dataclasses.replace(settings, data_sharding_axis=tuple(axis))


def loss_fn(model=None, **options):
    """Returns the loss function, for `trainer.with_loss_fn(loss_fn(model))`; the same object for the same options.

    Args:
        model: if given, checked at once as `train` of an installed trainer does; without it nothing is checked.
        options: as for `install`.
    """
    settings = read(**options)
    if settings.disabled:
        return loss.tunix_loss()
    if model is not None:
        _check(model, settings)
    return loss.make(settings)


def original(owner, name):
    """Returns what `owner.name` is without cutloss."""
    with _lock:
        return next((value for o, n, value in _originals if o is owner and n == name), getattr(owner, name))


def _trainer_modules():
    yield importlib.import_module(MODULES[0])
    try:
        yield importlib.import_module(MODULES[1])
    except ImportError as error:
        if error.name is None or not f"{MODULES[1]}.".startswith(f"{error.name}."):  # there, but something it needs is not
            warnings.warn(
                f"{MODULES[1]} cannot be imported ({error}): its trainers keep their own loss. Install what it needs and "
                "install() again",
                loss.CutLossWarning,
                stacklevel=2,
            )


def _replace(owner, name, value) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _checking(train):
    @functools.wraps(train)
    def wrapper(self, *args, **kwargs):
        settings = getattr(self.loss_fn, "cutloss_settings", None)
        if settings is not None:
            own = _as_split(self, settings)
            if own != settings:
                for name in ("loss_fn", "eval_loss_fn"):
                    if getattr(self, name, None) is loss.make(settings):
                        setattr(self, name, loss.make(own))
            _check_once(self, own)
        return train(self, *args, **kwargs)

    return wrapper


def _check_once(trainer, settings: Settings) -> None:
    if _checked.get(trainer) != settings:
        _check(trainer.model, settings)
        _checked[trainer] = settings


def _check(model, settings: Settings) -> None:
    if why := meshes.unseen_mesh(model):
        warnings.warn(why, loss.CutLossWarning, stacklevel=4)
    try:
        selfcheck.check(model, loss.tunix_loss(), settings)
    except adapters.UnsupportedModelError as error:
        if settings.strict:
            raise
        loss.warn_dense(error)
