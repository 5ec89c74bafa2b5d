"""Which way the XLA lowering goes to the gradients, the size of its tiles, and about how many bytes it takes beside
arguments and results: a pure function of the problem on one device, the kind of chip and the budget."""

from __future__ import annotations

from typing import NamedTuple

import jax

from .. import BudgetError
from . import _tiles
from ._gradients import MANY_TILES
from ._options import Extra, Options, Wants
from ._place import Place
from ._tiles import Tile

# Below this a ceiling on a tile's ids would cost more than the memory it saves: 512 bytes a token.
LEAST_IDS = 128
# A chunk reads and writes its logits and the f32 sum of the table's gradient, 8 bytes a number each: beside its three
# products, of chunks of R tokens and a hidden size of D, 4/3 (1/R + 1/D) bytes a flop. A v5e moves a byte in 240 flops.
CHUNK = 1024
LEAST_CHUNK = 128
# A gathered table that is read twice is kept, if it takes no more than this or, where one is given, fits the budget.
WHOLE_TABLE_BYTES = 512 << 20


class Problem(NamedTuple):
    """A device's part."""

    tokens: int
    hidden: int
    rows: int  # ids of the device's part of the table
    parts: int  # of the table that are gathered
    width: int  # bytes of a number of the table
    gathers: bool
    splits_tokens: bool
    soft: bool  # targets
    known: bool  # the softmax, from an earlier call
    chip: str

    @property
    def ids(self) -> int:
        return self.rows * self.parts

    @property
    def table_bytes(self) -> int:
        return self.ids * self.hidden * self.width


class Plan(NamedTuple):
    mode: str  # loss, stream, chunk, recompute
    tile: Tile  # ids: with those of the other parts that are gathered
    chunks: int  # of tokens, one after the other
    d_x_first: bool  # the gradient of x comes out of the first pass
    whole: bool  # the gathered table is kept
    bytes: int


def problem(options: Options, x: jax.Array, w: jax.Array, place: Place, extra: Extra, known: bool) -> Problem:
    ids, hidden = w.shape if options.head_layout == "vd" else w.shape[::-1]
    return Problem(x.shape[0], place.hidden(hidden), ids, place.parts, w.dtype.itemsize, place.gathers,
                   bool(place.token_axes), extra.soft_ids is not None, known, place.chip or _tiles.default_chip())


def make(options: Options, wants: Wants, p: Problem) -> Plan:
    """Raises BudgetError."""
    modes = _modes(options, wants, p)
    smallest = []
    for mode in modes:
        asked = len(modes) == 1
        for tile in _sizes(options, wants, p)[: None if asked or mode != "chunk" else 1]:
            plan = _plan(options, wants, p, mode, tile, asked)
            fits = plan.bytes <= options.budget if options.budget is not None else (
                mode != "chunk" or p.tokens <= plan.chunks * CHUNK)
            if fits:
                return _keeping_table(options, wants, p, plan)
        smallest.append(plan)
    least = min(smallest, key=lambda plan: plan.bytes)
    given = "without a budget" if options.budget is None else f"a budget of {options.budget} bytes"
    what = ("mode 'chunk' keeps the logits of all tokens of a device where a mesh splits them; " if least.mode == "chunk"
            and p.splits_tokens else "")
    raise BudgetError(f"the XLA lowering has no plan for {p.tokens} tokens x {p.ids} ids of {p.hidden} on a device with "
                      f"{given}: {what}mode '{least.mode}' takes about {least.bytes} bytes; give it budget={least.bytes}"
                      + (", or take mode 'recompute'" if least.mode == "chunk" else ""))


def _modes(options: Options, wants: Wants, p: Problem) -> tuple[str, ...]:
    """Those that may be taken, the fastest first."""
    if not any(wants):
        return ("loss",)
    filtered = options.filter_eps is not None
    # A stream needs the targets' rows of the table at its end: of gathered tiles one a token is kept as they come by, and
    # not the K of soft targets.
    if _streams(p) and not filtered and not wants.head and options.mode in ("auto", "stream"):
        return ("stream",)
    if options.mode == "recompute" or (p.known and not filtered):
        return ("recompute",)
    if options.mode == "chunk":
        return ("chunk",)
    return ("recompute",) if options.budget is None else ("chunk", "recompute")


