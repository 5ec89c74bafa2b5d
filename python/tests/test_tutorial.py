"""docs/tutorial.md: its code is right, and every number it states is what the code gives."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import close, dense
from tool import needs_tool, run

from cutloss import linear_cross_entropy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
if not PAGE.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
TEXT = PAGE.read_text()
FLAT = " ".join(TEXT.split())
CODE: dict = {}
for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
    exec(compile(block, str(PAGE), "exec"), CODE)  # noqa: S102

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(value):
    """Two digits, as the page writes them."""
    return f"{value:#.2g}".rstrip(".")


def percent(value):
    return "0 %" if value == 0 else f"{short(100 * value)} %"


def says(*parts):
    for part in parts:
        assert part in FLAT, f"the page does not say {part!r}"


def row_of(table_after, first):
    """The cells of the row that begins with `first` in the table behind the text `table_after`."""
    rest = TEXT[TEXT.index(table_after):]
    line = re.search(rf"^\| {re.escape(first)} \|(.*)\|$", rest, re.MULTILINE)
    assert line, f"no row {first}"
    return [cell.strip() for cell in line.group(1).split("|")]


def norm(x):
    return np.linalg.norm(x)


@pytest.fixture(scope="module")
def model():
    e, c, y = CODE["small_model"]()
    p = CODE["softmax"](e, c)
    hot = np.arange(len(c)) == y[:, None]
    return e, c, y, p, hot, (p - hot) @ c


@pytest.mark.parametrize(("n", "v", "d", "tile"), [(7, 130, 5, 64), (33, 64, 17, 64), (5, 1, 3, 64), (9, 200, 8, 1)])
def test_both_functions_are_the_loss_and_its_gradients(n, v, d, tile):
    rng = np.random.default_rng(v)
    e, c, y = rng.normal(size=(n, d)), rng.normal(size=(v, d)), rng.integers(0, v, n)
    want = dense(e.astype(np.float32), c.astype(np.float32), y)  # for the bounds; its values are those of rounded inputs
    z = e @ c.T
    p = np.exp(z - np.logaddexp.reduce(z, 1)[:, None])
    dz = (p - (np.arange(v) == y[:, None])) / n
    # Sums of at most N + V + D terms in float64, of logits below 32: 2^-53 of what the float32 bounds are.
    tight = 2.0**-53 / 2.0**-24 * 32
    for loss, d_e, *d_c in (CODE["cross_entropy"](e, c, y, tile), CODE["frozen_head"](e, c, y, tile)):
        close("loss", loss, (np.logaddexp.reduce(z, 1) - z[np.arange(n), y]).mean(), want.tol_loss * tight + 1e-15)
        close("d_e", d_e, dz @ c, want.tol_d_e * tight + 1e-14)
        for got in d_c:
            close("d_c", got, dz.T @ e, want.tol_d_c * tight + 1e-14)


def test_library_agrees_with_the_page():
    rng = np.random.default_rng(5)
    e, c = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 24), (300, 24)))
    y = rng.integers(0, 300, 40)
    want = dense(e, c, y)
    loss, d_e, d_c = CODE["cross_entropy"](e.astype(np.float64), c.astype(np.float64), y)
    got = linear_cross_entropy(e, c, y)
    close("loss", got.loss, loss, want.tol_loss)
    close("d_e", got.d_e, d_e, want.tol_d_e)
    close("d_c", got.d_c, d_c, want.tol_d_c)


def test_function_has_thirty_lines_and_four_products():
    source = re.search(r"def cross_entropy.*?```", TEXT, re.DOTALL).group().strip("`").rstrip()
    assert len(source.splitlines()) + 3 <= 30  # the import before it
    assert len(re.findall(r"\w\]?\.?T? @ ", source)) == 4
    says("Four products")


def test_a_frozen_head_takes_two_products_where_recompute_takes_three():
    source = re.search(r"def frozen_head.*?```", TEXT, re.DOTALL).group()
    assert source.count(" @ ") == 2
    says("Two products instead of three")


def test_running_softmax_by_hand():
    first = 1 + np.exp(-1)
    second = first * np.exp(-1) + 1 + np.exp(-3)
    says(f"= {first:.4f}", f"{first:.4f} · exp(−1) + 1 + exp(−3) = {second:.4f}", f"= {3 + np.log(second):.4f} =")
    assert 3 + np.log(second) == pytest.approx(np.log(np.exp([1, 2, 3, 0]).sum()), rel=1e-15)
    says("At V = 262,144 the f32 logits of 1024 tokens are 1 GiB; their lse is 4 KiB")
    assert 1024 * 262144 * 4 == 2**30
    assert 1024 * 4 == 4 * 2**10


def test_plain_sums_in_f32_lose_digits():
    x = np.random.default_rng(0).random(262144, dtype=np.float32)
    exact = x.sum(dtype=np.float64)

    def off(value):
        return abs(float(value) - exact) / exact

    plain = off(np.cumsum(x)[-1])
    tiles = off(np.cumsum(np.cumsum(x.reshape(-1, 128), axis=1)[:, -1])[-1])
    says(f"are off by {plain:.1e} of their sum".replace("e-0", "e-"), f"in tiles of 128 by {tiles:.1e}".replace("e-0", "e-"))


def test_small_model_is_as_peaked_as_it_says(model):
    e, c, y, p, _, _ = model
    says(f"Its loss is {CODE['frozen_head'](e, c, y)[0]:.2f} nats")
    top = np.sort(p, axis=1)[:, -10:].sum(1).mean()
    says(f"hold {percent(top)} of the mass", f"{100 * (p >= 2.0**-8).mean():.2f} % of all entries")


@pytest.mark.parametrize("k", [8, 10, 12, 14])
def test_cost_of_a_fixed_epsilon(model, k):
    _, c, y, p, hot, exact = model
    kept = CODE["drop"](p, y, 2.0**-k)
    delta, error = (p - kept).sum(1), (p - kept) @ c
    assert row_of("## What a fixed", "2" + f"-{k}".translate(SUPERSCRIPT)) == [
        percent((kept > 0).mean()),
        f"{short(delta.mean())}, {short(delta.max())}",
        percent(norm(error) / norm(exact)),
        percent(norm(error.sum(0)) / norm(exact.sum(0))),
        percent((~((kept > 0) | hot).any(0)).mean()),
    ]


def test_the_error_of_the_sum_stays_when_tokens_are_added_up(model):
    _, c, y, p, _, exact = model
    for k in (8, 10, 12, 14):
        error = (CODE["drop"](p, y, 2.0**-k) - p) @ c
        of_sum, of_all = norm(error.sum(0)) / norm(exact.sum(0)), norm(error) / norm(exact)
        assert 2 / 3 < of_sum / of_all < 1
    says("The error of the sum over tokens is more than two thirds of that of single tokens")


def test_what_whole_tiles_lose_is_part_of_what_entries_lose(model):
    _, c, y, p, hot, _ = model
    eps = 2.0**-10
    large = np.abs(p - hot) >= eps
    tiles = large.reshape(2, 128, 32, 128).any((1, 3)).repeat(128, 0).repeat(128, 1)
    dropped = CODE["drop"](p, y, eps) == 0
    assert (~tiles <= dropped).all() and (~tiles).sum() < dropped.sum()


def test_running_filter_drops_nothing_that_counts(model):
    e, c, y, p, _, _ = model
    z, eps = e @ c.T, 2.0**-12
    lse = np.full(len(e), -np.inf)
    kept = np.zeros(p.shape, bool)
    for v in range(0, len(c), 64):
        lse = np.logaddexp(lse, np.logaddexp.reduce(z[:, v:v + 64], 1))
        kept[:, v:v + 64] = np.exp(z[:, v:v + 64] - lse[:, None]) >= eps
    final = p >= eps
    assert not (final & ~kept).any()
    says(f"{percent((kept & ~final).mean())} of the entries are kept at 2⁻¹² beyond those {percent(final.mean())}")


def test_certificate_worked_by_hand():
    p, c = np.array([0.06, 0.04]), np.array([[3.0, 4], [0, -2]])
    delta, mean = p.sum(), c.mean(0)
    plain, corrected = p @ c, p @ c - delta * mean
    radius = np.linalg.norm(c - mean, axis=1).max()
    says(f"δ = {delta:.2f}", f"= ({plain[0]:.2f}, {plain[1]:.2f}), of norm {norm(plain):.3f}",
         f"the bound is {delta:.2f} · 5 = {delta * 5:.3f}",
         f"m = ({mean[0]:g}, {mean[1]:g}) the error is ({corrected[0]:.2f}, {corrected[1]:.2f}), "
         f"of norm {norm(corrected):.3f}",
         f"the bound {delta:.2f} · {radius:.3f} = {delta * radius:.3f}")


def test_certificate_holds_on_the_small_model(model):
    _, c, y, p, _, _ = model
    for k in (8, 10, 12, 14):
        left = p - CODE["drop"](p, y, 2.0**-k)
        error, delta = np.linalg.norm(left @ c, axis=1), left.sum(1)
        assert (error <= delta * np.linalg.norm(c, axis=1).max()).all()
        tail = c.mean(0)
        corrected = np.linalg.norm(left @ c - delta[:, None] * tail, axis=1)
        assert (corrected <= delta * np.linalg.norm(c - tail, axis=1).max()).all()


def test_library_keeps_its_certificate(model):
    e, c, y, _, hot, exact = model
    e32, c32 = e.astype(np.float32), c.astype(np.float32)
    got = CODE["certified"](e32, c32, y, 2.0**-10)
    report = got.filter_report
    assert report.rows_redone < len(e)  # something was filtered
    assert 0 < report.dropped_mass_mean < 1
    error = np.linalg.norm(got.d_e - exact / len(e), axis=1)
    assert error.max() > 1e-4 / len(e)  # and it shows
    assert error.max() <= report.error_bound


def draws(model, k, count):
    _, c, y, p, _, _ = model
    rng = np.random.default_rng(1)
    return [CODE["chance"](p, y, 2.0**-k, rng) for _ in range(count)]


@pytest.mark.parametrize("k", [8, 10, 12])
def test_error_of_one_draw(model, k):
    _, c, _, p, _, exact = model
    (drawn,) = draws(model, k, 1)
    error = (drawn - p) @ c
    assert row_of("## Chance", "2" + f"-{k}".translate(SUPERSCRIPT)) == [
        percent((drawn > 0).mean()),
        percent(norm(error) / norm(exact)),
        percent(norm(error.sum(0)) / norm(exact.sum(0))),
    ]


def test_chance_is_right_on_average_and_its_spread_is_bounded(model):
    _, c, y, p, _, exact = model
    eps = 2.0**-8
    drawn = draws(model, 8, 100)
    errors = [(one - p) @ c for one in drawn]
    one = np.sqrt(np.mean([norm(error) ** 2 for error in errors])) / norm(exact)
    mean = norm(np.mean(errors, axis=0)) / norm(exact)
    dropped = norm((CODE["drop"](p, y, eps) - p) @ c) / norm(exact)
    says(f"at 2⁻⁸ the mean gradient is off by {percent(mean)}, a tenth of one draw's {percent(one)}",
         f"while dropping stays at {percent(dropped)}")
    assert mean == pytest.approx(one / 10, rel=0.1)
    hot = np.arange(len(c)) == y[:, None]
    tail = np.where((p < eps) & ~hot, p, 0)
    dropping = (CODE["drop"](p, y, eps) > 0).sum()
    more = [(one > 0).sum() - dropping for one in drawn[:10]]
    expected, spread = tail.sum() / eps, np.sqrt((tail / eps * (1 - tail / eps)).sum() / 10)
    assert abs(np.mean(more) - expected) < 5 * spread  # about delta / epsilon more entries are kept
    below = tail.sum(1)
    bound = np.sqrt(eps * below) * np.linalg.norm(c, axis=1).max()
    rms = np.sqrt(np.mean([(error**2).sum(1) for error in errors], axis=0))
    # Of 100 draws the mean square has a relative spread of about sqrt(2 / 100) per independent direction: far below 1.
    assert (rms <= bound * 1.3).all()
    assert rms.max() > 0.05 * bound.max()


def test_dropping_as_much_costs_more(model):
    _, c, y, p, _, exact = model
    share = (draws(model, 8, 1)[0] > 0).mean()
    eps = np.quantile(p, 1 - share)
    kept = CODE["drop"](p, y, eps)
    assert (kept > 0).mean() == pytest.approx(share, rel=0.01)
    says(f"Of the same {percent(share)} of the entries dropping makes an error of "
         f"{percent(norm((kept - p) @ c) / norm(exact))}")


@pytest.mark.long
def test_the_figure_is_another_than_its_command_draws(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    root = PAGE.parents[1]
    if f"matplotlib=={matplotlib.__version__}\n" not in (root / "requirements.txt").read_text():
        pytest.skip("another matplotlib draws other pixels")
    from matplotlib import image

    command = next(line.strip() for line in TEXT.splitlines() if "tutorial_figure.py" in line)
    _, script, file = shlex.split(command)
    subprocess.run([sys.executable, root / script, tmp_path / "new.png"], check=True)
    new, kept = (image.imread(path) for path in (tmp_path / "new.png", root / file))
    # Of 255 levels: another CPU's sums end in other digits, which may round a pixel to the next level.
    np.testing.assert_allclose(new, kept, atol=1.5 / 255)


@needs_tool
def test_the_command_for_its_costs_runs():
    command = next(line.strip() for line in TEXT.splitlines() if "cutloss plan" in line)
    done = run(*shlex.split(command)[1:])
    assert done.returncode == 0 and "predicted" in done.stdout, done.stderr
