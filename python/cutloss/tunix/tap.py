"""Reads the hidden states on their way into a model's head, without changing what the model returns.

The head's method still runs and still returns true logits. The loss does not use them, so under jit the compiler
removes the product (a test asserts that no such array is left in the compiled step).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from contextvars import ContextVar
from typing import Any


class Record:
    """What one tapped model call sent into its head.

    Attributes:
        target: the object whose calls are recorded. Others of its class are not: in Qwen and Llama the head is an
            `Einsum` like every projection.
        calls: the hidden states of each call; emptied when the tap closes, so that no tracer outlives its trace.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.calls: list[Any] = []


# The wrapper sits on the class for the time of a trace, where every thread sees it; the variable confines its effect
# to the thread (or task) that opened the tap, so a Sampler running beside a trace is not recorded.
_recording: ContextVar[Record | None] = ContextVar("cutloss_tap", default=None)
_lock = threading.Lock()
_wrapped: dict[tuple[type, str], tuple[int, Any, Any]] = {}  # (open taps, original, wrapper)


@contextlib.contextmanager
def tap(target: Any, method: str):
    """Records the calls of `target.method` made in the body; yields a Record.

    The method is wrapped on the class that defines it, never on the instance: an instance attribute would become part
    of the model's graph, and every Sampler built meanwhile would keep it for ever.
    """
    owner = next(cls for cls in type(target).__mro__ if method in vars(cls))
    record = Record(target)
    _wrap(owner, method)
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)
        record.calls.clear()
        _unwrap(owner, method)


def _wrap(owner: type, method: str) -> None:
    with _lock:
        count, original, wrapper = _wrapped.get((owner, method), (0, None, None))
        if count == 0:
            original = vars(owner)[method]
            wrapper = _recorder(original)
            setattr(owner, method, wrapper)
        _wrapped[owner, method] = (count + 1, original, wrapper)


def _unwrap(owner: type, method: str) -> None:
    with _lock:
        count, original, wrapper = _wrapped[owner, method]
        if count > 1:
            _wrapped[owner, method] = (count - 1, original, wrapper)
            return
        del _wrapped[owner, method]
        # If someone patched the method during our trace, theirs holds ours: leave it, it records nothing from now on.
        if vars(owner)[method] is wrapper:
            setattr(owner, method, original)


def _recorder(original):
    @functools.wraps(original)
    def wrapper(self, x, *args, **kwargs):
        record = _recording.get()
        if record is not None and self is record.target:
            record.calls.append(x)
        return original(self, x, *args, **kwargs)

    return wrapper