def _streams(p: Problem) -> bool:
    return not (p.gathers and p.soft)


def _sizes(options: Options, wants: Wants, p: Problem) -> list[Tile]:
    """Of a tile, falling: the longer side is halved."""
    tile = _tiles.choose(p.tokens, p.hidden, p.chip)
    tile = Tile(options.tiles[0] or tile.tokens, options.tiles[1] or tile.ids)
    if options.filter_eps is not None and any(wants):  # whole chunks of ids
        return [tile._replace(ids=options.chunk_size * max(1, tile.ids // options.chunk_size))]
    sizes = [tile._replace(ids=min(tile.ids, max(options.chunk_size, LEAST_IDS)))]
    while max(sizes[-1]) > _tiles.LEAST_TOKENS:
        tokens, ids = sizes[-1]
        sizes.append(Tile(tokens, ids // 2) if ids >= tokens else Tile(tokens // 2, ids))
    return [Tile(tokens, max(8, ids // p.parts) * p.parts) for tokens, ids in sizes]


def _plan(options: Options, wants: Wants, p: Problem, mode: str, tile: Tile, asked: bool) -> Plan:
    if mode != "chunk":
        return Plan(mode, tile, 1, mode == "stream", False, _bytes(wants, p, mode, tile, p.tokens))
    first = wants.d_x and p.gathers and _streams(p)  # then the second pass needs no table
    # A sum of chunks over tokens that are elsewhere too would be exchanged for each.
    most = 1 if p.splits_tokens else -(-p.tokens // min(p.tokens, LEAST_CHUNK if asked else CHUNK))
    for chunks in range(1, most + 1):
        rows = -(-p.tokens // chunks)
        size = _bytes(wants, p, mode, tile, rows)
        if rows <= CHUNK if options.budget is None else size <= options.budget:
            break
    return Plan(mode, tile, chunks, first, False, size)


def _bytes(wants: Wants, p: Problem, mode: str, tile: Tile, rows: int) -> int:
    """rows: tokens that are worked on at a time, all but in mode chunk."""
    tokens, ids = min(tile.tokens, rows), min(tile.ids, p.ids)
    size = tokens * ids * (4 + p.width)  # logits, and their gradients as the next products take them
    size += ids * p.hidden * p.width if p.gathers else 0
    size += 4 * ids * p.hidden * (2 if rows > MANY_TILES * tile.tokens else 1) if wants.d_w else 0
    size += 4 * p.hidden * (tokens if mode == "stream" and not p.gathers else rows) if wants.d_x else 0
    size += 32 * p.tokens
    if mode == "chunk":
        size += 4 * rows * (-(-p.ids // ids) * ids)
        chunks = -(-p.tokens // rows)
        if chunks > 1 and wants.head:
            size += 4 * p.ids * (p.hidden * wants.d_w + wants.d_bias) * (2 if chunks > MANY_TILES else 1)
    return size


def _keeping_table(options: Options, wants: Wants, p: Problem, plan: Plan) -> Plan:
    if not p.gathers or passes(options, wants, p, plan) < 2:
        return plan
    room = WHOLE_TABLE_BYTES if options.budget is None else options.budget - plan.bytes
    return plan._replace(whole=True, bytes=plan.bytes + p.table_bytes) if p.table_bytes <= room else plan


def passes(options: Options, wants: Wants, p: Problem, plan: Plan) -> int:
    """How often a gathered table is read."""
    known = p.known and options.filter_eps is None
    first = 0 if known and plan.mode == "recompute" else 1
    second = plan.mode == "recompute" or (plan.mode == "chunk" and wants.d_x and not plan.d_x_first)
    return first + second + (0 if known else len({"rank", "mean_logits"} & options.metrics))
