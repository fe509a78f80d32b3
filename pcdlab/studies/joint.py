"""How fields hang together: what knowing one does to another, which dependencies are worth declaring, constraints on runs.

A field decided in isolation does not see the other answers. Whether that matters is measured by teacher forcing: write one
field's answer, whichever it is, and read another field behind it. From there: a table of effects per pair and document,
matrices of it, a proposal for ``depends_on``. Only :func:`questioner` and :func:`read_pairs` touch an engine; the rest works on
numbers, from wherever they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from tqdm.auto import tqdm

from pcdlab import decide as deciding
from pcdlab.constraints import Constraint, broken, most_probable
from pcdlab.errors import ParameterError
from pcdlab.schema import Field, Label, Schema

if TYPE_CHECKING:
    from pcdlab.engine import Engine
    from pcdlab.studies.runs import Run

__all__ = [
    "MEASURES",
    "Ask",
    "PairEffect",
    "Question",
    "Suggestion",
    "agreement",
    "broken_in_run",
    "effect_matrix",
    "pair_effect",
    "pair_effects",
    "questioner",
    "read_pairs",
    "repair_run",
    "strongest",
    "suggest_dependencies",
    "with_dependencies",
]

Floats = NDArray[np.float64]
Document = TypeVar("Document")

NODES_PER_PASS = 4096  # tree nodes in one pass of questions


# --- Teacher forcing ------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """A field to be read, and the answers that are written in front of it.

    Attributes
    ----------
    field : str
    given : tuple of (str, int)
        Fields and the indices of their labels; their lines are written in schema order.
    """

    field: str
    given: tuple[tuple[str, int], ...] = ()


Ask = Callable[[Sequence[Question]], list[Floats]]
"""Answers questions about one document: log-probabilities among the field's labels, shape (labels,) each."""


def questioner(engine: Engine, schema: Schema | Mapping[str, Any] | type, text: str, scorer: str = "marginal") -> Ask:
    """Run a document once, and return what answers questions about it.

    Questions are branches of one tree below the document, which shares the lines they have in common; a call takes one pass, or
    several of at most 4,096 tree nodes. The document's state stays in memory as long as what is returned does.

    Parameters
    ----------
    engine : Engine
    schema : Schema, dict or pydantic model
    text : str
        The document.
    scorer : {"marginal", "exact"}

    Returns
    -------
    Ask
        Under no given answers it reads what ``engine.extract`` reads with this scorer for fields without dependencies; under the
        answers of all fields before a field, what joint mode reads once they are settled.

    Raises
    ------
    ParameterError
        For another scorer: the shares of walk and hybrid are no log-probabilities.
    ContextLengthError
        If prompt and lines are longer than the model's context.
    """
    if scorer not in ("marginal", "exact"):
        raise ParameterError(f"scorer={scorer!r} does not give log-probabilities; choose 'marginal' or 'exact'")
    compiled = engine.compile(schema)
    ids, cached = engine.tokenise(compiled, text)
    with engine.lock:
        prefix = engine.heads.state(ids[:cached])[0] if cached else None
        prefix = engine.backend.prefill(ids[cached:], prefix)

    order = {name: place for place, name in enumerate(compiled.schema.names)}

    def wish(question: Question) -> deciding.Wish:
        given = sorted(question.given, key=lambda item: order[item[0]])
        before = tuple(token for name, label in given for token in compiled.fields[name].line(label))
        return deciding.Wish(compiled.fields[question.field], scorer, before)

    def read(wishes: Sequence[deciding.Wish]) -> list[Floats]:
        plan = deciding.plan(wishes)
        with engine.lock:
            log_probs = engine.backend.read(prefix, plan.tree).log_probs
        return [_normalised(deciding.scores(item, log_probs)) for item in plan.fields]

    def ask(questions: Sequence[Question]) -> list[Floats]:
        passes: list[list[tuple[int, deciding.Wish]]] = [[]]
        nodes = 0
        for place, question in enumerate(questions):
            item = compiled.fields[question.field]
            if item.field.fixed:  # nothing to be read
                continue
            asked = wish(question)
            size = len(asked.before) + len(item.branch) + len(item.trie)
            if nodes and nodes + size > NODES_PER_PASS:
                passes.append([])
                nodes = 0
            passes[-1].append((place, asked))
            nodes += size
        found = {i: v for p in passes if p for (i, _), v in zip(p, read([w for _, w in p]), strict=True)}
        return [found.get(place, np.zeros(1)) for place in range(len(questions))]

    return ask


