"""One fine-tuning run, from its settings to the trained adapters: what `cutloss-sft train` and each arm of the demo do."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import config as configuration
from . import adapter, curves, data, folder, generation, models, trainer
from .config import Config, ConfigError

Emit = Callable[..., None]


def run(config: Config, out: Path, emit: Emit) -> dict[str, Any]:
    """Runs, or goes on with, the run in the folder `out`; returns its summary.

    `emit(event, **fields)` is called as it goes along: phase, resumed, data, model, compiled, step, evaluated, trained,
    generated, quality, finished. All of them but phase are also in metrics.jsonl.

    Raises:
        ConfigError or data.DataError: a setting, a file or the data cannot be used; no step was taken.
        trainer.Stopped: a loss is not finite.
    """
    trainer.check_tunix()
    source = models.find(config.model)
    if config.generation.quality:
        generation.check_sacrebleu()
    place = folder.RunFolder(out, config)
    try:
        done = place.summary()
        if done is not None and done["steps"] >= config.train.steps:
            emit("finished", **done)
            return done
        made = _Run(config, source, place, emit)
        try:
            return made.all()
        finally:
            if made.curves is not None:
                made.curves.close()
    finally:
        place.close()


class _Run:
    def __init__(self, config: Config, source: models.Source, place: folder.RunFolder, emit: Emit) -> None:
        self.config, self.source, self.place = config, source, place
        self.show, self.emit = emit, place.recorder(emit, self.draw)
        self.curves: curves.Curves | None = None

    def draw(self, event: dict[str, Any]) -> None:
        if self.curves is not None:
            self.curves.take(event)

    def all(self) -> dict[str, Any]:
        self.show("phase", name="loading")
        self.tokenizer = models.load_tokenizer(self.source)
        self.read_data()
        self.check_vocabulary()
        mesh = make_mesh(self.config)
        with mesh if mesh is not None else contextlib.nullcontext():
            self.model = models.load(self.source, self.config, mesh)
            before = self.answers("before")
            summary = self.train()
            after = self.answers("after", fresh=True)
        summary.update(self.judge(before, after))
        folder.write(self.place.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        self.emit("finished", **summary)
        return summary

    def read_data(self) -> None:
        settings, train = self.config.data, self.config.train
        training, self.held_out, self.whence = data.of(settings)
        sizes = {"batch": train.batch, "context": train.context, "template": settings.prompt}
        self.batches, self.dropped = data.batches(
            training,
            self.tokenizer,
            steps=train.steps,
            seed=train.seed,
            accumulation=train.accumulation,
            **sizes,
        )
        self.training = len(training)
        self.held_out_batches = None
        if self.config.evaluation.every:
            count = self.config.evaluation.batches
            self.held_out_batches = data.held_out_batches(self.held_out, self.tokenizer, count=count, **sizes)
            if not self.held_out_batches:
                raise data.DataError(
                    f"evaluation: {len(self.held_out)} held-out pairs do not fill a batch of {train.batch} rows; hold out "
                    "more with a smaller data.held_out_one_in, or set evaluation.every=0"
                )

    def check_vocabulary(self) -> None:
        """The head may have rows no text uses; a token without a row would be read from another's."""
        rows = self.source.vocab
        examples = [*self.batches.examples, *(self.held_out_batches.examples if self.held_out_batches else ())]
        unknown = data.unknown_ids(examples, rows)
        if unknown:
            shown = ", ".join(map(str, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
            raise ConfigError(
                f"model.tokenizer: it has {self.tokenizer.vocab_size()} ids and the model's head {rows} rows; the data "
                f"uses {len(unknown)} ids without one: {shown}. Use the tokenizer the model was trained with"
            )

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        config = self.config
        made = trainer.build(self.model, config, self.place.checkpoints)
        first = made.train_steps
        before = self.place.rewind(first)
        self.curves = curves.Curves(self.place.path / "tensorboard", before)
        if first:
            self.emit("resumed", step=first)
        self.describe()
        with _shown_warnings(self.emit):
            trainer.with_loss(made, config)
        trainer.measure(made, self.compiled, self.step)
        made.with_training_hooks(_hooks(self))
        # Of a run that was killed after its last checkpoint no step is left to take: they are known from then.
        self.planned = next((e["planned_bytes"] for e in reversed(before) if e["event"] == "compiled"), None)
        self.losses = [e["loss"] for e in before if e["event"] == "step"]
        evaluated = any(e["event"] == "evaluated" and e["step"] == first for e in before)
        due = config.evaluation.every and first % config.evaluation.every == 0 and not evaluated
        self.show("phase", name="compiling")
        trainer.train(made, self.batches, self.held_out_batches, evaluate_now=bool(due))
        self.emit("trained", step=made.train_steps, peak_rss_bytes=peak_rss_bytes())
        state, digest = adapter.of(self.model)
        adapter.save(self.place.path / "adapter.safetensors", state, config, self.source)
        return {
            "steps": made.train_steps,
            "loss": self.losses[-1] if self.losses else None,
            "sha256": digest,
            "planned_bytes": self.planned,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def describe(self) -> None:
        import jax
        from flax import nnx

        def count(*kind):
            return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, *kind)))

        self.emit(
            "data",
            source=self.whence,
            training=self.training,
            held_out=len(self.held_out),
            dropped=self.dropped,
            digest=data.digest(self.batches),
            targets=[self.batches.targets(i) for i in range(min(64, len(self.batches)))],
        )
        self.emit(
            "model",
            family=self.source.family,
            vocab=self.source.vocab,
            parameters=count(),
            trained=count(models.trained(self.model)),
            devices=self.config.mesh.fsdp * self.config.mesh.tp,
        )

    def compiled(self, program: Any, seconds: float) -> None:
        from . import hlo

        self.planned = trainer.planned_bytes(program)
        devices = self.config.mesh.fsdp * self.config.mesh.tp
        logits = {}
        if self.source.vocab >= 4096 and devices == 1:  # in smaller models other arrays have such extents too
            logits = hlo.logit_arrays(program.as_text(), vocab=self.source.vocab)
        self.emit("compiled", seconds=seconds, planned_bytes=self.planned, logit_arrays=logits)
        if self.config.loss.arm == "cutloss" and logits and self.config.lora.rank:
            raise RuntimeError(f"the compiled step holds logits of many tokens: {', '.join(logits)}")
        self.show("phase", name="training")

    def step(self, step: int, losses: list[float], grad_norm: float, seconds: float) -> None:
        loss = sum(losses) / len(losses)
        self.losses.append(loss)
        self.emit(
            "step",
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=trainer.learning_rate(self.config.train, step),
            seconds=seconds,
        )

    def evaluated(self, step: int, loss: float) -> None:
        self.emit("evaluated", step=step, loss=loss, perplexity=math.exp(min(loss, 700.0)))

    # ---- answers -----------------------------------------------------------------------------------------------------

    def answers(self, when: str, fresh: bool = False) -> list[dict[str, str]]:
        """The model's answers to held-out prompts; those from before training are kept over a resumption."""
        path = self.place.path / f"{when}.jsonl"
        if not self.config.generation.prompts:
            return []
        pairs = generation.prompts(self.held_out, self.config, self.tokenizer)
        if not pairs:
            raise data.DataError("generation.prompts: no held-out prompt fits the context; raise train.context")
        kept = folder.read_lines(path) if path.is_file() and not fresh else []
        if [record["source"] for record in kept] == [pair.source for pair in pairs]:
            return kept
        self.show("phase", name=f"answering {len(pairs)} prompts")
        model = models.as_run(self.model, self.config)
        made = generation.records(pairs, generation.answers(model, self.tokenizer, pairs, self.config))
        folder.write_lines(path, made)
        return made

    def judge(self, before: list[dict[str, str]], after: list[dict[str, str]]) -> dict[str, Any]:
        if not after:
            return {}
        first = {**after[0], "before": before[0]["answer"], "after": after[0]["answer"]}
        del first["answer"]
        self.emit("generated", **first)
        if not self.config.generation.quality:
            return {}
        found = {"before": generation.quality(before), "after": generation.quality(after)}
        self.emit("quality", **found)
        return {"quality": found}


