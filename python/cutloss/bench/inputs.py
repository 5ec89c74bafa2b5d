"""Hidden states, table and labels of a shape, as .npy files of f32: every process reads the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from . import reference
from .cases import Shape

FORMAT = 1  # of the files: raise it when they are made differently
ROW = 512  # tokens of a row of real text


def prepare(shape: Shape, folder: Path) -> dict[str, Path]:
    """Makes e.npy [N, D], c.npy [V, D] and labels.npy [N] unless they are there; returns their paths by name."""
    target = folder / f"{shape.name}-n{shape.n}-v{shape.v}-d{shape.d}-f{FORMAT}"
    if not target.is_dir():
        building = target.with_suffix(f".{os.getpid()}")
        building.mkdir(parents=True)
        try:
            if shape.real:
                # In a process of its own, whose gigabytes go back before anything is measured.
                code = "import sys; from cutloss.bench import inputs; inputs.write_real(sys.argv[1], int(sys.argv[2]))"
                command = [sys.executable, "-c", code, str(building), str(shape.n)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise RuntimeError(f"no hidden states for {shape.name}: {done.stderr.strip().splitlines()[-1:]}")
            else:
                write_random(building, shape)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return {name: target / f"{name}.npy" for name in ("e", "c", "labels")}


def write_random(folder: Path, shape: Shape) -> None:
    """Normal numbers; logits of variance 4 give a flat softmax, where a filter has nothing to drop."""
    rng = np.random.default_rng(0)
    np.save(folder / "e.npy", rng.standard_normal((shape.n, shape.d), np.float32))
    table = rng.standard_normal((shape.v, shape.d), np.float32)
    table *= np.float32(2 / np.sqrt(shape.d))
    np.save(folder / "c.npy", table)
    np.save(folder / "labels.npy", rng.integers(0, shape.v, shape.n))


def write_real(folder: str, tokens: int) -> None:
    """Gemma 3 270M on the system's English and French texts: what goes into its head, the head, the next tokens."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from cutloss.sft import data, gemma3
    from cutloss.tunix import adapters
    from cutloss.tunix.loss import tapped_call

    weights = gemma3.prepare()
    tokenizer = gemma3.load_tokenizer(weights)
    model = gemma3.load_model(weights)
    pairs, _ = data.load(None)
    text = "\n".join(f"{pair.source}\n{pair.target}" for pair in pairs)
    rows = -(-tokens // ROW)
    ids = np.array(tokenizer.encode(text[: 12 * (rows + 1) * ROW]), np.int32)  # a token is 3 to 5 characters
    if len(ids) < rows * ROW:
        raise ValueError(f"the catalogues give {len(ids)} tokens; --n {tokens} needs {rows * ROW}")

    @nnx.jit
    def hidden_states(model, row):
        positions = jnp.arange(ROW)[None]
        mask = jnp.tril(jnp.ones((1, ROW, ROW), bool))
        return tapped_call(model, (row, positions, None, mask), {})[0]

    states, labels = [], []
    for row in ids[: rows * ROW].reshape(rows, ROW):
        states.append(np.asarray(hidden_states(model, np.concatenate([[tokenizer.bos_id()], row[:-1]])[None]))[0])
        labels.append(row)
    head = adapters.read_head(model)
    if head.layout != "vd" or head.softcap is not None:
        raise ValueError("the head of Gemma 3 is expected to be [V, D] without softcap")
    np.save(Path(folder) / "e.npy", np.concatenate(states)[:tokens].astype(np.float32))
    np.save(Path(folder) / "c.npy", np.asarray(jax.device_get(head.weight)).astype(np.float32))
    np.save(Path(folder) / "labels.npy", np.concatenate(labels)[:tokens].astype(np.int64))


def reference_of(paths: dict[str, Path], dtype: str) -> reference.Reference:
    """The float64 answer for these inputs in `dtype`, kept beside them."""
    kept = paths["e"].parent / f"reference-{dtype}.npz"
    if not kept.exists():
        e, c = np.load(paths["e"]), np.load(paths["c"])
        if dtype == "bf16":
            import ml_dtypes

            e, c = e.astype(ml_dtypes.bfloat16), c.astype(ml_dtypes.bfloat16)
        building = kept.with_suffix(f".{os.getpid()}.npz")
        reference.compute(e, c, np.load(paths["labels"])).save(building)
        building.rename(kept)
    return reference.Reference.load(kept)
