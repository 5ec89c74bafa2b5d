"""Reads a compiled program's HLO text: does any array in it have a vocabulary extent?"""

from __future__ import annotations

import math
import re

_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([0-9,]+)\]")


def logit_arrays(hlo_text: str, *, vocab: int, width: int, tile_tokens: int = 0) -> dict[str, int]:
    """Returns the arrays that hold logits of more than `tile_tokens` tokens, each with its number of tokens.

    Args:
        hlo_text: `compiled.as_text()`.
        vocab: V, the vocabulary's extent. An array counts if a dimension is V or a multiple of it (a flattened one).
        width: D. The table itself, [V, D] or [D, V] or flat, is not logits, nor is anything of one row of V.
        tile_tokens: tokens of the largest tile of logits that the plan allows.
    """
    found = {}
    for kind, dims in set(_ARRAY.findall(hlo_text)):
        shape = [int(dim) for dim in dims.split(",")]
        if not any(dim % vocab == 0 for dim in shape if dim):
            continue
        tokens = math.prod(shape) // vocab
        if tokens > max(tile_tokens, 1) and tokens != width:
            found[f"{kind}[{dims}]"] = tokens
    return found
