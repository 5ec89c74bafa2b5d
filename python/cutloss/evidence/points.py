"""A point: one train step that can be compiled. Its key says all of it, and two points with one key are the same."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any


class PointError(ValueError):
    """A point cannot exist; the message names the field, its value, the limit and what to do."""


@dataclass(frozen=True)
class Model:
    """A model of Tunix's as it is fine-tuned here: bf16 weights, and the head's logits capped where the model caps them."""

    name: str
    constructor: str


# The names of tables. Tunix names some of them by what they were trained for; their shapes are the same.
MODELS = {
    "gemma3-270m": Model("Gemma 3 270M", "gemma3_270m"),
    "gemma3-1b": Model("Gemma 3 1B", "gemma3_1b_it"),
    "gemma3-4b": Model("Gemma 3 4B", "gemma3_4b_it"),
    "gemma3-12b": Model("Gemma 3 12B", "gemma3_12b_it"),
    "gemma3-27b": Model("Gemma 3 27B", "gemma3_27b_it"),
    "gemma4-e2b": Model("Gemma 4 E2B", "gemma4_e2b"),
    "gemma4-e4b": Model("Gemma 4 E4B", "gemma4_e4b"),
    "qwen3-0.6b": Model("Qwen3 0.6B", "qwen3_0p6b"),
}
TINY = "tiny-"  # and a family: a model of a few layers, for tests

ARMS = {
    "default": "Tunix's own loss: whole logits",
    "scheme": "chunks of 128 tokens x 8192 ids, recomputed (baseline.py)",
    "scheme-large": "chunks of 512 tokens x 65536 ids, recomputed",
    "cutloss": "cutloss, its own tiles",
}
SCHEME_TILES = {"scheme": (128, 8192), "scheme-large": (512, 65536)}
REMATS = ("NONE", "BLOCK", "DECODER")

# chip: (topology of the compiler by number of chips, HBM the compiler has in GiB, peak bf16 FLOP/s, HBM bytes/s,
# interchip bytes/s in one direction). Peaks are Google's published figures for the chips.
CHIPS = {
    "v5e": ({1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4"}, 15.75, 197e12, 819e9, 200e9),
    "v6e": ({1: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4"}, 31.25, 918e12, 1640e9, 448e9),
}
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Point:
    """
    Attributes:
        model: a key of MODELS, or "tiny-" and a family of cutloss.sft.
        arm: a key of ARMS.
        batch, context: rows over all chips, and tokens of a row.
        rank: of the adapters on attention and MLP.
        remat: Tunix's rematerialisation.
        chip: a key of CHIPS.
        fsdp, tp: chips along the axes of the mesh.
        dtype: of the weights.
        tiles: (tokens, ids) of the arm's tiles, where they are not its own choice.
        split: whether each chip is given its part of the batch only. False is how the report's meshes were run: under a
            mesh that Tunix does not see, every chip computes all rows.
    """

    model: str
    arm: str
    batch: int
    context: int
    rank: int = 16
    remat: str = "NONE"
    chip: str = "v5e"
    fsdp: int = 1
    tp: int = 1
    dtype: str = "bfloat16"
    tiles: tuple[int, int] | None = None
    split: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def chips(self) -> int:
        return self.fsdp * self.tp

    @property
    def mesh(self) -> str:
        return f"fsdp{self.fsdp}-tp{self.tp}"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def rows_are_split(self) -> bool:
        """Tunix gives every chip all rows where they cannot be divided."""
        return self.split and self.batch % self.fsdp == 0

    @property
    def key(self) -> str:
        parts = [self.model, self.arm, f"{self.batch}x{self.context}", f"r{self.rank}", self.remat, self.chip, self.mesh]
        parts += [] if self.dtype == DTYPES[0] else [self.dtype]
        parts += [] if self.tiles is None else ["tiles" + "x".join(map(str, self.tiles))]
        parts += [] if self.split else ["whole-batch"]
        return " ".join(parts)

    @property
    def command(self) -> str:
        """What plans this point again."""
        return "cutloss-evidence plan " + " ".join(arguments(self))

    def with_(self, **changes: Any) -> Point:
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Point:
        tiles = found.get("tiles")
        return cls(**{**found, "tiles": None if tiles is None else tuple(tiles)})


def arguments(point: Point) -> list[str]:
    """The point on the command line; what is as usual is left out."""
    usual = {f.name: f.default for f in dataclasses.fields(Point)}
    found = ["--model", point.model, "--arm", point.arm, "--batch", str(point.batch), "--context", str(point.context)]
    for name in ("rank", "remat", "chip", "fsdp", "tp", "dtype"):
        if getattr(point, name) != usual[name]:
            found += [f"--{name}", str(getattr(point, name))]
    found += [] if point.tiles is None else ["--tiles", "x".join(map(str, point.tiles))]
    return found + ([] if point.split else ["--whole-batch"])


def _check(point: Point) -> None:
    if point.model not in MODELS and not point.model.startswith(TINY):
        raise PointError(f"model: {point.model!r} is not one of {', '.join(MODELS)}")
    for name, known in (("arm", ARMS), ("remat", REMATS), ("chip", CHIPS), ("dtype", DTYPES)):
        if getattr(point, name) not in known:
            raise PointError(f"{name}: {getattr(point, name)!r} is not one of {', '.join(known)}")
    for name, least in (("batch", 1), ("context", 2), ("rank", 1), ("fsdp", 1), ("tp", 1)):
        if getattr(point, name) < least:
            raise PointError(f"{name}: {getattr(point, name)} is less than {least}")
    most = max(CHIPS[point.chip][0])
    if point.chips > most or most % point.chips:
        raise PointError(f"fsdp x tp: {point.chips} chips of {point.chip}; there is 1, 2, 4 and {most}")
    if point.tiles is not None and (point.arm == "default" or len(point.tiles) != 2 or min(point.tiles) < 1):
        raise PointError(f"tiles: {point.tiles!r} are two numbers from 1 on, for an arm that has tiles")


def tiles(text: str) -> tuple[int, int]:
    """Returns the tiles of "128x8192"; raises PointError."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise PointError(f"tiles: {text!r} is not TOKENSxIDS, such as 128x8192")
    return int(found[1]), int(found[2])


def topology(point: Point) -> str:
    """The compiler's name of the smallest slice that has the point's chips."""
    known = CHIPS[point.chip][0]
    return known[min(n for n in known if n >= point.chips)]
