"""Tiny fine-tuning runs for the tests: random weights, one layer, one token a byte."""

import json

from cutloss.sft import config, run

SMALL = {
    "gemma": {"num_layers": 1},
    "gemma4": {"num_layers": 4},
}


def pairs(folder, count=40):
    path = folder / "pairs.tsv"
    path.write_text("".join(f"number {i}\tnombre {'x' * (i % 7)} {i}\n" for i in range(count)), encoding="utf-8")
    return path


def settings(folder, *overrides, family="gemma3", count=40, **train):
    """The configuration of a run over `pairs`, as a user would give it."""
    train = {"steps": 6, "batch": 2, "context": 64, "lr": 1e-2, "checkpoint_every": 2, **train}
    return config.load(
        None,
        [
            f"model.family={family}",
            "model.sizes={num_layers: " + str(SMALL.get(family, {}).get("num_layers", 1)) + "}",
            f"data.path={pairs(folder, count)}",
            "data.prompt='{source}:'",
            "data.held_out_one_in=4",
            "lora.rank=4",
            *(f"train.{key}={json.dumps(value)}" for key, value in train.items()),
            *overrides,
        ],
    )


def go(config, out):
    """Returns (summary, events) of a run."""
    events = []
    summary = run.run(config, out, lambda event, **fields: events.append({"event": event, **fields}))
    return summary, events


def losses(out):
    """Returns {step: loss} of a run's metrics.jsonl; a step that is there twice fails."""
    found = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            assert event["step"] not in found, "a step was recorded twice"
            found[event["step"]] = event["loss"]
    return found


def recorded(out, name):
    """Returns a run's events of one kind, from its metrics.jsonl."""
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == name]


def curves(out):
    """Returns {tag: [(step, value)]} of a run's TensorBoard files, read as TensorBoard does: all of the folder."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted((out / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")  # then a checksum of 4 bytes, the event, and another
            for value in Event.FromString(data[12 : 12 + size]).summary.value:
                found.setdefault(value.tag, []).append((Event.FromString(data[12 : 12 + size]).step, value.simple_value))
            data = data[16 + size :]
    return found
