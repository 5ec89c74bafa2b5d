"""Compares the model's own dense loss with ours on a few tokens, once, before training starts.

An adapter that forgets a softcap or a scale gives a plausible loss and wrong gradients for a whole run. Eight tokens
of dense logits cost V * 32 bytes in f32 (8 MiB for Gemma 3) and tell. The check runs as a program of its own: nothing
of it is in the compiled train step.

LoRA starts with B = 0, where an adapter left out of the loss would change nothing: the check runs on a copy of the
model whose adapters are moved away from that.
"""

from __future__ import annotations

import dataclasses
import math

from . import adapters, chunked, meshes
from .loss import as_scalar, as_tunix_loss, make, tapped, tapped_call, way_of, weighted_nll
from .settings import Settings

TOKENS = 8


class SelfCheckError(RuntimeError):
    """The loss cutloss computes is not the model's own; the message has both numbers and the tolerance."""


def check(model, reference_loss, settings: Settings = Settings()) -> None:
    """Raises SelfCheckError unless our loss and `reference_loss` agree on `model`, UnsupportedModelError if it must.

    Args:
        model: a model with concrete weights.
        reference_loss: Tunix's default loss function.
        settings: as for training.
    """
    import jax
    from flax import nnx

    way = way_of(model)
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)

    # One copy for each forward pass: dropout draws from the copy's own random state, the same for all.
    def losses(lora, rest):
        lora = jax.tree.map(_moved, lora)
        return _losses(lambda: _without_flash(nnx.merge(graph, lora, rest)), way, reference_loss, settings)

    result = {name: float(value) for name, value in jax.jit(losses)(lora, rest).items()}
    allowed = tolerance(**{name: result[name] for name in _BOUNDS})
    dense, ours = result["dense"], result["ours"]
    if not abs(dense - ours) <= allowed:  # also true for NaN
        raise SelfCheckError(
            f"on {TOKENS} tokens {type(model).__name__}'s own loss is {dense:.6f}, cutloss gives {ours:.6f}; they may "
            f"differ by {allowed:.1e}. The adapter for this model is wrong (softcap, scale, head?) or its weights are "
            "not finite. Train with Tunix's own loss: set CUTLOSS_DISABLE=1, or call cutloss.tunix.uninstall() before "
            "building the trainer."
        )


def tolerance(
    width: int, vocab: int, logits_unit: float, hidden_norm: float, row_norm: float, largest_logit: float
) -> float:
    """Returns by how much two right losses of the same hidden states may differ.

    - A logit is a dot product of `width` terms: its rounding error is within 4 sqrt(D) u |h| |c| but for one case in
      thousands (Higham and Mary's probabilistic bound; u = 2^-24). Both losses have it, in the label's logit and in
      the log-sum-exp: four times.
    - The sum of V positive terms, at least 8 of them side by side in SIMD lanes, is off by at most V u / 8 relative,
      which is absolute after the log: two times.
    - A dense path in bf16 rounds each logit once more, by logits_unit |z|: in the label's logit and in the log-sum-exp.
    - The loss itself, at most 2 |z| + log V, is rounded a few times.
    """
    unit = 2.0**-24
    products = 4 * 4 * math.sqrt(width) * unit * hidden_norm * row_norm
    sums = 2 * vocab * unit / 8
    scale = 2 * largest_logit + math.log(vocab)
    return products + sums + 2 * logits_unit * largest_logit + 8 * unit * scale


_BOUNDS = ("width", "vocab", "logits_unit", "hidden_norm", "row_norm", "largest_logit")


def _moved(adapter):
    """A value of an adapter with 0.05 of something added that no two elements nearby share."""
    import jax.numpy as jnp

    wave = jnp.sin(jnp.arange(1, adapter.size + 1, dtype=jnp.float32)).reshape(adapter.shape)
    return (adapter + 0.05 * wave).astype(adapter.dtype)


def _without_flash(model):
    """Flash attention asks for sequences of whole blocks, thousands of tokens; the head does not care for it."""
    from flax import nnx

    for _, module in nnx.iter_graph(model):
        config = getattr(module, "config", None) if isinstance(module, nnx.Module) else None
        if getattr(config, "use_flash_attention", False):
            module.config = dataclasses.replace(config, use_flash_attention=False)
    return model


def _losses(copy, way, reference_loss, settings):
    import jax
    import jax.numpy as jnp

    model = copy()
    if way is chunked.forward:
        head = None
        vocab = jax.eval_shape(lambda: copy()(*_arguments(_batch(TOKENS)))[0]).shape[-1]
    else:
        head = adapters.read_head(model)
        vocab = head.weight.shape[0 if head.layout == "vd" else 1]
    batch = _batch(vocab)
    if head is None:
        logits, cache = model(*_arguments(batch))
        hidden, _ = copy()(*_arguments(batch), skip_lm_head=True)
    else:
        hidden, (logits, cache) = tapped_call(model, _arguments(batch), {})
    if way is tapped:  # the same forward pass: a second one would double the time to compile
        sums = weighted_nll(hidden, head, batch["input_tokens"], batch["input_mask"], settings)
        ours = as_scalar(as_tunix_loss(*sums))
    else:
        ours = as_scalar(make(dataclasses.replace(settings, strict=True))(copy(), **batch))
    # Tunix's loss takes log_softmax in the dtype of the logits: 1 % off in bf16, too coarse to check anything against.
    # Given f32 copies of the same logits it is exact to f32, and only their own rounding is left.
    logits = logits.astype(jnp.float32)
    dense = as_scalar(reference_loss(lambda *args, **kwargs: (logits, cache), **batch))
    largest = jnp.max(jnp.abs(logits))
    norm = jnp.max(jnp.linalg.norm(hidden.astype(jnp.float32), axis=-1))
    return {
        "ours": ours,
        "dense": dense,
        "width": hidden.shape[-1],
        "vocab": vocab,
        "logits_unit": _unit(head.compute_dtype or head.weight.dtype if head else hidden.dtype),
        "hidden_norm": norm,
        # Rows that cannot be seen: as long as it takes for such logits, if they point anywhere.
        "row_norm": _largest_row(head) if head else largest * math.sqrt(hidden.shape[-1]) / norm,
        "largest_logit": largest,
    }


def _unit(dtype) -> float:
    """The relative error of rounding to a dtype narrower than f32, else 0."""
    import jax.numpy as jnp

    return float(jnp.finfo(dtype).eps) / 2 if jnp.finfo(dtype).bits < 32 else 0.0


def _largest_row(head):
    import jax.numpy as jnp

    return jnp.max(jnp.linalg.norm(head.weight.astype(jnp.float32), axis=1 if head.layout == "vd" else 0))


def _arguments(batch: dict) -> tuple:
    return batch["input_tokens"], batch["positions"], None, batch["attention_mask"]


def _batch(vocab: int) -> dict:
    """A batch of TOKENS ids spread over the vocabulary, one row for each device of the current mesh.

    Tunix shards activations over the mesh's first axes; a batch of one row cannot be split over several devices.
    """
    import numpy as np

    rows = max(1, meshes.tunix_mesh().size)
    tokens = (np.arange(TOKENS) * (vocab // TOKENS) + vocab // (2 * TOKENS)) % vocab
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))
    return {
        "input_tokens": np.tile(tokens.astype(np.int32), (rows, 1)),
        "input_mask": np.ones((rows, TOKENS), np.float32),
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (rows, 1)),
        "attention_mask": np.tile(causal, (rows, 1, 1)),
    }
