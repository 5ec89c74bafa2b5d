"""A point that is run, on the devices there are: seconds and memory of real steps, with random weights.

Planned memory is the compiler's word; this is the device's. A point counts as fitting only if every step ran: the first
may fit where the second, with the first one's results still there, does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import options as opts
from . import process, records, worker
from .points import Point

STEPS = 4


def add(commands: Any) -> None:
    command = commands.add_parser("run", help="one point on the devices there are: measured seconds and memory")
    opts.add_point(command)
    opts.add_run(command)
    command.set_defaults(run=main)


def main(options: argparse.Namespace, console: Any) -> int:
    from .display import in_words

    choice = {name: getattr(options, name) for name in ("arm", "batch", "context", "remat", "tiles")}
    point = opts.point_of(options, **choice)
    with records.Records(Path(options.out)) as store:
        record = store.find(f"run {point.key}")
        if record is None or (options.retry and record["outcome"] not in records.FINAL):
            with console.status(f"running {point.key}"):
                record = run(point, options.timeout, options.host_memory)
            store.add(record)
    if options.json:
        print(json.dumps(record))
    else:
        console.print(f"{record['key']}: {in_words(record)}", highlight=False, markup=False, soft_wrap=True)
    return 0 if record["outcome"] in records.FINAL else 1


def run(point: Point, timeout: float, host_bytes: int | None) -> dict[str, Any]:
    """The record of a point that was run in a process of its own."""
    found = process.run(point, timeout, host_bytes, [sys.executable, "-m", __name__], environment={})
    return {**found, "kind": "run", "key": f"run {point.key}", "command": point.command.replace(" plan ", " run ")}


def outcome_of(step: Callable[[int], float], steps: int = STEPS) -> dict[str, Any]:
    """Runs steps 1 to `steps`; returns the fields of a record, those of a refusal if any step does not fit."""
    taken = []
    for number in range(1, steps + 1):
        try:
            taken.append(step(number))
        except Exception as error:
            if not worker.is_out_of_memory(error):
                raise
            found = worker.refusal(str(error))
            return {**found, "message": f"step {number}: {found['message']}", "steps_done": number - 1}
    # The first step also fills caches; the median of the others is a step's time.
    seconds = {"first_step": round(taken[0], 4), "step": round(statistics.median(taken[1:] or taken), 4)}
    return {"outcome": "ok", "message": "", "seconds": seconds, "steps_done": steps}


def _run_here(point: Point) -> dict[str, Any]:
    import jax

    from . import step

    devices = jax.devices()[: point.chips]
    if len(devices) < point.chips:
        raise SystemExit(f"fsdp x tp: {point.chips} devices are wanted, there are {len(devices)}")
    mesh = step.mesh_of(point, devices)
    try:
        with mesh:
            one = _steps(point, mesh)
            found = outcome_of(one)
    except Exception as error:
        if not worker.is_out_of_memory(error):
            raise
        return worker.refusal(str(error))
    told = [device.memory_stats() or {} for device in devices]
    peaks = [one["peak_bytes_in_use"] for one in told if "peak_bytes_in_use" in one]
    return {**found, "device": devices[0].device_kind, "peak_bytes": max(peaks, default=None)}


def _steps(point: Point, mesh: Any) -> Callable[[int], float]:
    import jax
    import numpy as np
    from flax import nnx

    from cutloss.sft import models, trainer

    from . import step

    config = step.settings(point)
    source = models.find(config.model)
    made = step.with_arm(trainer.build(models.load(source, config, mesh), config, None), point)
    made._shard_optimizer(mesh)
    tokens = np.random.default_rng(0).integers(1, source.vocab, (point.batch, point.context)).astype(np.int32)
    shapes = step.example(point, mesh)
    values = {
        "input_tokens": tokens,
        "input_mask": np.ones(tokens.shape, bool),
        "positions": np.broadcast_to(np.arange(point.context, dtype=np.int32), tokens.shape),
        "attention_mask": np.broadcast_to(np.tril(np.ones((point.context,) * 2, bool)), (*tokens.shape, point.context)),
    }
    batch = {name: jax.device_put(value, shapes[name].sharding) for name, value in values.items()}
    train = nnx.jit(made.create_train_step_fn(), donate_argnames=("optimizer",))

    def one(_: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(train(made.model, made.optimizer, batch))
        return time.perf_counter() - start

    return one


def child() -> None:
    worker.end_with(int(sys.argv[3]))
    result = _run_here(Point.from_json(json.loads(sys.argv[1])))
    building = Path(sys.argv[2] + ".part")
    building.write_text(json.dumps(result))
    building.rename(sys.argv[2])


if __name__ == "__main__":
    child()
