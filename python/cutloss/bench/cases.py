"""What is measured: shapes, and the ways to compute them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HEADS = ("loss", "frozen", "trainable")  #: no gradient, dE, dE and dC
DTYPES = ("f32", "bf16")


@dataclass(frozen=True)
class Shape:
    name: str
    n: int
    v: int
    d: int
    real: bool = False  #: hidden states and table of a real model; else random numbers

    def flops(self, head: str) -> float:
        """What the dense loss takes with its gradients: every speed is counted in it, whoever does more or less."""
        return (1 + HEADS.index(head)) * 2.0 * self.n * self.v * self.d


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gemma3-270m-real", 2048, 262144, 640, real=True),
        Shape("gemma3-270m", 2048, 262144, 640),
        Shape("gemma3-1b", 1024, 262144, 1152),
        Shape("qwen3-0.6b", 2048, 151936, 1024),
        Shape("llama3.2-1b", 1024, 128256, 2048),
        Shape("smollm2-135m", 4096, 49152, 576),
    )
}
QUICK = Shape("quick", 256, 4096, 64)


@dataclass(frozen=True)
class Variant:
    """One way to compute the loss.

    Attributes:
        name: of this row.
        family: rows of one family differ by a setting: the fastest right one speaks for all.
        impl: a function of worker.py.
        options: what it is called with.
        heads: for which of HEADS.
        error: a filter's: up to this error of the whole dE or dC it is compared with the peers. None: exact.
    """

    name: str
    family: str
    impl: str
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[str, ...] = HEADS
    error: float | None = None

    @property
    def ours(self) -> bool:
        return self.impl == "cutloss"


CHUNKS = (128, 256, 512, 1024)
JAX_CCE = {"chunk_size": 4096, "filter_eps": None}

PEERS = {
    "torch-dense": [Variant("torch dense", "torch dense", "torch_dense")],
    "torch-auto": [
        Variant("torch F.linear_cross_entropy", "torch F.linear_cross_entropy", "torch_linear_cross_entropy")
    ],
    "torch-chunks": [
        Variant(f"torch F.linear_cross_entropy, chunk {size}", "torch F.linear_cross_entropy, best chunk",
                "torch_linear_cross_entropy", {"batch_chunk_size": size, "chunking_method": None})
        for size in CHUNKS
    ],
    "torch-loop": [Variant("torch loop over 8 chunks", "torch loop over 8 chunks", "torch_chunk_loop", {"chunks": 8})],
    "optax": [Variant("optax dense", "optax dense", "optax_dense")],
    "jax-cce": [Variant("jax-cce", "jax-cce", "jax_cce", JAX_CCE)],
}


def _exact(mode: str, *heads: str) -> Variant:
    return Variant(f"cutloss {mode}", f"cutloss {mode}", "cutloss", {"mode": mode}, heads)


def _filtered(kind: str, *powers: int) -> list[Variant]:
    """Each a family of its own: how fast and how far off goes together."""
    return [
        Variant(name, name, "cutloss", {"filter": kind, "epsilon": 2.0**-power}, HEADS[1:], error=1e-3)
        for power in powers
        for name in [f"cutloss {kind} 2^-{power}"]
    ]


MODES = {
    "auto": [_exact("auto", *HEADS)],
    "loss": [_exact("loss", "loss")],
    "stream": [_exact("stream", "frozen")],
    "chunk": [_exact("chunk", "trainable")],
    "recompute": [_exact("recompute", "trainable")],
    "certified": _filtered("certified", 20, 18, 22, 24),
    "unbiased": _filtered("unbiased", 14, 13, 15, 16),
}
DEFAULT_MODES = tuple(mode for mode in MODES if mode != "auto")  # auto is one of the others


def variants(shape: Shape, modes: list[str], peers: list[str]) -> list[Variant]:
    """The rows for these names, cutloss first. Without real data one setting of a filter tells as much as four."""
    ours = [way for mode in modes for way in MODES[mode][: None if shape.real else 1]]
    return ours + [way for peer in peers for way in PEERS[peer]]


def one_of_each(ways: list[Variant]) -> list[Variant]:
    """The first of every family, and of every filter."""
    found: dict[tuple, Variant] = {}
    for way in ways:
        found.setdefault((way.family, None) if way.error is None else (None, way.options["filter"]), way)
    return list(found.values())
