"""Every option of cutloss.linear_cross_entropy reaches the kernels. Each test is named after the fault it would catch."""

import itertools
import re

import numpy as np
import pytest
from objective import dense, metrics_of, near
from oracle import BF16, F32, lattice

import cutloss
from cutloss import linear_cross_entropy

N, V, D = 37, 101, 19
F16 = np.dtype(np.float16)


def make(seed=0, n=N, v=V, d=D, dtype=F32):
    rng = np.random.default_rng(seed)
    e = (2 * rng.standard_normal((n, d)) / np.sqrt(d)).astype(dtype)
    c = rng.standard_normal((v, d)).astype(dtype)
    labels = rng.integers(0, v, n)
    labels[rng.random(n) < 0.2] = -100
    return rng, e, c, labels


RNG, E, C, Y = make()
IDS = RNG.integers(0, V, (N, 3))
IDS[RNG.random((N, 3)) < 0.3] = -100
Q = RNG.random((N, 3)).astype(F32) / 3
OPTIONS = {
    "bias": {"bias": RNG.standard_normal(V).astype(F32)},
    "class_weights": {"class_weights": RNG.random(V).astype(F32) + 0.5},
    "token_weights": {"token_weights": np.where(RNG.random(N) < 0.2, 0, RNG.random(N)).astype(F32)},
    "label_smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.03},
    "logit_scale": {"logit_scale": 0.6},
    "softcap": {"softcap": 2.0},
    "shift": {"shift": 3},
    "denominator": {"denominator": 7.5},
    "cotangent": {"cotangent": -1.7},
    "lse_cotangent": {"lse_cotangent": RNG.standard_normal(N).astype(F32)},
    "soft_targets": {"labels": None, "soft_targets": (IDS, Q)},
}
# Soft targets have weights of their own, and a sum no denominator.
ILLEGAL = [{"soft_targets", "class_weights"}, {"soft_targets", "label_smoothing"}]


def run(options, e=E, c=C, labels=Y, **limits):
    """The library's result, checked against the dense one."""
    options = {"labels": labels, **options}
    bias = options.get("bias")
    wrt = limits.pop("wrt", ("e", "c") if bias is None else ("e", "c", "bias"))
    got = linear_cross_entropy(e, c, wrt=wrt, **options, **limits)
    want = dense(e, c, **options)
    assert got.valid_count == want["valid_count"]
    for name in ("loss", "nll", "lse"):
        near(name, getattr(got, name), want[name], want["tol"][name] + 1e-30)
    for name, source in (("d_e", e), ("d_c", c), ("d_bias", bias)):
        if getattr(got, name) is not None:
            assert getattr(got, name).dtype == source.dtype
            near(name, getattr(got, name), want[name], want["tol"][name])
    return got


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_dropped_on_the_way(name):
    plain = linear_cross_entropy(E, C, Y)
    for limits in ({"mode": "chunk"}, {"mode": "recompute"}, {"wrt": "e"}, {"wrt": "c"}, {"wrt": ()}):
        got = run(OPTIONS[name], **limits)
    changed = run(OPTIONS[name])
    if name == "cotangent":
        assert not np.allclose(changed.d_e, plain.d_e, rtol=1e-3)
    elif name == "lse_cotangent":
        assert changed.loss == plain.loss and not np.allclose(changed.d_e, plain.d_e, rtol=1e-3)
    else:
        assert abs(got.loss - plain.loss) > 1e-3 * abs(plain.loss), "the dense loss itself does not change"


@pytest.mark.parametrize("one,other", itertools.combinations(OPTIONS, 2))
def test_two_options_disturb_each_other(one, other):
    if {one, other} in ILLEGAL:
        with pytest.raises(ValueError, match="soft_targets"):
            linear_cross_entropy(E, C, wrt=(), **{"labels": Y, **OPTIONS[one], **OPTIONS[other]})
        return
    run({**OPTIONS[one], **OPTIONS[other]})


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_options_together(reduction, softcap):
    options = {k: v for name in OPTIONS if name not in ("soft_targets", "denominator", "softcap")
               for k, v in OPTIONS[name].items()}
    options |= {"reduction": reduction, "softcap": softcap}
    if reduction == "mean":
        options["denominator"] = 11.0
    if reduction == "none":
        options["cotangent"] = RNG.standard_normal(N).astype(F32)
    for mode in ("chunk", "recompute"):
        run(options, mode=mode)