def _normalised(scores: Floats) -> Floats:
    return scores - np.logaddexp.reduce(scores)


# --- Effects of pairs -----------------------------------------------------------------------------------------------


class PairEffect(NamedTuple):
    """What knowing field A does to field B, for one document.

    With p(a) the isolated shares of A, p(b) those of B, p(b | a) those of B behind the line that says a, and
    q(b) = Σ p(a) p(b | a) their mixture:

    Attributes
    ----------
    mutual_information : float
        Σ p(a) KL(p(b | a) ‖ q(b)), in nats, >= 0: what A's answer says about B's.
    total_variation : float
        Σ p(a) TV(p(b | a), q(b)), in [0, 1]: how far B moves with A's answer.
    presence : float
        TV(q(b), p(b)), in [0, 1]: how far B moves because a line of A stands there, whatever it says.
    moved : float
        TV(p(b | â), p(b)), in [0, 1], â being A's most probable answer: how far B is moved where A's answer is written down.
    changed : bool
        Whether that changes B's answer.
    """

    mutual_information: float
    total_variation: float
    presence: float
    moved: float
    changed: bool


MEASURES = PairEffect._fields


def pair_effect(a: ArrayLike, b: ArrayLike, b_given_a: ArrayLike) -> PairEffect:
    """Measure what knowing one field does to another.

    Parameters
    ----------
    a : array, shape (k,)
        Log-probabilities of A's answers, of all or of some; they are normalised here.
    b : array, shape (m,)
        Log-probabilities of B's labels in isolation.
    b_given_a : array, shape (k, m)
        Log-probabilities of B's labels behind each of A's answers.

    Returns
    -------
    PairEffect

    Raises
    ------
    ParameterError
        If the shapes do not fit.

    Examples
    --------
    A field that repeats a fair coin knows all about it, ln 2:

    >>> import numpy as np
    >>> with np.errstate(divide="ignore"):
    ...     effect = pair_effect(np.log([0.5, 0.5]), np.log([0.5, 0.5]), np.log(np.eye(2)))
    >>> round(effect.mutual_information, 4), effect.total_variation, effect.presence
    (0.6931, 0.5, 0.0)
    """
    p_a, p_b, rows = (np.exp(_rows(values)) for values in (a, b, b_given_a))
    if p_a.ndim != 1 or p_b.ndim != 1 or rows.shape != (len(p_a), len(p_b)):
        raise ParameterError(
            f"b_given_a has shape {rows.shape}; give ({p_a.size}, {p_b.size}): a row for each answer of A, a column for each of B"
        )
    mixture = p_a @ rows
    with np.errstate(divide="ignore", invalid="ignore"):
        divergences = np.where(rows > 0, rows * np.log(rows / mixture), 0.0).sum(axis=1)
    told = rows[p_a.argmax()]
    return PairEffect(
        mutual_information=max(0.0, float(p_a @ divergences)),
        total_variation=float(p_a @ np.abs(rows - mixture).sum(axis=1)) / 2,
        presence=float(np.abs(mixture - p_b).sum()) / 2,
        moved=float(np.abs(told - p_b).sum()) / 2,
        changed=bool(told.argmax() != p_b.argmax()),
    )


def _rows(log_probs: ArrayLike) -> Floats:
    """Log-probabilities that sum to one along the last axis."""
    values = np.asarray(log_probs, dtype=np.float64)
    return values - np.logaddexp.reduce(values, axis=-1, keepdims=True)


