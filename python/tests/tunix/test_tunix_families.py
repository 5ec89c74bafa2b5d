"""Loss and gradient of every adapter, of every model family, against Tunix's own default loss."""

import numpy as np
import pytest
import tiny

import cutloss.tunix as ct
from cutloss.tunix import adapters, selfcheck


def own_loss():
    from tunix.sft import peft_trainer

    return peft_trainer._default_loss_fn


def assert_same(model, data, wrt=None):
    (dense, dense_grads), (ours, grads) = tiny.values_and_grads(
        [own_loss(), ct.loss_fn(strict=True)], model, data, wrt
    )
    # Rounding of a logit: 4 sqrt(D) u |h| |c| = 4 * 5.7 * 6e-8 * 5.7 * 2.8 = 2e-5 at worst, typically a tenth; the
    # loss averages over the tokens. 1e-5 of a loss of 6 to 12 is 100 times what is seen, a thousandth of any fault.
    assert abs(ours - dense) <= 1e-5 * abs(dense)
    assert grads.keys() == dense_grads.keys() and grads
    for name, gradient in dense_grads.items():
        size = np.linalg.norm(gradient)
        assert size > 0 and np.linalg.norm(grads[name] - gradient) <= 1e-5 * size, name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_adapters_of_every_family_get_tunix_gradients(family):
    assert_same(tiny.lora_model(family), tiny.batch())


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_full_fine_tuning_of_every_family_gets_tunix_gradients(family):
    """A tied table's gradient is that of the head and of the look-up together."""
    from flax import nnx

    assert_same(tiny.model(family), tiny.batch(), nnx.Param)


@pytest.mark.parametrize("family", ["gemma2", "gemma4"])
def test_softcap_is_read_where_the_model_keeps_it(family):
    model = tiny.model(family)
    assert adapters.read_head(model).softcap == tiny.SOFTCAP
    owner = model if family == "gemma2" else model.config
    name = "final_logits_softcap" if family == "gemma2" else "final_logit_softcap"
    setattr(owner, name, None)
    assert adapters.read_head(model).softcap is None


def test_forgotten_softcap_is_caught_before_the_first_step(monkeypatch):
    monkeypatch.setattr(adapters, "FAMILIES", (adapters.Family("tunix.models.gemma.model", "Gemma"),))
    with pytest.raises(ct.SelfCheckError):
        selfcheck.check(tiny.model("gemma2"), own_loss())
