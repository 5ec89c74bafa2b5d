"""Which of the two lowerings a program runs. Both are in it where its platform may be either, and XLA takes its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from .. import BudgetError
from . import _ffi, _tiles
from ._options import Options


def is_for_cpu(options: Options, chip: str = "") -> bool:
    """Whether the C++ kernels run, as far as can be told while the program is traced. chip: of the mesh, if there is one."""
    if options.impl != "auto" or not _ffi.available():
        return options.impl == "cpu"
    return (chip or _tiles.default_chip()) == "cpu"


def either(options: Options, chip: str, kernels: Callable[..., Any], tiles: Callable[..., Any], *arguments: Any) -> Any:
    """kernels(options, *arguments) on CPU and tiles(options, *arguments) elsewhere. Limits are for the one that runs: where
    the other cannot keep them it does without."""
    if options.impl == "cpu":
        return kernels(options, *arguments)

    def limited(run: Callable[..., Any], here: bool, *arguments: Any) -> Any:
        try:
            return run(options, *arguments)
        except BudgetError:
            if here:
                raise
            return run(options._replace(mode="auto", budget=None), *arguments)

    cpu = is_for_cpu(options, chip)
    return lax.platform_dependent(*arguments, cpu=functools.partial(limited, kernels, cpu),
                                  default=functools.partial(limited, tiles, not cpu))
