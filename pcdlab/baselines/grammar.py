"""Token-by-token JSON under a grammar: what people run who want valid JSON from a generator.

llguidance parses the text and says after every token which may follow, for the whole vocabulary at once. The grammar is the
compiled schema's own line format: keys in schema order, allowed values spelled exactly, so that what comes out is an object
of the schema whatever the model prefers. Knows compiled schemas and tokenizers' vocabularies; refuses to know models and scores.

The grammar is about text, and a text can be cut into tokens in many ways: for ``"BLOCK"`` it also lets the model write ``B``, as
the beginning of ``B`` + ``LOCK``, and a model that likes ``B`` (as in ``Bad``) then answers BLOCK against its own preference
among the labels. :func:`own_tokens` leaves only the tokens that the tokenizer itself gives for one of the lines. What is left is
exactly :func:`pcdlab.baselines.json_stream.schema_lines`, and the object greedy writing makes of it is that of the engine's
joint mode with ``walk``: both take, at every node of the labels' token tries, the most probable token that leads to a label.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pcdlab.baselines.json_stream import Rule, schema_lines
from pcdlab.compile import CompiledSchema
from pcdlab.errors import TokenizationError
from pcdlab.tokenizer import Codec, HFCodec

__all__ = ["grammar_lines", "grammar_matcher", "grammar_tokenizer", "own_tokens"]


def grammar_tokenizer(codec: Codec, vocabulary: int) -> LLTokenizer:
    """The tokenizer as llguidance needs it; takes up to a second, so keep it.

    Parameters
    ----------
    codec : Codec
    vocabulary : int
        Size of the model's vocabulary, which may be padded beyond the tokenizer's.

    Raises
    ------
    TokenizationError
        If the tokens of this tokenizer do not stand for bytes, so that no grammar can follow them.
    """
    # Which token ends a text does not matter, as the text ends with the grammar; a control token stands for no text anyway.
    options: dict[str, Any] = {"n_vocab": vocabulary, "eos_token": min(codec.control_ids, default=None)}
    try:
        if isinstance(codec, HFCodec):
            return LLTokenizer(codec.to_json(), **options)
        from llguidance.llamacpp import lltokenizer_from_vocab

        return lltokenizer_from_vocab(codec.vocab, **options)  # type: ignore[attr-defined]
    except ValueError as error:
        raise TokenizationError(
            f"llguidance cannot follow this tokenizer ({error}); leave the grammar baselines out for this model"
        ) from error


def grammar_matcher(compiled: CompiledSchema, tokenizer: LLTokenizer) -> LLMatcher:
    """The parser for a schema's object in front of its first token; :func:`grammar_lines` takes copies of it.

    Parameters
    ----------
    compiled : CompiledSchema
        Every line is one of those its line format writes; the object's opening belongs to the prompt, its closing brace
        needs no model.
    tokenizer : LLTokenizer
        From :func:`grammar_tokenizer`.

    Raises
    ------
    TokenizationError
        If llguidance refuses the grammar, or the tokens that the tokenizer itself writes are none of it.
    """
    names = [f"field{i}" for i in range(len(compiled.fields))]
    rules = [f"start: {' '.join(names)}"]
    for name, item in zip(names, compiled, strict=True):
        lines = (compiled.format.line(item.field.name, item.field.json(label)) for label in item.field.labels)
        rules.append(f"{name}: {' | '.join(map(json.dumps, lines))}")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark("\n".join(rules)), log_level=0)
    _check(matcher)
    own = [token for item in compiled for token in item.line(0)]
    if matcher.validate_tokens(own) < len(own):
        raise TokenizationError(
            "this tokenizer changes text before it cuts it, so that llguidance cannot follow its tokens; leave the grammar "
            "baselines out for this model"
        )
    return matcher


def grammar_lines(matcher: LLMatcher, fast_forward: bool) -> Rule:
    """The tokens that keep to the grammar.

    Parameters
    ----------
    matcher : LLMatcher
        From :func:`grammar_matcher`; it is copied, not changed.
    fast_forward : bool
        Where the grammar leaves no choice of text, yield the tokens that the tokenizer gives for it, one at a time, instead of
        letting the model choose how to cut it. With ``generate(together=True)`` the model is then asked at choices only.
    """
    matcher = matcher.deep_copy()
    while not matcher.is_accepting():
        forced = matcher.compute_ff_tokens() if fast_forward else []
        forced = forced[
            : matcher.validate_tokens(forced)
        ]  # tokenizers that normalise text force other text than the grammar's
        for token in forced:
            yield (token,)
        if forced:
            matcher.consume_tokens(forced)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            matcher.consume_token((yield allowed))
        _check(matcher)


def own_tokens(rule: Rule, compiled: CompiledSchema) -> Rule:
    """Of the tokens that a rule allows, those with which the tokenizer itself writes a line of the schema.

    Parameters
    ----------
    rule : Rule
        A fresh one for the same schema.
    compiled : CompiledSchema

    Raises
    ------
    TokenizationError
        While it is used, if the rule allows none of them.
    """
    own = schema_lines(compiled)
    wanted, allowed = next(own), next(rule)
    while wanted is not None and allowed is not None:
        tokens = np.fromiter(wanted, dtype=np.int64, count=len(wanted))
        both = tokens[np.isin(tokens, np.fromiter(allowed, dtype=np.int64, count=len(allowed)))]
        if not len(both):
            raise TokenizationError(
                "the grammar allows none of the tokens with which this tokenizer itself goes on; leave the grammar baselines out"
            )
        token = yield both
        try:
            wanted, allowed = own.send(token), rule.send(token)
        except StopIteration:
            return


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise TokenizationError(f"llguidance cannot follow this schema's grammar: {matcher.get_error()}")
