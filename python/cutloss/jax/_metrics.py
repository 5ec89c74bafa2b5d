"""Metrics of rows from tiles of logits. The state is a dict of f32 or i32 arrays [T] or [T, k]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._options import Options
from ._place import Place

_F32 = jnp.float32


def start(options: Options, like: jax.Array) -> dict[str, jax.Array]:
    """like: f32, of the tokens' shape."""
    state = {}
    if "entropy" in options.metrics:
        state["entropy"] = jnp.zeros_like(like)
    if {"argmax", "correct"} & options.metrics or options.filter_eps is not None:
        state["best"] = like * 0 - jnp.inf
        state["best_id"] = jnp.zeros_like(like, jnp.int32)
    if options.top_k:
        wide = jnp.broadcast_to(like[..., None], (*like.shape, options.top_k))
        state["top"] = wide * 0 - jnp.inf
        state["top_ids"] = jnp.full_like(wide, -1, jnp.int32)
    return state


def absorb(options: Options, state: dict[str, jax.Array], ids: jax.Array, z: jax.Array, p: jax.Array, base: jax.Array,
           old_base: jax.Array, scale: jax.Array, total: jax.Array) -> dict[str, jax.Array]:
    """p: exp(z - base) without the label's; scale, total: exp(old base - base) and the sum up to this tile."""
    state = dict(state)
    if "entropy" in state:
        # sum of exp(z - base) (z - base): negative terms only, like all that the entropy is made of.
        own = jnp.where(p > 0, p * (z - base[:, None]), 0).sum(1)
        state["entropy"] = _rebased(state["entropy"], base, old_base, scale, total) + own
    if "best" in state:
        at = jnp.argmax(z, axis=1)
        best, best_id = jnp.max(z, axis=1), ids[at]
        first = (best > state["best"]) | ((best == state["best"]) & (best_id < state["best_id"]))
        state["best"] = jnp.where(first, best, state["best"])
        state["best_id"] = jnp.where(first, best_id, state["best_id"])
    if "top" in state:
        k = options.top_k
        values, at = lax.top_k(jnp.where(z == 0, 0, z), min(k, z.shape[1]))  # -0 is no smaller than 0
        every = jnp.concatenate([state["top"], values], axis=1)
        state["top"], state["top_ids"] = _top(every, jnp.concatenate([state["top_ids"], ids[at]], axis=1), k)
    return state


def combine(place: Place, state: dict[str, jax.Array], base: jax.Array, old_base: jax.Array, scale: jax.Array,
            total: jax.Array) -> dict[str, jax.Array]:
    """Over the vocabulary's parts. base: of all; old_base, total: of the part, whose scale is exp(old base - base)."""
    state = dict(state)
    if "entropy" in state:
        state["entropy"] = place.over_vocab(_rebased(state["entropy"], base, old_base, scale, total))
    if "best" in state:
        best = place.largest(state["best"])
        state["best_id"] = place.smallest(jnp.where(state["best"] == best, state["best_id"], jnp.iinfo(jnp.int32).max))
        state["best"] = best
    if "top" in state:
        k = state["top"].shape[1]
        state["top"], state["top_ids"] = _top(place.beside(state["top"]), place.beside(state["top_ids"]), k)
    return state


def _rebased(entropy: jax.Array, base: jax.Array, old_base: jax.Array, scale: jax.Array, total: jax.Array) -> jax.Array:
    moved = jnp.where(total > 0, total * (old_base - base), 0)
    return jnp.where(scale > 0, scale * (entropy + moved), 0)


def _top(values: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, of equal ones the smallest ids: gathered tiles do not come in the ids' order."""
    falling, ids = lax.sort((-values, ids), num_keys=2)
    return -falling[:, :k], ids[:, :k]


def finish(options: Options, state: dict[str, jax.Array], rows: Any, top: jax.Array, label_logit: jax.Array,
           total: jax.Array, peak: jax.Array, log_mass: jax.Array) -> dict[str, jax.Array]:
    """top, total: of the others than the label. Tokens whose lse is NaN have no order, and get -1 for an id; those that
    are not looked at are left to `only_valid`."""
    out = {}
    if "entropy" in state:
        base = jnp.where(peak == -jnp.inf, 0, peak)
        others, label = jnp.exp(top - base), jnp.exp(label_logit - base)
        mass = total * others + label
        moved = jnp.where(total * others > 0, total * (top - base), 0)
        terms = others * jnp.where(others > 0, state["entropy"] + moved, 0)
        terms += jnp.where(label > 0, label * (label_logit - base), 0)
        extra = jnp.where(label_logit >= top, jnp.log1p(total * others), jnp.log(mass))
        out["entropy"] = jnp.where(mass == 0, 0, extra - terms / mass)
    if "best_id" in state:
        # With every logit -inf, as with a NaN, there is no largest one.
        out["argmax"] = jnp.where(state["best"] == -jnp.inf, -1, state["best_id"])
        out["correct"] = (out["argmax"] == rows.target) & (out["argmax"] >= 0)
    if "top" in state:
        out["top_k_ids"] = state["top_ids"]
        out["top_k_logprobs"] = (state["top"] - jnp.where(peak == -jnp.inf, 0, peak)[:, None]) - log_mass[:, None]
    ordered = ~jnp.isnan(peak + log_mass)
    return {name: only_valid(ordered, value, name) if name in _OF_ORDER else value for name, value in out.items()}


_OF_ORDER = ("argmax", "correct", "top_k_ids")


def only_valid(valid: jax.Array, value: jax.Array, name: str) -> jax.Array:
    nothing = -1 if name in ("argmax", "top_k_ids", "rank") else False if name == "correct" else 0
    return jnp.where(valid if value.ndim == 1 else valid[:, None], value, nothing)


def rank(rows: Any, lse: jax.Array, larger: jax.Array) -> jax.Array:
    return jnp.where(rows.valid & (rows.target >= 0) & ~jnp.isnan(lse), larger, -1)
