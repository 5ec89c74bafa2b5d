"""The report's words. What they say of numbers is computed from the records; the rest holds whatever the records are."""

from __future__ import annotations

from typing import Any

from . import cells, programs, published, sweeps, tables
from .points import Point

TITLE = "cutloss in whole train steps: what fits, and whether it trains the same"

METHOD = [
    "Planned memory is what the TPU's own compiler says of the whole train step that Tunix's `PeftTrainer` would run: LoRA "
    "adapters on attention and MLP, AdamW, bf16 weights. libtpu compiles it on a CPU, for chips that are not there, from "
    "shapes alone; no weights are read. A step that does not fit is refused by the compiler, as it would be on the chip.",
    "Total is what the compiler's memory report calls total bytes, the figure that the published study's tables have. A "
    "compilation is ended when that is known and within 95 % of the chip's memory; else the compiler decides. Nothing "
    "here was run on a TPU: seconds on a TPU are published figures or marked as estimates. Parity and quality are real "
    "training, of the real Gemma 3 270M, on a CPU.",
    "Arms: default is Tunix's own loss. scheme is the published one written anew from its description (chunks of 128 "
    "tokens x 8192 ids, recomputed for the gradient); scheme-large has 512 x 65536. cutloss is `cutloss.tunix` as "
    "installed, with nothing set. Remat is Tunix's own `remat_config`.",
]

MEANING = [
    "For someone who fine-tunes: where the logits are the wall, which is a large vocabulary, many tokens a chip, and few "
    "layers or rematerialised ones, the loss is what to change first; what rematerialisation saves beside whole logits is "
    "small against them. Where attention or weights are the wall (the table of walls names it), another "
    "loss changes little. Nothing here says that a step gets faster.",
]

_ABOUT = {
    "validation": [
        "If our figures for Tunix's own loss are the published ones, then planning without a TPU plans what a TPU does, and "
        "the other columns can be trusted.",
    ],
    "pressure": [
        "Why cutloss plans less than the published loss at the same shape: no padded and turned f32 copy of the table is "
        "kept, tiles of logits stay in on-chip memory, and what is saved for the gradient is one row of the hidden size a "
        "token. With BLOCK or DECODER rematerialisation the activations of the layers go as well, which dense logits "
        "would hide: then the loss is what is left.",
    ],
    "frontier": [
        "The published frontier was swept at powers of two and without rematerialisation. Columns with remat answer what "
        "the published study left open: how far the frontier moves once activations are made again instead of kept, which "
        "does not help while the logits are the wall.",
    ],
    "walls": [
        "Weights are a model's size and the same for every arm; the loss is what this library is about; attention and MLP are "
        "what a layer keeps for its gradient, and what BLOCK and DECODER rematerialisation give up; layers' inputs are what "
        "is kept even then.",
    ],
    "estimate": [
        "How good is it? Where the published runs took the time of the same step, the last column has it: the estimate of "
        "the default and of the scheme can be held against that. Of cutloss nothing was run on a TPU.",
    ],
    "mesh": [
        "The published runs set their mesh with `jax.set_mesh`, which Tunix does not look at: the batch was not split, each "
        "chip computed all rows, and a four-chip frontier equal to the one-chip frontier is what that looks like. Columns "
        "with 'whole batch a chip' plan that; the others plan the batch split over fsdp, for every arm alike, so that the "
        "default is given its due as well.",
    ],
    "hlo": [
        "Left to XLA, chunks of a sharded table are gathered again for every pair of a token chunk and an id chunk. That is "
        "the published mixed-mesh outlier (97 times slower, in proportion to the number of pairs). cutloss says where the "
        "table lies and gathers each tile once for each pass over the tokens, or not at all where ids are split.",
    ],
    "transfer": [
        "Published rows with fewer rows than chips could not be split; ours are of eight rows and more where the chips are "
        "eight. The published negative result at 12B and 27B is of whole batches on each chip.",
        "Gemma 4 caps its logits. The published loss looked for the cap where Gemma 2 has it, did not find it, and trained "
        "on other logits than the model's (its own records have losses of 1.28 and 1.61 for the same steps): planned "
        "memory can be compared, the losses cannot.",
    ],
}  # fmt: skip


def about(table: tables.Table) -> list[str]:
    return [*_ABOUT.get(table.name, []), *([table.note] if table.note else [])]


def summary(found: list[dict[str, Any]], made: list[tables.Table]) -> list[str]:
    """What was found, in sentences computed from the records."""
    plans = tables.plans(found)
    says = [_validated(made), _matched(plans), _opened(plans), _worse(plans), *_walls(plans), _parity(found), _missing(found)]
    return [*(one for one in says if one), *MEANING]


def _validated(made: list[tables.Table]) -> str:
    table = next((one for one in made if one.name == "validation"), None)
    if table is None:
        return ""
    differences = [float(row[-1].rstrip(" %")) for row in table.rows]
    worst = max(map(abs, differences))
    return (f"The method: Tunix's own loss was planned again at {len(differences)} of the published shapes; the largest "
            f"difference from what was published is {worst:.1f} %.")  # fmt: skip


