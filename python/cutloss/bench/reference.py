"""What is right: the loss in float64 over all tokens, dE of some tokens, dC of some words; and how far off is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SAMPLED = 64
BLOCK = 2048  # words at a time: 2048 x 2048 doubles are 32 MiB


@dataclass(frozen=True)
class Reference:
    """Of the mean loss.

    Attributes:
        rows, vocab_rows: which rows of dE and of dC are known.
        largest_logit: over everything.
        norms: the largest norm of a hidden state times that of a table row, which bounds |e|·|c|.
    """

    rows: np.ndarray
    vocab_rows: np.ndarray
    loss: float
    d_e: np.ndarray
    d_c: np.ndarray
    largest_logit: float
    norms: float

    def save(self, path) -> None:
        np.savez(path, **self.__dict__)

    @classmethod
    def load(cls, path) -> Reference:
        with np.load(path) as file:
            values = {name: file[name] for name in file.files}
        return cls(**{name: v if v.shape else float(v) for name, v in values.items()})


def sample(labels: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, words): spread evenly, half of the words being labels."""
    tokens = len(labels)
    rows = np.unique(np.linspace(0, tokens - 1, min(SAMPLED, tokens)).astype(np.int64))
    spread = np.linspace(0, vocab - 1, min(SAMPLED // 2, vocab)).astype(np.int64)
    return rows, np.unique(np.concatenate([labels[rows[:: max(1, 2 * len(rows) // SAMPLED)]], spread]))


def compute(e: np.ndarray, c: np.ndarray, labels: np.ndarray) -> Reference:
    """e [N, D] and c [V, D] of any float dtype; labels [N] in [0, V)."""
    rows, vocab_rows = sample(labels, len(c))
    e = e.astype(np.float64)
    tokens, vocab = len(e), len(c)
    high, total = np.full(tokens, -np.inf), np.zeros(tokens)
    at_label = np.zeros(tokens)
    largest = norm = 0.0
    for first in range(0, vocab, BLOCK):
        table = c[first : first + BLOCK].astype(np.float64)
        z = e @ table.T
        largest = max(largest, float(np.abs(z).max()))
        norm = max(norm, float(np.sqrt((table**2).sum(1).max())))
        here = (labels >= first) & (labels < first + len(table))
        at_label[here] = z[here, labels[here] - first]
        new = np.maximum(high, z.max(1))
        total = total * np.exp(high - new) + np.exp(z - new[:, None]).sum(1)
        high = new
    lse = high + np.log(total)

    d_e = -c[labels[rows]].astype(np.float64)
    for first in range(0, vocab, BLOCK):
        table = c[first : first + BLOCK].astype(np.float64)
        d_e += np.exp(e[rows] @ table.T - lse[rows, None]) @ table
    p = np.exp(e @ c[vocab_rows].astype(np.float64).T - lse[:, None]) - (labels[:, None] == vocab_rows[None])
    return Reference(
        rows=rows, vocab_rows=vocab_rows, loss=float((lse - at_label).mean()), d_e=d_e / tokens, d_c=p.T @ e / tokens,
        largest_logit=largest, norms=norm * float(np.sqrt((e**2).sum(1).max())),
    )


def errors(reference: Reference, found: dict[str, np.ndarray]) -> dict[str, float]:
    """Of "loss" the absolute error, of "d_e" (all tokens) and "d_c" (the reference's words) that of the whole sample,
    relative to its norm."""
    result = {"loss": abs(float(found["loss"]) - reference.loss)}
    if "d_e" in found:
        result["d_e"] = _relative(found["d_e"][reference.rows], reference.d_e)
    if "d_c" in found:
        result["d_c"] = _relative(found["d_c"], reference.d_c)
    return result


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def limits(
    reference: Reference, hidden: int, dtype: str, *, rounded_logits: bool, error: float | None
) -> dict[str, float]:
    """Above these a result is wrong.

    A logit's error is that of a dot product of D terms summed in f32, of random sign: sqrt(D) 2^-24 |e| |c|; with
    `rounded_logits` and bf16 inputs also that of a logit stored in bf16, 2^-9 |z|, which dense implementations do and
    which is their choice. The loss is off by no more; p by that much relatively, and with it the gradients, twice for
    the softmax's two factors. Their own rounding is 2^-9 in bf16. All times 2 for what sums of p and of its products
    add. A filter's gradients may be off by `error` instead, beside what rounding its outputs costs.
    """
    logit = math.sqrt(hidden) * 2.0**-24 * reference.norms
    if dtype == "bf16" and rounded_logits:
        logit += 2.0**-9 * reference.largest_logit
    output = 2.0**-9 if dtype == "bf16" else 2.0**-24
    gradient = 2 * (2 * logit + output) if error is None else error + (2 * output if dtype == "bf16" else 0)
    loss = 2 * (logit + (output if rounded_logits else 2.0**-24) * max(abs(reference.loss), 1))
    return {"loss": loss, "d_e": gradient, "d_c": gradient}


def wrong(found: dict[str, float], limit: dict[str, float]) -> list[str]:
    """What is over its limit, as text; a NaN is."""
    return [f"{name} off by {value:.2g} (limit {limit[name]:.2g})" for name, value in found.items()
            if not value <= limit[name]]
