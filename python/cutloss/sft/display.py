"""Shows a run's events: a bar on a terminal, a line for each elsewhere."""

from __future__ import annotations

from typing import Any

GIB = 2**30


def note(event: str, fields: dict[str, Any]) -> str:
    """Returns an event in words."""
    match event:
        case "phase":
            return fields["name"]
        case "resumed":
            return f"going on after step {fields['step']}"
        case "data":
            text = f"{fields['training']} pairs to train on, {fields['held_out']} held out, {fields['dropped']} too long"
            return text
        case "model":
            share = fields["trained"] / fields["parameters"]
            return (
                f"{fields['family']}, {fields['parameters']:,} parameters, {fields['trained']:,} of them trained "
                f"({share:.2%})"
            )
        case "compiled":
            return f"compiled in {fields['seconds']:.0f} s, plans {fields['planned_bytes'] / GIB:.2f} GiB"
        case "step":
            return f"loss {fields['loss']:.4f}, {fields['seconds']:.1f} s"
        case "evaluated":
            return f"held-out loss {fields['loss']:.4f}, perplexity {fields['perplexity']:.2f}"
        case "trained":
            return f"peak {fields['peak_rss_bytes'] / GIB:.2f} GiB"
        case "quality":
            before, after = fields["before"], fields["after"]
            return (
                f"BLEU {before['bleu']:.2f} -> {after['bleu']:.2f}, chrF {before['chrf']:.2f} -> {after['chrf']:.2f} "
                f"({after['answers']} answers)"
            )
        case "warning" | "error":
            return fields["message"]
        case "finished":
            loss = fields.get("loss")
            return f"{fields['steps']} steps" + ("" if loss is None else f", last loss {loss:.4f}")
    return "done"


class Display:
    """A progress bar for each run; `with Display(console, steps) as display: display.start(name)`."""

    def __init__(self, console, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console, self._steps = console, steps
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def start(self, name: str) -> None:
        self._name = name
        self._task = self._progress.add_task(name, total=self._steps, note="starting")

    def show(self, event: str, fields: dict[str, Any]) -> None:
        text = note(event, fields)
        if event in ("step", "resumed"):
            self._progress.update(self._task, completed=fields["step"])
        self._progress.update(self._task, note=text)
        lasting = event in ("warning", "error", "evaluated", "quality")
        if not self._console.is_terminal or lasting:
            step = f" {fields['step']}/{self._steps}" if event == "step" else ""
            self._console.print(f"{self._name}: {event}{step}: {text}", highlight=False, markup=False, soft_wrap=True)
