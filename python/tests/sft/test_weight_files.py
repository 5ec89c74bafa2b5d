"""Files of weights that are cut, changed or made to harm: each must be refused in one line, soon and in little memory,
and none that is merely unusual."""

import json
import resource
import struct
import sys
import time

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("gguf")

import ml_dtypes
from safetensors.numpy import save

from cutloss.sft import weight_files
from cutloss.sft.config import ConfigError


def with_header(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = save({"a.weight": np.ones((2, 3), np.float32)})

# name: (file, what the refusal must say beside the file's name)
UNSOUND = {
    "no length": (b"\1\0\0", "safetensors"),
    **{
        f"header length {length}": (struct.pack("<Q", length) + GOOD[8:], str(length))
        for length in (0, len(GOOD) - 7, 2**31, 2**63, 2**64 - 1)
    },
    "header is all there is": (struct.pack("<Q", len(GOOD) - 8) + GOOD[8:], "JSON"),
    "too few bytes": (with_header({"t": tensor(shape=(1000, 1000), end=4_000_000)}, bytes(4)), ""),
    "bytes of another shape": (with_header({"t": tensor(shape=(3,))}, bytes(8)), ""),
    "end before begin": (with_header({"t": tensor(begin=8, end=0)}, bytes(8)), ""),
    "two on one range": (with_header({"t": tensor(), "u": tensor()}, bytes(8)), ""),
    "gap": (with_header({"t": tensor(), "u": tensor(begin=16, end=24)}, bytes(24)), ""),
    "bytes nobody owns": (with_header({"t": tensor()}, bytes(16)), ""),
    "shape past 2^64": (with_header({"t": tensor(shape=(2**33, 2**33))}, bytes(8)), ""),
    "negative shape": (with_header({"t": tensor(shape=(-2,))}, bytes(8)), ""),
    "fractional shape": (with_header({"t": tensor(shape=(2.5,))}, bytes(8)), ""),
    "2^53 + 1": (with_header({"t": tensor(begin=0, end=2**53 + 1)}, bytes(8)), ""),
    "dtype F99": (with_header({"t": tensor("F99")}, bytes(8)), ""),
    "integers for a weight": (with_header({"t.weight": tensor("I16", (4,))}, bytes(8)), "t.weight is I16"),
    "name twice": (with_header(b'{"t": %s, "t": %s}' % ((json.dumps(tensor()).encode(),) * 2), bytes(8)), "'t' twice"),
    "invalid UTF-8": (with_header(b'{"\xff": 1}'), "JSON"),
    "deep nesting": (with_header(b"[" * 100_000 + b"]" * 100_000), "JSON"),
    "not an object": (with_header(b"[1, 2]"), "JSON"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_file_gets_past_its_header(name, tmp_path):
    content, reason = UNSOUND[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as refused, weight_files.safetensors(path) as file:
        [file.get_tensor(key) for key in file.keys()]
    assert str(path) in str(refused.value) and reason in str(refused.value) and "\n" not in str(refused.value)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def read(path):
    with weight_files.safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_an_unusual_file_is_refused(tmp_path):
    values = {
        "ü.weight": np.ones((2, 2), ml_dtypes.bfloat16),
        "b.weight": np.ones(3, np.float16),
        "ids": np.arange(3),
        "empty.weight": np.ones((0, 4), np.float32),
        "scalar": np.float32(2).reshape(()),
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(save(values, {"made": "by hand"}))
    found = read(path)
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {n: (a.dtype, a.shape) for n, a in values.items()}
    assert all((found[name] == values[name]).all() for name in values)
    path.write_bytes(with_header({"__metadata__": {"only": "this"}}))
    assert read(path) == {}
    # Keys in falling order, and a header of a length that leaves the data at an odd address.
    path.write_bytes(with_header(json.dumps({"z": tensor(begin=8, end=16), "a": tensor()}).encode() + b" ", bytes(16)))
    assert set(read(path)) == {"a", "z"}


@pytest.mark.parametrize("length", range(99_992, 100_002))
def test_a_header_as_long_as_a_block_is_refused(length, tmp_path):
    text = json.dumps({"t": tensor()}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header(text + b" " * (length - len(text)), bytes(8)))
    assert set(read(path)) == {"t"}


def calls_of(f):
    """How many functions f calls, those of libraries and in C included: unlike a time, the same in every run."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count


def test_a_file_of_many_tensors_takes_long(tmp_path):
    def calls(count):
        path = tmp_path / f"{count}.safetensors"
        header = {f"layers.{i}.weight": tensor(begin=8 * i, end=8 * i + 8) for i in range(count)}
        path.write_bytes(with_header(header, bytes(8 * count)))

        def read():
            with weight_files.safetensors(path) as file:
                assert len(file.keys()) == count

        return calls_of(read)

    assert calls(20_000) < 11 * calls(2_000)


def test_a_file_of_more_than_4_gib_is_refused(tmp_path):
    elements = 2**32 + 2**20
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(with_header({"t.weight": tensor("F16", (elements,), 0, 2 * elements)}))
        file.truncate(file.tell() + 2 * elements)  # a hole: takes no room
    with weight_files.safetensors(path) as file:
        part = file.get_slice("t.weight")[elements - 3 :]
    assert part.tolist() == [0, 0, 0]


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_file(*, tensors=1, dims=(4,), dim_count=None, kind=0, alignment=None, name_length=None, array=None, words=0,
              version=3):
    """A small sound file, but for what is given."""
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    if alignment is not None:
        pairs.append(text("general.alignment") + struct.pack("<II", 4, alignment))
    if array is not None:
        pairs.append(text("numbers") + struct.pack("<IIQ", 9, 4, array) + bytes(8))
    if words:
        pairs.append(text("words") + struct.pack("<IIQ", 9, 8, words) + b"".join(text(str(i)) for i in range(words)))
    name = text("token_embd.weight") if name_length is None else struct.pack("<Q", name_length) + b"token_embd.weight"
    info = name + struct.pack("<I", len(dims) if dim_count is None else dim_count)
    info += b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(pairs)) + b"".join(pairs) + info
    return head + bytes(-len(head) % 32) + bytes(64)


GGUF_UNSOUND = {
    "2^60 tensors": {"tensors": 2**60},
    "5 dimensions": {"dims": (2, 2, 1, 1, 1)},
    "2^32 - 1 dimensions": {"dim_count": 2**32 - 1},
    "product that wraps": {"dims": (2**32, 2**32 - 4, 2, 2)},
    "product of 2^64 - 16": {"dims": (2**60 - 1, 16)},
    "unknown kind": {"kind": 9999},
    "more data than there is": {"dims": (1000, 1000)},
    "no values": {"dims": (0, 4)},
    "name of 2^63 bytes": {"name_length": 2**63},
    "array of 2^60": {"array": 2**60},
    "alignment 0": {"alignment": 0},
    "alignment 3": {"alignment": 3},
    "version 99": {"version": 99},
}


def refuse(path):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as refused:
        weight_files.gguf(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize("name", GGUF_UNSOUND)
def test_an_unsound_gguf_file_is_read(name, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file())
    assert [t.name for t in weight_files.gguf(path).tensors] == ["token_embd.weight"]
    path.write_bytes(gguf_file(**GGUF_UNSOUND[name]))
    refuse(path)


def test_a_gguf_file_cut_anywhere_is_read(tmp_path):
    whole = gguf_file()
    path = tmp_path / "model.gguf"
    for length in range(len(whole) - 64 + 15):  # the tensor's 16 bytes, and padding after them
        path.write_bytes(whole[:length])
        refuse(path)


def test_a_gguf_file_of_many_words_takes_long(tmp_path):
    path = tmp_path / "model.gguf"

    def calls(words):
        path.write_bytes(gguf_file(words=words))
        return calls_of(lambda: weight_files.gguf(path))

    calls(1)  # imports
    assert calls(10_000) < 11 * calls(1_000)