# ---- pieces ----------------------------------------------------------------------------------------------------------


def make_mesh(config: Config) -> Any:
    """Returns the mesh, or None for one device; raises ConfigError if there are too few devices."""
    import jax

    sizes = (config.mesh.fsdp, config.mesh.tp)
    count = math.prod(sizes)
    if count == 1:
        return None
    devices = jax.devices()
    if count > len(devices):
        hint = "; on CPU set JAX_NUM_CPU_DEVICES" if devices[0].platform == "cpu" else ""
        raise ConfigError(f"mesh: fsdp {sizes[0]} x tp {sizes[1]} needs {count} devices, there are {len(devices)}{hint}")
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(sizes, ("fsdp", "tp"), axis_types=auto, devices=devices[:count])


def settings(path: Path) -> tuple[Config, models.Source]:
    """Returns the settings of the run in the folder `path`, and where its model came from; raises ConfigError."""
    config = _config(path)
    return config, models.find(config.model)


def _config(path: Path) -> Config:
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no run; there is no config.json")
    return configuration.from_dict(json.loads(file.read_text()))


def answer(path: Path, texts: list[str]) -> list[str]:
    """Returns what the finished run in the folder `path` answers to source texts; raises ConfigError."""
    config, source, model = finished(path)
    adapter.load(model, path / "adapter.safetensors", config.lora)
    pairs = [data.Pair(text, "") for text in texts]
    return generation.answers(models.as_run(model, config), models.load_tokenizer(source), pairs, config)


def finished(path: Path) -> tuple[Config, models.Source, Any]:
    """Returns (settings, source, model) of a finished run's folder, the model as it was before training.

    Raises:
        ConfigError: there is no finished run, or its model is not there any more.
    """
    config = _config(path)
    if not (path / "summary.json").is_file():
        raise ConfigError(f"{path}: the run is not finished; there is no summary.json")
    source = models.find(config.model)
    return config, source, models.load(source, config)


def peak_rss_bytes() -> int:
    """Returns the largest resident size this process has had.

    Not `ru_maxrss` where the kernel tells better: that one also counts the parent's pages at the time of the fork.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@contextlib.contextmanager
def _shown_warnings(emit: Emit):
    """Warnings of cutloss are events too: a progress bar would paint over them."""
    from cutloss.tunix import CutLossWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", CutLossWarning)
        shown = warnings.showwarning

        def show(message, category, *place):
            if issubclass(category, CutLossWarning):
                emit("warning", message=str(message))
            else:
                shown(message, category, *place)

        warnings.showwarning = show
        yield


def _hooks(run: _Run) -> Any:
    from tunix.sft import hooks

    class Hooks(hooks.TrainingHooks):
        def on_train_start(self, train_ctx): ...
        def on_train_end(self, train_ctx): ...
        def on_train_step_start(self, train_ctx): ...
        def on_train_step_end(self, train_ctx, train_step, train_loss): ...
        def on_eval_step_start(self, train_ctx): ...

        def on_eval_step_end(self, train_ctx, eval_loss):
            run.evaluated(train_ctx.train_steps, float(eval_loss) / len(run.held_out_batches))

    return Hooks()
