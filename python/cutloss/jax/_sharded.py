"""The loss and its gradients over a mesh: one shard_map program each for the forward and the backward pass, below the
differentiation, so that no shard_map is ever differentiated."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from . import _ffi, _xla
from ._mesh import Layout
from ._options import Options, Values, Wants
from ._place import Place

# A trainable head reads its table twice. Gathered whole it is moved once; this is what it may take without a budget.
WHOLE_TABLE_BYTES = 512 << 20


def evaluate(options: Options, wants: Wants, x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array,
             saved: tuple[jax.Array, jax.Array, jax.Array] | None) -> Values:
    """x [..., D], labels and saved [...], cotangent [1], or [...] for reduction "none"."""
    layout = options.layout
    place = layout.place._replace(whole=_keeps_table(options, wants, w, layout))
    local = options._replace(layout=None)
    none = options.reduction == "none"
    lead = labels.shape
    tokens, table = layout.tokens_spec, layout.w_spec

    def program(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array, saved: Any) -> Values:
        flat = [a.reshape(-1) for a in (labels, cotangent)]
        saved = saved and tuple(a.reshape(-1) for a in saved)
        values = _on_device(local, wants, place, x.reshape(-1, x.shape[-1]), w, *flat, saved)
        return Values(
            values.loss.reshape(labels.shape) if none else values.loss,
            *(a.reshape(labels.shape) for a in (values.nll, values.peak, values.log_mass)),
            values.d_x.reshape(x.shape) if wants.d_x else None, values.d_w,
        )

    x = _pad(x, layout, 0)
    labels = _pad(labels, layout, options.ignore_index)
    cotangent = _pad(cotangent, layout, 0) if none else cotangent
    saved = saved and tuple(_pad(a, layout, 0) for a in saved)
    values = jax.shard_map(
        program, mesh=layout.mesh, check_vma=False,
        in_specs=(layout.x_spec, table, tokens, tokens if none else PartitionSpec(), saved and (tokens,) * 3),
        out_specs=Values(tokens if none else PartitionSpec(), tokens, tokens, tokens,
                         layout.x_spec if wants.d_x else None, table if wants.d_w else None),
    )(*_placed(layout, x, w, labels, cotangent, saved))

    def cut(a: Any) -> Any:
        return a if a is None else a[tuple(map(slice, lead))] if a.shape[: len(lead)] != lead else a

    return values._replace(loss=cut(values.loss) if none else values.loss, nll=cut(values.nll), peak=cut(values.peak),
                           log_mass=cut(values.log_mass), d_x=cut(values.d_x))


def _keeps_table(options: Options, wants: Wants, w: jax.Array, layout: Layout) -> bool:
    """Whether the device gathers its ids' part of the table whole: for a trainable head, if it is small enough."""
    ids = math.prod(size for axis, size in layout.place.ids if axis in layout.place.vocab_axes)
    limit = WHOLE_TABLE_BYTES if options.budget is None else options.budget
    return layout.place.gathers and wants.d_w and w.size * w.dtype.itemsize <= limit * ids


def _pad(a: jax.Array, layout: Layout, fill: Any) -> jax.Array:
    sizes = dict(layout.mesh.shape)
    extra = [-extent % math.prod(sizes[axis] for axis in axes) for extent, axes in zip(a.shape, layout.lead)]
    if not any(extra):
        return a
    return jnp.pad(a, [(0, n) for n in extra] + [(0, 0)] * (a.ndim - len(extra)), constant_values=fill)


def _placed(layout: Layout, x: Any, w: Any, labels: Any, cotangent: Any, saved: Any) -> tuple[Any, ...]:
    """Where axes are explicit, shard_map takes only what already lies as it wants."""
    if not layout.explicit:
        return x, w, labels, cotangent, saved

    def put(a: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.sharding.reshard(a, jax.sharding.NamedSharding(layout.mesh, spec))

    tokens = layout.tokens_spec
    return (put(x, layout.x_spec), put(w, layout.w_spec), put(labels, tokens),
            put(cotangent, tokens if cotangent.ndim == labels.ndim and cotangent.shape == labels.shape
                else PartitionSpec()),
            saved and tuple(put(a, tokens) for a in saved))


# ----------------------------------------------------------------------------------------------------- on one device


def _on_device(options: Options, wants: Wants, place: Place, x: jax.Array, w: jax.Array, labels: jax.Array,
               cotangent: jax.Array, saved: Any) -> Values:
    def tiles(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array, saved: Any) -> Values:
        return _xla.evaluate(options, wants, x, w, labels, cotangent, saved, place)

    def kernels(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array, saved: Any) -> Values:
        return _kernels(options, wants, place, x, w, labels, cotangent)

    arguments = (x, w, labels, cotangent, saved)
    # The kernels need each token's label among their ids, and round dw before it is summed over devices.
    rounded = wants.d_w and w.dtype != jnp.float32
    if options.impl == "xla" or place.vocab_axes or rounded or not _ffi.available():
        return tiles(*arguments)
    return kernels(*arguments) if options.impl == "cpu" else lax.platform_dependent(
        *arguments, cpu=kernels, default=tiles)


def _kernels(options: Options, wants: Wants, place: Place, x: jax.Array, w: jax.Array, labels: jax.Array,
             cotangent: jax.Array) -> Values:
    """The C++ kernels, over the whole vocabulary and this device's tokens."""
    id_axis = 0 if options.head_layout == "vd" else 1
    none = options.reduction == "none"
    count = jnp.float32(1)
    if options.reduction == "mean":
        count = jnp.maximum(place.over_tokens(jnp.sum(labels != options.ignore_index)), 1).astype(jnp.float32)
    values = _ffi.evaluate(
        options._replace(reduction="none" if none else "sum"), wants, x, place.gather(w, id_axis), labels,
        cotangent / count)
    d_w = values.d_w
    if wants.d_w:
        d_w = place.scatter(d_w.astype(jnp.float32), id_axis).astype(w.dtype)
    return values._replace(loss=values.loss if none else place.over_tokens(values.loss) / count, d_w=d_w)
