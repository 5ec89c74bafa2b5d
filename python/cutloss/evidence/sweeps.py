"""Which points each table has. What is published is at 2^k batches and contexts; the tables here start from the same."""

from __future__ import annotations

from collections.abc import Iterator

from .points import Point

COMPARED = ("default", "cutloss")


def _arms(arms: tuple[str, ...] | None) -> tuple[str, ...]:
    return COMPARED if arms is None else arms


def targets(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """What is looked at first: one shape on one chip, each arm, with and without rematerialisation."""
    for arm in arms or ("default", "cutloss", "scheme", "scheme-large"):
        for remat in ("NONE", "BLOCK", "DECODER") if arm in COMPARED else ("NONE",):
            yield Point("gemma3-270m", arm, 16, 512, remat=remat)


def pressure(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """The published pressure points on one chip, and past them: every arm at every shape up to where all fail."""
    for batch, contexts in ((16, (512, 1024, 2048, 4096)), (32, (512, 1024, 2048, 4096)), (64, (512, 1024, 2048, 4096)),
                            (4, (512, 1024, 2048, 4096)), (8, (256, 512, 1024, 2048))):  # fmt: skip
        for context in contexts:
            for arm in _arms(arms):
                yield Point("gemma3-270m", arm, batch, context)


def small(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """Shapes so small that a loss can only cost memory."""
    for fsdp, tp in ((1, 1), (1, 4), (2, 2)):
        for batch, context in ((1, 256), (1, 512), (2, 256)):
            for arm in _arms(arms):
                yield Point("gemma3-270m", arm, batch, context, fsdp=fsdp, tp=tp)


def rank(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    for batch, context in ((16, 512), (16, 1024), (32, 512), (32, 1024), (8, 1024), (8, 2048), (64, 512)):
        for r in (4, 8, 16, 32, 64):
            for arm in _arms(arms):
                yield Point("gemma3-270m", arm, batch, context, rank=r)


def chunks(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """The published tile sizes, in the published scheme and in cutloss."""
    for tokens in (64, 128, 256, 512):
        for ids in (4096, 8192, 16384, 32768, 65536):
            for arm in arms or ("cutloss", "scheme"):
                if arm != "default":
                    yield Point("gemma3-270m", arm, 16, 512, tiles=(tokens, ids))
    yield Point("gemma3-270m", "cutloss", 16, 512)


MESHES = ((4, 1), (2, 2), (1, 4))


def mesh(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """Four chips. Rows split over them as Tunix does it, and all on each, as the published ones were run."""
    for batch, context in ((16, 512), (16, 1024), (32, 512), (64, 512)):
        for fsdp, tp in MESHES:
            for arm in arms or ("default", "cutloss", "scheme"):
                for split in (True, False):
                    yield Point("gemma3-270m", arm, batch, context, fsdp=fsdp, tp=tp, split=split)


def hlo(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """The programs whose collectives are looked into: the mixed mesh on which the published scheme was slow, and its kin."""
    for fsdp, tp in MESHES:
        for arm in arms or ("default", "scheme", "scheme-large", "cutloss"):
            yield Point("gemma3-270m", arm, 16, 512, fsdp=fsdp, tp=tp)


# model: (fsdp, shapes that were published or lie past them)
TRANSFER = {
    "gemma3-1b": (4, ((8, 512), (8, 1024), (16, 512), (32, 256), (32, 512))),
    "gemma4-e2b": (4, ((4, 256), (4, 512), (8, 256), (8, 512))),
    "qwen3-0.6b": (1, ((4, 512), (4, 1024), (1, 2048), (1, 4096), (16, 256))),
    "gemma3-4b": (8, ((8, 512), (8, 1024), (16, 512))),
    "gemma4-e4b": (8, ((8, 256), (8, 512))),
    "gemma3-12b": (8, ((8, 256), (8, 512), (8, 1024))),
    "gemma3-27b": (8, ((8, 256), (8, 512))),
}


def transfer(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    for model, (fsdp, shapes) in TRANSFER.items():
        for batch, context in shapes:
            for remat in ("NONE", "BLOCK"):
                for arm in _arms(arms):
                    yield Point(model, arm, batch, context, remat=remat, fsdp=fsdp)


def published_batches(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    """The published shapes of the large models, whose rows are fewer than the chips: every chip computes them all."""
    for model, shapes in (("gemma3-4b", ((4, 512),)), ("gemma4-e4b", ((4, 512),)),
                          ("gemma3-12b", ((1, 1024), (2, 512), (4, 512))), ("gemma3-27b", ((1, 512), (1, 1024)))):
        for batch, context in shapes:
            for arm in _arms(arms):
                yield Point(model, arm, batch, context, fsdp=8, split=False)


def v6e(arms: tuple[str, ...] | None = None) -> Iterator[Point]:
    for batch, context in ((16, 512), (32, 1024), (64, 1024)):
        for arm in _arms(arms):
            yield Point("gemma3-270m", arm, batch, context, chip="v6e")


FIXED = {
    "targets": targets,
    "pressure": pressure,
    "small": small,
    "rank": rank,
    "chunks": chunks,
    "mesh": mesh,
    "hlo": hlo,
    "transfer": transfer,
    "published-batches": published_batches,
    "v6e": v6e,
}

ABOUT = {
    "targets": "the first look: 16 x 512 on one chip, each arm and rematerialisation",
    "pressure": "planned memory at the published pressure points, and past them",
    "small": "shapes so small that a loss can only cost memory",
    "rank": "adapters of rank 4 to 64",
    "chunks": "the tile sizes of the published scheme and of cutloss",
    "mesh": "four chips: rows split over them, and not",
    "hlo": "collectives in the programs of four chips",
    "transfer": "other models, on one, four and eight chips",
    "published-batches": "the published shapes with fewer rows than chips",
    "v6e": "another chip",
}


def points(name: str, arms: tuple[str, ...] | None = None, remats: tuple[str, ...] | None = None) -> list[Point]:
    """Returns the points of a sweep, none twice, those of the most important shapes first."""
    found = dict.fromkeys(FIXED[name](arms))
    if remats is not None:
        found = dict.fromkeys(point.with_(remat=remat) for point in found for remat in remats)
    return list(found)
