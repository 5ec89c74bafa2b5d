"""The real model trained with each loss: curves, BLEU and chrF, answers side by side. Built on cutloss-sft.

Three runs, each a `cutloss-sft train` of its own that goes on after a kill: Tunix's loss and cutloss on the same batches,
and cutloss with `--capacity` times the rows for the same number of tokens, which is what the memory it saves can be
spent on. (That run has as many times fewer steps, so its curve is drawn over tokens.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import process, records

ARMS = ("default", "cutloss", "capacity")


def add(commands: Any) -> None:
    command = commands.add_parser("quality", help="train with each loss: curves, BLEU and chrF, answers side by side")
    command.add_argument("settings", nargs="*", metavar="section.key=value", help="of cutloss-sft, over the ones used here")
    command.add_argument("--runs", default="evidence/quality", metavar="FOLDER", help="of the runs (default %(default)s)")
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--context", type=int, default=128)
    command.add_argument("--rank", type=int, default=16)
    command.add_argument("--capacity", type=int, default=4, help="times the rows, in the third run (default %(default)s)")
    command.add_argument("--prompts", type=int, default=32, help="held-out texts that are answered (default %(default)s)")
    command.add_argument("--arms", default=",".join(ARMS), metavar="LIST")
    command.add_argument("--out", default="evidence/records.jsonl", metavar="FILE")
    command.add_argument("--json", action="store_true", help="records as JSON lines on stdout")
    command.set_defaults(run=main)


def main(options: argparse.Namespace, console: Any) -> int:
    arms = options.arms.split(",")
    if wrong := [arm for arm in arms if arm not in ARMS]:
        raise records.RecordsError(f"--arms: {wrong[0]!r} is not one of {', '.join(ARMS)}")
    if options.steps % options.capacity:
        raise records.RecordsError(f"--steps: {options.steps} is no multiple of --capacity {options.capacity}")
    with records.Records(Path(options.out)) as store:
        for arm in arms:
            record = store.find(key_of(options, arm))
            if record is None or record["outcome"] != "ok":
                record = _train(options, arm)
                store.add(record)
            if options.json:
                print(json.dumps(record))
            else:
                console.print(f"{record['key']}: {record['outcome']} {record['message']}", highlight=False, markup=False)
            if record["outcome"] != "ok":
                return 1
    return 0


def key_of(options: argparse.Namespace, arm: str) -> str:
    batch, steps = shape(options, arm)
    more = "".join(f" {one}" for one in options.settings)
    return f"quality {arm} b{batch}x{options.context} r{options.rank} {steps} steps{more}"


def shape(options: argparse.Namespace, arm: str) -> tuple[int, int]:
    """(rows, steps): the same tokens in all."""
    many = options.capacity if arm == "capacity" else 1
    return options.batch * many, options.steps // many


def settings_of(options: argparse.Namespace, arm: str) -> list[str]:
    batch, steps = shape(options, arm)
    every = max(1, steps // 8)
    chosen = [
        f"train.steps={steps}", f"train.batch={batch}", f"train.context={options.context}", f"lora.rank={options.rank}",
        f"train.checkpoint_every={every}", f"evaluation.every={every}", "evaluation.batches=4",
        f"generation.prompts={options.prompts}", "generation.quality=true",
        f"loss.arm={'dense' if arm == 'default' else 'cutloss'}",
    ]  # fmt: skip
    if not any(one.startswith(("model.path=", "model.family=", "model.name=")) for one in options.settings):
        from .parity import _demo_weights

        chosen.append(f"model.path={_demo_weights()}")
    return [*chosen, *options.settings]


def _train(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    start = time.monotonic()
    folder = Path(options.runs) / arm
    command = [sys.executable, "-m", "cutloss.sft.cli", "train", "--json", "--out", str(folder), *settings_of(options, arm)]
    # Its bar and its messages go to this terminal; its events are in the folder.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    found: dict[str, Any] = {"outcome": "ok", "message": ""}
    if done.returncode:
        found = {"outcome": "failed", "message": f"cutloss-sft ended with {done.returncode}; its folder is {folder.name}/"}
    else:
        found |= results(folder)
    batch, steps = shape(options, arm)
    return {
        "format": records.FORMAT, "kind": "quality", "key": key_of(options, arm), "arm": arm, "batch": batch,
        "context": options.context, "steps": steps, "date": process.now(), "versions": process.versions(),
        "command": f"cutloss-evidence quality --steps {options.steps} --batch {options.batch} --context {options.context}"
        f" --rank {options.rank} --prompts {options.prompts}" + "".join(f" {one}" for one in options.settings),
        "seconds": {"total": round(time.monotonic() - start, 2)}, **found,
    }  # fmt: skip


def results(folder: Path) -> dict[str, Any]:
    """What a finished run left: curves, scores, answers, memory."""
    from cutloss.sft import report

    run = report.read(folder)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": run.losses,
        "evaluated": [[one["step"], one["loss"]] for one in events if one["event"] == "evaluated"],
        "step_seconds": run.step_seconds,
        "planned_bytes": run.planned_bytes,
        "peak_rss_bytes": run.peak_rss_bytes,
        "quality": run.quality,
        "answers": {when: _lines(folder / f"{when}.jsonl") for when in ("before", "after")},
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
