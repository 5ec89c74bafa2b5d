"""The loss of a model whose head cutloss does not know, a few tokens' logits at a time.

For models that hand out their hidden states and can be asked for the logits of any: `skip_lm_head` and
`compute_final_logits`, which Tunix's models have since 0.1.7. Any head is right here, with a bias or whatever else; it
holds full rows of logits, and computes them twice.
"""

from __future__ import annotations

from . import adapters

# 128 rows of 262,144 f32 logits are 128 MiB; a few arrays of that size live at a time.
TOKENS = 128


def fits(model) -> bool:
    """Returns whether the model has what this way needs."""
    return adapters.skips_head(model) and callable(getattr(model, "compute_final_logits", None))


def forward(model, batch, kwargs):
    """One of the ways of `loss.way_of`."""
    hidden, _ = model(*batch, **kwargs, skip_lm_head=True)
    _check_no_adapters(model, vocab(model, hidden))

    def nll_sum(settings, input_tokens, input_mask):
        return _nll_sum(model, hidden, input_tokens, input_mask, settings.token_chunk or TOKENS)

    return nll_sum


def vocab(model, hidden) -> int:
    """Returns the number of logits the model makes of a hidden state."""
    import jax

    return jax.eval_shape(model.compute_final_logits, hidden[:1, :1]).shape[-1]


def _check_no_adapters(model, ids: int) -> None:
    """LoRA and quantised weights work inside the model's own call only: outside they are left out, without a word."""
    from flax import nnx

    for path, value in nnx.iter_graph(model):
        if not isinstance(value, nnx.Variable):
            continue
        shape = getattr(value.get_value(), "shape", None)
        if ids not in (shape or ()):
            continue
        name = ".".join(map(str, path))
        if isinstance(value, nnx.LoRAParam):
            raise adapters.refusal(model, f"LoRA adapters sit on its head ({name}); leave it out of the module_path")
        if not hasattr(value.get_value(), "__array__"):
            raise adapters.refusal(model, f"its head is quantised ({name} is a {type(value.get_value()).__name__})")


def _nll_sum(model, hidden, input_tokens, input_mask, tokens):
    """Returns (sum of weight * nll, sum of weights). Cut along the sequence: the batch may be sharded."""
    import jax
    import jax.numpy as jnp

    from .loss import targets

    labels, weights = targets(input_tokens, input_mask)
    count = jnp.sum(weights)
    weights = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, 1)))
    rows, length = labels.shape
    step = min(max(1, tokens // rows), length)

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, -length % step)) + ((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(rows, -1, step, *a.shape[2:]), 1, 0)

    @jax.checkpoint
    def add(total, chunk):
        x, label, weight = chunk
        counts = weight != 0
        x = jnp.where(counts[..., None], x, 0)  # whatever is in an ignored row stays there
        logits = model.compute_final_logits(x).astype(jnp.float32)
        inside = (label >= 0) & (label < logits.shape[-1])
        own = jnp.take_along_axis(logits, jnp.where(inside, label, 0)[..., None], axis=-1)[..., 0]
        nll = jnp.where(inside, jax.nn.logsumexp(logits, axis=-1) - own, jnp.nan)
        return total + jnp.sum(jnp.where(counts, weight * nll, 0)), None

    total, _ = jax.lax.scan(add, jnp.float32(0), (cut(hidden), cut(labels), cut(weights)))
    return total, count
