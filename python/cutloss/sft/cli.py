"""The command `cutloss-sft`: fine-tunes a model of Tunix's, resumes after anything, and says beforehand what fits."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from .. import _options
from . import config as configuration
from .config import ConfigError

EPILOG = """\
examples
  cutloss-sft train --out runs/a model.path=weights/ data.path=pairs.tsv train.steps=500
  cutloss-sft train --config sft.yaml --out runs/a train.lr=1e-4
  cutloss-sft train --out runs/tiny model.family=qwen3 data.path=pairs.tsv train.steps=20     random weights
  cutloss-sft fit --budget 16GiB model.name=gemma3_270m
  cutloss-sft answer runs/a "The file is empty."
  cutloss-sft compare runs/dense runs/cutloss
  cutloss-sft export runs/a merged/

The same command again goes on where a run stopped, whatever stopped it. docs/sft.md lists the settings.
exit status: 0 done, 1 the run failed or stopped (a loss that is not finite), 2 a setting, file or data is wrong.
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="cutloss-sft",
        description="Supervised fine-tuning with Tunix and cutloss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, or go on with a run that stopped")
    fit = commands.add_parser("fit", help="what batch x context fits a memory budget, by compiling the step")
    show = commands.add_parser("config", help="print the settings as they would be used")
    for command in (train, fit, show):
        command.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML, TOML or JSON")
        command.add_argument("settings", nargs="*", metavar="section.key=value", help="settings over the file's")
    train.add_argument("--out", type=Path, required=True, help="the run's folder")
    train.add_argument("--json", action="store_true", help="events as JSON lines on stdout, the rest on stderr")
    fit.add_argument("--budget", type=_options.size, required=True, help="memory of a device, such as 16GiB")
    fit.add_argument("--batches", type=_options.numbers, metavar="LIST", help="default 1,2,4,8,16,32")
    fit.add_argument("--contexts", type=_options.numbers, metavar="LIST", help="default 256,512,1024,2048,4096")
    fit.add_argument("--json", action="store_true", help="print JSON")
    answer = commands.add_parser("answer", help="what a finished run's model answers to source texts")
    answer.add_argument("run", type=Path, help="its folder")
    answer.add_argument("texts", nargs="+", metavar="TEXT")
    compare = commands.add_parser("compare", help="two finished runs side by side")
    compare.add_argument("runs", type=Path, nargs="+", help="their folders")
    export = commands.add_parser("export", help="a finished run's model as a folder of safetensors, adapters merged")
    export.add_argument("run", type=Path, help="its folder")
    export.add_argument("out", type=Path, help="a new folder")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights; default: the run's")
    return result


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(argv)
    from rich.console import Console

    console = Console(stderr=getattr(options, "json", False))

    def failed(problem: object, status: int) -> int:
        console.print(f"cutloss-sft: {problem}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return status

    from .data import DataError

    try:
        commands = {
            "train": _train,
            "fit": _fit,
            "config": _config,
            "answer": _answer,
            "compare": _compare,
            "export": _export,
        }
        return commands[options.command](options, console)
    except (ConfigError, DataError) as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        return failed("stopped; the same command goes on from the last checkpoint", 130)
    except Exception as error:
        if os.environ.get("CUTLOSS_TRACEBACK") == "1":
            raise
        name = "" if isinstance(error, (FloatingPointError, OSError)) else f"{type(error).__name__}: "
        return failed(f"{name}{error} (CUTLOSS_TRACEBACK=1 shows where)", 1)


def _train(options: Any, console: Any) -> int:
    from . import run
    from .display import Display

    config = configuration.load(options.config, options.settings)
    events = sys.stdout
    with Display(console, config.train.steps) as display:
        display.start(options.out.name)

        def emit(event: str, **fields) -> None:
            if options.json:
                print(json.dumps({"event": event, **fields}), file=events, flush=True)
            display.show(event, fields)

        # Tunix and JAX print to stdout now and then, which with --json is for events.
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            summary = run.run(config, options.out, emit)
    if not options.json:
        _print_summary(summary, options.out, console)
    return 0


def _print_summary(summary: dict[str, Any], out: Path, console: Any) -> None:
    text = f"{summary['steps']} steps; adapters {summary['sha256'][:16]}; everything is in {out}/"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _config(options: Any, console: Any) -> int:
    import yaml

    config = configuration.load(options.config, options.settings)
    print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), end="")
    return 0


def _fit(options: Any, console: Any) -> int:
    from rich.table import Table

    from . import fit
    from .display import GIB

    config = configuration.load(options.config, options.settings)
    found = []
    table = Table("batch", "context", "tokens", "planned", "fits", title=f"within {options.budget / GIB:.2f} GiB")
    with console.status("compiling") as status:
        batches, contexts = options.batches or fit.BATCHES, options.contexts or fit.CONTEXTS
        for point in fit.frontier(config, options.budget, batches, contexts):
            found.append(point)
            status.update(f"compiled batch {point.batch} x context {point.context}")
            table.add_row(
                *map(str, (point.batch, point.context, point.tokens)),
                f"{point.planned_bytes / GIB:.3f} GiB",
                "yes" if point.fits else "no",
            )
    fitting = [point for point in found if point.fits]
    if options.json:
        print(json.dumps({"budget": options.budget, "points": [vars(point) for point in found]}))
    else:
        console.print(table)
    if not fitting:
        least = min(found, key=lambda point: point.planned_bytes)
        console.print(
            f"Nothing fits: batch {least.batch} x context {least.context} plans {least.planned_bytes / GIB:.3f} GiB.",
            highlight=False,
        )
        return 1
    most = max(fitting, key=lambda point: point.tokens)
    console.print(f"Most tokens a step: train.batch={most.batch} train.context={most.context}", highlight=False)
    return 0


def _answer(options: Any, console: Any) -> int:
    from . import run

    for text in run.answer(options.run, options.texts):
        print(text)
    return 0


def _compare(options: Any, console: Any) -> int:
    from . import report

    results = [report.read(path) for path in options.runs]
    console.print(report.table(results))
    for result in results:
        if result.quality:
            for when in ("before", "after"):
                scores = result.quality[when]
                console.print(f"{result.arm}, {when}: BLEU {scores['bleu']:.2f}, chrF {scores['chrf']:.2f}", highlight=False)
    return 0


def _export(options: Any, console: Any) -> int:
    from . import export
    from .display import GIB

    size = export.export(options.run, options.out, options.dtype)
    console.print(f"{size / GIB:.3f} GiB of weights are in {options.out}/", highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
