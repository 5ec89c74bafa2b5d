"""What cutloss must know about each Tunix model class: where its head is and what is applied to the logits.

To support another model, add an `Adapter` to `ADAPTERS` and run the parity tests on a tiny config of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(TypeError):
    """The model's head is not one that cutloss can compute the loss of; the message says why and what to do."""


@dataclass(frozen=True)
class Head:
    """The last layer of a model, as arrays.

    Attributes:
        weight: the head's matrix, [V, D] for layout "vd" or [D, V] for "dv".
        layout: "vd" or "dv".
        softcap: tau of tau * tanh(z / tau) on the logits, or None.
        compute_dtype: dtype to which the model casts the hidden states and the weight before the product, or None.
    """

    weight: Any
    layout: str = "vd"
    softcap: float | None = None
    compute_dtype: Any = None


@dataclass(frozen=True)
class Adapter:
    """How to reach the head of one model class.

    Attributes:
        module: module that defines the model class.
        name: name of the model class. qwix replaces a model's class by a subclass of the same name, so the whole
            inheritance chain is searched for (module, name).
        entry: maps a model to (object, name of its method) whose first argument is the hidden states [B, L, D] after
            the final norm, and whose result is the logits.
        layer: maps a model to the module that owns the head's weights: searched for adapters and a bias.
        read: maps a model to its Head.
    """

    module: str
    name: str
    entry: Callable[[Any], tuple[Any, str]]
    layer: Callable[[Any], Any]
    read: Callable[[Any], Head]


def _softcap(model) -> float | None:
    """Tunix keeps it on the model (Gemma, Gemma 2) or in its config (Gemma 4), under two spellings."""
    config = getattr(model, "config", None)
    for owner, name in ((model, "final_logits_softcap"), (config, "final_logit_softcap")):
        if (value := getattr(owner, name, None)) is not None:
            return float(value)
    return None


def _tied_embedder(model) -> Head:
    return Head(weight=model.embedder.input_embedding.get_value(), softcap=_softcap(model))


ADAPTERS = (
    Adapter(
        module="tunix.models.gemma3.model",
        name="Gemma3",
        entry=lambda model: (model.embedder, "decode"),
        layer=lambda model: model.embedder,
        read=_tied_embedder,
    ),
)


def find(model) -> Adapter:
    """Returns the adapter of `model`; raises UnsupportedModelError if there is none."""
    chain = {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
    for adapter in ADAPTERS:
        if (adapter.module, adapter.name) in chain:
            return adapter
    known = ", ".join(adapter.name for adapter in ADAPTERS)
    raise _refusal(model, f"cutloss has no adapter for this class (it has: {known})")


def read_head(model, adapter: Adapter) -> Head:
    """Returns the head of `model`; raises UnsupportedModelError for anything that is not one plain matrix product."""
    import jax

    for name, value in vars(adapter.layer(model)).items():
        if "_lora_" in name:
            raise _refusal(
                model, f"LoRA adapters sit on its head ({name}); leave the embedder out of the LoRA module_path"
            )
        if name == "bias" and value is not None:
            raise _refusal(model, "its head has a bias, which this adapter does not pass on")
    try:
        head = adapter.read(model)
    except AttributeError as error:
        raise _refusal(model, f"its head is not where the adapter expects it ({error})") from error
    if not isinstance(head.weight, jax.Array) or head.weight.ndim != 2:
        kind = type(head.weight).__name__
        raise _refusal(model, f"its head's weight is a {kind}, not a 2-D array; is it quantised?")
    if not jax.numpy.issubdtype(head.weight.dtype, jax.numpy.floating):
        raise _refusal(model, f"its head's weight has dtype {head.weight.dtype}, a floating one is needed")
    return head


def _refusal(model, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"cutloss cannot replace the loss of {type(model).__name__}: {reason}. Train this model with Tunix's own loss: "
        "call cutloss.tunix.uninstall(), or do not use patched() or with_cut_loss(), before building the trainer."
    )
