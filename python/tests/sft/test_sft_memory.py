"""Memory over a run: nothing of a step outlives it, and an evaluation does not grow with the set it is of."""

import json
import os
import subprocess
import sys

import pytest
import runs

# A process of its own for each: a peak cannot be taken back, and other tests have had theirs.
PROGRAM = """
import json, sys
from pathlib import Path
from cutloss.sft import config, run

def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024

seen = {}
def emit(event, **fields):
    if event == "step":
        seen[fields["step"]] = resident()

run.run(config.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), emit)
print("FOUND", json.dumps({"after": seen, "peak": run.peak_rss_bytes()}))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident sizes are read from /proc"),
]


def measured(settings, out):
    # glibc gives freed memory back at once, or what one step leaves to the next looks like growth.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings.to_dict()), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND ")[1])
    return {int(step): size for step, size in found["after"].items()}, found["peak"]


def test_no_step_leaves_its_buffers_to_the_next(tmp_path):
    """A step's batch alone, 4 x 512 with its attention mask, is 1 MiB: kept, 90 steps are 90 MiB. What the allocator holds
    swings by 60 MiB from step to step, so the least of 40 steps is compared with the least of 40 others, to half of that."""
    settings = runs.settings(tmp_path, steps=130, batch=4, context=512, checkpoint_every=0)
    after, _ = measured(settings, tmp_path / "run")
    early, late = (min(after[step] for step in range(first, first + 40)) for first in (1, 91))
    assert late <= early + 45 * 2**20, {step: size >> 20 for step, size in after.items()}


def test_evaluation_does_not_hold_the_whole_set(tmp_path):
    """10, 100 and 1000 rows of 128 tokens: kept, the logits alone would be 156 MiB of the last."""
    peaks = []
    for batches in (5, 50, 500):
        settings = runs.settings(tmp_path, "evaluation.every=1", f"evaluation.batches={batches}",
                                 "data.held_out_one_in=2", steps=1, context=128, count=2200)  # fmt: skip
        peaks.append(measured(settings, tmp_path / str(batches))[1])
    assert max(peaks) <= 1.05 * min(peaks), [peak >> 20 for peak in peaks]
