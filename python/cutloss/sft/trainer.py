"""Tunix's PeftTrainer as a run uses it: its loop, checkpoints and logger, with a step that is compiled once, measured and
stopped at the first loss that is not finite."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import models
from .config import Config, ConfigError, Train, loss_options


def check_tunix() -> None:
    """Raises ConfigError if Tunix's train step is not the one that is compiled and measured here."""
    import inspect

    from tunix.sft import peft_trainer

    takes = list(inspect.signature(peft_trainer.PeftTrainer._train_step).parameters)
    if takes != ["self", "model", "optimizer", "inputs"]:
        raise ConfigError(
            f"google-tunix: the train step of the installed version takes {', '.join(takes[1:])}; cutloss-sft is made for "
            "that of 0.1.7: pip install google-tunix==0.1.7 (cutloss.tunix, for trainers of your own, works with both)"
        )


def planned_bytes(compiled: Any) -> int:
    """Returns what XLA plans for a compiled program: temporaries, arguments and outputs, less outputs in their place."""
    plan = compiled.memory_analysis()
    return (
        plan.temp_size_in_bytes
        + plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
    )


def compile_step(trainer: Any, example: Any) -> Any:
    """Returns the compiled train step of a PeftTrainer for batches like `example`: the very step `train` would compile."""
    from flax import nnx

    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    return step.lower(trainer.model, trainer.optimizer, example).compile()


class Stopped(FloatingPointError):
    """A loss is not finite. Nothing was saved after the last finite one."""


def measure(trainer: Any, on_compiled: Callable[..., None], on_step: Callable[..., None]) -> Any:
    """Makes a PeftTrainer compile its step at the first batch and report each, and returns it.

    Tunix would compile inside its loop, unseen, and log a step while the next one runs. `on_compiled(compiled, seconds)`
    is called once, `on_step(step, losses, grad_norm, seconds)` for each update, with the loss of each micro-batch.
    """
    import jax
    from flax import nnx
    from jax.interpreters import pxla

    compiled = None
    losses: list[float] = []
    started = 0.0
    accumulation = trainer.config.get_with_default("gradient_accumulation_steps", 1)

    def step(example):
        nonlocal compiled, started
        if compiled is None:
            start = time.perf_counter()
            compiled = compile_step(trainer, example)
            on_compiled(compiled, time.perf_counter() - start)
        if not losses:
            started = time.perf_counter()
        result = jax.block_until_ready(compiled(trainer.model, trainer.optimizer, example))
        losses.append(float(result[0]))
        if len(losses) == accumulation or not math.isfinite(losses[-1]):
            number = trainer.train_steps + 1
            whole = accumulation > 1 and math.isfinite(losses[-1])
            norm = update_norm(trainer) if whole else float(result[2])
            on_step(number, list(losses), norm, time.perf_counter() - started)
            if not math.isfinite(losses[-1]):
                raise Stopped(
                    f"the loss of step {number} is {losses[-1]}; the run stops at the last checkpoint before it. Try a "
                    "smaller learning rate, or look for what is not finite in the weights"
                )
            losses.clear()
        return result

    def steps(skip_jit=False, cache_nnx_graph=False):
        trainer._shard_optimizer(pxla.thread_resources.env.physical_mesh)
        return step, functools.partial(nnx.jit(trainer.create_eval_step_fn()), trainer.model)

    trainer.jit_train_and_eval_step = steps
    return trainer


def train(trainer: Any, batches: Any, held_out: Any = None, evaluate_now: bool = True) -> None:
    """Runs Tunix's own loop of a measured trainer; raises Stopped.

    Tunix evaluates before the first step it takes, which after a resumption may be an evaluation that was, or none that
    a run without interruption has: `evaluate_now` says whether it is due.
    """
    run_eval, due = trainer._run_eval, evaluate_now

    def evaluate(*args):
        nonlocal due
        if due:
            run_eval(*args)
        due = True

    trainer._run_eval = evaluate
    # skip_jit keeps Tunix from asking the step for the size of a jit cache it does not have.
    trainer.train(batches, held_out or None, skip_jit=True)


# ---- the trainer of a run --------------------------------------------------------------------------------------------


