"""Reads a compiled program's HLO text: does any array in it have a vocabulary extent?"""

from __future__ import annotations


def logit_arrays(hlo_text: str, *, vocab: int, tile_tokens: int = 1) -> dict[str, int]:
    """Returns the arrays that hold logits of more than `tile_tokens` tokens, each with its number of tokens."""
    from cutloss.jax import hlo

    return {one.array: one.tokens for one in hlo.scan(hlo_text, vocab=vocab, tile_tokens=tile_tokens).logits}
