"""The arguments of ``cutloss.linear_cross_entropy`` as the C++ library takes them: fields of Problem by name, and arrays
by the names of Inputs and Outputs. What the fields may hold is checked in C++; here it is shapes, dtypes and spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _arrays, _check, _core

_GRADIENTS = ("d_e", "d_c", "d_bias")


class Call:
    """One problem. Collects ``fields`` for make_plan and ``inputs`` and ``outputs`` for Plan.run, which stay alive here."""

    def __init__(self, e: Any, c: Any, head_layout: str, labels: Any, soft_targets: Any) -> None:
        self.fields: dict[str, Any] = {}
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}  # what else Inputs has
        _core.validate_targets(labels is not None, soft_targets is not None)
        self.e, self.c = _arrays.as_numpy("e", e), _arrays.as_numpy("c", c)
        for name, operand in (("e", self.e), ("c", self.c)):
            _check.dtype_name(name, operand.dtype)
        array = None if labels is None else _arrays.as_numpy("labels", labels)
        if array is not None:
            _check.label_dtype(array.dtype)
        size = _check.sizes("e", self.e.shape, "c", self.c.shape, None if array is None else array.shape, head_layout)
        self.shape = self.e.shape[:-1]  # of whatever there is one of for each token
        self.vocab = size.vocab
        self.inputs["e"], e_dtype, e_strides = _arrays.matrix("e", self.e)
        self.inputs["c"], c_dtype, c_strides = _arrays.matrix("c", self.c)
        self.fields |= {
            "tokens": size.tokens, "hidden": size.hidden, "vocab": size.vocab, "e_dtype": e_dtype, "c_dtype": c_dtype,
            "e_strides": e_strides, "c_strides": c_strides, "head_layout": head_layout,
        }
        if array is not None:
            self.inputs["labels"], self.fields["label_dtype"], self.fields["label_stride"] = \
                _arrays.label_vector(array)
        if soft_targets is not None:
            self._soft_targets(soft_targets)

    def _soft_targets(self, pair: Any) -> None:
        _check.pair("soft_targets", pair)
        ids = _arrays.as_numpy("soft_targets ids", pair[0])
        k = ids.shape[-1] if ids.ndim else 0
        _arrays.shaped("soft_targets ids", ids, (*self.shape, max(k, 1)), _check.SOFT_IDS)
        probabilities = _arrays.reals("soft_targets probabilities", pair[1])
        _arrays.shaped("soft_targets probabilities", probabilities, ids.shape, _check.LIKE_IDS)
        ids = _arrays.contiguous(_arrays.integers("soft_targets ids", ids))
        self.inputs |= {"soft_ids": ids, "soft_probabilities": probabilities}
        self.fields |= {"soft_targets": k, "label_dtype": _arrays.integer_name(ids)}

    def shift(self, shift: int) -> None:
        self.fields["shift"] = shift
        if shift != 0:
            if not self.shape:
                raise ValueError(f"shift: {shift} needs a sequence, an e of shape [..., T, D], not {self.e.shape}")
            self.fields["sequence"] = self.shape[-1]

    def bias(self, bias: Any) -> None:
        if bias is None:
            return
        array = _arrays.contiguous(_arrays.as_numpy("bias", bias))
        self.fields["bias_dtype"] = _check.dtype_name("bias", array.dtype)
        self.inputs["bias"] = _arrays.shaped("bias", array, (self.vocab,), _check.PER_ID)

    def weights(self, token_weights: Any, class_weights: Any) -> None:
        if token_weights is not None:
            array = _arrays.reals("token_weights", token_weights, masks=True)
            self.inputs["token_weights"] = _arrays.shaped("token_weights", array, self.shape, _check.PER_TOKEN)
            self.fields["token_weights"] = True
        if class_weights is not None:
            array = _arrays.reals("class_weights", class_weights, masks=True)
            self.inputs["class_weights"] = _arrays.shaped("class_weights", array, (self.vocab,), _check.PER_ID)
            self.fields["class_weights"] = True

    def cotangents(self, cotangent: Any, lse_cotangent: Any, reduction: str) -> None:
        if cotangent is not None:
            array = _arrays.reals("cotangent", cotangent)
            if reduction == "none":
                array = self._for_each_token("cotangent", array)
            elif array.shape != ():
                raise ValueError(f"cotangent {array.shape}: a number is wanted for reduction {reduction!r}")
            self.inputs["cotangent"] = array
        if lse_cotangent is not None:
            array = _arrays.reals("lse_cotangent", lse_cotangent)
            self.inputs["lse_cotangent"] = self._for_each_token("lse_cotangent", array)
            self.fields["lse_cotangent"] = True

    def _for_each_token(self, what: str, array: np.ndarray) -> np.ndarray:
        if array.shape not in ((), self.shape):
            raise ValueError(f"{what} {array.shape}: a number, or one for each token, {self.shape}, is wanted")
        return _arrays.contiguous(np.broadcast_to(array, self.shape))

    def vocab_order(self, order: Any) -> None:
        """An array; or "learned", which is filled in when there is a plan to learn it with."""
        if order is None:
            return
        self.fields["vocab_order"] = True
        if isinstance(order, str):
            _check.one_of("vocab_order", order, ("learned",))
            return
        array = _arrays.integers("vocab_order", _arrays.as_numpy("vocab_order", order))
        array = _arrays.shaped("vocab_order", array, (self.vocab,), _check.PER_PLACE)
        self.inputs["vocab_order"] = _arrays.contiguous(array, np.int64)

    def gradients(self, wrt: frozenset[str], accumulate: Any) -> None:
        if accumulate is None:
            accumulate = {}
        if not isinstance(accumulate, Mapping):
            raise TypeError(f"accumulate: a mapping such as {{'d_c': array}} is wanted, not {accumulate!r}")
        for name in accumulate:
            _check.one_of("accumulate", name, _GRADIENTS)
        for name, source in zip(_GRADIENTS, (self.e, self.c, self.inputs.get("bias"))):
            if accumulate.get(name) is not None:
                self.fields["accumulate_" + name] = True
                if source is not None:
                    self._add_to(name, accumulate[name], source)
            wanted = name.removeprefix("d_") in wrt
            self.fields["want_" + name] = wanted
            if wanted and source is not None and name not in self.outputs:
                self.outputs[name] = np.empty(source.shape, source.dtype)

    def _add_to(self, name: str, array: Any, source: np.ndarray) -> None:
        self.outputs[name] = _arrays.buffer(name, array, source)
        dtype = _check.dtype_name(name, array.dtype)
        if name != "d_bias":
            self.fields[name + "_dtype"] = dtype
        elif array.dtype != source.dtype:
            raise TypeError(f"accumulate: d_bias has dtype {array.dtype.name}; the bias's, {source.dtype.name}, is "
                            "wanted")

    def metrics(self, wanted: dict[str, int]) -> None:
        """wanted: what _check.metrics gives. "argmax" and "correct" come together; "top_k" is two arrays."""
        self.fields |= {
            "entropy": "entropy" in wanted, "rank": "rank" in wanted, "mean_logits": "mean_logits" in wanted,
            "argmax": "argmax" in wanted or "correct" in wanted, "top_k": wanted.get("top_k", 0),
        }

    def metric_arrays(self, wanted: dict[str, int]) -> dict[str, np.ndarray]:
        """Memory for them, in C++'s names; to be called once the plan has accepted k."""
        tokens, top = self.shape, (*self.shape, wanted.get("top_k", 0))
        shapes = {"entropy": (tokens, np.float32), "argmax": (tokens, np.int64), "correct": (tokens, np.bool_),
                  "rank": (tokens, np.int64), "top_k_ids": (top, np.int64), "top_k_logprobs": (top, np.float32),
                  "mean_logits": ((self.vocab,), np.float32)}
        names = [n for n in shapes if n in wanted or (n.startswith("top_k") and "top_k" in wanted)]
        arrays = {name: np.empty(*shapes[name]) for name in names}
        self.outputs |= arrays
        if "correct" in wanted and "argmax" not in wanted:
            self.outputs["argmax"] = np.empty(*shapes["argmax"])
        return arrays

    def plan(self, target: str | None, **options: Any) -> _core.Plan:
        """options: what no array belongs to."""
        return _core.make_plan(_core.detect_machine(target), **self.fields, **options)

    def learn_vocab_order(self, plan: _core.Plan) -> np.ndarray:
        order = np.empty(self.vocab, np.int64)
        inputs = {name: array for name, array in self.inputs.items() if name != "vocab_order"}
        plan.learn_vocab_order(order.ctypes.data, **_addresses(inputs))
        return order

    def run(self, plan: _core.Plan, report: _core.FilterReport | None) -> int:
        if self.fields.get("vocab_order") and "vocab_order" not in self.inputs:
            self.inputs["vocab_order"] = self.learn_vocab_order(plan)
        return plan.run(report, **_addresses(self.inputs), **_addresses(self.outputs), **self.values)


def _addresses(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}
