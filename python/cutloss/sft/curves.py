"""The run's curves for TensorBoard, made from its events: what is rewound there is gone here too."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# {event: (where its curves are, which of its fields)}
CURVES = {
    "step": ("train", ("loss", "grad_norm", "learning_rate", "seconds")),
    "evaluated": ("eval", ("loss", "perplexity")),
}


class Curves:
    """The folder `path`, written anew from the events so far; `take` adds one."""

    def __init__(self, path: Path, events: Iterable[dict[str, Any]] = ()) -> None:
        from tensorboardX import SummaryWriter

        # Not in the run's settings, so that it can be removed; and TensorBoard shows every file of a folder.
        shutil.rmtree(path, ignore_errors=True)
        self._writer = SummaryWriter(str(path))
        for event in events:
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] not in CURVES:
            return
        group, names = CURVES[event["event"]]
        for name in names:
            self._writer.add_scalar(f"{group}/{name}", event[name], event["step"], walltime=event["time"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
