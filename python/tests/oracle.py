"""The loss written out densely in float64, with a bound on what float32 arithmetic may make of it, and test data."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
ROUNDOFF = {F32: 2.0**-24, BF16: 2.0**-8}  # half a unit in the last of 24 and of 8 binary digits


@dataclasses.dataclass
class Dense:
    """Values and, under the same name with a leading `tol_`, the largest error of each in float32.

    Every quantity is a sum of at most K = N + V + D + 16 rounded terms, whatever the order: its error is at most K u
    (u = 2^-24) times the sum of the terms' magnitudes. The 16 stand for exp, log and tanh, a few ulp each.
    An error dz of the logits changes each softmax weight by a factor of at most 1 + 2 dz, and nll by at most 2 dz.
    """

    loss: np.ndarray
    nll: np.ndarray
    lse: np.ndarray
    d_e: np.ndarray
    d_c: np.ndarray
    valid_count: int
    tol_loss: np.ndarray
    tol_nll: np.ndarray
    tol_d_e: np.ndarray
    tol_d_c: np.ndarray


def dense(e, c, labels, *, reduction="mean", ignore_index=-100, softcap=None, head_layout="vd", cotangent=1.0,
          roundings=1) -> Dense:
    out_dtypes = np.dtype(e.dtype), np.dtype(c.dtype)
    e = np.asarray(e, np.float64)
    c = np.asarray(c, np.float64)
    c = c if head_layout == "vd" else c.T
    labels = np.asarray(labels).astype(np.int64)
    (tokens, hidden), vocab = e.shape, c.shape[0]
    valid = labels != ignore_index
    e = np.where(valid[:, None], e, 0)
    target = np.where(valid, labels, 0)
    one_hot = np.arange(vocab) == target[:, None]

    z = e @ c.T
    slope = np.ones_like(z)
    if softcap is not None:
        bent = np.tanh(z / softcap)
        z, slope = softcap * bent, 1 - bent**2
    top = z.max(axis=1, initial=-np.inf)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    z_label = (z * one_hot).sum(axis=1)
    nll = np.where(valid, lse - z_label, 0)
    count = int(valid.sum())
    scale = {"mean": 1 / max(count, 1), "sum": 1.0, "none": 1.0}[reduction]
    g = np.where(valid, np.broadcast_to(np.float64(cotangent), labels.shape) * scale, 0)
    p = np.exp(z - lse[:, None])
    dz = g[:, None] * (p - one_hot) * slope
    d_e, d_c = dz @ c, dz.T @ e

    u = ROUNDOFF[F32]
    k = (tokens + vocab + hidden + 16) * u
    logit_error = k * (np.abs(e) @ np.abs(c).T).max(axis=1, initial=0) + 8 * u * (softcap or 0)
    tol_nll = np.where(valid, 2 * logit_error + k + 4 * u * (np.abs(lse) + np.abs(z_label)), 0)
    relative = k + 2 * logit_error + (2 * logit_error / softcap if softcap else 0)
    # p_y - 1 and every p_v are bounded by the same relative error; with softcap the slope's error is absolute.
    magnitude = np.abs(g)[:, None] * np.where(one_hot, 1 - p, p) * (slope if softcap is None else 1)
    tol_d_e = (relative[:, None] * magnitude) @ np.abs(c)
    tol_d_c = (relative[:, None] * magnitude).T @ np.abs(e)
    tol_loss = tol_nll if reduction == "none" else scale * (tol_nll.sum() + k * nll.sum())
    loss = nll if reduction == "none" else scale * nll.sum()

    # Rounding to the output's dtype, more than once where a saved gradient is scaled later.
    tol_d_e = tol_d_e + roundings * ROUNDOFF[out_dtypes[0]] * (np.abs(d_e) + tol_d_e) + 1e-37
    tol_d_c = tol_d_c + roundings * ROUNDOFF[out_dtypes[1]] * (np.abs(d_c) + tol_d_c) + 1e-37
    if head_layout == "dv":
        d_c, tol_d_c = d_c.T, tol_d_c.T
    return Dense(np.asarray(loss), nll, np.where(valid, lse, 0), d_e, d_c, count, np.asarray(tol_loss) + 1e-37, tol_nll,
                 tol_d_e, tol_d_c)


def close(what: str, got, wanted, tolerance) -> None:
    """|got - wanted| <= tolerance everywhere; says where it is worst."""
    got = np.asarray(got).astype(np.float64)
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, not {wanted.shape}"
    excess = np.where(np.isfinite(got), np.abs(got - wanted) / np.maximum(tolerance, 1e-300), np.inf)
    excess = np.where((got == wanted), 0, excess)
    if excess.size and excess.max() > 1:
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        raise AssertionError(f"{what}{list(map(int, worst))}: {got[worst]!r}, not {wanted[worst]!r}: "
                             f"{excess[worst]:.3g} times the bound; {int((excess > 1).sum())} of {excess.size} are off")


def problem(tokens, vocab, hidden, *, e_dtype=F32, c_dtype=F32, head_layout="vd", ignored=True, seed=0):
    """Random e, c and labels. Logits have a spread of about 3, and about one label in five is ignored."""
    rng = np.random.default_rng([seed, tokens, vocab, hidden])
    e = (3 * rng.standard_normal((tokens, hidden)) / np.sqrt(hidden)).astype(e_dtype)
    c = rng.standard_normal((vocab, hidden)).astype(c_dtype)
    labels = rng.integers(0, vocab, tokens)
    if ignored:
        labels[rng.random(tokens) < 0.2] = -100
    return e, c if head_layout == "vd" else np.ascontiguousarray(c.T), labels


def lattice(tokens, vocab, hidden):
    """A problem given by a formula in integers, exact in any language: fixed values elsewhere refer to it."""
    def table(rows, columns, seed):
        i, j = np.arange(rows)[:, None] + 0, np.arange(columns)[None, :] + 0
        return ((((i + 1) * (j + 3) * 7919 + i * 104729 + j * 1299709 + seed * 15485863) % 2003) / 1001 - 1)

    labels = (np.arange(tokens) * 7919 + 5) % vocab
    return (3 * table(tokens, hidden, 1)).astype(F32), table(vocab, hidden, 2).astype(F32), labels
