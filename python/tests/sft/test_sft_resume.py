"""A run that is killed at any moment and started again ends as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from cutloss.sft import config, run

# The process dies once an event is recorded.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from cutloss.sft import config, run

def emit(event, **fields):
    if event == sys.argv[3] and fields.get("step", 0) == int(sys.argv[4]):
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


OVERRIDES = ("train.schedule=cosine", "train.warmup=2", "evaluation.every=2", "evaluation.batches=1")


def go_straight(folder, **train):
    summary, events = runs.go(runs.settings(folder, *OVERRIDES, **train), folder / "run")
    return folder, summary, events


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return go_straight(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    return go_straight(tmp_path_factory.mktemp("accumulated"), accumulation=2)


def go_on(settings, out, event, step):
    """Returns (summary, events) of the second part of a run, whose first part died at an event."""
    command = [sys.executable, "-c", KILLED, json.dumps(settings.to_dict()), str(out), event, str(step)]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()[-2000:]
    assert not (out / "summary.json").exists()
    # What a process killed while it wrote leaves: half a line, half a checkpoint.
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    (out / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    return runs.go(settings, out)


def assert_same(out, summary, folder, expected):
    for key in ("sha256", "loss", "steps", "planned_bytes"):
        assert summary[key] == expected[key], key
    assert runs.losses(out) == runs.losses(folder / "run")
    evaluated = [[(e["step"], e["loss"]) for e in runs.recorded(place, "evaluated")] for place in (out, folder / "run")]
    assert evaluated[0] == evaluated[1]
    drawn, whole = (runs.curves(place) for place in (out, folder / "run"))
    assert {tag: curve for tag, curve in drawn.items() if "seconds" not in tag} == {
        tag: curve for tag, curve in whole.items() if "seconds" not in tag
    }


long = pytest.mark.long


@pytest.mark.parametrize(
    ("event", "step", "resumed"),
    [
        ("step", 5, 4),  # with a step of its own to lose
        # All steps taken and saved: what the summary says of them is known from the events alone.
        pytest.param("trained", 6, 6, marks=long),
        pytest.param("step", 1, 0, marks=long),
        pytest.param("evaluated", 4, 4, marks=long),  # between two steps
    ],
)
def test_killed_run_goes_on_to_the_same_bits(straight, tmp_path, event, step, resumed):
    folder, expected, _ = straight
    out = tmp_path / "run"
    summary, events = go_on(runs.settings(folder, *OVERRIDES), out, event, step)
    assert [e["step"] for e in events if e["event"] == "resumed"] == ([resumed] if resumed else [])
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(resumed + 1, 7))
    assert_same(out, summary, folder, expected)


@long
@pytest.mark.parametrize(("event", "step"), [("step", 5), ("trained", 6)])
def test_killed_run_with_accumulation_goes_on_to_the_same_bits(accumulated, tmp_path, event, step):
    """Its place in the data is counted in micro-batches, its checkpoints in steps."""
    folder, expected, _ = accumulated
    out = tmp_path / "run"
    summary, _ = go_on(runs.settings(folder, *OVERRIDES, accumulation=2), out, event, step)
    assert_same(out, summary, folder, expected)


def test_curves_are_the_events(straight):
    """Tunix writes a step's when the next is done, and its gradient norm is the mean over the micro-batches."""
    folder, _, events = straight
    drawn = runs.curves(folder / "run")
    for tag, (event, name) in {
        "train/loss": ("step", "loss"),
        "train/grad_norm": ("step", "grad_norm"),
        "train/learning_rate": ("step", "learning_rate"),
        "eval/loss": ("evaluated", "loss"),
        "eval/perplexity": ("evaluated", "perplexity"),
    }.items():
        wanted = [(e["step"], e[name]) for e in events if e["event"] == event]
        assert [step for step, _ in drawn[tag]] == [step for step, _ in wanted], tag
        assert [value for _, value in drawn[tag]] == pytest.approx([value for _, value in wanted], rel=1e-6), tag


def test_schedule_is_that_of_the_whole_run(straight):
    """Warm-up to the full rate in 2 steps, then down half a cosine to 0 after step 6."""
    _, _, events = straight
    rates = [e["learning_rate"] for e in events if e["event"] == "step"]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 8.5355e-3, 5e-3, 1.4645e-3], rel=1e-4)


def test_finished_run_does_nothing_and_a_changed_one_is_refused(straight):
    folder, expected, _ = straight
    kept = [p for p in (folder / "run").rglob("*") if p.is_file() and p.name not in ("lock", "config.json")]
    before = {p: p.stat().st_mtime_ns for p in kept}
    summary, events = runs.go(runs.settings(folder, *OVERRIDES), folder / "run")
    assert summary == expected and [e["event"] for e in events] == ["finished"]
    assert all(p.stat().st_mtime_ns == then for p, then in before.items())
    with pytest.raises(config.ConfigError, match=r"other settings: lora.rank was 4 and is 8"):
        runs.go(runs.settings(folder, *OVERRIDES, "lora.rank=8"), folder / "run")


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
