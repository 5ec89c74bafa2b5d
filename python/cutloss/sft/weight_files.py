"""Files of weights from anywhere, through their libraries: opened if they are sound, else refused in one line."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .config import ConfigError

MAX_HEADER_BYTES = 100_000_000  # of safetensors, by its format


@contextmanager
def safetensors(path: Path) -> Iterator[Any]:
    """Opens a .safetensors file; within the block, what its library refuses is a ConfigError too.

    Raises:
        ConfigError: the file is cut, changed or not of this format, has a name twice, or integers for a weight.
    """
    import ml_dtypes  # noqa: F401  (gives safetensors its bfloat16)
    from safetensors import SafetensorError, safe_open

    _check_header(path)
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a sound safetensors file: {error}") from error


def _check_header(path: Path) -> None:
    """The library lets the last of two tensors of one name win, and tells a wrong header's reason poorly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ConfigError(
                f"{path}: not a safetensors file: it has {size} bytes, and says that its header has {length}"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a sound safetensors file: its header is no JSON object: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: not a sound safetensors file: its header is no JSON object")
    for name, tensor in header.items():
        kind = tensor.get("dtype") if isinstance(tensor, dict) else None
        if name.endswith(".weight") and isinstance(kind, str) and kind.startswith(("I", "U", "BOOL")):
            raise ConfigError(f"{path}: {name} is {kind}; weights are F32, F16 or BF16")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it has {twice!r} twice")
    return found


# ---- GGUF ------------------------------------------------------------------------------------------------------------

# Of a value by its type: u8, i8, u16, i16, u32, i32, f32, bool, then strings and arrays, then u64, i64, f64.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def gguf(path: Path) -> Any:
    """Returns the gguf library's reader of a file; raises ConfigError if the file is cut, changed or not of this format."""
    import gguf as library

    # The library reads where a number in the file points it to: any exception may come of a wrong one.
    try:
        with path.open("rb") as file:
            _Counts(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).check()
        reader = library.GGUFReader(path)
        for tensor in reader.tensors:
            if tensor.data.size == 0:
                raise ValueError(f"its tensor {tensor.name!r} has the shape {tensor.shape.tolist()}")
    except Exception as error:
        raise ConfigError(f"{path}: not a sound GGUF file: {str(error) or type(error).__name__}") from error
    return reader


class _Counts:
    """Walks a GGUF header and sees that every count fits into the file: past its end the library reads on for ever."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def check(self) -> None:
        if self._skip(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._number(4)
        tensors, pairs = self._number(8), self._number(8)
        for _ in range(pairs):
            self._string()
            self._value(self._number(4))
        for _ in range(tensors):
            self._string()
            dimensions = self._number(4)
            if dimensions > 4:
                raise ValueError(f"a tensor has {dimensions} dimensions; 4 are the most")
            self._skip(8 * dimensions + 12)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            item, count = self._number(4), self._number(8)
            if item in _VALUE_BYTES:
                self._skip(count * _VALUE_BYTES[item])
            elif item == _STRING:
                for _ in range(count):
                    self._string()
            else:
                raise ValueError(f"an array of values of type {item}, which is not known")
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            raise ValueError(f"a value of type {kind}, which is not known")

    def _string(self) -> None:
        self._skip(self._number(8))

    def _number(self, size: int) -> int:
        return int.from_bytes(self._skip(size), "little")

    def _skip(self, size: int) -> bytes:
        begin = self.at
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"it is cut: it has {len(self.data)} bytes, and what begins at {begin} takes {size}")
        return self.data[begin : self.at] if size <= 8 else b""  # only numbers are looked at
