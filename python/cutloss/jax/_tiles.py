"""The size of a tile of logits in the XLA lowering: pure functions of the problem and the kind of chip."""

from __future__ import annotations

from typing import NamedTuple

import jax

MIB = 1 << 20


class Tile(NamedTuple):
    tokens: int
    ids: int


# Bytes of memory on the chip in which XLA places arrays, per core, by jax.Device.device_kind.
ON_CHIP = {
    "TPU v2": 16 * MIB,
    "TPU v3": 16 * MIB,
    "TPU v4": 64 * MIB,  # CMEM
    "TPU v4 lite": 128 * MIB,  # CMEM
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
    "TPU7": 64 * MIB,
    "TPU7x": 64 * MIB,
}
# GPUs, whose caches are of this order, and programs that are lowered for another machine.
UNKNOWN = 64 * MIB

IDS = 4096
MOST_TOKENS = 2048  # each tile reads the table once: with 2048 tokens, at 2048 flops a byte of bf16, of which a v5e
LEAST_TOKENS = 128  # needs 240 to be busy


def choose(tokens: int, hidden: int, chip: str = "") -> Tile:
    """The tile with the most tokens whose f32 logits and f32 accumulator of x's gradient take half the chip's memory.

    XLA keeps those there, beside the next tiles of x and of the table; what does not fit it puts into main memory, a
    read and a write of the logits for each product. Seen in compiled programs of a head of 640: 2048 tokens (37 MiB)
    stay on a v5e and a v6e. On a v5p, two cores that share no such memory, the logits go through main memory for tiles of
    any size (128 to 1024 tokens were tried); there the size bounds what that takes, 25 MiB in all for 1024.
    """
    room = ON_CHIP.get(chip, UNKNOWN) // 2
    size = MOST_TOKENS
    while size > LEAST_TOKENS and (4 * size * (IDS + hidden) > room or size >= 2 * max(tokens, 1)):
        size //= 2
    return Tile(size, IDS)


def default_chip() -> str:
    """The chip that a program without a mesh is for, as far as can be told while it is traced."""
    return jax.devices()[0].device_kind
