"""Every scorer and every normalisation from one reading of a field's label lines.

A pass that reads the lines of all labels to their ends has read everything that any scorer asks for, so that ways of scoring can
be compared on the same numbers for the price of one. Only :func:`read_lines` touches an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pcdlab import decide as deciding
from pcdlab.decide import FieldPlan, Normalise, Scorer, Wish
from pcdlab.errors import ParameterError
from pcdlab.result import FieldDecision
from pcdlab.tokentree import join

if TYPE_CHECKING:
    from pcdlab.engine import Engine
    from pcdlab.schema import Schema

__all__ = ["Reading", "read_lines"]

TOKENS_PER_PASS = 1024


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model says of every token of every label's line.

    Attributes
    ----------
    item : FieldPlan
        The field, planned with scorer ``exact``.
    log_probs : float64 array, shape (documents, candidates)
        What the plan's tree read behind each document, natural logarithms.
    empty : float64 array, shape (candidates,)
        The same behind an empty document.
    """

    item: FieldPlan
    log_probs: NDArray[np.float64]
    empty: NDArray[np.float64]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each label's line behind the field's branch, shape (labels,)."""
        return np.asarray((self.item.whole >= 0).sum(axis=1), dtype=np.int64)

    def scores(self, scorer: str, normalise: Normalise = "sum") -> NDArray[np.float64]:
        """Score of every label.

        Parameters
        ----------
        scorer : {"marginal", "exact"}
        normalise : {"sum", "length", "unconditional"}

        Returns
        -------
        float64 array, shape (documents, labels)
        """
        item = self._scored_by(scorer)
        if scorer not in ("marginal", "exact"):
            raise ParameterError(f"scorer={scorer!r} does not give log-probabilities; choose 'marginal' or 'exact'")
        rows = np.array([deciding.scores(item, row, normalise == "length") for row in self.log_probs])
        return rows - deciding.scores(item, self.empty) if normalise == "unconditional" else rows

    def decisions(self, scorer: Scorer, normalise: Normalise = "sum") -> list[FieldDecision]:
        """Decide every document as ``engine.extract`` would with this scorer and normalisation.

        Parameters
        ----------
        scorer : {"auto", "marginal", "exact", "walk", "hybrid"}
        normalise : {"sum", "length", "unconditional"}

        Raises
        ------
        ParameterError
            If they do not go together.
        """
        deciding.check_options(scorer, normalise)
        item = self._scored_by(deciding.resolve(scorer, len(self.item.wish.compiled.field.labels)))
        deciding.check_normalise([item.wish], normalise)
        reference = deciding.scores(item, self.empty) if normalise == "unconditional" else None
        found = []
        for row in self.log_probs:
            decision = deciding.decide(item, row, normalise, reference)
            if isinstance(decision, Wish):  # hybrid's second look: the lines of a few labels, which have been read
                assert decision.survivors is not None
                second = replace(item, wish=decision, whole=self.item.whole[sorted(decision.survivors)])
                decision = deciding.decide(second, row)
            assert isinstance(decision, FieldDecision)
            found.append(decision)
        return found

    def _scored_by(self, scorer: str) -> FieldPlan:
        return replace(self.item, wish=replace(self.item.wish, scorer=scorer))


def read_lines(engine: Engine, schema: Schema | Mapping[str, Any] | type, name: str, texts: Sequence[str]) -> Reading:
    """Read all label lines of a field behind each document and behind an empty one.

    Parameters
    ----------
    engine : Engine
    schema : Schema, dict or pydantic model
        Its catalogue is part of the prompt; the field is read in isolation.
    name : str
        The field.
    texts : sequence of str
        The documents, batched in passes of about 1,024 tree nodes.

    Returns
    -------
    Reading

    Raises
    ------
    ParameterError
        If there is no such field, or it has one label.
    """
    compiled = engine.compile(schema)
    if name not in compiled.fields or compiled.fields[name].field.fixed:
        raise ParameterError(f"field {name!r} is not in the schema, or has one label; choose another")
    plan = deciding.plan([Wish(compiled.fields[name], "exact")])
    found = [engine.tokenise(compiled, text, compiled.fields[name].longest_line) for text in ("", *texts)]
    shared = min(cached for _, cached in found)  # 0 where one prompt does not begin with the head
    trunks = [ids[shared:] for ids, _ in found]
    rows: list[NDArray[np.float64]] = []
    with engine.lock:
        prefix = engine.heads.state(compiled.prompt.head)[0] if shared else None
        while len(rows) < len(trunks):
            batch = [trunks[len(rows)]]
            size = len(batch[0]) + len(plan.tree)
            for trunk in trunks[len(rows) + 1 :]:
                size += len(trunk) + len(plan.tree)
                if size > TOKENS_PER_PASS:
                    break
                batch.append(trunk)
            read = engine.backend.read(prefix, join(batch, [plan.tree] * len(batch))).log_probs
            rows.extend(read.reshape(len(batch), -1))
    return Reading(plan.fields[0], np.array(rows)[1:], rows[0])