def pair_effects(schema: Schema, ask: Ask, answers: int = 8) -> list[dict[str, Any]]:
    """Measure all ordered pairs of fields on one document, the knowing field in front in the schema.

    Parameters
    ----------
    schema : Schema
    ask : Ask
    answers : int
        B is read under this many of A's answers, the most probable ones in isolation; their shares are taken as the whole. All of
        A's answers where it has no more.

    Returns
    -------
    list of dict
        One per pair: ``knowing`` (A), ``moving`` (B), and every measure of :class:`PairEffect`. Fields with one label are left
        out.
    """
    if answers < 1:
        raise ParameterError(f"answers={answers} is no positive number")
    names = [item.name for item in schema if not item.fixed]
    alone = dict(zip(names, ask([Question(name) for name in names]), strict=True))
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    likely = {name: np.sort(np.argsort(-alone[name], kind="stable")[:answers]) for name in names}
    # The same answer of A in front of all its B: neighbours in a tree share that line.
    questions = [Question(b, ((a, int(i)),)) for a in names for i in likely[a] for b in names[names.index(a) + 1 :]]
    read = dict(zip(questions, ask(questions), strict=True))
    return [
        {"knowing": a, "moving": b}
        | pair_effect(
            alone[a][likely[a]], alone[b], np.array([read[Question(b, ((a, int(i)),))] for i in likely[a]])
        )._asdict()
        for a, b in pairs
    ]


def read_pairs(
    engine: Engine,
    documents: Iterable[Any],
    schema: Schema | Mapping[str, Any] | type,
    answers: int = 8,
    scorer: str = "marginal",
    progress: bool = True,
) -> pd.DataFrame:
    """Measure all pairs of fields on documents.

    Parameters
    ----------
    engine : Engine
    documents : iterable of pcdlab.banks.Document
        A bank, or anything whose items have ``id`` and ``text``.
    schema : Schema, dict or pydantic model
    answers, scorer
        As for :func:`pair_effects` and :func:`questioner`.
    progress : bool
        Show a progress bar.

    Returns
    -------
    pandas.DataFrame
        One row per document and pair: ``document``, ``knowing``, ``moving`` and the measures of :class:`PairEffect`.
    """
    asked = Schema.of(schema)
    rows = [
        {"document": item.id, **row}
        for item in tqdm(documents, unit="doc", disable=not progress)
        for row in pair_effects(asked, questioner(engine, asked, item.text, scorer), answers)
    ]
    return pd.DataFrame(rows, columns=["document", "knowing", "moving", *MEASURES])


def effect_matrix(effects: pd.DataFrame, schema: Schema, measure: str = "moved") -> pd.DataFrame:
    """Average a measure over documents: a row per knowing field, a column per field that is moved.

    Parameters
    ----------
    effects : pandas.DataFrame
        As from :func:`read_pairs`.
    schema : Schema
        Gives the order.
    measure : str
        One of `MEASURES`.

    Returns
    -------
    pandas.DataFrame
        Shape (fields, fields), NaN where a pair was not measured: on and below the diagonal.
    """
    if measure not in MEASURES:
        raise ParameterError(f"measure={measure!r} is unknown; choose one of {', '.join(MEASURES)}")
    means = effects.groupby(["knowing", "moving"])[measure].mean().unstack()
    return means.reindex(index=list(schema.names), columns=list(schema.names)).astype(float)


def strongest(matrix: pd.DataFrame, least: float = 0.0) -> list[tuple[str, str, float]]:
    """List a matrix as the edges of a graph, strongest first.

    Parameters
    ----------
    matrix : pandas.DataFrame
        As from :func:`effect_matrix`.
    least : float
        Only edges stronger than this.

    Returns
    -------
    list of (str, str, float)
        Knowing field, moved field, strength.
    """
    strengths = matrix.to_numpy(dtype=np.float64)
    edges = [
        (str(matrix.index[i]), str(matrix.columns[j]), float(strengths[i, j]))
        for i, j in zip(*np.nonzero(strengths > least), strict=True)  # not a number is never above
    ]
    return sorted(edges, key=lambda edge: -edge[2])  # stable: equal ones in schema order


