"""One arm of the demo: a run in a process of its own, so that its peak memory is its own.

Started by demo.py as `python -m cutloss.sft.arm SETTINGS`, SETTINGS being an `ArmSettings` in JSON. The run's events go,
one JSON object a line, to the file descriptor in the settings. Its own output, and Tunix's, goes to stdout and stderr,
which demo.py keeps in a log file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The arms' names, and what the settings of a run call their losses.
ARMS = {"default": "dense", "cutloss": "cutloss"}


@dataclass(frozen=True)
class ArmSettings:
    """What one arm is to do.

    Attributes:
        arm: "default" (Tunix's own loss) or "cutloss".
        out: the folder of its run.
        config: the settings of the run, of both arms alike.
        events_fd: file descriptor the events are written to.
    """

    arm: str
    out: str
    config: dict[str, Any]
    events_fd: int = 1

    @classmethod
    def from_json(cls, text: str) -> ArmSettings:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main() -> None:
    settings = ArmSettings.from_json(sys.argv[1])
    with os.fdopen(settings.events_fd, "w", buffering=1) as events:

        def emit(event: str, **fields) -> None:
            print(json.dumps({"arm": settings.arm, "event": event, "time": time.time(), **fields}), file=events)

        try:
            from . import config, run

            run.run(config.from_dict({**settings.config, "loss": {"arm": ARMS[settings.arm]}}), Path(settings.out), emit)
        except Exception as error:
            emit("error", message=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main()