@pytest.mark.parametrize("dtypes", itertools.product((F32, BF16, F16), repeat=3), ids=lambda d: "-".join(map(str, d)))
def test_a_mix_of_dtypes_is_refused_or_misread(dtypes):
    bias = OPTIONS["bias"]["bias"].astype(dtypes[2])
    run({"bias": bias}, E.astype(dtypes[0]), C.astype(dtypes[1]))


def test_a_masked_id_gives_nan():
    x, w = np.ones((1, 1), F32), np.zeros((4, 1), F32)
    bias = np.array([0, 0, -np.inf, -np.inf], F32)
    got = linear_cross_entropy(x, w, [0], bias=bias, wrt=("e", "c", "bias"), metrics=("entropy", "rank", "top_k=3"))
    assert got.loss == pytest.approx(np.log(2), rel=1e-6)
    assert not got.d_c[2:].any() and not got.d_bias[2:].any() and np.isfinite(got.d_c).all()
    assert got.metrics["entropy"][0] == pytest.approx(np.log(2), rel=1e-6)
    assert linear_cross_entropy(x, w, [2], bias=bias, wrt=()).loss == np.inf


@pytest.mark.parametrize("softcap,reduction,loss,d_e,d_c,d_bias", [
    (None, "mean", 4.22264260, 2.04413950, 11.05120661, 1.46773728),
    (2.0, "mean", 3.28572188, 1.17292519, 5.72517245, 0.81191299),
    (2.0, "sum", 16.42860940, 5.86462597, 28.62586226, 4.05956497)])
def test_bias_fixed_values(softcap, reduction, loss, d_e, d_c, d_bias):
    e, c, _ = lattice(7, 11, 5)
    bias = (((np.arange(11) + 1) * 3 * 7919 + np.arange(11) * 104729 + 3 * 15485863) % 2003 / 1001 - 1).astype(F32)
    got = linear_cross_entropy(e, c, [5, 4, -100, 2, 1, -100, 10], bias=bias, softcap=softcap, reduction=reduction,
                               wrt=("e", "c", "bias"))
    assert got.loss == pytest.approx(loss, rel=1e-6)
    for name, want in (("d_e", d_e), ("d_c", d_c), ("d_bias", d_bias)):
        assert np.abs(getattr(got, name)).sum(dtype=np.float64) == pytest.approx(want, rel=1e-5)


def test_z_loss_or_smoothing_counts_ignored_rows():
    zeros = np.zeros((10, 1), F32), np.zeros((100, 1), F32), np.array([1, 2, 3] + [-100] * 7)
    assert linear_cross_entropy(*zeros, wrt=()).loss == pytest.approx(4.605170, rel=1e-6)
    assert linear_cross_entropy(*zeros, wrt=(), z_loss=1e-4).loss == pytest.approx(4.605170 + 0.00212076, rel=1e-6)
    x, w = np.array([[0], [2], [4], [1]], F32), np.array([[0], [1]], F32)
    for ignored in (-100, -1):
        got = linear_cross_entropy(x, w, [0, ignored, 0, ignored], label_smoothing=0.2, ignore_index=ignored)
        assert got.loss == pytest.approx(2.155649, rel=1e-6)


# ----------------------------------------------------------------------------------------------- shapes and arrays


