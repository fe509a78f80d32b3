"""`pcdlab.studies.joint`: planted dependencies are found, teacher-forced numbers are the engine's, constraints work on runs."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from brute_force import brute_force, engine

import pcdlab.studies.joint
from pcdlab.banks import Bank, Document, save_bank
from pcdlab.constraints import broken, constraints_from_json
from pcdlab.errors import ContextLengthError, ParameterError
from pcdlab.schema import Field, Label, Schema
from pcdlab.studies.joint import (
    Question,
    agreement,
    broken_in_run,
    effect_matrix,
    pair_effect,
    pair_effects,
    questioner,
    read_pairs,
    repair_run,
    strongest,
    suggest_dependencies,
    with_dependencies,
)
from pcdlab.studies.runs import run_study


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(pcdlab.studies.joint).failed == 0


# --- Numbers --------------------------------------------------------------------------------------------------------


def test_pair_effect_by_hand() -> None:
    effect = pair_effect(np.log([0.25, 0.75]), np.log([0.5, 0.5]), np.log([[0.8, 0.2], [0.4, 0.6]]))
    # The mixture is (0.5, 0.5), so that the line's presence moves nothing.
    assert effect.presence == pytest.approx(0)
    assert effect.total_variation == pytest.approx(0.25 * 0.3 + 0.75 * 0.1)
    divergences = [0.8 * np.log(1.6) + 0.2 * np.log(0.4), 0.4 * np.log(0.8) + 0.6 * np.log(1.2)]
    assert effect.mutual_information == pytest.approx(0.25 * divergences[0] + 0.75 * divergences[1])
    assert effect.moved == pytest.approx(0.1)  # by the second answer
    assert effect.changed


def test_a_line_that_moves_whatever_it_says() -> None:
    effect = pair_effect(np.log([0.25, 0.75]), np.log([0.9, 0.1]), np.log([[0.3, 0.7], [0.3, 0.7]]))
    assert (effect.mutual_information, effect.total_variation) == (pytest.approx(0), pytest.approx(0))
    assert (effect.presence, effect.moved, effect.changed) == (pytest.approx(0.6), pytest.approx(0.6), True)


def test_mutual_information_is_symmetric_in_a_true_joint_distribution() -> None:
    joint = np.random.default_rng(0).dirichlet(np.ones(12)).reshape(3, 4)
    a, b = joint.sum(1), joint.sum(0)
    one = pair_effect(np.log(a), np.log(b), np.log(joint / a[:, None]))
    other = pair_effect(np.log(b), np.log(a), np.log(joint / b).T)
    assert one.mutual_information == pytest.approx(other.mutual_information)
    assert one.presence == pytest.approx(0)


def test_shapes_are_checked() -> None:
    with pytest.raises(ParameterError, match=r"shape \(2, 3\); give \(3, 2\)"):
        pair_effect(np.zeros(3), np.zeros(2), np.zeros((2, 3)))


# --- Planted dependencies -------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d", "e")
PLANTED = {("a", "b"), ("b", "c"), ("a", "d")}  # e stands alone, c needs two steps
SIMULATED = Schema(tuple(Field(name, ("x", "y", "z") if name in "ab" else ("x", "y")) for name in NAMES))


def network(seed: int) -> Callable[[Sequence[Question]], list[np.ndarray]]:
    """A document as a Bayesian network with the planted edges: answers questions from its exact distribution over all objects."""
    rng = np.random.default_rng(seed)
    sizes = [len(SIMULATED[name].labels) for name in NAMES]
    joint = np.ones(sizes)
    for i, name in enumerate(NAMES):
        parents = [NAMES.index(a) for a, b in PLANTED if b == name]
        for picks in itertools.product(*(range(sizes[p]) for p in parents)):
            own = rng.normal(size=sizes[i]) * 0.2
            # The parent's answer decides, another way round in each document. For c one answer of b stands against the two others
            # together, so that c must see which one b has: that two steps back a likes that one best does not tell.
            turned = {"c": int(picks[:1] == (seed % 3,)), "b": sum(picks) + seed, "d": sum(picks) + seed}.get(
                name, seed
            )
            own[turned % sizes[i]] += {"a": 0.5, "b": 0.8, "c": 3.0, "d": 3.0, "e": 0.5}[name]
            place: list[Any] = [slice(None)] * len(NAMES)
            for p, pick in zip(parents, picks, strict=True):
                place[p] = pick
            shape = [sizes[i] if j == i else 1 for j in range(len(NAMES)) if isinstance(place[j], slice)]
            joint[tuple(place)] *= (np.exp(own) / np.exp(own).sum()).reshape(shape)

    def ask(questions: Sequence[Question]) -> list[np.ndarray]:
        found = []
        for field, given in questions:
            place: list[Any] = [slice(None)] * len(NAMES)
            for name, label in given:
                place[NAMES.index(name)] = slice(label, label + 1)
            i = NAMES.index(field)
            p = joint[tuple(place)].sum(axis=tuple(j for j in range(len(NAMES)) if j != i))
            found.append(np.log(p / p.sum()))
        return found

    assert np.isclose(joint.sum(), 1)
    return ask


def decide(documents: Sequence[int], schema: Schema, mode: str) -> list[dict[str, Label]]:
    """What the engine does, on the simulated model."""
    found = []
    for seed in documents:
        ask = network(seed)
        picks: dict[str, int] = {}
        for name in schema.names if mode == "joint" else [name for wave in schema.waves() for name in wave]:
            seen: set[str] = set(picks) if mode == "joint" else set()
            waiting = list(schema[name].depends_on) if mode == "isolated" else []
            while waiting:
                seen.add(waiting[-1])
                waiting.extend(schema[waiting.pop()].depends_on)
            (values,) = ask([Question(name, tuple((other, picks[other]) for other in seen))])
            picks[name] = int(values.argmax())
        found.append({name: schema[name].labels[picks[name]] for name in schema.names})
    return found


@pytest.fixture(scope="module")
def effects() -> pd.DataFrame:
    rows = [{"document": seed, **row} for seed in range(12) for row in pair_effects(SIMULATED, network(seed))]
    return pd.DataFrame(rows)


def test_the_matrix_shows_what_was_planted(effects: pd.DataFrame) -> None:
    assert len(effects) == 12 * 10
    assert effects["presence"].max() < 1e-9  # in a true distribution a line says nothing but what it says
    information = effect_matrix(effects, SIMULATED, "mutual_information")
    assert list(information.index) == list(information.columns) == list(NAMES)
    assert np.isnan(information.to_numpy()[np.tril_indices(5)]).all()
    assert information["e"].max() < 1e-9
    top = strongest(information)[:3]
    assert {(a, b) for a, b, _ in top} == PLANTED
    assert strongest(information, least=top[-1][2]) == top[:2]
    # What passes through another field is less than either step (the data processing inequality).
    assert information.at["a", "c"] < min(information.at["a", "b"], information.at["b", "c"])
    assert information.at["a", "c"] > 1e-3


@pytest.mark.parametrize("measure", ["mutual_information", "total_variation", "moved"])
def test_the_suggested_waves_recover_it(effects: pd.DataFrame, measure: str) -> None:
    matrix = effect_matrix(effects, SIMULATED, measure)
    found = suggest_dependencies(SIMULATED, matrix, decide, range(100, 140), range(200, 240), share=1.0)
    assert {(a, b.name) for b in found.schema for a in b.depends_on} == PLANTED
    assert found.waves == 3
    assert found.share == 1.0
    assert (found.held_out == 1.0).all()
    # Nothing with fewer waves does, isolated decisions least of all.
    fewer = found.tried[found.tried["waves"] < 3]
    assert (fewer["share"] < 1).all()
    assert found.tried["share"][0] < 0.9
    assert (found.tried["waves"][0], found.tried["edges"][0]) == (1, 0)


def test_a_lower_share_takes_fewer_waves(effects: pd.DataFrame) -> None:
    matrix = effect_matrix(effects, SIMULATED)
    all_of_it = suggest_dependencies(SIMULATED, matrix, decide, range(100, 140), range(200, 210), share=1.0)
    two = float(all_of_it.tried.query("waves == 2")["share"].max())
    found = suggest_dependencies(SIMULATED, matrix, decide, range(100, 140), range(200, 210), share=two)
    assert found.waves == 2
    assert found.share == two
    one = float(all_of_it.tried["share"][0])
    found = suggest_dependencies(SIMULATED, matrix, decide, range(100, 140), range(200, 210), share=one)
    assert (found.waves, len(found.tried)) == (1, 1)


def test_where_nothing_is_enough_the_best_is_returned(effects: pd.DataFrame) -> None:
    matrix = effect_matrix(effects, SIMULATED)
    matrix.loc["b", "c"] = 0.0  # an edge that may not be used
    matrix.loc["a", "c"] = 0.0
    found = suggest_dependencies(SIMULATED, matrix, decide, range(100, 140), range(200, 210), share=1.0)
    assert found.share == found.tried["share"].max() < 1
    assert {(a, b.name) for b in found.schema for a in b.depends_on} == PLANTED - {("b", "c")}


def test_what_is_asked_for_is_checked(effects: pd.DataFrame) -> None:
    matrix = effect_matrix(effects, SIMULATED)
    with pytest.raises(ParameterError, match="share=0"):
        suggest_dependencies(SIMULATED, matrix, decide, [1], [2], share=0)
    with pytest.raises(ParameterError, match="held_out"):
        suggest_dependencies(SIMULATED, matrix, decide, [1], [])
    with pytest.raises(ParameterError, match="measure='tv'"):
        effect_matrix(effects, SIMULATED, "tv")
    with pytest.raises(ParameterError, match="answers=0"):
        pair_effects(SIMULATED, network(0), answers=0)


def test_few_answers_take_the_most_probable() -> None:
    asked: list[Question] = []

    def ask(questions: Sequence[Question]) -> list[np.ndarray]:
        asked.extend(questions)
        return network(3)(questions)

    rows = pair_effects(SIMULATED, ask, answers=1)
    best = {name: int(values.argmax()) for name, values in zip(NAMES, ask([Question(n) for n in NAMES]), strict=True)}
    assert {given for _, given in asked if given} == {((name, best[name]),) for name in NAMES[:-1]}
    # One answer carries no information; that it moves others is seen all the same.
    assert all(row["mutual_information"] == pytest.approx(0) for row in rows)
    full = pair_effects(SIMULATED, network(3))
    assert [row["moved"] for row in rows] == pytest.approx([row["moved"] for row in full])


def test_dependencies_are_replaced() -> None:
    schema = with_dependencies(SIMULATED, [("b", "c"), ("a", "c")])
    assert schema["c"].depends_on == ("a", "b")
    assert with_dependencies(schema, [("a", "b")])["c"].depends_on == ()
    assert with_dependencies(schema, ()) == SIMULATED


def test_agreement_tells_true_from_one() -> None:
    values = [{"a": True, "b": "x"}, {"a": False, "b": "x"}]
    others = [{"a": 1, "b": "x"}, {"a": False, "b": "x"}]
    assert agreement(values, others).tolist() == [0.5, 1.0]


# --- The engine's numbers -------------------------------------------------------------------------------------------

NAME = "qwen"
TEXT = "We're sorry, the payment of 1,299.00 was declined."
SCHEMA = Schema.from_dict(
    {
        "risk": {"type": "enum", "choices": ["LOW", "HIGH", "HIGHEST"]},
        "version": {"type": "enum", "choices": ["1.0"]},
        "urgent": {"type": "boolean", "depends_on": ["risk"]},
        "track": {"type": "enum", "choices": ["a b", "a c", None]},
    }
)


@pytest.mark.parametrize("scorer", ["marginal", "exact"])
def test_forced_answers_agree_with_brute_force(scorer: str) -> None:
    this = engine(NAME)
    ask = questioner(this, SCHEMA, TEXT, scorer)
    questions = [
        Question("risk"),
        Question("urgent", (("risk", 2),)),
        Question("track", (("urgent", 1), ("risk", 0))),  # written in schema order whatever the order here
        Question("version", (("risk", 1),)),
        Question("track", (("version", 0),)),
    ]
    found = ask(questions)
    assert found[3].tolist() == [0.0]
    for question, values in zip(questions, found, strict=True):
        if question.field == "version":
            continue
        given = sorted(question.given, key=lambda item: SCHEMA.names.index(item[0]))
        seen = [(name, SCHEMA[name].labels[i]) for name, i in given]
        expected = brute_force(this, NAME, SCHEMA, question.field, TEXT, scorer, seen=seen)
        np.testing.assert_allclose(np.exp(values), expected.shares, atol=1e-5)


def test_joint_mode_reads_the_same() -> None:
    this = engine(NAME)
    out = this.extract(TEXT, SCHEMA, mode="joint", scorer="marginal")
    ask = questioner(this, SCHEMA, TEXT)
    given: tuple[tuple[str, int], ...] = ()
    for field in SCHEMA:
        (values,) = ask([Question(field.name, given)])
        shares = np.array([dict(out.fields[field.name].alternatives).get(v, -1.0) for v in field.labels])
        chosen = field.labels.index(out.values[field.name])
        shares[chosen] = out.fields[field.name].probability
        np.testing.assert_allclose(np.exp(values), shares, atol=1e-5)
        given += ((field.name, chosen),)


def test_many_questions_take_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    this = engine(NAME)
    ask = questioner(this, SCHEMA, TEXT)
    questions = [
        Question(b, ((a, i),))
        for a in ("risk", "urgent")
        for i in (0, 1)
        for b in ("urgent", "track", "risk")
        if a != b
    ]
    passes = this.backend.meter.forward_passes
    once = ask(questions)
    assert this.backend.meter.forward_passes == passes + 1
    monkeypatch.setattr(pcdlab.studies.joint, "NODES_PER_PASS", 40)
    cut = ask(questions)
    assert this.backend.meter.forward_passes > passes + 3
    for a, b in zip(once, cut, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert ask([]) == []


def test_pairs_of_documents() -> None:
    documents = [
        Document(id="one", text=TEXT, gold={}),
        Document(id="two", text="Call 555-0199 before 12:30.", gold={}),
    ]
    frame = read_pairs(engine(NAME), documents, SCHEMA, progress=False)
    assert list(frame["document"]) == ["one"] * 3 + ["two"] * 3
    assert list(frame["knowing"])[:3] == ["risk", "risk", "urgent"]
    assert list(frame["moving"])[:3] == ["urgent", "track", "track"]
    this, (urgent,) = (
        engine(NAME),
        frame.query("document == 'two' and knowing == 'risk' and moving == 'urgent'").to_dict("records"),
    )
    alone = brute_force(this, NAME, SCHEMA, "urgent", documents[1].text, "marginal")
    risk = brute_force(this, NAME, SCHEMA, "risk", documents[1].text, "marginal")
    rows = [
        brute_force(this, NAME, SCHEMA, "urgent", documents[1].text, "marginal", seen=[("risk", label)]).shares
        for label in SCHEMA["risk"].labels
    ]
    expected = pair_effect(np.log(risk.shares), np.log(alone.shares), np.log(rows))
    for measure in ("mutual_information", "total_variation", "presence", "moved"):
        assert urgent[measure] == pytest.approx(getattr(expected, measure), abs=1e-5)
    assert urgent["moved"] > 1e-3  # the model does look at the line in front
    empty = read_pairs(engine(NAME), [], SCHEMA, progress=False)
    assert list(empty.columns) == list(frame.columns)


def test_questioner_refuses() -> None:
    with pytest.raises(ParameterError, match="scorer='walk'"):
        questioner(engine(NAME), SCHEMA, TEXT, "walk")
    with pytest.raises(ContextLengthError, match="the document the rest: shorten it"):
        questioner(engine(NAME), SCHEMA, "a b " * 4000)


# --- Constraints on runs --------------------------------------------------------------------------------------------


def test_a_constraint_is_found_broken_and_repaired(tmp_path: Path) -> None:
    about = Bank("b", "B", "", True, "none", "none", SCHEMA, tmp_path / "b" / "documents.jsonl")
    texts = [TEXT, "Call 555-0199 before 12:30.", "Dear customer, your order 4711 has been shipped.", "x" * 9000]
    bank = save_bank(about, [Document(id=f"d{i}", text=t, gold={}) for i, t in enumerate(texts)], tmp_path / "b")
    run = run_study(bank, engine(NAME), tmp_path / "run", progress=False)
    frame = run.frame()
    first = {row.field: row.value for row in frame[frame["document"] == "d0"].itertuples()}
    # Plant one that the isolated answers of the first document break.
    others = [label for label in SCHEMA["track"].labels if label != first["track"]]
    rules = constraints_from_json(
        [{"if": {"risk": first["risk"], "urgent": first["urgent"]}, "then": {"track": others}}], SCHEMA
    )
    found = broken_in_run(run, rules)
    assert "d0" in set(found["document"])
    assert found["values"][0] == {name: first[name] for name in ("risk", "urgent", "track")}
    assert found["constraint"][0] == str(rules[0])

    repaired = repair_run(run, rules)
    decided = {row["document"] for row in run.rows() if "error" not in row}
    assert decided == {"d0", "d1", "d2"}
    for document, rows in repaired.groupby("document"):
        values = dict(zip(rows["field"], rows["value"], strict=True))
        consistent = dict(zip(rows["field"], rows["consistent"], strict=True))
        assert not broken(rules, consistent)
        if not broken(rules, values):
            assert consistent == values
            assert (rows["loss"] == 0).all()
            continue
        # Brute force over all objects, from the run's own scores.
        tables = {}
        for name in SCHEMA.names:
            labels, scores, _, documents = run.log_probs(name)
            tables[name] = dict(zip(map(Field.json, labels), scores[documents.index(document)], strict=True))
        totals = {
            picks: sum(tables[name][Field.json(v)] for name, v in zip(SCHEMA.names, picks, strict=True))
            for picks in itertools.product(*(field.labels for field in SCHEMA))
        }
        allowed = [p for p in totals if not broken(rules, dict(zip(SCHEMA.names, p, strict=True)))]
        best = max(allowed, key=totals.__getitem__)
        assert tuple(consistent[name] for name in SCHEMA.names) == best
        assert rows["loss"].iloc[0] == pytest.approx(max(totals.values()) - totals[best])
    assert set(repaired["document"]) == decided


def test_a_run_without_log_probs_cannot_be_repaired(tmp_path: Path) -> None:
    about = Bank("b", "B", "", True, "none", "none", SCHEMA, tmp_path / "b" / "documents.jsonl")
    bank = save_bank(about, [Document(id="d", text=TEXT, gold={})], tmp_path / "b")
    run = run_study(bank, engine(NAME), tmp_path / "run", mode="grammar", progress=False)
    (values,) = [{row["field"]: row["value"] for row in run.rows()}]
    rule = {"if": {"risk": values["risk"]}, "then": {"urgent": not values["urgent"]}}
    assert len(broken_in_run(run, constraints_from_json([rule], SCHEMA))) == 1
    with pytest.raises(ParameterError, match="no log-probabilities"):
        repair_run(run, [])
