"""What cutloss knows about Tunix's models: where the head is, what is applied to its logits, how to reach its input.

To support another model, add a `Family` to `FAMILIES` and a tiny config of it to the parity tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(TypeError):
    """The model's head is not one that cutloss can compute the loss of; the message says why and what to do."""


@dataclass(frozen=True)
class Head:
    """The last layer of a model.

    Attributes:
        layer: the module that owns it.
        method: name of the layer's method that takes the hidden states after the final norm, [B, L, D], to logits.
        weight: its matrix, [V, D] for layout "vd" or [D, V] for "dv".
        layout: "vd" or "dv".
        softcap: tau of tau * tanh(z / tau) on the logits, or None.
        compute_dtype: dtype to which the model casts the hidden states and the weight before the product, or None.
        spec: the PartitionSpec of the weight in the model's metadata, or None.
    """

    layer: Any
    method: str
    weight: Any
    layout: str
    softcap: float | None = None
    compute_dtype: Any = None
    spec: Any = None


@dataclass(frozen=True)
class Family:
    """One model class of Tunix.

    Attributes:
        module: module that defines the class.
        name: name of the class. qwix replaces a model's class by a subclass of the same name, so the whole inheritance
            chain is searched for (module, name).
        tied_flag: the field of the model's config by which it chooses the embedding or `lm_head`; None: always the
            embedding.
        softcap: maps a model to the softcap that its forward pass applies to the logits, or None.
        compute_dtype: maps a model and its head's layer to the dtype they cast to before the product, or None.
    """

    module: str
    name: str
    tied_flag: str | None = None
    softcap: Callable[[Any], float | None] = lambda model: None
    compute_dtype: Callable[[Any, Any], Any] = lambda model, layer: None


FAMILIES = (
    Family("tunix.models.gemma.model", "Gemma", softcap=lambda model: model.final_logits_softcap),  # 1 and 2
    Family("tunix.models.gemma3.model", "Gemma3"),
    Family(
        "tunix.models.gemma4.model",
        "Gemma4",
        softcap=lambda model: model.config.final_logit_softcap,
        compute_dtype=lambda model, layer: model.config.dtype,
    ),
    Family(
        "tunix.models.qwen2.model",
        "Qwen2",
        tied_flag="use_tied_embedding",
        compute_dtype=lambda model, layer: layer.dtype,
    ),
    Family(
        "tunix.models.qwen3.model",
        "Qwen3",
        tied_flag="use_tied_embedding",
        compute_dtype=lambda model, layer: layer.dtype,
    ),
    Family("tunix.models.llama3.model", "Llama3", tied_flag="weight_tying"),
)


def read_head(model) -> Head:
    """Returns the head of `model`; raises UnsupportedModelError for anything that is not one plain matrix product."""
    family = _family(model)
    try:
        if family.tied_flag is None or getattr(model.config, family.tied_flag):
            layer, method, name, layout = model.embedder, "decode", "input_embedding", "vd"
        else:
            layer, method, name, layout = model.lm_head, "__call__", "w", "dv"
        variable = getattr(layer, name)
        plain = hasattr(variable, "get_value")
        head = Head(
            layer=layer,
            method=method,
            weight=variable.get_value() if plain else variable,  # qwix puts a box in place of the variable
            spec=variable.get_metadata().get("out_sharding") if plain else None,
            layout=layout,
            softcap=family.softcap(model),
            compute_dtype=family.compute_dtype(model, layer),
        )
    except AttributeError as error:
        raise refusal(model, f"its head is not where {family.name}'s is expected ({error})") from error
    _check_plain(model, head, name)
    return head


def skips_head(model) -> bool:
    """Returns whether the model can be asked for its hidden states (Tunix after 0.1.7)."""
    return "skip_lm_head" in inspect.signature(type(model).__call__).parameters


def refusal(model, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cutloss cannot replace the loss of {type(model).__name__}: {reason}.")


def _family(model) -> Family:
    chain = {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
    for family in FAMILIES:
        if (family.module, family.name) in chain:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise refusal(model, f"it has no adapter for this class (it has: {known})")


def _check_plain(model, head: Head, name: str) -> None:
    import jax
    import numpy as np

    for attribute, value in vars(head.layer).items():
        if attribute.startswith(f"{name}_lora_"):
            raise refusal(
                model,
                f"LoRA adapters sit on its head ({attribute} of {type(head.layer).__name__}); leave the head out of "
                "the LoRA module_path",
            )
        if attribute == "bias" and value is not None:
            raise refusal(model, "its head has a bias")
    equation = getattr(head.layer, "einsum_str", "BTD,DV->BTV")
    if head.layout == "dv" and equation != "BTD,DV->BTV":
        raise refusal(model, f"its head computes the einsum {equation!r}, not 'BTD,DV->BTV'")
    if not isinstance(head.weight, (jax.Array, np.ndarray)) or head.weight.ndim != 2:
        kind = type(head.weight).__name__
        raise refusal(model, f"its head's weight is a {kind}, not a 2-D array; is it quantised?")
    for what, dtype in (("weight has", head.weight.dtype), ("product is in", head.compute_dtype)):
        if dtype is not None and np.dtype(dtype).name not in ("float32", "bfloat16"):
            raise refusal(model, f"its head's {what} dtype {np.dtype(dtype).name}; float32 and bfloat16 are taken")