def test_leading_axes_are_lost_or_sequences_run_into_each_other():
    b, t = 3, 12
    rng, e, c, labels = make(1, b * t)
    ids, q = rng.integers(0, V, (b * t, 2)), rng.random((b * t, 2)).astype(F32)
    weights, h = rng.random(b * t).astype(F32), rng.standard_normal(b * t).astype(F32)
    for options in ({"labels": labels}, {"labels": None, "soft_targets": (ids, q)}):
        flat = run({**options, "token_weights": weights, "lse_cotangent": h}, e, c)
        want = dense(e, c, **options, token_weights=weights, lse_cotangent=h, shift=2, sequence=t)

        def fold(a):
            return a.reshape(b, t, *a.shape[1:])

        folded = {"labels": None if options["labels"] is None else fold(labels)}
        if options.get("soft_targets"):
            folded["soft_targets"] = fold(ids), fold(q)
        got = linear_cross_entropy(fold(e), c, token_weights=fold(weights), lse_cotangent=fold(h), shift=2,
                                   metrics=("entropy", "top_k=4"), **folded)
        assert got.valid_count == want["valid_count"] != flat.valid_count
        assert got.nll.shape == got.lse.shape == got.metrics["entropy"].shape == (b, t)
        assert got.metrics["top_k_ids"].shape == (b, t, 4)
        assert not got.nll[:, -2:].any() and not got.d_e[:, -2:].any() and (got.metrics["top_k_ids"][:, -2:] == -1).all()
        near("loss", got.loss, want["loss"], want["tol"]["loss"])
        near("d_e", got.d_e.reshape(-1, D), want["d_e"], want["tol"]["d_e"])
        near("d_c", got.d_c, want["d_c"], want["tol"]["d_c"])


def test_shift_by_everything_or_by_nothing():
    assert linear_cross_entropy(E, C, Y, shift=N).valid_count == 0
    assert linear_cross_entropy(E, C, Y, shift=0).loss == linear_cross_entropy(E, C, Y).loss
    by_hand = np.append(Y[1:], -100)
    assert linear_cross_entropy(E, C, Y, shift=1).loss == linear_cross_entropy(E, C, by_hand).loss


def test_odd_arrays_are_misread():
    want = linear_cross_entropy(E, C, Y, **OPTIONS["bias"], **OPTIONS["class_weights"], **OPTIONS["token_weights"])
    bias, classes = OPTIONS["bias"]["bias"], OPTIONS["class_weights"]["class_weights"]
    tokens = OPTIONS["token_weights"]["token_weights"]

    def strided(a):
        return np.repeat(a, 2)[::2]

    got = linear_cross_entropy(E, C, Y, bias=strided(bias), class_weights=strided(classes)[::-1][::-1].astype(np.float64),
                               token_weights=list(map(float, tokens)))
    np.testing.assert_array_equal(got.d_e, want.d_e)
    mask = tokens > 0
    ones = linear_cross_entropy(E, C, Y, token_weights=mask)
    assert ones.loss == linear_cross_entropy(E, C, Y, token_weights=mask.astype(int)).loss
    for kind in (np.int32, np.uint8, np.float16):
        assert linear_cross_entropy(E, C, Y, class_weights=np.full(V, 2, kind), reduction="sum").loss == pytest.approx(
            2 * linear_cross_entropy(E, C, Y, reduction="sum").loss, rel=1e-6)
    soft = (np.asfortranarray(IDS.astype(np.int16)), np.asfortranarray(Q.astype(np.float64)))
    assert linear_cross_entropy(E, C, soft_targets=soft).loss == linear_cross_entropy(E, C, soft_targets=(IDS, Q)).loss
    assert linear_cross_entropy(E, C, soft_targets=(IDS.astype(np.int32), Q)).loss == \
        linear_cross_entropy(E, C, soft_targets=(IDS, Q)).loss


def test_a_huge_unsigned_soft_id_wraps():
    ids = np.full((N, 1), 3, np.uint64)
    ids[4] = 2**63 + 1
    with pytest.raises(ValueError, match=r"soft_targets ids\[4, 0\] is 9223372036854775809"):
        linear_cross_entropy(E, C, soft_targets=(ids, np.ones((N, 1))))
    ids[4] = V
    with pytest.raises(ValueError, match=rf"soft_targets ids\[4, 0\] is {V}, outside"):
        linear_cross_entropy(E, C, soft_targets=(ids, np.ones((N, 1))))


