"""What cutloss.linear_cross_entropy takes and refuses. Each test is named after the fault it would catch."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from checks import assert_same, check
from oracle import BF16, F32, problem

import cutloss
from cutloss import linear_cross_entropy

# ------------------------------------------------------------------------------------------------------- arrays


def test_strided_input_is_read_as_if_contiguous():
    e, c, labels = problem(24, 40, 12)
    want = linear_cross_entropy(e, c, labels)

    def spread(a, step, axis):
        big = np.full([s * abs(step) if k == axis else s for k, s in enumerate(a.shape)], 7, a.dtype)
        view = big[tuple(slice(None, None, step) if k == axis else slice(None) for k in range(a.ndim))]
        view[...] = a
        return view

    views = [np.asfortranarray]
    views += [lambda a, s=s, k=k: spread(a, s, k) for s in (2, 3, -1, -2) for k in (0, 1)]
    label_views = [lambda a: spread(a, 3, 0), lambda a: spread(a, -1, 0)]
    for e_view in views:
        assert_same(linear_cross_entropy(e_view(e), c, labels), want)
    for c_view in views:
        assert_same(linear_cross_entropy(e, c_view(c), labels), want, bits=False)
    for l_view in label_views:
        assert_same(linear_cross_entropy(e, c, l_view(labels)), want)
    assert_same(linear_cross_entropy(e, c.T, labels, head_layout="dv"), want, bits=False, d_c_of=lambda g: g.T)


def test_broadcast_input_is_misread():
    e, c, labels = problem(9, 11, 5, ignored=False)
    check(np.broadcast_to(e[:1], e.shape), c, labels)
    check(e, c, np.broadcast_to(labels[:1], labels.shape))
    assert check(e, np.broadcast_to(c[:1], c.shape), labels).loss == pytest.approx(np.log(11), rel=1e-6)


def test_unaligned_or_packed_input_crashes():
    e, c, labels = problem(9, 11, 5)
    raw = np.zeros(e.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(F32).reshape(e.shape)
    unaligned[...] = e
    record = np.zeros(e.shape, np.dtype([("flag", "u1"), ("value", "f4")]))
    record["value"] = e
    for view in (unaligned, record["value"]):
        assert_same(linear_cross_entropy(view, c, labels), linear_cross_entropy(e, c, labels))


def unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned and view.flags.c_contiguous
    return view


def test_an_unaligned_option_crashes_or_is_refused():
    e, c, labels = problem(9, 11, 5, ignored=False)
    ones, weights = np.ones(9, F32), np.linspace(0.5, 2, 11).astype(F32)
    soft = np.arange(18).reshape(9, 2) % 11, np.full((9, 2), 0.25, F32)
    options = {"bias": weights, "token_weights": ones, "class_weights": weights, "lse_cotangent": ones,
               "cotangent": ones, "vocab_order": np.arange(11)[::-1]}
    for change in [{name: value} for name, value in options.items()] + [{"soft_targets": soft}, {}]:
        given = {"labels": labels, "reduction": "none", **change}
        if "soft_targets" in change:
            given |= {"labels": None, "soft_targets": tuple(map(unaligned, soft))}
        elif change:
            given |= {name: unaligned(np.ascontiguousarray(value)) for name, value in change.items()}
        else:
            given["labels"] = unaligned(labels)
        want = {"labels": None if "soft_targets" in change else labels, "reduction": "none", **change}
        assert_same(linear_cross_entropy(e, c, **given), linear_cross_entropy(e, c, **want))
    with pytest.raises(ValueError, match="accumulate: d_c must be C-contiguous, aligned"):
        linear_cross_entropy(e, c, labels, accumulate={"d_c": unaligned(np.zeros_like(c))})


def test_read_only_and_memory_mapped_input_is_refused_or_written(tmp_path):
    e, c, labels = problem(9, 11, 5)
    want = linear_cross_entropy(e, c, labels)
    np.save(tmp_path / "c.npy", c)
    before = [a.copy() for a in (e, c, labels)]
    for array in (e, c, labels):
        array.flags.writeable = False
    assert_same(linear_cross_entropy(e, np.load(tmp_path / "c.npy", mmap_mode="r"), labels), want)
    assert_same(linear_cross_entropy(e, c, labels), want)
    for array, copy in zip((e, c, labels), before):
        np.testing.assert_array_equal(array, copy)


def test_leading_axes_change_the_answer():
    e, c, labels = problem(24, 11, 5)
    flat = linear_cross_entropy(e, c, labels, reduction="none")
    for shape in ((4, 6), (2, 3, 4), (24,)):
        got = linear_cross_entropy(e.reshape(*shape, 5), c, labels.reshape(shape), reduction="none")
        assert got.loss.shape == got.nll.shape == got.lse.shape == shape and got.d_e.shape == (*shape, 5)
        np.testing.assert_array_equal(got.d_e.reshape(e.shape), flat.d_e)
    one = linear_cross_entropy(e[0], c, np.int32(3))
    assert one.nll.shape == () and one.d_e.shape == (5,)
    # Axes that no stride can merge, a batch of rows cut out of a longer one, are copied.
    cut = np.zeros((4, 9, 5), F32)[:, :6]
    cut[...] = e.reshape(4, 6, 5)
    np.testing.assert_array_equal(linear_cross_entropy(cut, c, labels.reshape(4, 6)).loss,
                                  linear_cross_entropy(e, c, labels).loss)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"])
def test_integer_labels_are_refused(dtype):
    e, c, labels = problem(9, 11, 5, ignored=False)
    assert linear_cross_entropy(e, c, labels.astype(dtype)).loss == linear_cross_entropy(e, c, labels).loss


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_arrays_are_refused():
    e, c, labels = problem(9, 11, 5)
    want = linear_cross_entropy(e, c, labels)
    assert_same(linear_cross_entropy(*map(OnlyDlpack, (e, c, labels))), want)


def test_jax_arrays_are_refused():
    jnp = pytest.importorskip("jax.numpy")
    for dtype in (F32, BF16):
        e, c, labels = problem(9, 11, 5, e_dtype=dtype, c_dtype=dtype)
        got = linear_cross_entropy(*(jnp.asarray(a) for a in (e, c, labels)))
        assert got.d_e.dtype == dtype
        np.testing.assert_array_equal(got.d_e.astype(F32), linear_cross_entropy(e, c, labels).d_e.astype(F32))


# ------------------------------------------------------------------------------------------------------ refusals

E, C, Y = problem(7, 11, 5, ignored=False)


@pytest.mark.parametrize("error,text,arguments,options", [
    (ValueError, r"labels \(6,\) and e \(7, 5\)", (E, C, Y[:6]), {}),
    (ValueError, r"labels \(7, 1\) and e \(7, 5\)", (E, C, Y[:, None]), {}),
    (ValueError, r"labels \(\) and e \(7, 5\)", (E, C, Y[0]), {}),
    (ValueError, r"e \(7, 5\) and c \(11, 4\)", (E, C[:, :4], Y), {}),
    (ValueError, r"head_layout='dv'\?", (E, C.T, Y), {}),
    (ValueError, r"head_layout='vd'\?", (E, C, Y), {"head_layout": "dv"}),
    (ValueError, r"gathered", (E, np.zeros(0, F32), Y), {}),
    (ValueError, r"gathered", (E, C[:0], Y), {}),
    (ValueError, r"the hidden sizes are 0 and 5", (E[:, :0], C, Y), {}),
    (TypeError, r"float64 is not taken; float32, bfloat16 and float16.*astype", (E.astype(np.float64), C, Y), {}),
    (TypeError, r"c: dtype >f4", (E, C.astype(">f4"), Y), {}),
    (TypeError, r"labels: dtype float32.*integer", (E, C, Y.astype(F32)), {}),
    (TypeError, r"labels: dtype bool.*integer", (E, C, Y > 3), {}),
    (TypeError, r"masked", (E, C, np.ma.masked_array(Y)), {}),
    (ValueError, r"softcap", (E, C, Y), {"softcap": 0.0}),
    (ValueError, r"softcap", (E, C, Y), {"softcap": float("nan")}),
    (ValueError, r"softcap", (E, C, Y), {"softcap": -1.0}),
    (ValueError, r"reduction", (E, C, Y), {"reduction": "avg"}),
    (ValueError, r"head_layout", (E, C, Y), {"head_layout": "VD"}),
    (ValueError, r"mode", (E, C, Y), {"mode": "dense"}),
    (ValueError, r"wrt", (E, C, Y), {"wrt": "x"}),
    (ValueError, r'mode is "loss"', (E, C, Y), {"mode": "loss"}),
    (ValueError, r'mode is "stream"', (E, C, Y), {"mode": "stream"}),
    (ValueError, r"budget", (E, C, Y), {"budget": "12 parsecs"}),
    (ValueError, r"budget", (E, C, Y), {"budget": -1}),
    (TypeError, r"budget", (E, C, Y), {"budget": 1.5}),
    (ValueError, r"threads", (E, C, Y), {"threads": 2**40}),
    (TypeError, r"ignore_index", (E, C, Y), {"ignore_index": None}),
    (ValueError, r"cotangent", (E, C, Y), {"cotangent": np.ones(7)}),
    (ValueError, r"cotangent", (E, C, Y), {"cotangent": np.ones(6), "reduction": "none"}),
    (cutloss.BudgetError, r"\d", (E, C, Y), {"budget": 1}),
    (RuntimeError, r"nope", (E, C, Y), {"target": "nope"}),
])
def test_bad_input_is_accepted(error, text, arguments, options):
    with pytest.raises(error, match=text) as caught:
        linear_cross_entropy(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_budget_text_is_misread():
    from cutloss._check import budget

    assert [budget(b) for b in (0, "64MiB", "1.5 GiB", "2kb", "7", np.int64(9))] == [0, 2**26, 3 * 2**29, 2000, 7, 9]


# ------------------------------------------------------------------------------------------------------- package


def test_import_drags_in_a_framework():
    code = "import sys, cutloss; sys.exit(any(m in sys.modules for m in ('jax', 'torch', 'tunix', 'flax')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_plan_cannot_be_looked_at():
    plan = linear_cross_entropy(E, C, Y, wrt="e").plan
    assert plan.mode == plan.as_dict()["mode"] == "stream"
    assert plan.workspace_bytes == plan.as_dict()["workspace_bytes"]
    assert plan.target in cutloss.available_targets() and cutloss.__version__.count(".") == 2


def test_gil_is_held_while_computing():
    e, c, labels = problem(512, 16384, 64)
    done = threading.Event()
    ticks = []

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    linear_cross_entropy(e, c, labels, threads=1)
    took = time.perf_counter() - start
    done.set()
    thread.join()
    # Held, no tick would fall inside the call but for the one or two at its ends.
    inside = [t for t in ticks if start + 0.2 * took < t < start + 0.8 * took]
    assert inside or took < 0.02


@pytest.mark.parametrize("ignore_index", [-100, 2**63 - 1])
def test_a_uint64_label_beyond_int64_is_taken_for_another(ignore_index):
    e, c, labels = problem(7, 11, 5, ignored=False)
    labels = labels.astype(np.uint64)
    labels[3] = 2**63 + 5
    with pytest.raises(ValueError, match=r"labels\[3\] is 9223372036854775813"):
        cutloss.linear_cross_entropy(e, c, labels, ignore_index=ignore_index)


def test_a_matrix_of_labels_is_read_past_its_end():
    e, c, labels = problem(6, 21, 8, ignored=False)
    want = cutloss.linear_cross_entropy(e, c, labels).loss
    assert cutloss.linear_cross_entropy(e.reshape(2, 3, 8), c, np.matrix(labels.reshape(2, 3))).loss == want
