"""What Python checks before the C++ library sees a problem: the things that only Python knows (shapes of more than two
axes, dtypes, spelling). Every front end uses these functions, so all say the same; the policies on the problem itself
(sizes, softcap, modes, labels' values) are in C++."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
INT64_MAX = 2**63 - 1


class Sizes(NamedTuple):
    tokens: int
    hidden: int
    vocab: int


def one_of(what: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{what}: {value!r} is not one of {', '.join(map(repr, known))}")
    return value


def reduction(value: object) -> str:
    return one_of("reduction", value, ("mean", "sum", "none"))


def mode(value: object) -> str:
    return one_of("mode", value, ("auto", "loss", "stream", "chunk", "recompute", "sparse"))


def filter_name(value: object) -> str | None:
    return None if value is None else one_of("filter", value, ("certified", "unbiased", "tile"))


def integer(what: str, value: object, low: int, high: int = INT64_MAX) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what}: an integer is wanted, not {value!r}") from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what}: an integer is wanted, not {value!r}")
    if not low <= number <= high:
        # Python itself refuses to write down the largest.
        text = number if abs(number) < 2**70 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{what}: {text} is outside [{low}, {high}]")
    return number


def ignore_index(value: object) -> int:
    return integer("ignore_index", value, -(2**63))


def threads(value: object) -> int:
    """Number of threads, 0 for "as many as the machine allows and the work is worth"."""
    return 0 if value is None else integer("threads", value, -(2**63))


def number(what: str, value: object) -> float:
    """A float out of a number of any library; texts, truth values and arrays are none."""
    odd = isinstance(value, (str, bytes, bytearray, bool, np.bool_)) or getattr(value, "ndim", 0) != 0
    try:
        if odd or getattr(value, "dtype", None) == np.bool_:
            raise TypeError("it is none")
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond any float
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except (TypeError, ValueError) as failure:
        reason = "" if odd else f": {failure}"
        raise TypeError(f"{what}: a number is wanted, known when the program is traced, not {value!r}{reason}") from None


def optional_number(what: str, value: object) -> float | None:
    return None if value is None else number(what, value)


def target(value: object) -> str | None:
    """A kernel target by name; C++ knows which there are."""
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"target: one of available_targets() or None is wanted, not {value!r}")


def flag(what: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what}: True or False is wanted, not {value!r}")
    return bool(value)


def softcap(value: object) -> float | None:
    return optional_number("softcap", value)


def budget(value: object) -> int | None:
    """Bytes out of an integer or a text such as "64MiB", "1.5GiB" or "800MB"."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"budget: cannot read {value!r}; write bytes, or a number with KiB, MiB, GiB, KB, MB, GB")
        bytes_ = float(match[1]) * _UNITS[match[2]]
        value = int(bytes_) if math.isfinite(bytes_) else INT64_MAX + 1
    return integer("budget", value, 0)


def names(what: str, value: object) -> tuple[object, ...]:
    """One name, or any number of them."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{what}: a name or a tuple of names is wanted, not {value!r}")
    return tuple(value)


def wrt(value: object) -> frozenset[str]:
    """Which of "e", "c" and "bias" get a gradient."""
    return frozenset(one_of("wrt", item, ("e", "c", "bias")) for item in names("wrt", value))


def metrics(value: object) -> dict[str, int]:
    """The metrics asked for, by name; the value is k for "top_k=k", which comes in as "top_k", and 1 for all others."""
    known = ("entropy", "argmax", "correct", "rank", "mean_logits", "top_k=5")
    wanted: dict[str, int] = {}
    for item in names("metrics", value):
        match = re.fullmatch(r"top_k=(\d{1,18})", item) if isinstance(item, str) else None
        if match is None:
            wanted[one_of("metrics", item, known)] = 1
        elif int(match[1]) == 0:
            raise ValueError(f"metrics: {item!r} asks for no logit; k is 1 or more")
        elif wanted.setdefault("top_k", int(match[1])) != int(match[1]):
            raise ValueError(f"metrics: {item!r} beside top_k={wanted['top_k']}; one k is wanted, the larger has both")
    return wanted


def dtype_name(what: str, dtype: np.dtype) -> str:
    known = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    if dtype.name in known and dtype.isnative:
        return known[dtype.name]
    raise TypeError(f"{what}: dtype {dtype.name if dtype.isnative else dtype.str} is not taken; float32, bfloat16 and "
                    f"float16 are, in any mix: cast with {what}.astype('float32')")


def label_dtype(dtype: np.dtype, what: str = "labels") -> None:
    if dtype.kind not in "iu":
        raise TypeError(f"{what}: dtype {dtype.name} is not taken; any integer dtype is (int32 and int64 without a "
                        f"copy): cast with {what}.astype('int32')")


PER_TOKEN = "one for each token"
PER_ID = "one for each id of the vocabulary"
PER_PLACE = "one place for each id of the vocabulary"
SOFT_IDS = "one row of K >= 1 for each token"
LIKE_IDS = "the shape of the ids"


def shape(what: str, got: tuple[int, ...], wanted: tuple[int, ...], meaning: str) -> None:
    if got != wanted:
        raise ValueError(f"{what} {got}: {meaning}, {wanted}, is wanted")


def pair(what: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{what}: a pair (ids, probabilities) is wanted, not {type(value).__name__}")


def real(what: str, value: object, dtype: np.dtype, ndim: int, masks: bool) -> None:
    """Of truth values only where a mask makes sense."""
    if dtype.kind in "fiu" or dtype.name in ("bfloat16", "float16") or (masks and dtype.kind == "b"):
        return
    raise TypeError(f"{what}: real numbers are wanted, not {value!r}" if ndim == 0 else
                    f"{what}: dtype {dtype.name} is not taken; real numbers are wanted")


def sizes(e_name: str, e: tuple[int, ...], c_name: str, c: tuple[int, ...], labels: tuple[int, ...] | None,
          head_layout: object) -> Sizes:
    """Checks that the shapes e [..., D], c [V, D] or [D, V] and, unless None, labels [...] fit together. Whether V and D
    are 1 or more is for C++ to say."""
    layout = one_of("head_layout", head_layout, ("vd", "dv"))
    axes = "[V, D]" if layout == "vd" else "[D, V]"
    if len(c) != 2:
        hint = ": is it empty or not yet gathered?" if 0 in c else ""
        raise ValueError(f"{c_name}: shape {c} is no table {axes} (head_layout={layout!r}){hint}")
    vocab, hidden = c if layout == "vd" else c[::-1]
    if not e:
        raise ValueError(f"{e_name}: shape {e}, where [..., D] is wanted")
    if e[-1] != hidden:
        other = "dv" if layout == "vd" else "vd"
        hint = f"; the transposed table would fit: head_layout={other!r}?" if e[-1] == vocab else ""
        raise ValueError(f"{e_name} {e} and {c_name} {c} do not fit together: the hidden sizes are {e[-1]} and "
                         f"{hidden}, with {c_name} as {axes} (head_layout={layout!r}){hint}")
    if labels is not None and labels != e[:-1]:
        raise ValueError(f"labels {labels} and {e_name} {e} do not fit together: one label for each token is wanted, "
                         f"shape {e[:-1]}")
    tokens = 1
    for extent in e[:-1]:
        tokens *= extent
    return Sizes(tokens, hidden, vocab)