# --------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("wrt", [(), ("e",), ("e", "c")])
@pytest.mark.parametrize("name", ["bias", "softcap", "logit_scale", "shift", "soft_targets"])
def test_metrics_are_of_other_logits(name, wrt):
    options = {"labels": Y, **OPTIONS[name]}
    got = linear_cross_entropy(E, C, wrt=wrt, **options,
                               metrics=("entropy", "argmax", "correct", "rank", "top_k=5", "mean_logits"))
    want = dense(E, C, **options)
    m = metrics_of(want)
    near("entropy", got.metrics["entropy"], m["entropy"], 10 * want["tol"]["lse"])
    for exact in ("argmax", "correct", "rank"):
        np.testing.assert_array_equal(got.metrics[exact], m[exact], err_msg=exact)
    top, rows = m["order"][:, :5], np.arange(N)[:, None]
    on = want["counts"]
    np.testing.assert_array_equal(got.metrics["top_k_ids"][on], top[on])
    logprobs = np.log(want["p"])[rows, top]
    near("top_k_logprobs", got.metrics["top_k_logprobs"][on], logprobs[on], (10 * want["tol"]["lse"])[on, None])
    assert (got.metrics["top_k_ids"][~on] == -1).all() and not got.metrics["top_k_logprobs"][~on].any()
    near("mean_logits", got.metrics["mean_logits"], m["mean_logits"], 1e-4)
    assert got.metrics["correct"].dtype == np.bool_


def test_a_metric_is_given_unasked_or_not_given():
    assert linear_cross_entropy(E, C, Y).metrics == {}
    for name in ("entropy", "argmax", "correct", "rank", "mean_logits"):
        assert set(linear_cross_entropy(E, C, Y, metrics=name).metrics) == {name}
    assert set(linear_cross_entropy(E, C, Y, metrics=["top_k=2"]).metrics) == {"top_k_ids", "top_k_logprobs"}


def test_more_top_logits_than_ids_are_made_up():
    got = linear_cross_entropy(E, C[:3], np.zeros(N, int), metrics="top_k=8").metrics
    assert (got["top_k_ids"][:, 3:] == -1).all() and (np.sort(got["top_k_ids"][:, :3]) == [0, 1, 2]).all()


def test_metrics_change_the_loss():
    plain = linear_cross_entropy(E, C, Y)
    asked = linear_cross_entropy(E, C, Y, metrics=("entropy", "argmax", "rank", "top_k=3", "mean_logits"))
    np.testing.assert_array_equal(plain.nll, asked.nll)
    np.testing.assert_array_equal(plain.d_e, asked.d_e)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("wrt", [w for k in range(4) for w in itertools.combinations(("e", "c", "bias"), k)])
def test_a_gradient_is_missing_or_unasked(wrt):
    got = run(OPTIONS["bias"], wrt=wrt)
    for name in ("e", "c", "bias"):
        assert (getattr(got, "d_" + name) is not None) == (name in wrt)


