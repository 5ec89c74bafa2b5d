"""A run that is killed at any moment and started again ends as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from cutloss.sft import config, run

# The process dies at the events of step 5: after the checkpoint of step 4, with a step of its own to lose.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from cutloss.sft import config, run

def emit(event, **fields):
    if event == "step" and fields["step"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)

run.run(config.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), emit)
"""


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling is most of these tests' time. The killed process must compile alike, or its bits differ."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    summary, events = runs.go(runs.settings(folder, "train.schedule=cosine", "train.warmup=2"), folder / "run")
    return folder, summary, events


def test_killed_run_goes_on_to_the_same_bits(straight, tmp_path):
    folder, expected, _ = straight
    settings = runs.settings(folder, "train.schedule=cosine", "train.warmup=2")
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, json.dumps(settings.to_dict()), str(out)]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()[-2000:]
    assert sorted(runs.losses(out)) == [1, 2, 3, 4, 5] and not (out / "summary.json").exists()
    # What a process killed while it wrote leaves: half a line, half a checkpoint.
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    (out / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()

    summary, events = runs.go(settings, out)
    assert [e["step"] for e in events if e["event"] == "resumed"] == [4]
    assert [e["step"] for e in events if e["event"] == "step"] == [5, 6]
    assert summary["sha256"] == expected["sha256"] and summary["loss"] == expected["loss"]
    assert runs.losses(out) == runs.losses(folder / "run")


def test_schedule_is_that_of_the_whole_run(straight):
    """Warm-up to the full rate in 2 steps, then down half a cosine to 0 after step 6."""
    _, _, events = straight
    rates = [e["learning_rate"] for e in events if e["event"] == "step"]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 8.5355e-3, 5e-3, 1.4645e-3], rel=1e-4)


def test_finished_run_does_nothing_and_a_changed_one_is_refused(straight):
    folder, expected, _ = straight
    before = {p: p.stat().st_mtime_ns for p in (folder / "run").rglob("*") if p.is_file() and p.name not in ("lock", "config.json")}
    summary, events = runs.go(runs.settings(folder, "train.schedule=cosine", "train.warmup=2"), folder / "run")
    assert summary == expected and [e["event"] for e in events] == ["finished"]
    assert all(p.stat().st_mtime_ns == then for p, then in before.items())
    with pytest.raises(config.ConfigError, match=r"other settings: lora.rank was 4 and is 8"):
        runs.go(runs.settings(folder, "train.schedule=cosine", "train.warmup=2", "lora.rank=8"), folder / "run")


def test_adapters_are_saved_with_their_scale(straight):
    from safetensors import safe_open

    folder, _, events = straight
    with safe_open(folder / "run" / "adapter.safetensors", framework="numpy") as file:
        told, names = file.metadata(), list(file.keys())
        assert any(abs(file.get_tensor(name)).max() > 0 for name in names if name.endswith("lora_b"))
    assert told["rank"] == "4" and told["alpha"] == "4.0" and told["family"] == "gemma3"
    assert all("lora" in name for name in names) and names
    (model,) = [e for e in events if e["event"] == "model"]
    assert 0 < model["trained"] < model["parameters"]
    assert (folder / "run" / "tensorboard").is_dir() and any((folder / "run" / "tensorboard").iterdir())


def test_two_processes_do_not_share_a_folder(tmp_path):
    from cutloss.sft import folder

    settings = runs.settings(tmp_path)
    first = folder.RunFolder(tmp_path / "run", settings)
    with pytest.raises(config.ConfigError, match="another process"):
        folder.RunFolder(tmp_path / "run", settings)
    first.close()
    folder.RunFolder(tmp_path / "run", settings).close()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(config.ConfigError, match="holds no run"):
        run.run(runs.settings(tmp_path), tmp_path, lambda *_, **__: None)
    assert Path(tmp_path / "thesis.tex").read_text() == "precious"
