"""What a user can choose about the Tunix loss, by argument or by environment variable. A bad value is an error."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .. import _check

#: Tile sizes of the XLA lowering as (tokens, vocabulary ids); None leaves the size to cutloss.
PRESETS = {
    "auto": (None, None),
    "default": (128, 8192),
    "portable": (128, 8192),
    "tpu_large_chunks": (512, 65536),
}
_LARGEST_TILE = 2**31 - 8
DATA_SHARDING_AXIS = ("fsdp",)  # the default of TrainingConfig.data_sharding_axis


@dataclass(frozen=True)
class Settings:
    """How the loss is computed; hashable. `read` makes one out of arguments and the environment.

    Attributes:
        token_chunk: tokens of a tile of logits on TPU and GPU, a multiple of 8, or None. On CPU the C++ kernels' own
            plan decides.
        vocab_chunk: vocabulary ids of such a tile, or None.
        budget: bytes of workspace, or None.
        mode: as in cutloss.jax.
        filter, tolerance, epsilon: of the C++ kernels, as in cutloss.linear_cross_entropy. The random numbers of
            filter "unbiased" follow from the batch's tokens: other ones for each batch, the same in a second run.
        strict: raise UnsupportedModelError where cutloss would else warn and use the model's own loss.
        disabled: change nothing anywhere.
        data_sharding_axis: how Tunix splits the batch, one entry for each of its dimensions: an axis of the mesh, a tuple
            of them, or None.
    """

    token_chunk: int | None = None
    vocab_chunk: int | None = None
    budget: int | None = None
    mode: str = "auto"
    filter: str | None = None
    tolerance: float | None = None
    epsilon: float | None = None
    strict: bool = False
    disabled: bool = False
    data_sharding_axis: tuple = DATA_SHARDING_AXIS


def read(
    preset: str | None = None,
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
    budget: int | str | None = None,
    strict: bool | None = None,
    mode: str = "auto",
    filter: str | None = None,
    tolerance: float | None = None,
    epsilon: float | None = None,
    data_sharding_axis: tuple | None = None,
) -> Settings:
    """Returns the settings of these arguments; for each that is None, of the environment.

    Args:
        preset: a name from PRESETS, else CUTLOSS_PRESET, else "auto".
        token_chunk, vocab_chunk: else CUTLOSS_TOKEN_CHUNK and CUTLOSS_VOCAB_CHUNK, else what the preset says.
        budget: bytes, or text such as "256MiB"; else CUTLOSS_BUDGET.
        strict: else CUTLOSS_STRICT, else False.
        mode, filter, tolerance, epsilon: by argument only.
        data_sharding_axis: as in the trainer's TrainingConfig; an installed trainer's own is used without it.

    Raises:
        ValueError or TypeError naming the argument or variable, its value, and what is wanted.
    """
    if preset is None:
        name, preset = "CUTLOSS_PRESET", os.environ.get("CUTLOSS_PRESET") or "auto"
    else:
        name = "preset"
    tokens, ids = PRESETS[_check.one_of(name, preset, tuple(PRESETS))]
    return Settings(
        token_chunk=_chunk("token_chunk", token_chunk, tokens, multiple=8),
        vocab_chunk=_chunk("vocab_chunk", vocab_chunk, ids, multiple=1),
        budget=_budget(budget),
        mode=_check.mode(mode),
        filter=_check.filter_name(filter),
        tolerance=_check.optional_number("tolerance", tolerance),
        epsilon=_check.optional_number("epsilon", epsilon),
        strict=switch("CUTLOSS_STRICT") if strict is None else strict,
        disabled=switch("CUTLOSS_DISABLE"),
        data_sharding_axis=DATA_SHARDING_AXIS if data_sharding_axis is None else tuple(data_sharding_axis),
    )


def switch(variable: str) -> bool:
    """Returns whether an environment variable is 1; unset, empty and 0 are False, anything else is a ValueError."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: {value!r} is neither 0 nor 1")
    return value == "1"


def _budget(value: int | str | None) -> int | None:
    if value is not None:
        return _check.budget(value)
    try:
        return _check.budget(os.environ.get("CUTLOSS_BUDGET") or None)
    except ValueError as error:
        raise ValueError(f"CUTLOSS_BUDGET: {str(error).removeprefix('budget: ')}") from None


def _chunk(name: str, value: int | None, from_preset: int | None, multiple: int) -> int | None:
    if value is None:
        variable = f"CUTLOSS_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            return from_preset
        name = variable
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{variable}: {text!r} is not an integer") from None
    value = _check.integer(name, value, multiple, _LARGEST_TILE)
    if value % multiple:
        raise ValueError(f"{name}: {value} is not a multiple of {multiple}, the rows XLA handles at a time")
    return value