@pytest.mark.parametrize("mode", ["chunk", "recompute"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_accumulation_overwrites_or_rounds_twice(mode, dtype):
    bias = OPTIONS["bias"]["bias"]
    start = {"d_e": np.ones(E.shape, dtype), "d_c": np.full(C.shape, 2, dtype), "d_bias": np.full(V, 3, F32)}
    buffers = {name: array.copy() for name, array in start.items()}
    got = linear_cross_entropy(E, C, Y, bias=bias, wrt=("e", "c", "bias"), accumulate=buffers, mode=mode, reduction="sum")
    want = dense(E, C, Y, bias=bias, reduction="sum")
    for name, buffer in buffers.items():
        assert getattr(got, name) is buffer
        near(name, buffer, start[name].astype(np.float64) + want[name],
             want["tol"][name] + 2**-23 * (3 + np.abs(want[name])))


def test_micro_batches_do_not_add_up():
    whole = linear_cross_entropy(E, C, Y)
    d_c, loss = np.zeros(C.shape, F32), 0.0
    for part in (slice(0, 10), slice(10, 11), slice(11, N)):
        got = linear_cross_entropy(E[part], C, Y[part], denominator=whole.valid_count, accumulate={"d_c": d_c})
        loss += got.loss
    assert loss == pytest.approx(whole.loss, rel=1e-6)
    np.testing.assert_allclose(d_c, whole.d_c, rtol=0, atol=40 * 2**-24 * np.abs(whole.d_c).max())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_compensated_sums_are_not_taken(dtype):
    n, c = 8192, np.zeros((2, 1), dtype)

    def d_c(weights, budget, compensated):
        got = linear_cross_entropy(np.ones((n, 1), dtype), c, np.zeros(n, int), token_weights=weights, reduction="sum",
                                   wrt="c", mode="chunk", budget=budget, compensated=compensated)
        return float(got.d_c[1, 0]), got.plan.as_dict()["chunk_tokens"]

    with pytest.raises(cutloss.BudgetError) as least:
        d_c(np.ones(n), 1, True)
    budget = int(re.search(r"works here is (\d+)", str(least.value))[1])
    _, chunk = d_c(np.ones(n), budget, True)
    # Chunks add 2^24, then 0.5 each, then -2^24: in float32 the halves are lost one by one.
    weights = np.full(n, 1 / chunk)
    weights[:chunk], weights[-chunk:] = 2.0**25 / chunk, -(2.0**25) / chunk
    assert d_c(weights, budget, True) == (float(dtype.type((n // chunk - 2) / 2)), chunk)
    assert d_c(weights, budget, False) == (0, chunk)


def test_vocab_order_changes_the_loss():
    order = RNG.permutation(V)
    want = linear_cross_entropy(E, C, Y, **OPTIONS["bias"])
    for kind in (np.int64, np.int32, np.uint8):
        got = linear_cross_entropy(E, C, Y, vocab_order=order.astype(kind), **OPTIONS["bias"])
        assert got.loss == pytest.approx(want.loss, rel=1e-6)


# -------------------------------------------------------------------------------------------------------- refusals

ZEROS = np.zeros(V, int)


@pytest.mark.parametrize("error,text,options", [
    (TypeError, r"softcap: a number is wanted.*'30'", {"softcap": "30"}),
    (TypeError, r"softcap: a number is wanted.*True", {"softcap": True}),
    (TypeError, r"z_loss: a number is wanted.*None", {"z_loss": None}),
    (TypeError, r"logit_scale: a number is wanted.*\(1,\)", {"logit_scale": (1,)}),
    (TypeError, r"label_smoothing: a number is wanted.*array", {"label_smoothing": np.ones(1)}),
    (ValueError, r"logit_scale is 1e\+300, beyond float32", {"logit_scale": 1e300}),
    (ValueError, r"logit_scale is nan", {"logit_scale": float("nan")}),
    (ValueError, r"label_smoothing is 1.5; it must be in \[0, 1\]", {"label_smoothing": 1.5}),
    (ValueError, r"z_loss is inf", {"z_loss": float("inf")}),
    (ValueError, r"metrics: 'top_k=0'", {"metrics": "top_k=0"}),
    (ValueError, r"top_k is 129; it must be in \[0, 128\]", {"metrics": ("top_k=129",)}),
    (ValueError, r"metrics: 'perplexity' is not one of", {"metrics": ("perplexity",)}),
    (ValueError, r"metrics: 'top_k' is not one of", {"metrics": "top_k"}),
    (TypeError, r"metrics: .*not 5", {"metrics": 5}),
    (TypeError, r"wrt: .*not 5", {"wrt": 5}),
    (ValueError, r"d_bias is wanted, but there is no bias", {"wrt": "bias"}),
    (ValueError, r"filter: 'x' is not one of 'certified', 'unbiased', 'tile'", {"filter": "x"}),
    (ValueError, r'filter is "certified", which needs one of tolerance and epsilon; neither', {"filter": "certified"}),
    (ValueError, r'filter is "unbiased", which.*both', {"filter": "unbiased", "tolerance": 0.1, "epsilon": 0.1}),
    (ValueError, r'filter is "tile", which needs epsilon', {"filter": "tile"}),
    (ValueError, r'tolerance is given with filter "tile"', {"filter": "tile", "tolerance": 0.1, "epsilon": 0.1}),
    (ValueError, r"tolerance is 2; it must be in \(0, 1\)", {"filter": "certified", "tolerance": 2.0}),
    (ValueError, r"epsilon is 1;.*\(0, 1\)", {"filter": "unbiased", "epsilon": 1}),
    (ValueError, r"epsilon is given without a filter", {"epsilon": 0.1}),
    (ValueError, r"tolerance is given without a filter", {"tolerance": 0.1}),
    (ValueError, r'"certified" with softcap and label_smoothing',
     {"filter": "certified", "tolerance": 0.1, "softcap": 2.0, "label_smoothing": 0.1}),
    (ValueError, r"shift is 38; it must be in \[0, 37\]", {"shift": N + 1}),
    (ValueError, r"shift is -1", {"shift": -1}),
    (TypeError, r"shift: an integer is wanted, not 1.5", {"shift": 1.5}),
    (TypeError, r"shift: an integer is wanted, not True", {"shift": True}),
    (ValueError, r"token_weights \(3,\): one for each token, \(37,\)", {"token_weights": np.ones(3)}),
    (TypeError, r"token_weights: real numbers are wanted, not 'abc'", {"token_weights": "abc"}),
    (TypeError, r"token_weights: dtype complex128", {"token_weights": np.ones(N, complex)}),
    (ValueError, r"class_weights \(3,\): one for each id of the vocabulary, \(101,\)", {"class_weights": np.ones(3)}),
    (TypeError, r"bias: dtype float64 is not taken", {"bias": np.ones(V)}),
    (ValueError, r"bias \(100,\): one for each id of the vocabulary, \(101,\)", {"bias": np.ones(V - 1, F32)}),
    (TypeError, r"soft_targets: a pair .*not int", {"labels": None, "soft_targets": 3}),
    (ValueError, r"labels are not given, and neither are soft_targets", {"labels": None}),
    (ValueError, r"labels are given beside soft_targets", {"soft_targets": (IDS, Q)}),
    (ValueError, r"probabilities \(37, 2\): the shape of the ids, \(37, 3\)",
     {"labels": None, "soft_targets": (IDS, Q[:, :2])}),
    (ValueError, r"soft_targets ids \(37,\)", {"labels": None, "soft_targets": (IDS[:, 0], Q)}),
    (ValueError, r"soft_targets ids \(37, 0\): .* K >= 1", {"labels": None, "soft_targets": (IDS[:, :0], Q[:, :0])}),
    (TypeError, r"soft_targets ids: dtype float64", {"labels": None, "soft_targets": (IDS * 1.0, Q)}),
    (ValueError, r"seed: -1 is outside", {"seed": -1}),
    (ValueError, r"seed: 18446744073709551616 is outside", {"seed": 2**64}),
    (TypeError, r"seed: an integer", {"seed": 1.0}),
    (ValueError, r"denominator is -1; it must be finite and 0 or more", {"denominator": -1}),
    (ValueError, r"denominator is inf", {"denominator": np.inf}),
    (TypeError, r"denominator: a number is wanted.*'a'", {"denominator": "a"}),
    (ValueError, r'denominator is given with reduction "sum"', {"denominator": 2, "reduction": "sum"}),
    (ValueError, r"vocab_order: 'sorted' is not one of 'learned'", {"vocab_order": "sorted"}),
    (ValueError, r"vocab_order \(3,\)", {"vocab_order": np.arange(3)}),
    (TypeError, r"vocab_order: dtype float64", {"vocab_order": ZEROS * 1.0}),
    (TypeError, r"accumulate: a mapping such as", {"accumulate": 3}),
    (ValueError, r"accumulate: 'd_x' is not one of", {"accumulate": {"d_x": 1}}),
    (TypeError, r"accumulate: d_c is a list", {"accumulate": {"d_c": [1]}}),
    (TypeError, r"d_c: dtype float64 is not taken", {"accumulate": {"d_c": np.zeros(C.shape)}}),
    (ValueError, r"accumulate: d_c has shape \(2,\)", {"accumulate": {"d_c": np.zeros(2, F32)}}),
    (ValueError, r"accumulate: d_c must be C-contiguous", {"accumulate": {"d_c": np.zeros(C.shape[::-1], F32).T}}),
    (ValueError, r"accumulate_d_c is set, but d_c is not wanted", {"accumulate": {"d_c": np.zeros_like(C)}, "wrt": "e"}),
    (TypeError, r"accumulate: d_bias has dtype float16; the bias's, float32",
     {"bias": np.zeros(V, F32), "wrt": "bias", "accumulate": {"d_bias": np.zeros(V, F16)}}),
    (ValueError, r"c and d_c overlap", {"accumulate": {"d_c": C}}),
    (TypeError, r"compensated: True or False is wanted, not 1", {"compensated": 1}),
    (TypeError, r"cotangent: real numbers are wanted, not '3'", {"cotangent": "3"}),
    (TypeError, r"cotangent: real numbers are wanted, not True", {"cotangent": True}),
    (ValueError, r"lse_cotangent \(3,\): a number, or one for each token, \(37,\)", {"lse_cotangent": np.ones(3)}),
    (ValueError, r'mode is "sparse"', {"mode": "sparse"}),
    (ValueError, r"softcap is inf; it must be a number between", {"softcap": 10**400}),
    (ValueError, r"softcap is 1e\+300, beyond float32", {"softcap": 1e300}),
    (ValueError, r"metrics: 'top_k=3' beside top_k=5; one k is wanted", {"metrics": ("top_k=5", "top_k=3")}),
    (ValueError, r"metrics: 'top_k=9+' is not one of", {"metrics": "top_k=" + "9" * 5000}),
    (ValueError, r"logit_scale is -inf; it must be finite", {"logit_scale": -(10**400)}),
    (ValueError, r"denominator is inf; it must be finite", {"denominator": 10**400}),
    (ValueError, r"threads: an integer of 20000 bits is outside", {"threads": 2**19999}),
    (ValueError, r"budget: 9223372036854775808 is outside", {"budget": "9" * 400}),
    (TypeError, r"target: one of available_targets\(\) or None is wanted, not 3", {"target": 3}),
])
def test_a_bad_value_is_accepted_or_misnamed(error, text, options):
    with pytest.raises(error, match=text) as caught:
        linear_cross_entropy(E, C, **{"labels": Y, **options})
    assert "\n" not in str(caught.value)


def test_vocab_order_that_is_no_permutation_is_used():
    with pytest.raises(ValueError, match=r"vocab_order\[1\] is 0, as \[0\] is: it must be a permutation"):
        linear_cross_entropy(E, C, Y, vocab_order=ZEROS, filter="certified", tolerance=1e-3)


def test_shift_without_a_sequence_is_taken():
    with pytest.raises(ValueError, match=r"shift: 1 needs a sequence.*\(19,\)"):
        linear_cross_entropy(E[0], C, np.int64(3), shift=1)


def test_a_misspelt_field_is_ignored():
    with pytest.raises(TypeError, match="there is no field z_los"):
        cutloss._core.make_plan(cutloss._core.detect_machine(), tokens=1, hidden=1, vocab=1, z_los=1.0)
    with pytest.raises(TypeError, match="tokens: 'a' has the wrong type"):
        cutloss._core.make_plan(cutloss._core.detect_machine(), tokens="a")