# --- depends_on -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    """Dependencies that bring isolated answers near the joint ones.

    Attributes
    ----------
    schema : Schema
        With the suggested ``depends_on``.
    waves : int
        Passes it takes after the document is read.
    share : float
        Of the joint answers, on the documents the suggestion was made on.
    held_out : float64 array, shape (held-out documents,)
        The same on each of the other documents: share of its fields that are answered as in joint mode.
    tried : pandas.DataFrame
        A row per graph that was tried, in order: ``waves``, ``edges``, ``share``.
    """

    schema: Schema
    waves: int
    share: float
    held_out: Floats
    tried: pd.DataFrame


Decide = Callable[[Sequence[Any], Schema, str], Sequence[Mapping[str, Label]]]
"""Documents, schema and mode ("isolated" or "joint") in, the values of each document out."""


def suggest_dependencies(
    schema: Schema,
    matrix: pd.DataFrame,
    decide: Decide,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    share: float = 0.95,
) -> Suggestion:
    """Find the fewest waves of fields whose answers are those of joint mode, or nearly so.

    Edges are taken greedily, the strongest of `matrix` first, as long as they make no more waves than allowed, in growing
    numbers (1, 2, 4, … all, then bisected). Each graph is tried on `documents`; the first number of waves at which the answers
    agree with the joint ones to `share` is taken, with the fewest edges found. If none does, the graph that agrees best. An
    edge that others imply is left out, because a field sees the answers of everything it depends on, however indirectly.

    Parameters
    ----------
    schema : Schema
        Its own dependencies are ignored.
    matrix : pandas.DataFrame
        Strength of each possible edge, as from :func:`effect_matrix`; NaN and 0 make none.
    decide : callable
        Documents, schema and mode in, values per document out. With an engine:
        ``lambda texts, schema, mode: [out.values for out in engine.extract_many(texts, schema, mode)]``.
    documents : sequence
        To choose on.
    held_out : sequence
        To validate on; none of `documents`.
    share : float
        Of the joint answers, in (0, 1].

    Returns
    -------
    Suggestion

    Raises
    ------
    ParameterError
        If `share` is outside its range or there are no documents.
    """
    if not 0 < share <= 1:
        raise ParameterError(f"share={share} is outside (0, 1]")
    if not len(documents) or not len(held_out):
        raise ParameterError("documents and held_out must both hold documents; split what there is in two")
    bare = with_dependencies(schema, ())
    edges = [(a, b) for a, b, _ in strongest(matrix) if bare.names.index(a) < bare.names.index(b)]
    joint = decide(documents, bare, "joint")
    tried: list[tuple[Schema, int, int, float]] = []
    seen: dict[Schema, float] = {}

    def attempt(graph: Sequence[tuple[str, str]]) -> float:
        candidate = with_dependencies(bare, _reduced(graph))
        if candidate in seen:  # of another size before what is implied was left out
            return seen[candidate]
        found = seen[candidate] = float(agreement(decide(documents, candidate, "isolated"), joint).mean())
        links = sum(len(item.depends_on) for item in candidate)
        tried.append((candidate, len(candidate.waves()), links, found))
        return found

    enough = attempt(()) >= share
    for waves in range(2, len(schema) + 1):
        if enough:
            break
        within = _within(bare, edges, waves)
        fails = 0
        for size in [*(2**i for i in range(len(within).bit_length()) if 2**i < len(within)), len(within)]:
            if attempt(within[:size]) >= share:
                enough = True
                while size - fails > 1:  # the last graph tried may still hold more edges than it takes
                    middle = (size + fails) // 2
                    size, fails = (middle, fails) if attempt(within[:middle]) >= share else (size, middle)
                break
            fails = size
    fit = [row for row in tried if row[3] >= share]
    best = fit[-1] if fit else max(tried, key=lambda row: (row[3], -row[1], -row[2]))
    held = agreement(decide(held_out, best[0], "isolated"), decide(held_out, bare, "joint"))
    table = pd.DataFrame([row[1:] for row in tried], columns=["waves", "edges", "share"])
    return Suggestion(best[0], best[1], best[3], held, table)


def agreement(values: Sequence[Mapping[str, Label]], others: Sequence[Mapping[str, Label]]) -> Floats:
    """Share of fields that have the same answer, shape (documents,).

    Parameters
    ----------
    values, others : sequence of mapping
        Values of the same documents, with the same fields.
    """
    return np.array(
        [
            np.mean([Field.json(a[name]) == Field.json(b[name]) for name in a])
            for a, b in zip(values, others, strict=True)
        ],
        dtype=np.float64,
    )


def with_dependencies(schema: Schema, edges: Iterable[tuple[str, str]]) -> Schema:
    """Return the schema with exactly these dependencies.

    Parameters
    ----------
    schema : Schema
    edges : iterable of (str, str)
        The field that is depended on, the field that depends on it.
    """
    before: dict[str, list[str]] = {name: [] for name in schema.names}
    for a, b in edges:
        before[b].append(a)
    return Schema(
        tuple(replace(item, depends_on=tuple(n for n in schema.names if n in before[item.name])) for item in schema)
    )


def _within(schema: Schema, edges: Sequence[tuple[str, str]], waves: int) -> list[tuple[str, str]]:
    """Take edges in order, leaving out those that would make more waves."""
    taken: list[tuple[str, str]] = []
    for edge in edges:
        if len(with_dependencies(schema, [*taken, edge]).waves()) <= waves:
            taken.append(edge)
    return taken


def _reduced(edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out each edge that a longer way implies."""

    def reaches(start: str, end: str, left: Sequence[tuple[str, str]]) -> bool:
        return any(a == start and (b == end or reaches(b, end, left)) for a, b in left)

    return [edge for edge in edges if not reaches(*edge, [other for other in edges if other != edge])]


