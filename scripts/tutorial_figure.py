#!/usr/bin/env python3
"""tutorial_figure.py FILE: draws the figure of docs/tutorial.md with the code of that page."""

import re
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
    code: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), code)  # noqa: S102

    e, c, y = code["small_model"]()
    p = code["softmax"](e, c)
    exact = np.linalg.norm((p - (np.arange(len(c)) == y[:, None])) @ c)
    rng = np.random.default_rng(1)
    dropped, chance = [], []
    for k in range(7, 19):
        kept = code["drop"](p, y, 2.0**-k)
        bound = (p - kept).sum(1) * np.linalg.norm(c, axis=1).max()
        dropped.append(((kept > 0).mean(), np.linalg.norm((p - kept) @ c) / exact, np.linalg.norm(bound) / exact))
        drawn = code["chance"](p, y, 2.0**-k, rng)
        chance.append(((drawn > 0).mean(), np.linalg.norm((p - drawn) @ c) / exact))
    dropped, chance = 100 * np.array(dropped), 100 * np.array(chance)

    figure, (ranks, errors) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    by_rank = np.sort(p, axis=1)[:, ::-1].mean(0)
    ranks.loglog(np.arange(1, len(by_rank) + 1), by_rank)
    ranks.axhline(2.0**-12, color="gray", linestyle=":", label="2⁻¹²")
    ranks.set(xlabel="rank of the word", ylabel="mean softmax", title="The small model's softmax")
    ranks.legend()
    errors.loglog(dropped[:, 0], dropped[:, 2], "^--", color="gray", label="certificate of dropping")
    errors.loglog(dropped[:, 0], dropped[:, 1], "o-", label="dropped")
    errors.loglog(chance[:, 0], chance[:, 1], "s-", label="left to chance")
    errors.set(xlabel="entries kept, %", ylabel="error of dE, %", title="What a filter costs")
    errors.legend()
    figure.savefig(sys.argv[1], dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
