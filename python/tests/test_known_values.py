"""Losses known beforehand, through NumPy, DLPack and files: the arrays reach the kernels as they are."""

import itertools

import numpy as np
import pytest
from oracle import BF16, F32, lattice
from tool import BAD_USAGE, needs_tool, refused, run_json

from cutloss import linear_cross_entropy

F16 = np.dtype(np.float16)
MASKED = np.array([5, 4, -100, 2, 1, -100, 10])
# bias, softcap, reduction; loss and the sums of the gradients' absolute values
TERMS = [(False, None, "mean", 3.72740049, 2.10268485, 10.01176701, 0),
         (True, None, "mean", 4.22264260, 2.04413950, 11.05120661, 1.46773728),
         (False, 2.0, "mean", 2.99038656, 1.38972126, 5.94975858, 0),
         (True, 2.0, "mean", 3.28572188, 1.17292519, 5.72517245, 0.81191299),
         (True, 2.0, "sum", 16.42860940, 5.86462597, 28.62586226, 4.05956497)]


def bias_of(vocab):
    i = np.arange(vocab)
    return ((((i + 1) * 3 * 7919 + i * 104729 + 3 * 15485863) % 2003) / 1001 - 1).astype(F32)


def total(array):
    return np.abs(np.asarray(array, np.float64)).sum()


@pytest.mark.parametrize("tokens,vocab,hidden,loss,d_e,d_c", [
    (7, 11, 31, 7.17644465, 16.82973918, 60.79915554), (7, 11, 63, 7.93035362, 38.96718008, 133.25423443),
    (7, 63, 5, 4.26038358, 1.88591752, 11.86156338), (7, 127, 5, 8.03326771, 3.44441613, 13.48125517),
    (7, 257, 5, 7.84321461, 3.11330279, 13.40614590), (7, 1000, 5, 9.26790530, 3.02682733, 13.43570583)])
def test_edges_of_a_tile_change_the_loss(tokens, vocab, hidden, loss, d_e, d_c):
    got = linear_cross_entropy(*lattice(tokens, vocab, hidden))
    assert got.loss == pytest.approx(loss, rel=1e-6)
    assert total(got.d_e) == pytest.approx(d_e, rel=1e-5) and total(got.d_c) == pytest.approx(d_c, rel=1e-5)


@pytest.mark.parametrize("bias,softcap,reduction,loss,d_e,d_c,d_bias", TERMS)
@pytest.mark.parametrize("read_only", [False, True], ids=["writeable", "read-only"])
def test_a_term_is_lost_on_the_way(bias, softcap, reduction, loss, d_e, d_c, d_bias, read_only):
    e, c, _ = lattice(7, 11, 5)
    arrays = [e, c, MASKED.copy(), bias_of(11)]
    for array in arrays:
        array.flags.writeable = not read_only
    options = {"bias": arrays[3], "wrt": ("e", "c", "bias")} if bias else {}
    got = linear_cross_entropy(*arrays[:3], softcap=softcap, reduction=reduction, **options)
    assert got.loss == pytest.approx(loss, rel=1e-6) and got.loss.dtype == F32
    assert total(got.d_e) == pytest.approx(d_e, rel=1e-5) and total(got.d_c) == pytest.approx(d_c, rel=1e-5)
    if bias:
        assert total(got.d_bias) == pytest.approx(d_bias, rel=1e-5)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_mixed_dtypes_crash_or_lose_a_gradients_dtype(frozen):
    e, c, _ = lattice(7, 11, 5)
    for x, w, b in itertools.product((F32, BF16, F16), repeat=3):
        got = linear_cross_entropy(e.astype(x), c.astype(w), MASKED, bias=bias_of(11).astype(b),
                                   wrt="e" if frozen else ("e", "c", "bias"))
        assert got.loss == pytest.approx(TERMS[1][3], rel=2e-2)
        assert got.d_e.dtype == x and (frozen or (got.d_c.dtype == w and got.d_bias.dtype == b))


@needs_tool
@pytest.mark.parametrize("bias,softcap,reduction,loss,d_e,d_c,d_bias", TERMS)
def test_files_give_another_loss(tmp_path, bias, softcap, reduction, loss, d_e, d_c, d_bias):
    e, c, _ = lattice(7, 11, 5)
    line = ["loss", "--reduction", reduction] + (["--softcap", softcap] if softcap else [])
    for name, array in (("e", e), ("c", c), ("labels", MASKED), ("bias", bias_of(11))):
        if name != "bias" or bias:
            np.save(tmp_path / f"{name}.npy", array)
            line += [f"--{name}", tmp_path / f"{name}.npy"]
    wanted = {"d_e": d_e, "d_c": d_c} | ({"d_bias": d_bias} if bias else {})
    for name in wanted:
        line += ["--out-" + name.replace("_", "-"), tmp_path / f"{name}.npy"]
    assert run_json(*line)["loss"] == pytest.approx(loss, rel=1e-6)
    for name, sum_of in wanted.items():
        assert total(np.load(tmp_path / f"{name}.npy")) == pytest.approx(sum_of, rel=1e-5)


@needs_tool
def test_a_good_file_is_refused(tmp_path):
    """Data behind a header of any length; other names; other orders; a table past 4 GiB."""
    e, c, labels = lattice(7, 11, 5)
    want = run_of(tmp_path, e, c, labels)
    folder = tmp_path / "über résumé 日本"
    folder.mkdir()
    assert run_of(folder, np.asfortranarray(e), np.asfortranarray(c), labels.astype(np.int16)) == want
    for extra in (5, 9):  # 116 and 120: aligned for the elements and for nothing more
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (11, 5), }}{' ' * (40 + extra)}\n".encode()
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + c.tobytes()
        (tmp_path / "c.npy").write_bytes(data)
        assert run_json(*line_of(tmp_path))["loss"] == want, extra
    np.save(tmp_path / "c.npy", c)
    # Past 4 GiB, with holes: mapped, and found to be of the shape it says.
    np.lib.format.open_memmap(tmp_path / "e.npy", mode="w+", dtype=F32, shape=(2**28 + 1, 5)).flush()
    assert (tmp_path / "e.npy").stat().st_size > 2**32
    refused(BAD_USAGE, *line_of(tmp_path), words=["[268435457, 5]", "[7]", "disagree on N"])


def line_of(folder):
    return ["loss", *(part for name in ("e", "c", "labels") for part in (f"--{name}", folder / f"{name}.npy"))]


def run_of(folder, e, c, labels):
    for name, array in (("e", e), ("c", c), ("labels", labels)):
        np.save(folder / f"{name}.npy", array)
    return run_json(*line_of(folder))["loss"]
