"""One arm of the demo: one fine-tuning run in a process of its own, so that its peak memory is its own.

Started by demo.py as `python -m cutloss.sft.arm SETTINGS`, SETTINGS being an `ArmSettings` in JSON. It writes one JSON
object a line to the file descriptor in the settings; `events` of them, in this order: phase..., compiled, step...,
trained, generated. Its own output, and Tunix's, goes to stdout and stderr, which demo.py keeps in a log file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ARMS = ("default", "cutloss")


@dataclass(frozen=True)
class ArmSettings:
    """What one arm is to do.

    Attributes:
        arm: "default" (Tunix's own loss) or "cutloss".
        weights: folder made by gemma3.prepare().
        data: file of pairs, or None for the system's gettext catalogues.
        steps, batch, context, rank, seed: sizes of the run; context in tokens.
        lr: learning rate of AdamW.
        answer_tokens: length limit of the sample translations.
        events_fd: file descriptor the events are written to.
    """

    arm: str
    weights: str
    data: str | None
    steps: int
    batch: int
    context: int
    rank: int
    lr: float
    seed: int
    answer_tokens: int
    events_fd: int = 1

    @classmethod
    def from_json(cls, text: str) -> ArmSettings:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


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


def planned_bytes(compiled) -> int:
    """Returns what XLA plans for a compiled program: temporaries, arguments and outputs, less outputs in their place."""
    plan = compiled.memory_analysis()
    return (
        plan.temp_size_in_bytes
        + plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
    )


def compile_step(trainer, example):
    """Returns the compiled train step of a PeftTrainer for batches like `example`: the very step `train` would compile."""
    from flax import nnx

    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    return step.lower(trainer.model, trainer.optimizer, example).compile()


def train(trainer, compiled, batches: list[dict], on_step: Callable[[int, float, float], None]) -> None:
    """Runs Tunix's own `train` loop over the batches with a step that is compiled already.

    Tunix would compile the step again inside `train`, 15 s and a second plan; handing it the compiled one also lets
    each step be timed to its end. `on_step` gets the step's number from 1, its loss and its seconds.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    import jax

    done = 0

    def step(example):
        nonlocal done
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(trainer.model, trainer.optimizer, example))
        seconds = time.perf_counter() - start
        done += 1
        loss = float(result[0])
        on_step(done, loss, seconds)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {done} is {loss}; try a smaller --lr")
        return result

    trainer.jit_train_and_eval_step = lambda skip_jit=False, cache_nnx_graph=False: (step, None)
    # skip_jit keeps Tunix from asking the step for the size of a jit cache it does not have.
    trainer.train(batches, skip_jit=True)


def run(settings: ArmSettings, emit: Callable[..., None]) -> None:
    """Runs the arm; `emit(event, **fields)` is called as it goes along."""
    emit("phase", name="loading")
    import contextlib

    import jax
    import optax
    from flax import nnx
    from tunix.sft import peft_trainer

    import cutloss.tunix

    from . import data, gemma3, hlo

    weights = Path(settings.weights)
    tokenizer = gemma3.load_tokenizer(weights)
    pairs, whence = data.load(Path(settings.data) if settings.data else None)
    training, held_out = data.split(pairs)
    batches, dropped = data.batches(
        training,
        tokenizer,
        batch=settings.batch,
        context=settings.context,
        steps=settings.steps,
        seed=settings.seed,
    )
    emit(
        "data",
        source=whence,
        training=len(training),
        held_out=len(held_out),
        dropped=dropped,
        digest=data.digest(batches),
        targets=[int(batch["input_mask"][:, 1:].sum()) for batch in batches],
    )
    model = gemma3.add_lora(gemma3.load_model(weights), settings.rank, settings.seed)
    # A copy: the step donates the optimizer's buffers only, but training replaces the adapters in the model.
    untrained = jax.tree.map(lambda leaf: leaf.copy(), nnx.state(model, nnx.LoRAParam))

    with cutloss.tunix.patched() if settings.arm == "cutloss" else contextlib.nullcontext():
        config = peft_trainer.TrainingConfig(eval_every_n_steps=settings.steps + 1)
        trainer = peft_trainer.PeftTrainer(model, optax.adamw(settings.lr), config)
        emit("phase", name="compiling")
        start = time.perf_counter()
        compiled = compile_step(trainer, batches[0])
        seconds = time.perf_counter() - start
        logits = hlo.logit_arrays(compiled.as_text(), vocab=gemma3.EMBEDDING_ROWS)
        emit("compiled", seconds=seconds, planned_bytes=planned_bytes(compiled), logit_arrays=logits)
        if settings.arm == "cutloss" and logits:
            raise RuntimeError(f"the compiled step holds logits of many tokens: {', '.join(logits)}")
        emit("phase", name="training")
        train(trainer, compiled, batches, lambda n, loss, s: emit("step", step=n, loss=loss, seconds=s))
    emit("trained", peak_rss_bytes=peak_rss_bytes())

    if settings.answer_tokens:
        emit("phase", name="translating")
        pair = _sample(held_out or training)
        trained = nnx.state(model, nnx.LoRAParam)
        before, after = translate(model, tokenizer, pair.source, [untrained, trained], settings)
        emit("generated", source=pair.source, reference=pair.target, before=before, after=after)


def translate(model, tokenizer, source: str, states: list, settings: ArmSettings) -> list[str]:
    """Returns the greedy translation of `source` under each of the LoRA states, by Tunix's Sampler."""
    from tunix.generate import sampler as sampling
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    from . import data

    prompt = data.prompt(source)
    room = len(tokenizer.encode(prompt)) + 1
    cache = sampling.CacheConfig(
        cache_size=room + settings.answer_tokens + 1,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
    sampler = sampling.Sampler(model, TokenizerAdapter(tokenizer), cache)
    answers = []
    for state in states:
        sampler.transformer_state = state
        output = sampler(
            [prompt], max_generation_steps=settings.answer_tokens, max_prompt_length=room, temperature=0.0
        )
        answers.append(output.text[0].strip())
    return answers


def _sample(pairs):
    """Returns the first held-out pair that is a sentence of moderate length: a menu entry would show little."""
    return next((p for p in pairs if 40 <= len(p.source) <= 90 and p.source.count(" ") >= 6), pairs[0])


def main() -> None:
    settings = ArmSettings.from_json(sys.argv[1])
    with os.fdopen(settings.events_fd, "w", buffering=1) as events:

        def emit(event: str, **fields) -> None:
            print(json.dumps({"arm": settings.arm, "event": event, "time": time.time(), **fields}), file=events)

        try:
            run(settings, emit)
        except Exception as error:
            emit("error", message=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main()