def build(model: Any, config: Config, checkpoints: Path | None) -> Any:
    """Returns a PeftTrainer for the run, with the weights and optimizer of its last checkpoint if there is one."""
    from orbax import checkpoint as orbax
    from tunix.sft import peft_trainer

    every = config.train.checkpoint_every or config.train.steps
    options = orbax.CheckpointManagerOptions(
        save_interval_steps=every,
        max_to_keep=config.train.keep,
        # The next step reuses the optimizer's buffers: nothing may still be reading them.
        enable_async_checkpointing=False,
    )
    accumulation = config.train.accumulation
    settings = peft_trainer.TrainingConfig(
        max_steps=config.train.steps,
        eval_every_n_steps=config.evaluation.every or config.train.steps + 1,
        gradient_accumulation_steps=accumulation if accumulation > 1 else None,
        checkpoint_root_directory=None if checkpoints is None else str(checkpoints.absolute()),
        checkpointing_options=options,
    )
    trainer = peft_trainer.PeftTrainer(model, optimizer(config.train), settings)
    trainer._pbar = _NoBar()  # Tunix would draw one of its own
    return trainer


def forget_values(trainer: Any, mesh: Any = None) -> None:
    """Puts shapes in place of the optimizer's arrays, spread over the mesh as training spreads them: to compile only."""
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)

    def shape(leaf, spec=None):
        place = {} if mesh is None else {"sharding": NamedSharding(mesh, spec or PartitionSpec())}
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **place)

    specs = () if mesh is None else (nnx.get_partition_spec(state),)
    nnx.update(trainer.optimizer, jax.tree.map(shape, state, *specs))


class _NoBar:
    def update_metrics(self, *_, **__) -> None: ...
    def update(self) -> None: ...
    def close(self) -> None: ...


def optimizer(train: Train) -> Any:
    """Returns AdamW with the run's schedule."""
    import optax

    parts = [] if train.accumulation == 1 else [_norm_keeper()]
    parts += [] if train.clip is None else [optax.clip_by_global_norm(train.clip)]
    adamw = optax.adamw(schedule(train))
    return optax.chain(*parts, adamw) if parts else adamw


class UpdateNorm(NamedTuple):
    """The norm of the last update's gradient. Each micro-batch has one of its own, whose mean is another number."""

    update_norm: Any


def _norm_keeper() -> Any:
    import jax.numpy as jnp
    import optax

    return optax.GradientTransformation(
        lambda params: UpdateNorm(jnp.zeros((), jnp.float32)),
        lambda updates, state, params=None: (updates, UpdateNorm(optax.global_norm(updates).astype(jnp.float32))),
    )


def update_norm(trainer: Any) -> float:
    """Returns the norm of the gradient of the last update, before it was clipped."""
    import jax
    from flax import nnx

    state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if "update_norm" in jax.tree_util.keystr(path):
            return float(leaf)
    raise ValueError("the optimizer was not made by `optimizer`: it keeps no norm of its updates")


def schedule(train: Train) -> Any:
    """Returns the learning rate of a step, counted from 0."""
    import optax

    if train.schedule == "constant" and not train.warmup:
        return train.lr
    warmup = optax.linear_schedule(train.lr / (train.warmup + 1), train.lr, train.warmup)
    rest = train.steps - train.warmup
    after = optax.cosine_decay_schedule(train.lr, rest) if train.schedule == "cosine" else optax.constant_schedule(train.lr)
    return optax.join_schedules([warmup, after], [train.warmup])


def learning_rate(train: Train, step: int) -> float:
    """Returns the learning rate of step `step`, counted from 1."""
    rate = schedule(train)
    return float(rate(step - 1)) if callable(rate) else rate


def with_loss(trainer: Any, config: Config, check: bool = True) -> Any:
    """Gives the trainer the run's loss and returns it; cutloss's is checked at once against the model's own.

    Raises:
        ConfigError: cutloss cannot compute this model's loss, such as one with adapters on its head.
        cutloss.tunix.SelfCheckError: it computes another.
    """
    if config.loss.arm == "cutloss":
        import cutloss.tunix

        try:
            model = models.as_run(trainer.model, config) if check else None
            trainer.with_loss_fn(cutloss.tunix.loss_fn(model, **loss_options(config.loss)))
        except cutloss.tunix.UnsupportedModelError as error:
            raise ConfigError(f"loss.arm: {error} Or train with Tunix's own loss: loss.arm=dense") from error
    return trainer.with_loss_fn(over_targets(trainer.loss_fn, config))


def over_targets(loss_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """Returns the loss of the run's model, for batches that know their share of their group's targets.

    Tunix 0.1.7 averages micro-batches' means, so that a batch of few targets weighs as much as one of many; with the
    share the mean over the group is that over its targets, whatever the cut. Tunix after it does so itself.
    """

    def shared(model, input_tokens, input_mask, positions, attention_mask, images=None, share=None):
        batch = (input_tokens, input_mask, positions, attention_mask, images)
        loss = loss_fn(models.as_run(model, config), *batch)
        return loss if share is None or hasattr(loss, "primary_loss") else loss * share

    return shared
