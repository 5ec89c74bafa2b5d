"""What batch and context fit a memory budget, found by compiling the train step. No weights are read, nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import models, run, trainer
from .config import Config, ConfigError

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Point:
    """One shape of a micro-batch, and what its train step plans on each device."""

    batch: int
    context: int
    planned_bytes: int
    fits: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.context


def frontier(
    config: Config, budget: int, batches: tuple[int, ...] = BATCHES, contexts: tuple[int, ...] = CONTEXTS
) -> Iterator[Point]:
    """Yields, for each batch, the largest of the contexts that fits, and the first that does not.

    Planned memory grows with both, so the search goes down the contexts as the batch grows: one compilation for each
    point that is yielded, at most len(batches) + len(contexts) of them.
    """
    plan = planner(config)
    batches = tuple(b for b in sorted(batches) if b % config.mesh.fsdp == 0)
    if not batches:
        raise ConfigError(f"--batches: none is a multiple of mesh.fsdp = {config.mesh.fsdp}")
    at = len(contexts) - 1
    contexts = tuple(sorted(contexts))
    for batch in batches:
        while at >= 0:
            planned = plan(batch, contexts[at])
            yield Point(batch, contexts[at], planned, planned <= budget)
            if planned <= budget:
                break
            at -= 1
        if at < 0:
            return


def planner(config: Config) -> Callable[[int, int], int]:
    """Returns a function (batch, context) -> bytes the whole train step plans on each device."""
    import contextlib

    trainer.check_tunix()
    source = models.find(config.model)
    mesh = run.make_mesh(config)

    def plan(batch: int, context: int) -> int:
        with mesh if mesh is not None else contextlib.nullcontext():
            model = models.abstract(source, config, mesh)
            made = trainer.build(model, dataclasses.replace(config, evaluation=type(config.evaluation)()), None)
            trainer.with_loss(made, config, check=False)
            trainer.forget_values(made, mesh)
            compiled = trainer.compile_step(made, example(batch, context, mesh, config.train.accumulation))
            return trainer.planned_bytes(compiled)

    return plan


def example(batch: int, context: int, mesh: Any, accumulation: int = 1) -> dict[str, Any]:
    """Returns the shapes of a batch as the step takes them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    split = {} if mesh is None else {"sharding": NamedSharding(mesh, PartitionSpec("fsdp"))}
    rows = (batch, context)
    shapes = {
        "input_tokens": jax.ShapeDtypeStruct(rows, jnp.int32, **split),
        "input_mask": jax.ShapeDtypeStruct(rows, jnp.bool_, **split),
        "positions": jax.ShapeDtypeStruct(rows, jnp.int32, **split),
        "attention_mask": jax.ShapeDtypeStruct((*rows, context), jnp.bool_, **split),
    }
    if accumulation > 1:
        whole = {} if mesh is None else {"sharding": NamedSharding(mesh, PartitionSpec())}
        shapes["share"] = jax.ShapeDtypeStruct((), jnp.float32, **whole)
    return shapes
