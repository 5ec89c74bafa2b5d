"""Arrays and options of a call, checked and brought into the form that the lowerings take."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from .. import _arrays, _check, _core
from ._options import Options


def known(array: Any) -> bool:
    """Whether the values can be looked at now: not while tracing, nor where other hosts hold a part."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def as_array(array: Any, what: str = "labels") -> Any:
    if isinstance(array, jax.Array):
        return array
    return jnp.asarray(array) if hasattr(array, "__jax_array__") else _arrays.as_numpy(what, array)


def operand(what: str, value: Any) -> jax.Array:
    """x or w. What JAX narrows by itself (a list, float64 where x64 is off) is narrowed."""
    array = as_array(value, what)
    try:
        array = jnp.asarray(array)
    except TypeError:  # of objects or texts, which it has no dtype for
        pass
    _check.dtype_name(what, array.dtype)
    return array


def ids(what: str, taken: Any, vocab: int, ignore_index: int, checked: bool = False, shift: int = 0) -> jax.Array:
    """Labels as int32 or int64. Large unsigned ids are kept out of range instead of wrapping into it. checked: those that
    are not known yet are checked when the program runs. shift: so many at the start of a sequence are never used."""
    _check.label_dtype(taken.dtype, what)
    if known(taken):  # before JAX narrows int64, where an id of 2**32 + 5 would become 5
        _check_values(what, np.asarray(taken), vocab, ignore_index, shift)
    if taken.dtype.kind == "u" and taken.dtype.itemsize >= 4:
        top = 2**31 - (2 if ignore_index == 2**31 - 1 else 1)
        narrow = jnp.minimum(jnp.asarray(taken), top).astype(jnp.int32)
        if ignore_index == 2**31 - 1:
            narrow = jnp.where(jnp.asarray(taken) == ignore_index, ignore_index, narrow)
    elif taken.dtype in (np.int32, np.int64):
        narrow = jnp.asarray(taken)  # int64 becomes int32 where x64 is off
    else:
        narrow = jnp.asarray(taken).astype(jnp.int32)
    limits = jnp.iinfo(narrow.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(f"ignore_index {ignore_index} does not fit {narrow.dtype}, in which JAX holds these "
                         f"{taken.dtype} {what}: no label can equal it; use one that fits, such as -100")
    if checked and not known(taken) and taken.size:
        _check_later(what, taken, narrow, vocab, ignore_index, shift)
    return narrow


def floats(what: str, value: Any, shape: tuple[int, ...], meaning: str, masks: bool = False) -> jax.Array | None:
    return None if value is None else jnp.asarray(_reals(what, value, shape, meaning, masks)).astype(jnp.float32)


def _reals(what: str, value: Any, shape: tuple[int, ...], meaning: str, masks: bool = False) -> Any:
    array = as_array(value, what)
    _check.real(what, value, array.dtype, array.ndim, masks)
    _check.shape(what, array.shape, shape, meaning)
    return array


def bias(array: Any, vocab: int) -> jax.Array | None:
    if array is None:
        return None
    array = as_array(array, "bias")
    _check.dtype_name("bias", array.dtype)
    _check.shape("bias", array.shape, (vocab,), _check.PER_ID)
    return jnp.asarray(array)


def order(what: str, array: Any, vocab: int) -> jax.Array | None:
    if array is None:
        return None
    array = as_array(array, what)
    _check.label_dtype(array.dtype, what)
    _check.shape(what, array.shape, (vocab,), _check.PER_PLACE)
    if known(array):
        values = np.ascontiguousarray(array, np.int64)
        _core.validate_order(what, values.ctypes.data, vocab)
    return jnp.asarray(array).astype(jnp.int32)


def soft_targets(value: Any, lead: tuple[int, ...], vocab: int, ignore_index: int,
                 checked: bool = False) -> tuple[Any, Any]:
    if value is None:
        return None, None
    _check.pair("soft_targets", value)
    taken = as_array(value[0], "soft_targets ids")
    k = taken.shape[-1] if taken.ndim else 0
    _check.shape("soft_targets ids", taken.shape, (*lead, max(k, 1)), _check.SOFT_IDS)
    narrow = ids("soft_targets ids", taken, vocab, ignore_index, checked)
    probabilities = _reals("soft_targets probabilities", value[1], taken.shape, _check.LIKE_IDS)
    return narrow, jnp.asarray(probabilities).astype(jnp.float32)


def denominator(value: Any, reduction: str) -> jax.Array | None:
    """A mean's, f32 []. One that is known must be finite and 0 or more; of a traced one the kernels say so when they run,
    and the XLA lowering makes NaN."""
    if value is None:
        return None
    array = _reals("denominator", value, (), "a number")
    _core.validate_denominator(float(array) if known(array) else 1.0, reduction)
    narrow = jnp.asarray(array).astype(jnp.float32)
    if known(array) or array.dtype != np.float64:
        return narrow
    return jnp.where((narrow == 0) & (array != 0), jnp.nan, narrow)


def seed(value: Any) -> jax.Array:
    """u32 [2], the low word first."""
    if isinstance(value, jax.Array):
        if value.dtype.kind not in "iu" or value.shape:
            raise TypeError(f"seed: an integer is wanted, not {value.dtype.name} of shape {value.shape}")
        return jnp.stack([value.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])
    number = _check.integer("seed", value, 0, 2**64 - 1)
    return jnp.asarray(np.array([number % 2**32, number >> 32], np.uint32))


def metrics(value: Any) -> tuple[frozenset[str], int]:
    names = _check.names("metrics", value)
    own = frozenset(name for name in names if name in ("lse", "nll", "valid_count", "filter_report"))
    wanted = _check.metrics(tuple(name for name in names if name not in own))
    return own | frozenset(wanted), wanted.get("top_k", 0)


def valid_count(options: Options, labels: jax.Array | None, lead: tuple[int, ...]) -> jax.Array:
    """i32: rows with a label that is not ignore_index (with soft targets: all that the shift leaves)."""
    counts = jnp.broadcast_to(True, lead) if labels is None else labels != options.ignore_index
    if options.shift:
        counts &= jnp.arange(lead[-1]) >= options.shift
    return jnp.sum(counts, dtype=jnp.int32)


def filter_eps(value: Any) -> float | None:
    number = _check.optional_number("filter_eps", value)
    if number is not None and math.isnan(number):
        raise ValueError("filter_eps is nan; it is a gap in logits, inf for none that is too large")
    return number


def chunk_size(value: Any) -> int:
    # The texts of jax-cce, whose function this replaces.
    number = _check.integer("chunk_size", value, -(2**63))
    if number <= 0:
        raise ValueError(f"chunk_size must be positive, got {number}")
    return number


def _is_bad(ids: Any, vocab: int, ignore_index: int) -> Any:
    """Neither an id of the vocabulary nor ignore_index."""
    return ((ids < 0) | (ids >= vocab)) & (ids != ignore_index)


def _at(what: str, where: tuple[Any, ...]) -> str:
    return f"{what}[{', '.join(map(str, where))}]"


def _check_values(what: str, ids: np.ndarray, vocab: int, ignore_index: int, shift: int = 0) -> None:
    """Raises for the first bad id."""
    bad = _is_bad(ids, vocab, ignore_index) & _used(ids, shift)
    if bad.any():
        where = tuple(map(int, np.argwhere(bad)[0]))
        _core.raise_bad_id(_at(what, where), str(int(ids[where])), vocab, ignore_index)


def _used(ids: Any, shift: int) -> Any:
    return np.arange(ids.shape[-1]) >= shift if ids.ndim else True


def _check_later(what: str, taken: jax.Array, narrow: jax.Array, vocab: int, ignore_index: int, shift: int = 0) -> None:
    """The same, with the same text, in a program under jax.experimental.checkify. A callback that raises would need no such
    wrapper, but on a mesh the other devices then wait for the one that raised, until XLA ends the process."""
    try:
        _core.raise_bad_id(_at(what, ("{}",) * taken.ndim), "{}", vocab, ignore_index)
    except ValueError as error:
        text = str(error)
    bad = (_is_bad(narrow, vocab, ignore_index) & _used(narrow, shift)).reshape(-1)
    first = jnp.argmax(bad)
    where = jnp.unravel_index(first, taken.shape) if taken.ndim else ()
    checkify.check(~bad.any(), text, *where, taken.reshape(-1)[first])
