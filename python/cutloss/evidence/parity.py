"""Dense and cutloss on the same weights, step by step: both losses, and how far the two gradients point the same way.

One trajectory: each step computes loss and adapter gradients by Tunix's own loss and by cutloss at the same weights and
on the same batch, records them, and updates the weights with the dense gradient. So each step compares the two alone,
where two runs would also compare what rounding did to the steps before.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from . import process, records

KEY = "parity {model} {dtype} b{batch}x{context} r{rank} lr{lr:g} seed{seed} {data} step {step}"


def add(commands: Any) -> None:
    command = commands.add_parser("parity", help="dense and cutloss on the real model: loss and gradients of each step")
    command.add_argument("--model-path", metavar="PATH", help="weights; none: those of cutloss-demo, Gemma 3 270M")
    command.add_argument("--model-family", metavar="NAME", help="a tiny random model of this family instead, for tests")
    command.add_argument("--data", metavar="FILE", help="pairs of texts; none: this system's French gettext catalogues")
    command.add_argument("--steps", type=int, default=32)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--context", type=int, default=128)
    command.add_argument("--rank", type=int, default=16)
    command.add_argument("--lr", type=float, default=2e-4)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    command.add_argument("--out", default="evidence/records.jsonl", metavar="FILE")
    command.add_argument("--state", metavar="FILE", help="weights and moments between steps (default: beside --out)")
    command.add_argument("--time-budget", type=float, metavar="SECONDS", help="begin no step after this")
    command.add_argument("--json", action="store_true", help="records as JSON lines on stdout")
    command.set_defaults(run=main)


def main(options: argparse.Namespace, console: Any) -> int:
    from rich.progress import Progress

    for name in ("steps", "batch", "rank"):
        if getattr(options, name) < 1:
            raise records.RecordsError(f"--{name}: {getattr(options, name)} is less than 1")
    with records.Records(Path(options.out)) as store, Progress(console=console, disable=not console.is_terminal) as bar:
        if all(store.find(_key(options, step)) for step in range(1, options.steps + 1)):
            return 0
        task = bar.add_task("parity", total=options.steps)
        start = time.monotonic()
        for record in _steps(options, store):
            bar.update(task, completed=record["step"])
            if options.json:
                print(json.dumps(record), flush=True)
            else:
                text = _in_words(record)
                console.print(text, highlight=False, markup=False, soft_wrap=True)
            if options.time_budget is not None and time.monotonic() - start > options.time_budget:
                return 3
    return 0


def _command(options: argparse.Namespace) -> str:
    names = ("steps", "batch", "context", "rank", "lr", "seed", "dtype")
    given = [f"--{name} {getattr(options, name)}" for name in names]
    given += [f"--{name.replace('_', '-')} {Path(value).name}" for name in ("model_path", "model_family", "data")
              if (value := getattr(options, name))]  # fmt: skip
    return " ".join(["cutloss-evidence parity", *given])


def _in_words(record: dict[str, Any]) -> str:
    a, b = record["losses"]["default"], record["losses"]["cutloss"]
    return f"{record['key']}: loss {a:.6f} and {b:.6f}, cosine 1 - {1 - record['cosine']:.1e}"


def _key(options: argparse.Namespace, step: int) -> str:
    model = f"tiny-{options.model_family}" if options.model_family else Path(options.model_path or "gemma3-270m").name
    given = {n: getattr(options, n) for n in ("dtype", "batch", "context", "rank", "lr", "seed")}
    return KEY.format(model=model, step=step, data=Path(options.data or "catalogues").name, **given)


def _steps(options: argparse.Namespace, store: records.Records):
    """Yields the record of each step that was not there, as it is made."""
    import jax

    config, model, batches = _prepare(options)
    compare, update, state = _programs(config, model)
    path = Path(options.state or Path(options.out).with_suffix(f".parity-{options.dtype}-{options.seed}.npz"))
    step, pending, state = _resumed(path, state, options)
    if pending is not None and store.find(pending["key"]) is None:
        store.add(pending)
        yield pending
    while step < options.steps:
        started = time.monotonic()
        both = compare(state[0], batches[step])
        record = _record(options, step + 1, jax.device_get(both), time.monotonic() - started)
        state = update(state, both["default"][1])
        step += 1
        known = store.find(record["key"]) is not None
        # First the weights with the record in them: after a kill in between, the record is written from there.
        _save(path, step, state, None if known else record, options)
        if not known:
            store.add(record)
            yield record


def _prepare(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    from cutloss.sft import config as configuration
    from cutloss.sft import data, models

    settings = [f"lora.rank={options.rank}", f"train.batch={options.batch}", f"train.context={options.context}",
                f"train.steps={options.steps}", f"train.seed={options.seed}", f"train.lr={options.lr}",
                f"model.dtype={options.dtype}"]  # fmt: skip
    if options.model_family:
        settings.append(f"model.family={options.model_family}")
    else:
        settings.append(f"model.path={options.model_path or _demo_weights()}")
    config = configuration.load(None, settings)
    source = models.find(config.model)
    pairs, _ = data.load(Path(options.data) if options.data else None)
    training, _ = data.split(pairs, config.data.held_out_one_in)
    tokenizer = models.load_tokenizer(source)
    batches, _ = data.batches(
        training, tokenizer, steps=options.steps, seed=options.seed, batch=options.batch, context=options.context
    )
    return config, models.load(source, config), batches


def _demo_weights() -> Path:
    from cutloss.sft import gemma3

    return gemma3.prepare()


def _programs(config: Any, model: Any) -> tuple[Any, Any, Any]:
    """(program that compares, program that updates, (adapters, the optimizer's state))."""
    import jax
    from flax import nnx

    import cutloss.tunix
    from cutloss.sft import models, trainer
    from cutloss.tunix import loss

    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    optimizer = trainer.optimizer(config.train)
    losses = {"default": loss.tunix_loss(), "cutloss": cutloss.tunix.loss_fn(strict=True)}

    @jax.jit
    def compare(adapters, rest, batch):
        def of(loss_fn):
            def value(adapters):
                return loss.as_scalar(loss_fn(models.as_run(nnx.merge(graph, adapters, rest), config), **batch))

            return jax.value_and_grad(value)(adapters)

        return {name: of(loss_fn) for name, loss_fn in losses.items()}

    @jax.jit
    def update(state, gradient):
        adapters, moments = state
        change, moments = optimizer.update(gradient, moments, adapters)
        return jax.tree.map(lambda a, c: a + c, adapters, change), moments

    return lambda state, batch: compare(state, rest, batch), update, (adapters, optimizer.init(adapters))


def _record(options: argparse.Namespace, step: int, both: Any, seconds: float) -> dict[str, Any]:
    import numpy as np

    flat = {name: _flat(gradient) for name, (_, gradient) in both.items()}
    a, b = flat["default"], flat["cutloss"]
    norms = {name: float(np.linalg.norm(value)) for name, value in flat.items()}
    return {
        "format": records.FORMAT,
        "kind": "parity",
        "key": _key(options, step),
        "step": step,
        "outcome": "ok",
        "message": "",
        "losses": {name: float(value) for name, (value, _) in both.items()},
        "norms": norms,
        "cosine": cosine(a, b),
        "relative_difference": float(np.linalg.norm(a - b) / norms["default"]) if norms["default"] else 0.0,
        "seconds": {"total": round(seconds, 2)},
        "versions": process.versions(),
        "date": process.now(),
        "command": _command(options),
    }


def cosine(a: Any, b: Any) -> float:
    """Of two vectors, in float64; 1 for two zeros, 0 if one is."""
    import numpy as np

    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    if lengths == 0:
        return float(np.linalg.norm(a) == np.linalg.norm(b))
    return float(a @ b / lengths)


def _flat(tree: Any) -> Any:
    import jax
    import numpy as np

    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


# ---- between steps ---------------------------------------------------------------------------------------------------


def _save(path: Path, step: int, state: Any, record: dict[str, Any] | None, options: argparse.Namespace) -> None:
    import jax
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    told = json.dumps({"step": step, "of": _key(options, 0), "record": record})
    building = path.with_suffix(".part")
    with building.open("wb") as file:
        np.savez(file, told=np.array(told), **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)})
        file.flush()
        os.fsync(file.fileno())
    building.rename(path)


def _resumed(path: Path, state: Any, options: argparse.Namespace) -> tuple[int, dict[str, Any] | None, Any]:
    """(steps that are done, the record of the last, the state after it), or the beginning."""
    import jax
    import numpy as np

    if not path.is_file():
        return 0, None, state
    leaves, shape = jax.tree.flatten(state)
    with np.load(path, allow_pickle=False) as saved:
        told = json.loads(str(saved["told"]))
        if told["of"] != _key(options, 0):
            raise records.RecordsError(f"{path}: it is of {told['of']!r}, not {_key(options, 0)!r}; name another --state")
        kept = [jax.numpy.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
    return told["step"], told["record"], jax.tree.unflatten(shape, kept)
