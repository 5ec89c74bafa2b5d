"""Two processes of four devices each, over gloo, against one process of eight."""

import json
import socket
import subprocess
import sys

import processes
import pytest

from cutloss.jax import smoke


def start(devices, *arguments):
    command = [sys.executable, "-m", "cutloss.jax.smoke", "--json", *map(str, arguments)]
    return subprocess.Popen(command, env=processes.environment(devices), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out + error[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--xla"]], ids=["kernels", "xla"])
def test_second_process_holds_another_part(how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = [start(4, "--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", k, *how) for k in (0, 1)]
    try:
        first, second = map(result, together)
    finally:
        for process in together:
            process.kill()
    alone = result(start(8, *how))
    assert list(first) == list(alone) == ["fsdp 8 x tp 1", "fsdp 4 x tp 2", "fsdp 1 x tp 8"]
    for name in alone:
        assert first[name]["value"] == second[name]["value"] == pytest.approx(alone[name]["value"], rel=1e-6)


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
