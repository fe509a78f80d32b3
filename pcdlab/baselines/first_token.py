"""A specimen: the engine this technique started from. Kept so that its behaviour can be studied, not to be used.

It reads one token per field. Where a label's first token is its own, that is the answer; where labels share it, the model writes
on freely for a few tokens and the answer is the label that this begins with, and a confidence below three quarters is reported as
three quarters. What to look for: labels are judged by how they begin; a shared beginning collects the probability of all that
share it; free writing may land on no label at all, and the first that collided is taken; the floor hides all of this from whoever
sorts answers by confidence.

Knows compiled schemas and a backend's ``read`` and ``stream``. Run it on a backend of layout ``rows`` to have its cost too: a
padded row per field on a copied cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pcdlab.backends.base import Backend
from pcdlab.compile import CompiledField, CompiledSchema
from pcdlab.schema import Label
from pcdlab.tokentree import TreeBuilder

__all__ = ["CONTINUATION", "FLOOR", "FirstToken", "first_token"]

FLOOR = 0.75  # least confidence reported after a collision
CONTINUATION = 8  # tokens written freely after a collision


@dataclass(frozen=True)
class FirstToken:
    """One field's answer.

    Attributes
    ----------
    value : str, bool, int, float or None
    confidence : float
        The first token's share among the labels' first tokens; after a collision at least :data:`FLOOR`.
    share : float
        The same without the floor.
    collided : int
        How many labels have that first token; 1 is no collision.
    written : str
        What was written freely after a collision, the shared token included; else empty.
    """

    value: Label
    confidence: float
    share: float
    collided: int
    written: str


def first_token(backend: Backend, compiled: CompiledSchema, prefix: Any) -> dict[str, FirstToken]:
    """Decide every field by its first token.

    Parameters
    ----------
    backend : Backend
    compiled : CompiledSchema
    prefix : Prefix
        The whole prompt. Every field is read right behind it, its key and what all its labels begin with written in front.

    Returns
    -------
    dict
        Field → answer, in schema order.
    """
    builder = TreeBuilder()
    asked = [item for item in compiled if not item.field.fixed]
    # One read per field: branches differ in their key.
    firsts = [list(item.trie[()]) for item in asked]
    reads = [
        builder.read(builder.extend(-1, item.branch), tokens)[0] for item, tokens in zip(asked, firsts, strict=True)
    ]
    tree = builder.build()
    log_probs = backend.read(prefix, tree).log_probs
    answers = {}
    for item, tokens, read in zip(asked, firsts, reads, strict=True):
        scores = log_probs[tree.offsets[read] : tree.offsets[read + 1]]
        shares = np.exp(scores - np.logaddexp.reduce(scores))
        best = int(shares.argmax())
        answers[item.field.name] = _answer(backend, compiled, prefix, item, tokens[best], float(shares[best]))
    return {
        item.field.name: answers.get(item.field.name) or FirstToken(item.field.labels[0], 1.0, 1.0, 1, "")
        for item in compiled
    }


def _answer(
    backend: Backend, compiled: CompiledSchema, prefix: Any, item: CompiledField, token: int, share: float
) -> FirstToken:
    labels = sorted(item.trie[()][token])
    if len(labels) == 1:
        return FirstToken(item.field.labels[labels[0]], share, share, 1, "")
    codec = compiled.prompt.codec
    tokens = [token]
    stream = backend.stream(prefix)
    logits = stream.feed([*item.branch, token], last=True)
    for step in range(CONTINUATION):
        tokens.append(int(logits[-1].argmax()))
        if step + 1 < CONTINUATION:
            logits = stream.feed(tokens[-1:], last=True)
    written = codec.decode(tokens)
    # The labels as they are written from the shared token on, without what closes the line.
    texts = {i: codec.decode(item.canonical[i].tokens) for i in labels}
    bare = {i: text.removesuffix(compiled.format.after).removesuffix('"') for i, text in texts.items()}
    begun = [i for i in labels if written.startswith(bare[i])]
    chosen = max(begun, key=lambda i: len(bare[i])) if begun else labels[0]
    return FirstToken(item.field.labels[chosen], max(share, FLOOR), share, len(labels), written)
