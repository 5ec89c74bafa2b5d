"""The folder of a run: everything it needs to go on after it was killed at any moment, and everything it leaves.

    config.json         the settings          checkpoints/        Tunix's, the newest few
    metrics.jsonl       what happened         tensorboard/        the same curves
    before.jsonl, after.jsonl   answers       adapter.safetensors, summary.json   at the end
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, difference


_OF_THE_END = ("trained", "generated", "quality", "finished")


class RunFolder:
    """An open run folder. One process at a time has it: the lock goes with the process, however that ends."""

    def __init__(self, path: Path, config: Config) -> None:
        """Opens the folder, new or left by an earlier part of the same run.

        Raises:
            ConfigError: another process is in it, its run had other settings, or it is no run folder.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path}: another process is running in this folder") from error
        settings = path / "config.json"
        if settings.is_file():
            changed = difference(config, json.loads(settings.read_text()))
            if changed and any(self.checkpoints.glob("[0-9]*")):
                raise ConfigError(
                    f"{path} holds a run with other settings: {changed}. Give another folder with --out, or remove it"
                )
            if changed:  # it came to no checkpoint: nothing of it is worth keeping
                for name in ("metrics.jsonl", "before.jsonl"):
                    (path / name).unlink(missing_ok=True)
        elif any(p.name != "lock" for p in path.iterdir()):
            raise ConfigError(f"{path} is not empty and holds no run; give another folder with --out")
        write(settings, json.dumps(config.to_dict(), indent=1) + "\n")

    def close(self) -> None:
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def summary(self) -> dict[str, Any] | None:
        """Returns what a finished run found, or None."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops the events of steps after `step` and returns the others: they were lost with the process, and come again.

        So do those of the end, which an earlier part of the run may have come to.
        """
        if not self.metrics.is_file():
            return []
        kept = []
        for line in self.metrics.read_text().splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # the process was killed while it wrote this line
            if event.get("step", 0) <= step and event["event"] not in _OF_THE_END:
                kept.append(event)
        write_lines(self.metrics, kept)
        return kept

    def recorder(self, emit: Callable[..., None], also: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        """Returns an `emit` that also appends each event to metrics.jsonl, and gives that line to `also`."""

        def record(event: str, **fields) -> None:
            whole = {"event": event, "time": round(time.time(), 3), **fields}
            with self.metrics.open("a") as file:
                file.write(json.dumps(whole) + "\n")
            also(whole)
            emit(event, **fields)

        return record


def write(path: Path, text: str | bytes) -> None:
    """Writes a file whole or not at all."""
    data = text.encode() if isinstance(text, str) else text
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name + ".", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
