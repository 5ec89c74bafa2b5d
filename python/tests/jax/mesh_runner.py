"""Checks that need 8 virtual devices, as programs of their own, since the number of devices is fixed when JAX starts."""

from __future__ import annotations

import json
import os
import sys
import traceback


def eight_devices() -> None:
    """Before JAX is imported."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


class Checks:
    def __init__(self):
        self.groups = {"short": {}, "long": {}}

    def __call__(self, *cases, long=()):
        """Registers a check, once for each tuple of arguments. Those in `long` run in `make test-long` only: compiling
        takes a second or two for each."""
        def register(f):
            for group, some in (("short", cases if cases or long else ((),)), ("long", long)):
                for case in some:
                    self.groups[group][f"{f.__name__}{list(case) if case else ''}"] = lambda case=case: f(*case)
            return f

        return register

    def main(self, small_tiles: bool = True) -> None:
        """Prints one JSON object, {name of a check: None, or what went wrong}. Arguments: short|long [-v] [-k PART]."""
        import jax

        from cutloss.jax import _head, _plan, _tiles

        jax.config.update("jax_disable_most_optimizations", True)
        if small_tiles:
            _tiles.choose = lambda *_: _tiles.Tile(tokens=16, ids=24)
            _head.Labels.CHUNK = 8
            _plan.CHUNK, _plan.LEAST_CHUNK = 32, 8
        part = sys.argv[sys.argv.index("-k") + 1] if "-k" in sys.argv else ""
        outcomes = {}
        for name, run in self.groups[sys.argv[1]].items():
            if part not in name:
                continue
            try:
                run()
                outcomes[name] = None
            except Exception:
                outcomes[name] = traceback.format_exc()
            if "-v" in sys.argv:
                print(name, outcomes[name] or "", file=sys.stderr, flush=True)
        json.dump(outcomes, sys.stdout)
