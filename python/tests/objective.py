"""The whole objective written out densely in float64, after the formulas of cutloss.hpp, and how far float32 may be off.

Independent of the library: arrays in, arrays out. Rows are [N]; a test of more axes reshapes.
"""

from __future__ import annotations

import numpy as np

U = 2.0**-24  # half a unit in the last place of float32


def dense(e, c, labels=None, *, bias=None, reduction="mean", denominator=None, ignore_index=-100, token_weights=None,
          class_weights=None, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=None, shift=0, sequence=0,
          soft_targets=None, cotangent=1.0, lse_cotangent=None):
    """A dict of loss, nll, lse, d_e, d_c, d_bias, valid_count, what metrics_of needs, and tolerances of the first six."""
    e, c = np.asarray(e, np.float64), np.asarray(c, np.float64)
    (n, hidden), vocab = e.shape, c.shape[0]
    row = np.arange(n)
    length = sequence or n
    inside = row % max(length, 1) + shift < length
    source = np.where(inside, row + shift, 0)
    if soft_targets is None:
        label = np.asarray(labels).astype(np.int64)[source]
        valid = inside & (label != ignore_index)
        label = np.where(valid, label, 0)
        w = np.ones(vocab) if class_weights is None else np.asarray(class_weights, np.float64)
        hot = (np.arange(vocab) == label[:, None]).astype(np.float64)
        target = (1 - label_smoothing) * hot * w[label][:, None] + label_smoothing / vocab * w  # of sum_v q_v (lse - z_v)
        weight = w[label]
    else:
        ids, q = (np.asarray(a)[source] for a in soft_targets)
        valid = inside & np.ones(n, bool)
        target = np.zeros((n, vocab))
        for k in range(ids.shape[1]):
            kept = ids[:, k] != ignore_index
            np.add.at(target, (row[kept], ids[kept, k]), q[kept, k].astype(np.float64))
        likeliest = np.where(ids == ignore_index, -np.inf, q).argmax(1)
        label = np.where((ids == ignore_index).all(1), -1, ids[row, likeliest])  # all padding: no target, nll 0
        hot = np.arange(vocab) == label[:, None]  # nll is that of the likeliest id
        weight = target.sum(1)
    t = (np.ones(n) if token_weights is None else np.asarray(token_weights, np.float64)) * valid
    # Of a row with no target left nothing is looked at, unless lse itself matters.
    counts = valid & (t != 0) & (target.any(1) | (z_loss != 0) | (lse_cotangent is not None))
    e = np.where(counts[:, None], e, 0)

    raw = logit_scale * (e @ c.T) + (0 if bias is None else np.asarray(bias, np.float64))
    bent = np.tanh(raw / softcap) if softcap else None
    z, slope = (softcap * bent, 1 - bent**2) if softcap else (raw, np.ones_like(raw))
    top = z.max(1, initial=-np.inf)
    lse = top + np.log(np.exp(z - top[:, None]).sum(1))
    p = np.exp(z - lse[:, None])
    gap = lse[:, None] - z
    nll = np.where(hot > 0, hot * gap, 0).sum(1)
    each = t * (np.where(target > 0, target * gap, 0).sum(1) + z_loss * lse**2)
    total = (t * weight).sum() if denominator is None else denominator
    scale = {"mean": 1 / total if total else 0.0, "sum": 1.0, "none": 1.0}[reduction]
    loss = each if reduction == "none" else scale * each.sum()

    g = np.broadcast_to(np.float64(cotangent), n) * scale * t
    h = np.where(counts, 0 if lse_cotangent is None else lse_cotangent, 0)
    a = g * (target.sum(1) + 2 * z_loss * lse) + h
    d_raw = (a[:, None] * p - g[:, None] * target) * slope
    d_e, d_c, d_bias = logit_scale * d_raw @ c, logit_scale * d_raw.T @ e, d_raw.sum(0)

    # Every quantity is a sum of at most k rounded terms, a logit one of D and a few for bias, scale and tanh. An error of
    # the logits changes each softmax weight and slope by a relative 2 errors (softcap >= 1), each logit by itself.
    k = (n + hidden + vocab + 32) * U
    logit_error = (hidden + 8) * U * (abs(logit_scale) * np.abs(e) @ np.abs(c).T
                       + (0 if bias is None else np.abs(np.nan_to_num(np.asarray(bias, np.float64), neginf=0)))).max(
                           initial=0)
    relative = k + 4 * logit_error
    magnitude = np.abs(a)[:, None] * p + np.abs(g)[:, None] * target
    tol = {
        "nll": relative * (1 + np.abs(nll)) * max(1, weight.max(initial=0)),
        "lse": relative * (1 + np.abs(lse)),
        "d_e": relative * abs(logit_scale) * magnitude @ np.abs(c) + 1e-37,
        "d_c": relative * abs(logit_scale) * magnitude.T @ np.abs(e) + 1e-37,
        "d_bias": relative * magnitude.sum(0) + 1e-37,
    }
    off = relative * np.abs(t) * (target.sum(1) * (1 + np.abs(gap).max(1, initial=0)) + abs(z_loss) * (1 + lse**2) * 2)
    tol["loss"] = (off if reduction == "none" else abs(scale) * off.sum()) + 1e-37
    return {"loss": loss, "nll": nll * counts, "lse": np.where(counts, lse, 0), "d_e": d_e, "d_c": d_c, "d_bias": d_bias,
            "valid_count": int(valid.sum()), "logits": z, "label": label, "counts": counts, "p": p, "tol": tol}


def near(what, got, want, tol):
    """|got - want| <= tol, and half a unit in the last place of got's dtype where that is narrower, everywhere."""
    rounding, smallest = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0)}.get(np.asarray(got).dtype.name, (0, 0))
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    off = np.where(got == want, 0, np.abs(got - want)) / (np.asarray(tol) + rounding * np.abs(want) + smallest)
    assert not np.isnan(off).any() and (off.size == 0 or off.max() <= 1), \
        f"{what}: {np.nanmax(off):.3g} times the bound, {int((~(off <= 1)).sum())} of {off.size} are off"


def metrics_of(want):
    """Entropy, argmax, rank by the formulas; ids of the largest logits in falling order."""
    z, p, label, counts = want["logits"], want["p"], want["label"], want["counts"]
    rows = np.arange(len(z))
    log_p = np.log(p, where=p > 0, out=np.zeros_like(p))
    return {
        "entropy": np.where(counts, -(p * log_p).sum(1), 0),
        "argmax": np.where(counts, z.argmax(1), -1),
        "correct": counts & (z.argmax(1) == label),
        "rank": np.where(counts & (label >= 0), (z > z[rows, label][:, None]).sum(1), -1),
        "order": np.argsort(-z, axis=1, kind="stable"),
        "mean_logits": z[counts].mean(0) if counts.any() else np.zeros(z.shape[1]),
    }
