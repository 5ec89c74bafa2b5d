"""Values of cutloss.linear_cross_entropy. Each test is named after the fault it would catch."""

import numpy as np
import pytest
from checks import assert_same, check
from oracle import BF16, F32, lattice, problem

from cutloss import linear_cross_entropy

EDGES = (1, 5, 15, 16, 17, 31, 33, 95, 96, 97, 129, 257)


# ------------------------------------------------------------------------------------------------ tails and layouts


@pytest.mark.parametrize("head_layout", ["vd", "dv"])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=lambda d: f"{d[0]}-{d[1]}")
def test_tail_of_a_tile_is_dropped_or_counted_twice(dtypes, head_layout):
    shapes = {(n, v, d) for n in EDGES for v, d in ((97, 17), (33, 96))}
    shapes |= {(n, v, d) for v in EDGES for n, d in ((17, 31), (5, 16))}
    shapes |= {(n, v, d) for d in EDGES for n, v in ((17, 97), (33, 15))}
    for n, v, d in sorted(shapes):
        check(*problem(n, v, d, e_dtype=dtypes[0], c_dtype=dtypes[1], head_layout=head_layout), head_layout=head_layout)


@pytest.mark.parametrize("mode,wrt", [("loss", ()), ("stream", "e"), ("chunk", "ec"), ("recompute", "ec"),
                                      ("chunk", "c"), ("recompute", "c"), ("auto", "e"), ("auto", "c")])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_modes_disagree(mode, wrt, softcap):
    for n, v, d in ((37, 257, 19), (129, 300, 64)):
        for reduction in ("mean", "sum", "none"):
            check(*problem(n, v, d), mode=mode, wrt=tuple(wrt), softcap=softcap, reduction=reduction)


