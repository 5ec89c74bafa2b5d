"""The loss that replaces Tunix's default one."""

from __future__ import annotations

import functools
import warnings

from . import adapters, chunked, meshes
from .settings import Settings
from .tap import tap

IGNORE_INDEX = -100


class CutLossWarning(UserWarning):
    """Training goes on and is right, but without what cutloss is for: the message says what and why."""


@functools.cache
def make(settings: Settings):
    """Returns the loss function for these settings, always the same object."""

    def cut_loss_fn(model, input_tokens, input_mask, positions, attention_mask, images=None):
        """Mean next-token loss of `model`, as `tunix.sft.peft_trainer._default_loss_fn` defines it, without its logits.

        Args:
            model: a model that `adapters.py` lists; others by way of `chunked.py` or of Tunix's own loss.
            input_tokens: [B, L] integers.
            input_mask: [B, L], bool or a number: the weight of each token as a target; the first column is not used.
            positions: [B, L] integers.
            attention_mask: [B, L, L] bool.
            images: passed on to the model if not None.

        Returns:
            sum(weight * nll) / (sum(weight) + 1e-8) as an f32 scalar; on a Tunix that has `LossOutput`, that with the
            unreduced sum and the denominator apart, which its gradient accumulation needs. 0 if every weight is 0.

        Raises:
            UnsupportedModelError: the settings are strict, and the model or its head is not one cutloss knows.
        """
        if why := meshes.undivided_batch(input_tokens.shape[0], settings.data_sharding_axis):
            warnings.warn(why, CutLossWarning, stacklevel=2)
        batch = (input_tokens, positions, None, attention_mask)
        kwargs = {} if images is None else {"images": images}
        try:
            nll_sum = way_of(model)(model, batch, kwargs)
        except adapters.UnsupportedModelError as error:
            if settings.strict:
                raise
            warn_dense(error)
            return tunix_loss()(model, input_tokens, input_mask, positions, attention_mask, **kwargs)
        return as_tunix_loss(*nll_sum(settings, input_tokens, input_mask))

    cut_loss_fn.cutloss_settings = settings
    return cut_loss_fn


def way_of(model):
    """Returns how the loss of `model` is computed: a function (model, batch, kwargs) -> nll_sum.

    It runs the forward pass and returns a function (settings, input_tokens, input_mask) -> (sum of weight * nll, sum of
    weights). Raises UnsupportedModelError where only the model's own loss is right.
    """
    try:
        adapters.read_head(model)
    except adapters.UnsupportedModelError:
        if not chunked.fits(model):
            raise
        return chunked.forward
    return skipped if adapters.skips_head(model) else tapped


def skipped(model, batch, kwargs):
    """The way of models that can leave out the head."""
    hidden, _ = model(*batch, **kwargs, skip_lm_head=True)
    return functools.partial(_nll_sum, hidden, adapters.read_head(model))


def tapped(model, batch, kwargs):
    """The way of models that cannot: the hidden states are seen as they enter the head."""
    hidden, _ = tapped_call(model, batch, kwargs)
    return functools.partial(_nll_sum, hidden, adapters.read_head(model))


def tapped_call(model, batch, kwargs):
    """Returns what one forward pass sends into the model's head, and what the pass returns."""
    head = adapters.read_head(model)
    with tap(head.layer, head.method) as record:
        result = model(*batch, **kwargs)
        if len(record.calls) != 1:
            raise adapters.refusal(model, f"a forward pass called its head {len(record.calls)} times, expected once")
        return record.calls[0], result


def _nll_sum(hidden, head, settings, input_tokens, input_mask):
    return weighted_nll(hidden, head, input_tokens, input_mask, settings)


def weighted_nll(hidden, head: adapters.Head, input_tokens, input_mask, settings: Settings = Settings()):
    """Returns (sum of weight * nll, sum of weights), two scalars.

    Args:
        hidden: [B, L, D], what the model feeds to its head.
        head: the head.
        input_tokens, input_mask: [B, L], as for the loss function.
    """
    import jax.numpy as jnp

    from cutloss.jax import linear_cross_entropy

    labels, weights = targets(input_tokens, input_mask)
    table = head.weight
    if head.compute_dtype is not None:
        hidden, table = hidden.astype(head.compute_dtype), table.astype(head.compute_dtype)
    # All weights are 0 or 1: their sum is over the labels that are not ignored, and a trainable head costs one product
    # less when the loss's gradient is one number for all tokens.
    plain = weights.dtype == jnp.bool_
    nll = linear_cross_entropy(
        hidden,
        table,
        labels,
        reduction="sum" if plain else "none",
        ignore_index=IGNORE_INDEX,
        softcap=head.softcap,
        head_layout=head.layout,
        budget=settings.budget,
        mode=settings.mode,
        filter=settings.filter,
        tolerance=settings.tolerance,
        epsilon=settings.epsilon,
        seed=_seed(input_tokens) if settings.filter == "unbiased" else 0,
        _tiles=(settings.token_chunk, settings.vocab_chunk),
        # A filter follows one order of all tokens and ids: XLA's partitioner gathers what it needs.
        **({} if settings.filter else meshes.layout(hidden.shape[:2], head.spec, settings.data_sharding_axis)),
    )
    total = nll if plain else jnp.sum(weights.astype(nll.dtype) * nll[:, :-1])
    return total, jnp.sum(weights)


def _seed(input_tokens):
    """A number that follows from the batch: the trainer's step is not known here."""
    import jax.numpy as jnp

    tokens = input_tokens.astype(jnp.uint32).reshape(-1)
    return jnp.sum(tokens * (2 * jnp.arange(tokens.size, dtype=jnp.uint32) + 1) * jnp.uint32(2654435761))


def targets(input_tokens, input_mask):
    """Returns the labels [B, L] and the weights [B, L - 1] of the tokens to predict.

    The last position has no target. Giving it IGNORE_INDEX instead of slicing it off keeps the hidden states where they
    are. Positions of weight 0 are ignored too: they cost no work, and a NaN there reaches nothing.
    """
    import jax.numpy as jnp

    weights = input_mask[:, 1:]
    # Unsigned ids have no -100: the label would be 2^32 - 100, which no vocabulary has, and the loss NaN.
    ids = input_tokens[:, 1:].astype(jnp.promote_types(input_tokens.dtype, jnp.int32))
    labels = jnp.where(weights != 0, ids, IGNORE_INDEX)
    return jnp.pad(labels, ((0, 0), (0, 1)), constant_values=IGNORE_INDEX), weights


def tunix_loss():
    """Returns Tunix's own default loss, whether or not cutloss is installed in its place."""
    from tunix.sft import peft_trainer

    from . import patch

    return patch.original(peft_trainer, "_default_loss_fn")


def warn_dense(error: adapters.UnsupportedModelError) -> None:
    warnings.warn(
        f"{error} Training goes on with the model's own loss, which is right and needs the memory of the logits. "
        "CUTLOSS_STRICT=1 or strict=True makes this an error.",
        CutLossWarning,
        stacklevel=2,
    )


def as_tunix_loss(total, weight):
    from tunix.sft import utils

    if hasattr(utils, "LossOutput"):
        primary = utils.WeightedMetric(unreduced_sum=total, denominator=weight, eps=1e-8)
        return utils.LossOutput(primary_loss=primary, aux_metrics={})
    return total * (1 / (weight + 1e-8))


def as_scalar(loss):
    """Returns a loss of either of Tunix's kinds as a scalar."""
    if hasattr(loss, "primary_loss"):
        metric = loss.primary_loss
        return metric.unreduced_sum / (metric.denominator + metric.eps)
    return loss
