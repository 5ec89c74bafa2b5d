"""The loss that replaces Tunix's default one."""

from __future__ import annotations

from . import adapters
from .tap import tap

IGNORE_INDEX = -100


def cut_loss_fn(model, input_tokens, input_mask, positions, attention_mask, images=None):
    """Mean next-token loss of `model`, as `tunix.sft.peft_trainer._default_loss_fn` defines it, without its logits.

    Args:
        model: a model that `adapters.py` lists.
        input_tokens: [B, L] integers.
        input_mask: [B, L], bool or a number: the weight of each token as a target; the first column is not used.
        positions: [B, L] integers.
        attention_mask: [B, L, L] bool.
        images: passed on to the model if not None.

    Returns:
        sum(weight * nll) / (sum(weight) + 1e-8) as an f32 scalar; on a Tunix that has `LossOutput`, that with the
        unreduced sum and the denominator apart, which its gradient accumulation needs. 0 if every weight is 0.

    Raises:
        UnsupportedModelError: the model or its head is not one that cutloss knows to be right.
    """
    adapter = adapters.find(model)
    kwargs = {} if images is None else {"images": images}
    with tap(*adapter.entry(model)) as record:
        model(input_tokens, positions, None, attention_mask, **kwargs)
        hidden, _ = one_call(record, model, adapter)
    total, weight = weighted_nll(hidden, adapters.read_head(model, adapter), input_tokens, input_mask)
    return _as_tunix_loss(total, weight)


def one_call(record, model, adapter):
    """Returns the (hidden states, logits) of the one call of the head; raises UnsupportedModelError if not one."""
    if len(record.calls) != 1 or record.calls[0][0] is not adapter.entry(model)[0]:
        raise adapters._refusal(model, f"a forward pass called its head {len(record.calls)} times, expected once")
    _, hidden, logits = record.calls[0]
    return hidden, logits


def weighted_nll(hidden, head: adapters.Head, input_tokens, input_mask):
    """Returns (sum of weight * nll, sum of weights), two scalars.

    Args:
        hidden: [B, L, D], what the model feeds to its head.
        head: the head.
        input_tokens, input_mask: [B, L], as for cut_loss_fn.
    """
    import jax.numpy as jnp

    from cutloss.jax import linear_cross_entropy

    weights = input_mask[:, 1:]
    # The last position has no target. Giving it ignore_index instead of slicing it off keeps the hidden states where
    # they are. Positions of weight 0 are ignored too: they cost no work, and a NaN there reaches nothing.
    labels = jnp.where(weights != 0, input_tokens[:, 1:], IGNORE_INDEX)
    labels = jnp.pad(labels, ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    table = head.weight
    if head.compute_dtype is not None:
        hidden, table = hidden.astype(head.compute_dtype), table.astype(head.compute_dtype)
    nll = linear_cross_entropy(
        hidden,
        table,
        labels,
        reduction="none",
        ignore_index=IGNORE_INDEX,
        softcap=head.softcap,
        head_layout=head.layout,
    )
    return jnp.sum(weights.astype(nll.dtype) * nll[:, :-1]), jnp.sum(weights)


def _as_tunix_loss(total, weight):
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
