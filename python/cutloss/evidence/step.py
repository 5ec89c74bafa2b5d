"""The train step of a point, as Tunix would compile it on the chips, with shapes in place of all arrays."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from . import baseline
from .points import MODELS, SCHEME_TILES, TINY, Point, topology


def devices(point: Point) -> list[Any]:
    """The point's chips, which need not be there: the compiler describes them."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology(point), platform="tpu").devices[: point.chips]


def mesh_of(point: Point, chips: list[Any]) -> Any:
    import jax
    import numpy as np

    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(np.array(chips).reshape(point.fsdp, point.tp), ("fsdp", "tp"), axis_types=auto)


def settings(point: Point) -> Any:
    """The settings of cutloss-sft that build the model. alpha is twice the rank, as published; it changes no shape."""
    from cutloss.sft import config

    tiny = point.model.startswith(TINY)
    model = {"family": point.model.removeprefix(TINY)} if tiny else {"name": MODELS[point.model].constructor}
    return config.from_dict(
        {
            "model": {**model, "dtype": point.dtype, "remat": point.remat},
            "lora": {"rank": point.rank, "alpha": 2.0 * point.rank},
            "train": {"batch": point.batch, "context": point.context, "steps": 1},
        }
    )


def build(point: Point, mesh: Any) -> Any:
    """Returns (a PeftTrainer with the arm's loss, its vocabulary), with shapes on the mesh in place of arrays."""
    import jax
    from flax import nnx

    from cutloss.sft import models, trainer

    config = settings(point)
    source = models.find(config.model)
    # The mesh comes last: the optimizer's zeros cannot be made on chips that are not there.
    made = trainer.build(_adapters_as_qwix_makes_them(models.abstract(source, config), point.dtype), config, None)
    state = nnx.state(made.model)

    def placed(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    nnx.update(made.model, jax.tree.map(placed, state, models.places(state, mesh)))
    trainer.forget_values(made, mesh)
    return with_arm(made, point), source.vocab


def _adapters_as_qwix_makes_them(model: Any, dtype: str) -> Any:
    """In the dtype of the weights: cutloss-sft keeps them in f32, Tunix alone does not."""
    import jax
    from flax import nnx

    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), adapters), rest)


def with_arm(made: Any, point: Point) -> Any:
    """Gives the trainer the arm's loss; Tunix's own is the one it has."""
    if point.arm == "default":
        return made
    if point.arm in SCHEME_TILES:
        return made.with_loss_fn(baseline.loss_fn(point.tiles or SCHEME_TILES[point.arm]))
    import cutloss.tunix

    tokens, ids = point.tiles or (None, None)
    return made.with_loss_fn(cutloss.tunix.loss_fn(token_chunk=tokens, vocab_chunk=ids, strict=True))


def example(point: Point, mesh: Any) -> dict[str, Any]:
    """The shapes of a batch, split as Tunix splits it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from cutloss.sft import fit

    place = NamedSharding(mesh, PartitionSpec("fsdp" if point.rows_are_split else None))
    shapes = fit.example(point.batch, point.context, None)
    return {name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place) for name, one in shapes.items()}


@contextlib.contextmanager
def as_if_there(chips: list[Any]):
    """Makes `jax.devices()` return the chips: Tunix places activations only if the first device is not a CPU, and
    cutloss sizes its tiles for the first device."""
    import jax

    real = jax.devices
    jax.devices = lambda *_: chips
    try:
        yield
    finally:
        jax.devices = real


@dataclass(frozen=True)
class Lowered:
    """A step before the compiler: JAX's lowered program, the vocabulary, and the seconds it took so far."""

    program: Any
    vocab: int
    seconds: dict[str, float]


def lower(point: Point) -> Lowered:
    """Returns the point's step, ready to be compiled for chips that are not there."""
    from flax import nnx

    chips = devices(point)
    mesh = mesh_of(point, chips)
    start = time.perf_counter()
    made, vocab = build(point, mesh)
    built = time.perf_counter()
    with mesh, as_if_there(chips) if point.split else contextlib.nullcontext():
        step = nnx.jit(made.create_train_step_fn(), donate_argnames=("optimizer",))
        program = step.lower(made.model, made.optimizer, example(point, mesh))
    return Lowered(program, vocab, {"build": round(built - start, 2), "lower": round(time.perf_counter() - built, 2)})
