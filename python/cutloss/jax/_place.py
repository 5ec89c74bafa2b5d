"""Where a device's part of the problem lies in the whole, when tokens and table are spread over a mesh.

Every axis of the mesh has one of two roles:

  vocab   the table's ids are split along it and each device works on its own: tokens are the same along the axis, and
          three numbers a token are combined (the largest logit, the sum, the label's logit), and the gradient of x
  token   tokens are split along it. If the table is split along it too, by ids or by the hidden dimension, its parts
          are gathered to be used by all tokens of the device, and the table's gradient is reduced back into its parts

Everything here runs inside shard_map, and does nothing for axes that are not there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Place(NamedTuple):
    """Static. Names of mesh axes, major first, as in PartitionSpecs."""

    token_axes: tuple[str, ...] = ()  # all that split tokens
    ids: tuple[tuple[str, int], ...] = ()  # (axis, its size): all that split the table's ids, in the order of its spec
    hidden_parts: tuple[tuple[str, int], ...] = ()  # token axes that split the table's hidden dimension, with sizes
    chip: str = ""  # device_kind

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.ids if axis not in self.token_axes)

    @property
    def hidden_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.hidden_parts)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Token axes that split the table's ids."""
        return tuple(axis for axis, _ in self.ids if axis in self.token_axes)

    @property
    def gathers(self) -> bool:
        return bool(self.row_axes or self.hidden_axes)

    @property
    def parts(self) -> int:
        """Number of devices whose ids are gathered."""
        return math.prod(size for axis, size in self.ids if axis in self.token_axes)

    @property
    def vocab_parts(self) -> int:
        return math.prod(size for _, size in self.ids)

    @property
    def ungathered(self) -> Place:
        """For a loop over the device's part alone."""
        return self._replace(token_axes=(), hidden_parts=())

    # ---------------------------------------------------------------------------------------------------- ids

    def start(self, rows: int) -> jax.Array:
        """The first id of this device's part, of `rows` ids."""
        index = jnp.int32(0)
        for axis, size in self.ids:
            index = index * size + lax.axis_index(axis)
        return index * rows

    def seen_at(self, ids: jax.Array, rows: int, size: int) -> jax.Array:
        """When each id is seen, counting those before it, if `size` of each part's `rows` are gathered at a time;
        2**31 - 1 for one that is in none of the parts."""
        offset = ids[:, None] - self.starts(rows)
        found = (ids[:, None] >= 0) & (offset >= 0) & (offset < rows)
        first = offset // size * size
        at = first * self.parts + jnp.arange(self.parts) * jnp.minimum(size, rows - first) + offset - first
        return jnp.min(jnp.where(found, at, jnp.iinfo(jnp.int32).max), axis=1)

    def starts(self, rows: int) -> jax.Array:
        """The first id of each gathered part, [parts], in the order in which `gather` lays them side by side."""
        own = self.start(rows)[None]
        return lax.all_gather(own, self.row_axes, tiled=True) if self.row_axes else own

    # -------------------------------------------------------------------------------------------- the table's parts

    def gather(self, part: jax.Array, id_axis: int) -> jax.Array:
        """A part of the table's ids, [t, D / k] or [D / k, t] -> [parts * t, D], the same on all token axes."""
        if self.hidden_axes:
            part = lax.all_gather(part, self.hidden_axes, axis=1 - id_axis, tiled=True)
        if self.row_axes:
            part = lax.all_gather(part, self.row_axes, axis=id_axis, tiled=True)
        return part

    def hidden(self, part: int) -> int:
        return part * math.prod(size for _, size in self.hidden_parts)

    def scatter(self, total: jax.Array, id_axis: int) -> jax.Array:
        """Sums `total` over all tokens and keeps this device's part: the transpose of `gather`."""
        rest = tuple(a for a in self.token_axes if a not in self.row_axes + self.hidden_axes)
        if self.row_axes:
            total = lax.psum_scatter(total, self.row_axes, scatter_dimension=id_axis, tiled=True)
        if self.hidden_axes:
            total = lax.psum_scatter(self._columns(total, 1 - id_axis), self.hidden_axes)
        return _as_it_is(lax.psum(total, rest) if rest else total) if self.token_axes else total

    def spread(self, part: jax.Array) -> jax.Array:
        """[1, D / k] sums over the rows of the parts -> [1, D] over those of all that `gather` brings together."""
        if self.row_axes:
            part = lax.psum(part, self.row_axes)
        return lax.all_gather(part, self.hidden_axes, axis=1, tiled=True) if self.hidden_axes else part

    def scatter_ids(self, total: jax.Array) -> jax.Array:
        """[parts, rows], a number for each gathered id -> [rows], this device's, summed over all tokens."""
        rest = tuple(a for a in self.token_axes if a not in self.row_axes)
        total = lax.psum_scatter(total, self.row_axes) if self.row_axes else total[0]
        return lax.psum(total, rest) if rest else total

    def own_ids(self, total: jax.Array) -> jax.Array:
        """The same for numbers that are sums over all tokens already."""
        index = jnp.int32(0)
        for axis, size in self.ids:
            index = index * size + lax.axis_index(axis) if axis in self.token_axes else index
        return total[index]

    def _columns(self, a: jax.Array, axis: int) -> jax.Array:
        """Parts of the hidden axis as a leading one: scattering a minor axis is an all-reduce and a slice on TPU, twice
        the bytes."""
        parts = math.prod(size for _, size in self.hidden_parts)
        return jnp.moveaxis(a.reshape(*a.shape[:axis], parts, -1, *a.shape[axis + 1 :]), axis, 0)

    # --------------------------------------------------------------------------------------------------- reductions

    def over_tokens(self, a: Any) -> Any:
        return lax.psum(a, self.token_axes) if self.token_axes else a

    def over_vocab(self, a: Any) -> Any:
        return _as_it_is(lax.psum(a, self.vocab_axes)) if self.vocab_axes else a

    def largest(self, a: jax.Array) -> jax.Array:
        return lax.pmax(a, self.vocab_axes) if self.vocab_axes else a

    def smallest(self, a: jax.Array) -> jax.Array:
        return lax.pmin(a, self.vocab_axes) if self.vocab_axes else a

    def beside(self, a: jax.Array) -> jax.Array:
        """[T, k] of each of the vocabulary's parts -> [T, parts * k]"""
        return lax.all_gather(a, self.vocab_axes, axis=1, tiled=True) if self.vocab_axes else a


def _as_it_is(total: jax.Array) -> jax.Array:
    """Without a barrier XLA for TPU moves a cast of the sum before it, and adds the devices' parts in bfloat16."""
    return lax.optimization_barrier(total)


ALONE = Place()
