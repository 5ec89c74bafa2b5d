"""The loss and its gradients over a mesh: one shard_map program each for the forward and the backward pass, below the
differentiation, so that no shard_map is ever differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi, _lowering, _objective, _xla
from ._mesh import Layout
from ._options import Extra, Options, Values, Wants
from ._place import Place


class _Inputs(NamedTuple):
    """Arrays by token have the leading dimensions of x."""

    x: jax.Array
    w: jax.Array
    labels: jax.Array | None
    cotangent: jax.Array  # [1], or by token for reduction "none"
    saved: tuple[jax.Array, jax.Array, jax.Array] | None
    extra: Extra


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array | None, cotangent: jax.Array,
             saved: tuple[jax.Array, jax.Array, jax.Array] | None, extra: Extra) -> Values:
    layout, lead = options.layout, x.shape[:-1]
    none = options.reduction == "none"
    inputs = _ready(options, _Inputs(x, w, labels, cotangent, saved, extra))
    specs = _specs(options, inputs)
    local = options._replace(layout=None, shift=0, sequence=0)

    def program(inputs: _Inputs) -> Values:
        own = inputs.x.shape[:-1]
        flat = _by_token(options, inputs, lambda a, _: a.reshape(-1, *a.shape[len(own) :]))
        return _results_by_token(_on_device(local, wants, layout.place, flat), none, lambda a: a.reshape(own + a.shape[1:]))

    values = jax.shard_map(program, mesh=layout.mesh, check_vma=False, in_specs=(specs,),
                           out_specs=_result_specs(options, wants, layout))(_placed(layout, inputs, specs))
    values = _results_by_token(values, none, lambda a: a[tuple(map(slice, lead))] if a.shape[: len(lead)] != lead else a)
    return values._replace(d_x=_like(layout, values.d_x, x), d_w=_like(layout, values.d_w, w),
                           d_bias=_like(layout, values.d_bias, extra.bias))


def _by_token(options: Options, inputs: _Inputs, change: Callable[[jax.Array, int], Any]) -> _Inputs:
    """With the arrays that are by token changed. The second argument is what a row that does not count has there."""
    ignored, extra = options.ignore_index, inputs.extra

    def on(array: Any, fill: int = 0) -> Any:
        return jax.tree.map(lambda a: change(a, fill), array)  # None is a tree without arrays

    return inputs._replace(
        x=on(inputs.x), labels=on(inputs.labels, ignored), saved=on(inputs.saved),
        cotangent=on(inputs.cotangent) if options.reduction == "none" else inputs.cotangent,
        extra=extra._replace(
            token_weights=on(extra.token_weights), soft_ids=on(extra.soft_ids, ignored),
            soft_probabilities=on(extra.soft_probabilities), lse_cotangent=on(extra.lse_cotangent)))


def _results_by_token(values: Values, none: bool, change: Callable[[jax.Array], jax.Array]) -> Values:
    """With the arrays that are by token changed."""
    by_token = {name: getattr(values, name) for name in ("nll", "peak", "log_mass", "d_x")}
    by_token |= {"loss": values.loss} if none else {}
    metrics = {name: a if name == "mean_logits" else change(a) for name, a in values.metrics.items()}
    return values._replace(metrics=metrics, **{name: a if a is None else change(a) for name, a in by_token.items()})


# ------------------------------------------------------------------------------------ arrays as the devices take them


def _ready(options: Options, inputs: _Inputs) -> _Inputs:
    """Labels and soft targets shifted to their rows, and all padded to what the mesh divides."""
    layout, lead = options.layout, inputs.x.shape[:-1]
    missing = layout.missing(lead)
    if options.shift:
        inputs = _shifted(options, inputs)
    if not any(missing):
        return inputs
    inputs = _weighed(inputs, lead)
    return _by_token(options, inputs, lambda a, fill: jnp.pad(
        a, [(0, n) for n in missing] + [(0, 0)] * (a.ndim - len(lead)), constant_values=fill))


def _shifted(options: Options, inputs: _Inputs) -> _Inputs:
    lead = inputs.x.shape[:-1]
    last, by = len(lead) - 1, min(options.shift, lead[-1])

    def shift(a: jax.Array | None, fill: int = 0) -> jax.Array | None:
        if a is None:
            return a
        if options.layout.explicit:  # slices of a split axis are refused
            a = _put(options.layout, a, PartitionSpec(*options.layout.lead[:-1]))
        kept = lax.slice_in_dim(a, by, a.shape[last], axis=last)
        return jnp.pad(kept, [(0, by if k == last else 0) for k in range(a.ndim)], constant_values=fill)

    inputs = _weighed(inputs, lead)
    extra, ignored = inputs.extra, options.ignore_index
    weights = extra.token_weights
    if extra.soft_ids is not None:
        weights = jnp.where(lax.iota(jnp.int32, lead[-1]) + by < lead[-1], weights, 0)
    return inputs._replace(labels=shift(inputs.labels, ignored), extra=extra._replace(
        token_weights=weights, soft_ids=shift(extra.soft_ids, ignored),
        soft_probabilities=shift(extra.soft_probabilities)))


def _weighed(inputs: _Inputs, lead: tuple[int, ...]) -> _Inputs:
    """With weights that can be 0 in rows that are not there: of soft targets a row without any counts for its lse."""
    extra = inputs.extra
    if extra.soft_ids is None or extra.token_weights is not None:
        return inputs
    return inputs._replace(extra=extra._replace(token_weights=jnp.ones(lead, jnp.float32)))


def _specs(options: Options, inputs: _Inputs) -> _Inputs:
    """Arrays by id but the table are whole on each device: a few bytes an id."""
    layout = options.layout
    specs = _by_token(options, jax.tree.map(lambda _: PartitionSpec(), inputs), lambda *_: layout.tokens_spec)
    return specs._replace(x=layout.x_spec, w=layout.w_spec)


def _result_specs(options: Options, wants: Wants, layout: Layout) -> Values:
    tokens = layout.tokens_spec
    names = options.metrics & {"entropy", "argmax", "correct", "rank", "mean_logits"}
    names |= {"top_k_ids", "top_k_logprobs"} if options.top_k else set()
    return Values(tokens if options.reduction == "none" else PartitionSpec(), tokens, tokens, tokens,
                  layout.x_spec if wants.d_x else None, layout.w_spec if wants.d_w else None,
                  layout.ids_spec if wants.d_bias else None,
                  {name: layout.ids_spec if name == "mean_logits" else tokens for name in names})


def _placed(layout: Layout, inputs: _Inputs, specs: _Inputs) -> _Inputs:
    """Where axes are explicit, shard_map takes only what already lies as it wants."""
    return jax.tree.map(lambda a, spec: _put(layout, a, spec), inputs, specs) if layout.explicit else inputs


def _like(layout: Layout, gradient: jax.Array | None, primal: Any) -> jax.Array | None:
    """... and a gradient is to lie as what it is of."""
    if gradient is None or not layout.explicit:
        return gradient
    return _put(layout, gradient, jax.typeof(primal).sharding.spec)


def _put(layout: Layout, a: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(a, NamedSharding(layout.mesh, spec))


# ----------------------------------------------------------------------------------------------------- on one device


def _on_device(options: Options, wants: Wants, place: Place, inputs: _Inputs) -> Values:
    def tiles(options: Options, i: _Inputs) -> Values:
        return _xla.evaluate(options, wants, i.x, i.w, i.labels, i.cotangent, i.saved, place, i.extra)

    def kernels(options: Options, i: _Inputs) -> Values:
        return _kernels(options, wants, place, i)

    # The kernels need each token's label among their ids, and round dw and dbias before they are summed over devices.
    bias = inputs.extra.bias
    rounded = (wants.d_w and inputs.w.dtype != jnp.float32) or (wants.d_bias and bias.dtype != jnp.float32)
    if options.impl == "xla" or place.vocab_axes or rounded or not _ffi.available():
        return tiles(options, inputs)
    return _lowering.either(options, place.chip, kernels, tiles, inputs)


def _kernels(options: Options, wants: Wants, place: Place, inputs: _Inputs) -> Values:
    """The C++ kernels, over the whole vocabulary and this device's tokens."""
    x, w, labels, cotangent, _, extra = inputs
    id_axis = 0 if options.head_layout == "vd" else 1
    table = place.gather(w, id_axis)
    none = options.reduction == "none"
    rows, reduced = _objective.prepare(options, labels, cotangent, extra, len(x), table.shape[id_axis], place)
    values = _ffi.evaluate(
        options._replace(reduction="none" if none else "sum"), wants, x, table, labels,
        _objective.divide(cotangent, reduced.denominator), extra._replace(denominator=None))
    d_w, d_bias, metrics = values.d_w, values.d_bias, dict(values.metrics)

    def own(by_id: jax.Array) -> jax.Array:
        return place.scatter_ids(by_id.reshape(place.parts, -1))

    if wants.d_w:
        d_w = place.scatter(d_w.astype(jnp.float32), id_axis).astype(w.dtype)
    if "mean_logits" in metrics:
        count = rows.valid.sum()
        metrics["mean_logits"] = _objective.divide(own(metrics["mean_logits"] * count), place.over_tokens(count))
    return values._replace(
        loss=values.loss if none else _objective.divide(place.over_tokens(values.loss), reduced.denominator),
        d_w=d_w, d_bias=own(d_bias) if wants.d_bias else None, metrics=metrics)
