"""Environment variables and options: what they choose, and that a bad value is an error."""

import os
import subprocess
import sys

import numpy as np
import pytest

import cutloss.tunix as ct
from cutloss.tunix import settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("CUTLOSS_")]:
        monkeypatch.delenv(name)


def chunks(**options):
    chosen = settings.read(**options)
    return chosen.token_chunk, chosen.vocab_chunk


def test_presets_mean_what_they_say(monkeypatch):
    assert chunks() == (None, None)
    assert chunks(preset="default") == chunks(preset="portable") == (128, 8192)
    monkeypatch.setenv("CUTLOSS_PRESET", "tpu_large_chunks")
    assert chunks() == (512, 65536)
    monkeypatch.setenv("CUTLOSS_VOCAB_CHUNK", "4096")
    assert chunks() == (512, 4096)  # an explicit size wins over a preset
    assert chunks(preset="portable", vocab_chunk=100) == (128, 100)  # and an argument over a variable


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUTLOSS_PRESET", "tpu"),
        ("CUTLOSS_TOKEN_CHUNK", "many"),
        ("CUTLOSS_TOKEN_CHUNK", "100"),
        ("CUTLOSS_TOKEN_CHUNK", "0"),
        ("CUTLOSS_VOCAB_CHUNK", "-1"),
        ("CUTLOSS_BUDGET", "lots"),
        ("CUTLOSS_STRICT", "yes"),
        ("CUTLOSS_DISABLE", "true"),
    ],
)
def test_bad_value_is_an_error_not_silence(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}: .*{value}"):
        ct.install()
    assert not ct.is_installed()


def test_every_variable_has_its_effect(monkeypatch):
    monkeypatch.setenv("CUTLOSS_BUDGET", "1MiB")
    monkeypatch.setenv("CUTLOSS_TOKEN_CHUNK", "64")
    assert settings.read().budget == 2**20 and chunks() == (64, None)
    assert settings.read(budget=5, token_chunk=8).budget == 5
    batch = {name: np.ones((1, 4), np.int32) for name in ("input_tokens", "input_mask", "positions", "attention_mask")}
    monkeypatch.setenv("CUTLOSS_STRICT", "1")
    with pytest.raises(ct.UnsupportedModelError):
        ct.loss_fn()(object(), **batch)
    assert not settings.read(strict=False).strict


def test_disabled_changes_nothing(monkeypatch):
    from tunix.sft import peft_trainer

    monkeypatch.setenv("CUTLOSS_DISABLE", "1")
    before = peft_trainer._default_loss_fn
    with ct.patched():
        assert not ct.is_installed() and peft_trainer._default_loss_fn is before
    assert ct.loss_fn() is before


def test_other_options_while_installed_are_an_error():
    with ct.patched(preset="portable"):
        ct.install(preset="portable")
        with pytest.raises(RuntimeError, match="uninstall"):
            ct.install(token_chunk=64)


def test_same_options_give_the_same_function():
    """Another object would be compiled again."""
    assert ct.loss_fn(preset="portable") is ct.loss_fn(token_chunk=128, vocab_chunk=8192)


def test_chunks_are_the_tiles_of_the_tpu_program():
    import jax
    import jax.numpy as jnp

    from cutloss.tunix import adapters, loss

    def total(hidden, table, tokens, mask, chosen):
        head = adapters.Head(layer=None, method="decode", weight=table, layout="vd")
        return loss.weighted_nll(hidden, head, tokens, mask, chosen)[0]

    def shapes(**options):
        arrays = jnp.ones((2, 60, 8)), jnp.ones((1000, 8)), jnp.ones((2, 60), jnp.int32), jnp.ones((2, 60), bool)
        traced = jax.jit(total, static_argnums=4).trace(*arrays, settings.read(**options))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "tensor<24x100xf32>" in shapes(token_chunk=24, vocab_chunk=100)
    assert "tensor<120x1000xf32>" in shapes()


def run(code, *arguments, **variables):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run(
        [sys.executable, *arguments, *(["-c", code] if code else [])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_autopatch_waits_for_tunix_and_needs_the_variable(tmp_path):
    asked = "import sys, cutloss.tunix as ct; ct.autopatch(); assert 'tunix' not in sys.modules;"
    look = "from tunix.sft import peft_trainer as p; print(hasattr(p._default_loss_fn, 'cutloss_settings'))"
    assert run(asked + look, CUTLOSS_AUTOPATCH="1").stdout.strip() == "True"
    script = tmp_path / "train.py"
    script.write_text("import sys;" + look + "; print(sys.argv[1:])")
    done = run("", "-m", "cutloss.tunix", str(script), "a", CUTLOSS_AUTOPATCH="0")
    assert done.stdout.split("\n")[:2] == ["False", "['a']"], done.stderr


def test_autopatch_after_the_trainer_is_imported_installs_at_once(monkeypatch):
    from tunix.sft import peft_trainer

    monkeypatch.setenv("CUTLOSS_AUTOPATCH", "yes")
    with pytest.raises(ValueError, match="^CUTLOSS_AUTOPATCH: 'yes' is neither 0 nor 1"):
        ct.autopatch()
    monkeypatch.setenv("CUTLOSS_AUTOPATCH", "1")
    try:
        assert ct.autopatch() and hasattr(peft_trainer._default_loss_fn, "cutloss_settings")
    finally:
        ct.uninstall()


def test_a_module_is_run_with_the_patch_waiting_and_its_own_arguments(tmp_path):
    program = "import sys\nprint(any('cutloss' in type(f).__module__ for f in sys.meta_path), __name__, sys.argv[1:])"
    (tmp_path / "my_training.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("", "-m", "cutloss.tunix", "-m", "my_training", "--steps", "3", PYTHONPATH=path)
    assert done.stdout.strip() == "True __main__ ['--steps', '3']", done.stderr
    for wrong in ([], ["-m"], ["--help"]):
        done = run("", "-m", "cutloss.tunix", *wrong)
        assert done.returncode == 2 and "python -m cutloss.tunix [-m MODULE | SCRIPT]" in done.stderr
