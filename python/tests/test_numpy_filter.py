"""Filters and vocabulary orders, asked for from Python. Each test is named after the fault it would catch."""

import numpy as np
import pytest
from oracle import BF16, F32

import cutloss
from cutloss import linear_cross_entropy

N, V, D = 64, 3000, 32


def peaked(dtype=F32):
    """Logits of deviation 5: nearly all of a softmax on a few ids, as of a trained model."""
    rng = np.random.default_rng(3)
    e = (5 * rng.standard_normal((N, D)) / np.sqrt(D)).astype(dtype)
    c = rng.standard_normal((V, D)).astype(dtype)
    labels = rng.integers(0, V, N)
    labels[::7] = -100
    return e, c, labels


E, C, Y = peaked()
EXACT = linear_cross_entropy(E, C, Y, reduction="sum")


def row_errors(got):
    return np.linalg.norm(got.d_e.astype(np.float64) - EXACT.d_e, axis=1)


@pytest.mark.parametrize("wrt", [("e",), ("e", "c")])
@pytest.mark.parametrize("options", [
    {"filter": "certified", "epsilon": 2**-10}, {"filter": "certified", "tolerance": 1e-2},
    {"filter": "unbiased", "epsilon": 2**-10}, {"filter": "unbiased", "tolerance": 1e-2, "seed": 5},
    {"filter": "tile", "epsilon": 2**-12}], ids=lambda o: "-".join(map(str, o.values())) if isinstance(o, dict) else None)
def test_a_filter_is_not_used_or_not_reported(options, wrt):
    got = linear_cross_entropy(E, C, Y, reduction="sum", wrt=wrt, **options)
    report = got.filter_report
    assert got.loss == pytest.approx(EXACT.loss, rel=1e-5) and got.valid_count == EXACT.valid_count
    assert got.plan.mode == ("recompute" if options["filter"] == "tile" else "sparse")
    assert report.rows == EXACT.valid_count and 0 <= report.rows_redone <= report.rows
    if options["filter"] != "tile":  # which reports no mass, and may find no tile that is small all over
        assert 0 < report.kept_entries < N * V / 2
        assert 0 < report.dropped_mass_mean <= report.dropped_mass_max < 1
        assert 0 < report.epsilon < 1
        if "epsilon" in options:
            assert report.epsilon == np.float32(options["epsilon"])
        assert row_errors(got).max() > 1e-7, "nothing was filtered"
    assert "rows" in repr(report)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
def test_the_certificate_lies(tolerance):
    got = linear_cross_entropy(E, C, Y, reduction="sum", wrt="e", filter="certified", tolerance=tolerance)
    assert got.filter_report.dropped_mass_max <= tolerance
    # Beside the bound stands float32's own rounding of D + V terms.
    slack = (D + V) * 2**-24 * np.linalg.norm(C, axis=1).max()
    assert row_errors(got).max() <= got.filter_report.error_bound + slack


def test_the_seed_is_not_used():
    def run(**options):
        return linear_cross_entropy(E, C, Y, reduction="sum", filter="unbiased", epsilon=2**-8, **options)

    one = run(seed=1)
    for again in (run(seed=1), run(seed=1, threads=1), run(seed=1, threads=2)):
        np.testing.assert_array_equal(one.d_e, again.d_e)
        np.testing.assert_array_equal(one.d_c, again.d_c)
    assert (run(seed=2).d_e != one.d_e).any() and (run(seed=2**64 - 1).d_e != one.d_e).any()


def test_the_mean_of_unbiased_gradients_is_off():
    runs = [linear_cross_entropy(E, C, Y, reduction="sum", wrt="e", filter="unbiased", epsilon=2**-6, seed=s)
            for s in range(64)]
    mean = np.mean([run.d_e.astype(np.float64) for run in runs], axis=0)
    # Root mean square of the mean of 64 is an eighth of the bound; five of those by chance: never.
    bound = runs[0].filter_report.error_bound
    assert np.linalg.norm(mean - EXACT.d_e, axis=1).max() <= 5 * bound / 8
    assert np.median([row_errors(run).max() for run in runs]) <= 5 * bound


def test_a_result_without_a_filter_has_a_report():
    assert EXACT.filter_report is None


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
def test_filters_take_float32_only(dtype):
    e, c, labels = peaked(dtype)
    got = linear_cross_entropy(e, c, labels, reduction="sum", filter="certified", tolerance=1e-3)
    want = linear_cross_entropy(e, c, labels, reduction="sum")
    assert got.d_e.dtype == got.d_c.dtype == dtype and got.loss == pytest.approx(want.loss, rel=1e-5)


# ------------------------------------------------------------------------------------------------ vocabulary order


@pytest.mark.parametrize("options", [{}, {"shift": 2}, {"token_weights": np.arange(N) % 2}, {"logit_scale": -0.5},
                                     {"bias": np.linspace(-3, 3, V, dtype=F32)}], ids=lambda o: ",".join(o) or "plain")
def test_the_learned_order_is_not_of_mean_logits(options):
    order = cutloss.learn_vocab_order(E, C, Y, **options)
    assert order.dtype == np.int64 and (np.sort(order) == np.arange(V)).all()
    counts = np.append(Y[2:], [-100, -100]) != -100 if "shift" in options else Y != -100
    if "token_weights" in options:
        counts &= options["token_weights"] != 0
    mean = options.get("logit_scale", 1) * C @ E[counts].mean(0) + options.get("bias", 0)
    falling = mean[order]
    assert (np.diff(falling) <= 1e-5 * np.abs(falling).max()).all()


def test_learned_is_another_order_than_that_learned_before():
    order = cutloss.learn_vocab_order(E, C, Y)
    options = {"filter": "certified", "tolerance": 1e-2, "wrt": "e"}
    given = linear_cross_entropy(E, C, Y, vocab_order=order, **options)
    learned = linear_cross_entropy(E, C, Y, vocab_order="learned", **options)
    np.testing.assert_array_equal(given.d_e, learned.d_e)
    assert given.filter_report.kept_entries == learned.filter_report.kept_entries


def test_any_order_changes_the_loss():
    rng = np.random.default_rng(0)
    for order in (rng.permutation(V), np.arange(V)[::-1], "learned"):
        got = linear_cross_entropy(E, C, Y, reduction="sum", filter="certified", tolerance=1e-2, vocab_order=order)
        assert got.loss == pytest.approx(EXACT.loss, rel=1e-5)
        assert row_errors(got).max() <= got.filter_report.error_bound + (D + V) * 2**-24 * 8
