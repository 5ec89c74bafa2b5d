"""The head's table and the tokens, as the XLA programs go through them: tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _objective
from ._options import Extra, Options
from ._place import Place

_F32 = jnp.float32


class Tokens(NamedTuple):
    """Token-wise arrays, [tiles, T, ...]."""

    x: jax.Array
    rows: _objective.Rows

    @property
    def target(self) -> jax.Array:
        return self.rows.target

    @property
    def valid(self) -> jax.Array:
        return self.rows.valid

    @property
    def counted(self) -> jax.Array:
        """x with zeros in the rows that do not count: whatever is in these stays there."""
        return jnp.where(self.valid[..., None], self.x, 0)


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=_F32)


class Head(NamedTuple):
    """The table in either layout, or this device's part of it."""

    options: Options
    w: jax.Array
    place: Place
    tile_ids: int  # of this device's ids in a tile; of gathered ones there are `place.parts` times as many
    kept: jax.Array | None = None  # the gathered table, its tiles one after another
    extra: Extra = Extra()  # bias, class weights and order, of all ids
    total: Any = None  # sum of the class weights

    @property
    def id_axis(self) -> int:
        return 0 if self.options.head_layout == "vd" else 1

    @property
    def hidden_axis(self) -> int:
        return 1 - self.id_axis

    @property
    def rows(self) -> int:
        return self.w.shape[self.id_axis]

    @property
    def vocab(self) -> int:
        return self.rows * self.place.vocab_parts

    def class_weights(self, ids: jax.Array) -> jax.Array:
        weights = self.extra.class_weights
        return jnp.ones(ids.shape, _F32) if weights is None else weights[ids]

    def keeping(self) -> Head:
        """Gathers the table once for all loops to come: by tiles, since XLA would lay out a whole one twice."""
        shape = [0, 0]
        shape[self.id_axis] = self.rows * self.place.parts
        shape[self.hidden_axis] = self.place.hidden(self.w.shape[self.hidden_axis])

        def keep(first: Any, _: jax.Array, tile: jax.Array, kept: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(kept, tile, first * self.place.parts, self.id_axis)

        return self._replace(kept=self.over_tiles(keep, jnp.zeros(shape, self.w.dtype)))

    def logits(self, x: jax.Array, tile: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """z [T, ids] and its derivative by the raw logit, None for 1."""
        raw = product(x, tile, 1, self.hidden_axis)
        if self.options.logit_scale != 1:
            raw *= self.options.logit_scale
        if self.extra.bias is not None:
            raw += self.extra.bias[ids].astype(_F32)
        cap = self.options.softcap
        if cap is None:
            return raw, None
        bent = jnp.tanh(raw / cap)
        return cap * bent, 1 - bent * bent

    def slope(self, z: jax.Array) -> jax.Array | None:
        """The same derivative, of logits that were kept."""
        return None if self.options.softcap is None else 1 - (z / self.options.softcap) ** 2

    def rows_of(self, weights: jax.Array, tile: jax.Array) -> jax.Array:
        """weights [T, ids] @ table -> [T, D]"""
        return product(weights, tile, 1, self.id_axis)

    def label_rows(self, target: jax.Array) -> jax.Array:
        """[T] -> [T, D], 0 for a label that is not among this device's ids. For a table that is not gathered."""
        return self.take(self.w, target - self.place.start(self.rows))

    def take(self, tile: jax.Array, index: jax.Array) -> jax.Array:
        """The tile's rows, 0 for an index outside."""
        size = tile.shape[self.id_axis]
        rows = jnp.take(tile, jnp.clip(index, 0, size - 1), axis=self.id_axis)
        rows = rows if self.id_axis == 0 else rows.T
        return jnp.where(((index >= 0) & (index < size))[:, None], rows, 0)

    @property
    def size(self) -> int:
        return min(self.tile_ids, self.rows)

    @property
    def own(self) -> Head:
        """The device's part of the table, gathering nothing."""
        return self._replace(place=self.place.ungathered, kept=None)

    def tile_shape(self, ids: int) -> tuple[int, int]:
        hidden = self.place.hidden(self.w.shape[self.hidden_axis])
        return (ids, hidden) if self.id_axis == 0 else (hidden, ids)

    def over_tiles(self, body: Callable[[Any, jax.Array, Any, Any], Any], carry: Any, read: bool = True) -> Any:
        """carry = body(first, ids, tile, carry) over tiles in order. first: of the tile's rows in the device's part.
        Without `read` nothing is gathered, and the tile is None."""
        size = self.size
        whole = self.rows // size
        starts = self.place.starts(self.rows)

        def step(first: Any, size: int, carry: Any) -> Any:
            ids = (starts[:, None] + first + lax.iota(jnp.int32, size)).reshape(-1)
            if self.extra.vocab_order is not None:
                ids = self.extra.vocab_order[ids]
            return body(first, ids, self._part(first, size, ids) if read else None, carry)

        carry = lax.fori_loop(0, whole, lambda k, carry: step(k * size, size, carry), carry)
        if whole * size < self.rows:
            carry = step(whole * size, self.rows - whole * size, carry)
        return carry

    def _part(self, first: Any, size: int, ids: jax.Array) -> jax.Array:
        def cut(a: jax.Array, first: Any, size: int) -> jax.Array:
            if isinstance(first, int):
                return lax.slice_in_dim(a, first, first + size, axis=self.id_axis)
            return lax.dynamic_slice_in_dim(a, first, size, self.id_axis)

        if self.extra.vocab_order is not None:
            return jnp.take(self.w, ids, axis=self.id_axis)
        if self.kept is None:
            return self.place.gather(cut(self.w, first, size), self.id_axis)
        return cut(self.kept, first * self.place.parts, size * self.place.parts)


def at_label(target: jax.Array, ids: jax.Array) -> jax.Array:
    return target[:, None] == ids[None, :]


def finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0, top)  # nothing but the label so far (V = 1)


def at(i: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


class Labels(NamedTuple):
    """The tokens' label rows, picked from gathered tiles as they come by. Sorted by when their tile comes, so that
    each tile has a run of them, and n labels cost about n rows, not n for every tile. (Asking the table's owners for
    their columns makes XLA copy their whole part, where it keeps the ids minor: for D / k that is no multiple of 128.)
    """

    when: jax.Array  # [n], ascending
    order: jax.Array  # [n], the tokens in that order
    rows: jax.Array  # [n, D], those seen so far, in that order

    CHUNK = 128

    @classmethod
    def of(cls, head: Head, target: jax.Array) -> Labels:
        when = head.place.seen_at(target, head.rows, head.size)
        when, order = lax.sort_key_val(when, lax.iota(jnp.int32, len(target)))
        hidden = head.place.hidden(head.w.shape[head.hidden_axis])
        return cls(when, order, jnp.zeros((len(target), hidden), head.w.dtype))

    def see(self, head: Head, first: Any, tile: jax.Array) -> Labels:
        index = self.when - first * head.place.parts
        size = min(self.CHUNK, len(index))

        def chunk(carry: Any) -> Any:
            at, rows = carry
            start = jnp.minimum(at, len(index) - size)  # what is before `at` is found once more
            part = lax.dynamic_slice_in_dim(index, start, size)
            here = ((part >= 0) & (part < tile.shape[head.id_axis]))[:, None]
            old = lax.dynamic_slice_in_dim(rows, start, size)
            rows = lax.dynamic_update_slice_in_dim(rows, jnp.where(here, head.take(tile, part), old), start, 0)
            return at + size, rows

        begin, end = jnp.sum(index < 0), jnp.sum(index < tile.shape[head.id_axis])
        return self._replace(rows=lax.while_loop(lambda carry: carry[0] < end, chunk, (begin, self.rows))[1])

    def in_order(self) -> jax.Array:
        return self.rows[jnp.argsort(self.order)]