def test_small_budget_changes_the_answer_or_is_not_kept():
    e, c, labels = problem(200, 3000, 32)
    free = check(e, c, labels).plan.workspace_bytes
    smallest = check(e, c, labels, mode="recompute").plan.workspace_bytes
    for budget in {smallest, (smallest + free) // 2, free}:
        assert check(e, c, labels, budget=budget).plan.workspace_bytes <= budget


def test_threads_change_the_bits():
    e, c, labels = problem(257, 1000, 33, e_dtype=BF16)
    one, two = (linear_cross_entropy(e, c, labels, threads=t) for t in (1, 2))
    for name in ("loss", "nll", "lse", "d_e", "d_c"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), name


# ------------------------------------------------------------------------------------------- values known beforehand


@pytest.mark.parametrize("tokens,vocab,hidden,loss,sum_d_e,sum_d_c", [
    (7, 11, 1, 2.74546126, 0.59975318, 1.81261774), (7, 11, 3, 3.74773958, 1.72333942, 6.95038226),
    (7, 11, 5, 3.77654999, 2.08603829, 8.70248578), (7, 11, 7, 4.22534900, 3.41802242, 13.76985409),
    (7, 11, 9, 4.93517514, 4.41998660, 17.97179284), (7, 11, 17, 4.54169594, 8.63247315, 31.25736752),
    (7, 11, 33, 7.26833110, 18.04339557, 65.78575404), (7, 11, 65, 7.94322682, 39.21581416, 134.85822579),
    (7, 11, 129, 6.96454588, 56.43996493, 227.16597183), (7, 1, 5, 0, 0, 0),
    (7, 2, 5, 0.82140781, 0.37840971, 2.51352900), (7, 15, 5, 3.79740677, 1.91947087, 9.11849063),
    (7, 17, 5, 5.15826676, 2.65750388, 11.14191354), (7, 65, 5, 4.31331403, 1.98209777, 11.33778596),
    (7, 129, 5, 8.77075644, 4.15845205, 13.08685876), (7, 1025, 5, 8.31534509, 2.53292525, 13.39684837),
])
def test_fixed_values(tokens, vocab, hidden, loss, sum_d_e, sum_d_c):
    got = linear_cross_entropy(*lattice(tokens, vocab, hidden))
    assert got.loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
    assert np.abs(got.d_e).sum(dtype=np.float64) == pytest.approx(sum_d_e, rel=1e-5, abs=1e-7)
    assert np.abs(got.d_c).sum(dtype=np.float64) == pytest.approx(sum_d_c, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("softcap,loss,sum_d_e,sum_d_c", [
    (None, 3.72740049, 2.10268485, 10.01176701), (2.0, 2.99038656, 1.38972126, 5.94975858)])
def test_masked_and_capped_fixed_values(softcap, loss, sum_d_e, sum_d_c):
    e, c, _ = lattice(7, 11, 5)
    got = linear_cross_entropy(e, c, [5, 4, -100, 2, 1, -100, 10], softcap=softcap)
    assert got.loss == pytest.approx(loss, rel=1e-6)
    assert np.abs(got.d_e).sum(dtype=np.float64) == pytest.approx(sum_d_e, rel=1e-5)
    assert np.abs(got.d_c).sum(dtype=np.float64) == pytest.approx(sum_d_c, rel=1e-5)


def test_chunk_means_are_summed_instead_of_token_losses():
    # D = 1, table [0, 1], label 0: the loss of x is softplus(x), its gradient sigmoid(x).
    x = np.arange(5, dtype=F32)[:, None]
    c = np.array([[0], [1]], F32)
    softplus = [0.6931472, 1.3132617, 2.1269280, 3.0485874, 4.0181499]
    for budget in (None, "1MiB"):
        got = {r: linear_cross_entropy(x, c, np.zeros(5, int), reduction=r, budget=budget)
               for r in ("mean", "sum", "none")}
        np.testing.assert_allclose(got["none"].loss, softplus, rtol=1e-6)
        assert got["mean"].loss == pytest.approx(2.2400148, rel=1e-6)
        assert got["sum"].loss == pytest.approx(11.2000742, rel=1e-6)
        np.testing.assert_allclose(got["sum"].d_e[:, 0], 1 / (1 + np.exp(-x[:, 0])), rtol=1e-6)


def test_softcap_is_left_out_or_applied_twice():
    got = linear_cross_entropy(np.ones((1, 1), F32), np.array([[124], [-124], [40], [0]], F32), [3], softcap=30.0)
    assert got.loss == pytest.approx(30.004973, rel=1e-6)


def test_padded_vocabulary_enters_the_sum():
    got = linear_cross_entropy(np.ones((1, 1), F32), np.full((129, 1), -20, F32), [0])
    assert got.loss == pytest.approx(np.log(129), rel=1e-6)


def test_confident_row_loses_its_gradient():
    # One logit 16 above 9 others: 1 - p is 1e-6, of which a subtraction in f32 keeps two digits.
    for gap in (10.0, 16.0, 30.0, 80.0):
        e, c = np.array([[gap]], F32), np.zeros((10, 1), F32)
        c[3] = 1
        got = linear_cross_entropy(e, c, [3])
        rest = 9 * np.exp(-gap)
        np.testing.assert_allclose(got.loss, np.log1p(rest), rtol=4e-6)
        np.testing.assert_allclose(got.d_e[0, 0], -rest / (1 + rest), rtol=4e-6)


def test_bfloat16_gradients_are_summed_in_bfloat16():
    n = 4096
    got = linear_cross_entropy(np.ones((n, 1), BF16), np.zeros((2, 1), BF16), np.zeros(n, int), reduction="sum")
    np.testing.assert_array_equal(got.d_c.astype(F32)[:, 0], [-n / 2, n / 2])
    c = np.ones((4096, 1), BF16)
    c[0] = 0
    assert linear_cross_entropy(np.zeros((1, 1), BF16), c, [0]).d_e.astype(F32)[0, 0] == 1.0


# ------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_token_gives_nan(reduction):
    e, c, labels = problem(7, 11, 5)
    for x, y in ((e, np.full(7, -100)), (e[:0], labels[:0]), (np.full_like(e, np.nan), np.full(7, -100))):
        got = linear_cross_entropy(x, c, y, reduction=reduction)
        assert got.valid_count == 0 and not np.any(got.loss) and not np.any(got.lse)
        assert got.d_e.shape == x.shape and not got.d_e.any() and not got.d_c.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_an_ignored_row_spreads(poison):
    e, c, labels = problem(40, 50, 6)
    labels[[2, 17]] = -100
    want = linear_cross_entropy(np.where(labels[:, None] == -100, 0, e), c, labels)
    e[[2, 17]] = poison
    assert_same(linear_cross_entropy(e, c, labels), want)
    labels[2] = 1
    assert np.isnan(linear_cross_entropy(e, c, labels).loss)


@pytest.mark.parametrize("ignored", [4, -1, 255])
def test_ignore_index_is_not_used(ignored):
    e, c, labels = problem(30, 11, 5, ignored=False)
    check(e, c, labels, ignore_index=ignored)
    check(e, c, np.where(labels == 3, ignored, labels), ignore_index=ignored)


@pytest.mark.parametrize("bad", [11, 12, 63, 10**6, -1, -99, 2**31, 2**32 + 5])
def test_label_out_of_range_trains_on_something_else(bad):
    e, c, labels = problem(7, 11, 5, ignored=False)
    labels[3] = bad
    with pytest.raises(ValueError, match=rf"3\b.*{bad}\b.*11\b"):
        linear_cross_entropy(e, c, labels)


def test_huge_unsigned_label_wraps_to_a_valid_one():
    e, c, _ = problem(1, 11, 5)
    with pytest.raises(ValueError):
        linear_cross_entropy(e, c, np.array([2**64 - 100], np.uint64))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cotangent_is_lost(reduction):
    e, c, labels = problem(23, 31, 7)
    cotangent = np.linspace(-2, 3, 23).astype(F32) if reduction == "none" else 2.5
    check(e, c, labels, reduction=reduction, cotangent=cotangent)
    check(e, c, labels, reduction=reduction, cotangent=0.0)
