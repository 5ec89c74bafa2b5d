"""Two processes over gloo: of one device each, and of four each against one process of eight."""

from pathlib import Path

import pytest
from processes import result, results_of_two, start

from cutloss.jax import smoke

SMOKE = ("-m", "cutloss.jax.smoke", "--json")


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--xla"]], ids=["kernels", "xla"])
def test_second_process_holds_another_part(how):
    first, second = results_of_two(
        lambda address, k: (*SMOKE, "--coordinator", address, "--processes", 2, "--process", k, *how)
    )
    alone = result(start(8, *SMOKE, *how))
    assert list(first) == list(alone) == ["fsdp 8 x tp 1", "fsdp 4 x tp 2", "fsdp 1 x tp 8"]
    for name in alone:
        assert first[name]["value"] == second[name]["value"] == pytest.approx(alone[name]["value"], rel=1e-6)


def test_two_processes_of_one_device_disagree():
    """Each compares what it computes with float64, and ends with 1 if it is wrong."""
    first, second = results_of_two(
        lambda address, k: (*SMOKE, "--coordinator", address, "--processes", 2, "--process", k), devices=1
    )
    assert list(first) == list(second) == ["fsdp 2 x tp 1", "fsdp 1 x tp 2"]
    for name in first:
        assert first[name]["value"] == second[name]["value"]


@pytest.mark.long
def test_second_process_loses_an_option():
    """Softcap, weights, smoothing, z-loss and shift; each process compares the parts it holds with float64."""
    program = Path(__file__).with_name("process_objective.py")
    first, second = results_of_two(lambda address, k: (program, address, 2, k))
    alone = result(start(8, program, "-", 1, 0))
    assert list(first) == list(alone) == ["fsdp8 auto", "fsdp4tp2 xla", "tp8 xla"]
    for name in alone:
        assert first[name] == second[name] == pytest.approx(alone[name], rel=1e-6)


def test_wrong_sums_pass(monkeypatch, capsys):
    """One process, one device: what the command says when numbers are off, or options do not fit."""
    real = smoke.dense
    assert smoke.main([]) == 0 and "WRONG" not in capsys.readouterr().out
    for k in range(3):
        monkeypatch.setattr(smoke, "dense", lambda *a: tuple(v * (1.001 if i == k else 1) for i, v in enumerate(real(*a))))
        assert smoke.main([]) == 1 and "WRONG" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        smoke.main(["--process", "1"])
    assert "go together" in capsys.readouterr().err
