"""The engine's decisions behind somebody else's answers: the paired comparison of single decisions.

Two ways of filling an object field by field part for good at their first difference: every later field then has other answers
in front of it. Given the same answers, each field is a comparison of its own. Knows the engine's plans and a backend's ``read``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcdlab import decide
from pcdlab.backends.base import Backend
from pcdlab.compile import CompiledSchema
from pcdlab.result import FieldDecision
from pcdlab.schema import Label
from pcdlab.tokentree import join

__all__ = ["decide_after"]


def decide_after(
    backend: Backend,
    compiled: CompiledSchema,
    prompt: Sequence[int],
    answers: Mapping[str, Label],
    scorer: str = "walk",
) -> dict[str, FieldDecision]:
    """Decide every field with the given answers of all fields before it written in front, in one pass.

    Parameters
    ----------
    backend : Backend
    compiled : CompiledSchema
    prompt : sequence of int
        The whole prompt.
    answers : mapping
        Field → allowed value, for every field.
    scorer : {"walk", "marginal", "exact"}
        See :mod:`pcdlab.decide`.

    Returns
    -------
    dict
        Field → decision, for the fields with more than one label.
    """
    wishes: list[decide.Wish] = []
    before: list[int] = []
    for item in compiled:
        if not item.field.fixed:
            wishes.append(decide.Wish(item, scorer, tuple(before)))
        texts = [item.field.json(label) for label in item.field.labels]
        before.extend(item.line(texts.index(item.field.json(answers[item.field.name]))))
    plan = decide.plan(wishes)
    log_probs = backend.read(None, join([prompt], [plan.tree])).log_probs
    decisions = [decide.decide(item, log_probs, "sum", None) for item in plan.fields]
    return {found.name: found for found in decisions if isinstance(found, FieldDecision)}
