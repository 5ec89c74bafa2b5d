"""Installs the patch when, and only when, Tunix's trainer is imported; only for those who call `autopatch`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

from . import patch, settings


def autopatch() -> bool:
    """Installs the patch if the environment variable CUTLOSS_AUTOPATCH is 1; returns whether it is.

    For a place that runs before the program, such as `sitecustomize.py` or a launcher: Tunix is not imported by this
    call. If its trainer is imported already the patch is installed now, else as soon as it is. Unset or 0: nothing.

    Raises:
        ValueError or TypeError: a CUTLOSS_ variable has a value it cannot have.
    """
    if not settings.switch("CUTLOSS_AUTOPATCH"):
        return False
    chosen = settings.read()
    if patch.MODULES[0] in sys.modules:
        patch.install_settings(chosen)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(chosen))
    return not chosen.disabled


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Tunix's trainer where Python would, with a loader that installs after it has loaded."""

    def __init__(self, chosen: settings.Settings):
        self.chosen = chosen

    def find_spec(self, name, path, target=None):
        if name != patch.MODULES[0]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self.chosen)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, chosen: settings.Settings):
        self.loader, self.chosen = loader, chosen

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        patch.install_settings(self.chosen)