def _pairs(plans: list) -> list[tuple[Point, float | None, float | None]]:
    """(shape, GiB of the default, GiB of cutloss) of the same shape; None where it does not fit."""
    by = {(p.with_(arm="cutloss"), p.arm): r for p, r in plans if p.tiles is None and r["outcome"] in ("ok", "out-of-memory")}
    both = [(p, by[p, "default"], by[p, "cutloss"]) for p, arm in by if arm == "cutloss" and (p, "default") in by]
    return [(p, *(cells.gib(r) if r["outcome"] == "ok" else None for r in two)) for p, *two in both]


def _matched(plans: list) -> str:
    known = [(p, a, b) for p, a, b in _pairs(plans) if a is not None and b is not None]
    if not known:
        return ""
    ratios = [(a / b, p, a, b) for p, a, b in known]
    most, least = max(ratios, key=lambda r: r[0]), min(ratios, key=lambda r: r[0])
    return (f"Same shape, both losses fit: {len(known)} shapes. The default plans {least[0]:.2f} to {most[0]:.2f} times the "
            f"memory of cutloss; the most at {_shape(most[1])}: {most[2]:.2f} and {most[3]:.2f} GiB a chip.")  # fmt: skip


def _opened(plans: list) -> str:
    opened = [p for p, a, b in _pairs(plans) if a is None and b is not None]
    if not opened:
        return ""
    shown = "; ".join(_shape(p) for p in opened[:10]) + (" ..." if len(opened) > 10 else "")
    return f"Shapes at which the default does not fit and cutloss does: {len(opened)}: {shown}."


def _worse(plans: list) -> str:
    pairs = [(p, a, b) for p, a, b in _pairs(plans) if a is not None]
    worse = [(p, a, b) for p, a, b in pairs if b is None or b > a]
    if not pairs:
        return ""
    if not worse:
        return f"No shape of the {len(pairs)} at which the default fits plans more with cutloss."
    shown = "; ".join(f"{_shape(p)}: {a:.2f} and {'no fit' if b is None else f'{b:.2f} GiB'}" for p, a, b in worse[:6])
    return f"Shapes at which cutloss plans more than the default: {len(worse)} of {len(pairs)}: {shown}."


def _walls(plans: list) -> list[str]:
    """What is most once the logits are gone, for each model and rematerialisation: at its largest shape that fits."""
    says = []
    largest: dict[tuple, tuple[Point, dict[str, Any]]] = {}
    for point, record in plans:
        usual = point.arm == "cutloss" and point.tiles is None and point.rank == 16
        if usual and record["outcome"] == "ok" and record["largest"]:
            key = (point.model, point.chips, point.chip, point.remat)
            if key not in largest or point.tokens > largest[key][0].tokens:
                largest[key] = (point, record)
    for point, record in largest.values():
        kinds = programs.by_kind(record)
        most = max(kinds, key=kinds.get)
        says.append(f"{_shape(point)}: {most}, {kinds[most] / cells.GIB:.2f} of {cells.gib(record):.2f} GiB")
    return [f"The next wall, what is most at the peak with cutloss: {'; '.join(says)}."] if says else []


def _missing(found: list[dict[str, Any]]) -> str:
    known = {one["key"] for one in found if one["kind"] == "plan"}
    wanted = {point.key for name in sweeps.FIXED for point in sweeps.points(name)}
    return (f"Of the {len(wanted)} points of the sweeps, {len(wanted & known)} are in these records; the tables say 'not run' "
            "of the others (an empty cell is in no sweep), and the last table has the commands that run them.")  # fmt: skip


def _shape(point: Point) -> str:
    chips = f"{point.chips} {point.chip}" + ("" if point.chips == 1 else f" ({point.mesh})")
    remat = "" if point.remat == "NONE" else f", {point.remat} remat"
    whole = "" if point.split else ", whole batch a chip"
    return f"{cells.model_name(point.model)} {point.batch} x {point.context} on {chips}{remat}{whole}"


def _parity(found: list[dict[str, Any]]) -> str:
    steps = [one for one in found if one["kind"] == "parity"]
    if not steps:
        return ""
    loss = max(abs(one["losses"]["cutloss"] - one["losses"]["default"]) for one in steps)
    cosine = min(one["cosine"] for one in steps)
    return (f"Parity: over {len(steps)} training steps of the real model the losses differ by {loss:.1e} at most, and the "
            f"cosine of the gradients is 1 - {1 - cosine:.1e} at least.")  # fmt: skip


def limits(found: list[dict[str, Any]]) -> list[str]:
    given_up = [one for one in found if one["outcome"] not in ("ok", "out-of-memory")]
    says = [
        "Nothing was timed on a TPU. Planned memory decides what fits; it says nothing about speed, and the estimates are "
        "lower bounds that rank arms.",
        "The compiler's version is libtpu's, not that of the published runs; a figure may move with it.",
        f"Published figures: {published.load()['title']!r}, {published.load()['repository']}. Its chunked loss was not run "
        "here: the scheme arms are ours, after its description.",
    ]
    if given_up:
        shown = "; ".join(f"{one['key']} ({one['outcome']})" for one in given_up[:8])
        says.append(f"Points that were given up or failed: {len(given_up)}: {shown}. `--retry` does them again.")
    return says


def made_with(found: list[dict[str, Any]]) -> str:
    versions = sorted({f"{name} {version}" for one in found for name, version in one["versions"].items()})
    dates = sorted(one["date"][:10] for one in found)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{len(found)} records, made {when} with {', '.join(versions)}."