# --- Constraints on runs --------------------------------------------------------------------------------------------


def broken_in_run(run: Run, constraints: Sequence[Constraint]) -> pd.DataFrame:
    """List where a run's answers break constraints.

    Parameters
    ----------
    run : Run
        Of any mode.
    constraints : sequence of Constraint

    Returns
    -------
    pandas.DataFrame
        One row per document and broken constraint: ``document``, ``constraint`` (as text), ``values`` (dict of the fields it
        names). Documents that could not be decided are left out.
    """
    rows = [
        {
            "document": document,
            "constraint": str(item),
            "values": {name: values[name] for name, _ in (*item.when, *item.then)},
        }
        for document, values in _objects(run).items()
        for item in broken(constraints, values)
    ]
    return pd.DataFrame(rows, columns=["document", "constraint", "values"])


def repair_run(run: Run, constraints: Sequence[Constraint]) -> pd.DataFrame:
    """Find the most probable consistent object of every document of a run.

    Parameters
    ----------
    run : Run
        Of a mode with log-probabilities. In isolated mode the sum of the fields' log-shares is the object's own; in joint mode
        each field was read under the answers before it, and changing one would change what stands behind it.
    constraints : sequence of Constraint

    Returns
    -------
    pandas.DataFrame
        One row per document and field: ``document``, ``field``, ``value`` (the run's), ``consistent`` (the repaired object's),
        ``loss`` (by how much the repaired object is less probable, natural logarithm; the same in each row of a document, 0 where
        nothing was broken and nothing is changed). A run's own answer stays where the constraints are kept, even where its scorer
        (a walk) did not choose the highest share.

    Raises
    ------
    ParameterError
        If the run has no log-probabilities.
    SchemaError
        If no object keeps all constraints.
    """
    schema = run.schema
    tables = {}
    for name in schema.names:
        _, scores, _, documents = run.log_probs(name)
        tables[name] = dict(zip(documents, scores, strict=True))
    rows = []
    for document, values in _objects(run).items():
        repaired, loss = values, 0.0
        if broken(constraints, values):
            repaired, _, loss = most_probable(schema, constraints, {n: tables[n][document] for n in schema.names})
        rows += [
            {"document": document, "field": n, "value": values[n], "consistent": repaired[n], "loss": loss}
            for n in schema.names
        ]
    columns = {
        name: pd.Series([row[name] for row in rows], dtype=float if name == "loss" else object)
        for name in ("document", "field", "value", "consistent", "loss")
    }
    return pd.DataFrame(columns)


def _objects(run: Run) -> dict[str, dict[str, Label]]:
    found: dict[str, dict[str, Label]] = {}
    for row in run.rows():
        if "error" not in row:
            found.setdefault(row["document"], {})[row["field"]] = row["value"]
    return found
