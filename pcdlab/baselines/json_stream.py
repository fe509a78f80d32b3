"""Token-by-token JSON: what decoding usually does, one token after another, always the most probable one.

A *rule* says at every step which tokens may follow: any (:func:`anything`), those that keep to a compiled schema
(:func:`schema_lines`), or what a grammar library allows (:mod:`pcdlab.baselines.grammar`). What was written is read leniently
and judged strictly (:func:`judge`). Knows token ids, a backend's ``stream`` and compiled schemas; refuses to know how labels are
scored anywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from pcdlab.backends.base import Backend
from pcdlab.compile import CompiledSchema
from pcdlab.schema import Field, Label, Schema

__all__ = ["Judged", "Rule", "Step", "anything", "generate", "judge", "next_log_probs", "read_object", "schema_lines"]

# Yields the tokens that may follow (None: any), is sent the one that was taken, returns where the text ends.
Rule = Generator[Collection[int] | NDArray[np.int64] | None, int, None]


@dataclass(frozen=True, eq=False)
class Step:
    """One written token.

    Attributes
    ----------
    token : int
    allowed : int or None
        How many tokens the rule left; 1 is no choice. None: the whole vocabulary.
    logits : float32 array, shape (vocabulary,), or None
        The model's next-token logits in front of the token; None where it was not asked.
    """

    token: int
    allowed: int | None
    logits: NDArray[np.float32] | None

    @property
    def probability(self) -> float:
        """Probability of the token under the model, whatever the rule says; NaN where the model was not asked."""
        return float(np.exp(self._log_probs()[self.token])) if self.logits is not None else float("nan")

    @property
    def entropy(self) -> float:
        """Entropy of the model's next-token distribution in bits; NaN where the model was not asked."""
        if self.logits is None:
            return float("nan")
        log_probs = self._log_probs()
        return float(-(np.exp(log_probs) * log_probs).sum() / np.log(2))

    def _log_probs(self) -> NDArray[np.float64]:
        assert self.logits is not None
        return np.asarray(log_softmax(self.logits.astype(np.float64)))


def next_log_probs(backend: Backend, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities of the token after `tokens`, by one plain forward pass over all of them.

    No tree and no cached prefix is involved: what they give is compared with this.

    Parameters
    ----------
    backend : Backend
        One that offers ``plain_logits`` runs the framework's own forward pass, any other a fresh stream.
    tokens : sequence of int
        At least two.

    Returns
    -------
    float64 array, shape (vocabulary,)
        Natural logarithms.
    """
    plain = getattr(backend, "plain_logits", None)
    rows = plain(tokens) if plain else backend.stream(backend.prefill(tokens[:1])).feed(tokens[1:])
    return np.asarray(log_softmax(rows[-1].astype(np.float64)))


def anything(stop: Collection[int], limit: int) -> Rule:
    """Any token, until one of `stop` was written or `limit` tokens were.

    Parameters
    ----------
    stop : collection of int
        Tokens that end the text: a codec's ``control_ids``, one of which ends a model's turn.
    limit : int
        Most tokens.
    """
    for _ in range(limit):
        if (yield None) in stop:
            return


def schema_lines(compiled: CompiledSchema) -> Rule:
    """The lines of the object field by field: keys and punctuation as they are, values along the label tries.

    Parameters
    ----------
    compiled : CompiledSchema
        The text ends behind the last field's line; the closing brace needs no model.
    """
    for item in compiled:
        for token in item.branch:
            yield (token,)
        path: tuple[int, ...] = ()
        while path in item.trie:
            path = (*path, (yield item.trie[path]))


def generate(
    backend: Backend, prefix: Any, prompt: Sequence[int], rule: Rule, together: bool = False
) -> Iterator[Step]:
    """Write greedily: at each step the most probable of the tokens that the rule allows.

    Parameters
    ----------
    backend : Backend
    prefix : Prefix or None
        The cached beginning of the prompt.
    prompt : sequence of int
        The rest of it, at least one token.
    rule : Rule
        A fresh one; it is used up.
    together : bool
        Do not ask the model where the rule leaves one token: such tokens go through it together with the next choice.

    Yields
    ------
    Step
        The last token is not run through the model, as nothing follows it.
    """
    # All but the last prompt token ahead of the stream, which would compute next-token logits for each of them.
    stream = backend.stream(backend.prefill(prompt[:-1], prefix) if len(prompt) > 1 else prefix)
    waiting = list(prompt[-1:])
    allowed = next(rule, ())
    while allowed is None or len(allowed):
        choice = allowed is None or len(allowed) > 1
        logits = None
        if choice or not together:
            logits = stream.feed(waiting, last=True)[-1]
            waiting = []
        token = _most_probable(logits, allowed)
        yield Step(token, None if allowed is None else len(allowed), logits)
        waiting.append(token)
        try:
            allowed = rule.send(token)
        except StopIteration:
            return


def _most_probable(logits: NDArray[np.float32] | None, allowed: Collection[int] | NDArray[np.int64] | None) -> int:
    if allowed is None:
        assert logits is not None
        return int(logits.argmax())
    tokens = np.fromiter(allowed, dtype=np.int64, count=len(allowed))
    return int(tokens[logits[tokens].argmax() if logits is not None else 0])


def read_object(text: str) -> dict[str, Label] | None:
    """Read the JSON object that a text begins with.

    Parameters
    ----------
    text : str
        What was written, the opening brace included. A last comma and a missing closing brace are made good, text behind
        the object is ignored.

    Returns
    -------
    dict or None
        None where the text does not begin with an object.
    """
    for attempt in (text, text.rstrip().rstrip(",") + "\n}"):
        try:
            found, _ = json.JSONDecoder().raw_decode(attempt.lstrip())
        except json.JSONDecodeError:
            continue
        return found if isinstance(found, dict) else None
    return None


@dataclass(frozen=True)
class Judged:
    """What a written text is worth as an answer.

    Attributes
    ----------
    values : dict
        Field → value, for the fields whose value is an allowed one, in schema order.
    missing : tuple of str
        Fields without a key.
    invented : dict
        Field → what was written, where that is no allowed value.
    extra : tuple of str
        Keys that are no field.
    parsed : bool
        Whether there was an object at all; if not, every field is missing.
    """

    values: dict[str, Label]
    missing: tuple[str, ...]
    invented: dict[str, Any]
    extra: tuple[str, ...]
    parsed: bool

    @property
    def valid(self) -> bool:
        """Whether it is an object of the schema: every field, every value allowed, nothing else."""
        return self.parsed and not (self.missing or self.invented or self.extra)


def judge(text: str, schema: Schema) -> Judged:
    """Hold a text that should be an object of a schema against the schema.

    Nothing is guessed or made good but what :func:`read_object` does: a value counts where it is JSON for an allowed value,
    so that ``"true"`` is not ``true`` and ``"High"`` not ``"HIGH"``.

    Parameters
    ----------
    text : str
        What was written, the opening brace included.
    schema : Schema
    """
    found = read_object(text)
    given = found or {}
    values: dict[str, Label] = {}
    invented = {}
    for field in schema:
        if field.name not in given:
            continue
        allowed = {field.json(label): label for label in field.labels}
        value = given[field.name]
        written = Field.json(value) if isinstance(value, str | bool | int | float | None) else None
        if written in allowed:
            values[field.name] = allowed[written]
        else:
            invented[field.name] = value
    missing = tuple(name for name in schema.names if name not in given)
    extra = tuple(key for key in given if key not in schema.names)
    return Judged(values, missing, invented, extra, found is not None)
