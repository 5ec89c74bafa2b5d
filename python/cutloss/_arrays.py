"""Arrays of any library on CPU as NumPy views: nothing is copied that the C++ library can read where it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _check, _core


def refuse_masked(what: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what}: masked arrays are not taken; give labels with masked tokens set to ignore_index")


def as_numpy(what: str, array: Any) -> np.ndarray:
    """A NumPy view of an array that is one, speaks DLPack (PyTorch, JAX, ...) or converts to one; bfloat16 included."""
    refuse_masked(what, array)
    if isinstance(array, np.ndarray):
        return np.asarray(array)  # a matrix stays two-dimensional whatever it is reshaped to
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except Exception:  # each library has its own exceptions for "not this dtype" and "not this device"
            pass
        try:
            bits = _core.bits_of_bfloat16(array)
        except TypeError:
            pass
        else:
            import ml_dtypes  # comes with JAX; otherwise only callers who have bfloat16 need it

            return bits.view(ml_dtypes.bfloat16)
    try:
        return np.asarray(array)
    except Exception as failure:
        raise TypeError(f"{what}: {type(array).__name__} cannot be read as an array in CPU memory: {failure}") \
            from failure


def contiguous(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """C-contiguous and aligned, which a contiguous array need not be: a copy only where it is not the one or the other."""
    return np.require(array, dtype, "CA")


def readable(array: np.ndarray) -> np.ndarray:
    """The array itself if its strides are whole elements and its address is aligned; else (a field of a packed record,
    say) a copy."""
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    return array if whole and array.flags.aligned else contiguous(array)


def matrix(what: str, array: np.ndarray) -> tuple[np.ndarray, str, tuple[int, int]]:
    """A [rows, columns] view of an array [..., columns], its dtype's name and its strides in elements."""
    name = _check.dtype_name(what, array.dtype)
    rows = int(np.prod(array.shape[:-1], dtype=np.int64))
    flat = readable(array.reshape(rows, array.shape[-1]))
    return flat, name, (flat.strides[0] // flat.itemsize, flat.strides[1] // flat.itemsize)


def integers(what: str, array: np.ndarray) -> np.ndarray:
    """The array as int32 or int64; a uint64 that int64 cannot hold is an error, since it would become another id."""
    _check.label_dtype(array.dtype, what)
    if array.dtype in (np.int32, np.int64):
        return array
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > _check.INT64_MAX:
        at = np.unravel_index(array.argmax(), array.shape)
        raise ValueError(f"{what}[{', '.join(map(str, at))}] is {array[at]}, beyond any vocabulary")
    return array.astype(np.int64)


def integer_name(array: np.ndarray) -> str:
    return "i32" if array.dtype == np.int32 else "i64"


def label_vector(array: np.ndarray) -> tuple[np.ndarray, str, int]:
    """Labels as one axis of int32 or int64, with the dtype's name and the stride in elements."""
    flat = readable(integers("labels", array).reshape(-1))
    return flat, integer_name(flat), flat.strides[0] // flat.itemsize


def shaped(what: str, array: np.ndarray, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    _check.shape(what, array.shape, shape, meaning)
    return array


def reals(what: str, value: Any, masks: bool = False) -> np.ndarray:
    """float32 out of real numbers of any dtype; of truth values only where a mask makes sense."""
    array = as_numpy(what, value)
    _check.real(what, value, array.dtype, array.ndim, masks)
    with np.errstate(over="ignore"):
        return contiguous(array, np.float32)


def buffer(what: str, array: Any, like: np.ndarray) -> np.ndarray:
    """Checks an array that a gradient is added to."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"accumulate: {what} is a {type(array).__name__}; a numpy.ndarray is wanted, written in place")
    if array.shape != like.shape:
        raise ValueError(f"accumulate: {what} has shape {array.shape}; its input's, {like.shape}, is wanted")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise ValueError(f"accumulate: {what} must be C-contiguous, aligned and writeable, to be written in place")
    return array
