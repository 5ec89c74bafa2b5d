"""consumer.py LIBRARY: the C interface from Python's ctypes, without cutloss's own Python package.

The structs are read out of cutloss.h, so that what is tested is the header and not a copy of it.
"""

import ctypes
import math
import pathlib
import re
import sys

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "cutloss" / "cutloss.h"
TYPES = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64,
         "float": ctypes.c_float, "double": ctypes.c_double}


def struct(name: str) -> type[ctypes.Structure]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text)[1]
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        base, names = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, re.DOTALL).groups()
        for field in names.split(","):
            plain, count = re.fullmatch(r"\s*\**\s*(\w+)(?:\[(\d+)\])?\s*", field).groups()
            kind = ctypes.c_void_p if "*" in field else TYPES[base]
            fields.append((plain, kind * int(count) if count else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


lib = ctypes.CDLL(sys.argv[1])
lib.cutloss_last_error.restype = lib.cutloss_version.restype = lib.cutloss_plan_json.restype = ctypes.c_char_p
lib.cutloss_plan_workspace_bytes.restype = ctypes.c_size_t


def init(name: str, **values: object) -> ctypes.Structure:
    made = struct("cutloss_" + name)()
    getattr(lib, f"cutloss_{name}_init")(ctypes.byref(made))
    assert made.size == ctypes.sizeof(made), f"cutloss_{name}: {made.size} bytes in the library, {ctypes.sizeof(made)} here"
    for field, value in values.items():
        setattr(made, field, value)
    return made


def must(status: int) -> None:
    assert status == 0, (status, lib.cutloss_last_error())


def array(kind: type, *values: float) -> ctypes.Array:
    return (kind * len(values))(*values)


def at(values: ctypes.Array) -> int:
    return ctypes.addressof(values)


# One token with logits 0 and 1 + log 2 (a bias), label 0, z-loss and smoothing beside it.
e, c, bias = array(ctypes.c_float, 1), array(ctypes.c_float, 0, 1), array(ctypes.c_float, 0, math.log(2))
label, loss, lse = array(ctypes.c_int64, 0), array(ctypes.c_float, -1), array(ctypes.c_float, -1)
entropy, rank = array(ctypes.c_float, -1), array(ctypes.c_int64, -1)
problem = init("problem", tokens=1, hidden=1, vocab=2, has_bias=1, z_loss=0.5, label_smoothing=0.25, entropy=1, rank=1)
plan = ctypes.c_void_p()
must(lib.cutloss_make_plan(ctypes.byref(problem), None, ctypes.byref(plan)))
size = lib.cutloss_plan_workspace_bytes(plan)
workspace = ctypes.create_string_buffer(size)
inputs = init("inputs", e=at(e), c=at(c), labels=at(label), bias=at(bias))
outputs = init("outputs", loss=at(loss), lse=at(lse), entropy=at(entropy), rank=at(rank))
must(lib.cutloss_run(plan, ctypes.byref(inputs), ctypes.byref(outputs), workspace, ctypes.c_size_t(size), None))
lib.cutloss_plan_free(plan)

z = 1 + math.log(2)
want_lse = math.log(1 + math.exp(z))
want_loss = 0.75 * want_lse + 0.125 * (want_lse + want_lse - z) + 0.5 * want_lse**2
p = math.exp(z - want_lse)
want_entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
for what, got, want in (("loss", loss, want_loss), ("lse", lse, want_lse), ("entropy", entropy, want_entropy)):
    assert abs(got[0] - want) < 1e-5 * (1 + abs(want)), f"{what} is {got[0]}, not {want}"
assert rank[0] == 1

for name in ("problem", "limits", "inputs", "outputs", "filter_report"):
    getattr(lib, f"cutloss_{name}_init")(None)
    init(name)
problem.filter = 9
assert lib.cutloss_make_plan(ctypes.byref(problem), None, ctypes.byref(plan)) == 1
assert lib.cutloss_last_error() == b"filter is 9; it must be in [0, 4)"
print("cutloss", lib.cutloss_version().decode(), "by ctypes: as wanted")
