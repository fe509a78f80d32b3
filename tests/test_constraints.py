"""Constraints: what can be written, what keeps them, and that the repaired object is the most probable consistent one."""

from __future__ import annotations

import doctest
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pcdlab.constraints
from pcdlab.constraints import Condition, Constraint, broken, constraints_from_json, most_probable
from pcdlab.errors import ParameterError, PresetError, SchemaError
from pcdlab.presets import Preset, load_preset, save_preset
from pcdlab.schema import Field, Schema

SCHEMA = Schema(
    (
        Field("format", ("BOF", "LAB", "TALK")),
        Field("laptop", (True, False)),
        Field("level", ("LOW", "HIGH", None)),
        Field("mixed", ("true", "1", 1.5)),
    )
)
RULE = {"if": {"format": "LAB", "level": ["LOW", None]}, "then": {"laptop": True}}


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(pcdlab.constraints).failed == 0


# --- Writing and reading --------------------------------------------------------------------------------------------


def test_truth_table() -> None:
    (rule,) = constraints_from_json([RULE], SCHEMA)
    kept = [
        (f, laptop, level)
        for f, laptop, level in itertools.product(("BOF", "LAB", "TALK"), (True, False), ("LOW", "HIGH", None))
        if rule.kept({"format": f, "laptop": laptop, "level": level})
    ]
    broken_ones = [("LAB", False, "LOW"), ("LAB", False, None)]
    assert len(kept) == 16
    assert not set(kept) & set(broken_ones)
    assert broken([rule], {"format": "LAB", "laptop": False, "level": None}) == [rule]


def test_true_is_not_one() -> None:
    condition = Condition("laptop", (True,))
    assert condition.holds({"laptop": True})
    assert not condition.holds({"laptop": 1})


def test_preset_round_trip(tmp_path: Path) -> None:
    rules = constraints_from_json([RULE, {"if": {"mixed": 1.5}, "then": {"level": None, "format": ["BOF"]}}], SCHEMA)
    preset = Preset("p", "P", "", "A text.", SCHEMA, constraints=rules)
    save_preset(preset, tmp_path / "p.json")
    assert load_preset(tmp_path / "p.json") == preset
    assert json.loads((tmp_path / "p.json").read_text())["constraints"][0] == RULE
    save_preset(Preset("p", "P", "", "A text.", SCHEMA), tmp_path / "q.json")
    assert "constraints" not in json.loads((tmp_path / "q.json").read_text())


@pytest.mark.parametrize(
    ("constraints", "parts"),
    [
        ({}, ["is object", "array"]),
        ([RULE, 3], ["number 2", "is integer", '"if" and "then"']),
        ([{"if": {"format": "LAB"}}], ["number 1", "'if'", '"if" and "then"']),
        ([RULE | {"else": {}}], ["number 1", "'else'"]),
        ([{"if": {}, "then": {"laptop": True}}], ["number 1", '"if"', "at least one field"]),
        ([{"if": {"format": "LAB"}, "then": ["laptop"]}], ['"then"', "at least one field"]),
        ([{"if": {"fromat": "LAB"}, "then": {"laptop": True}}], ["'fromat'", "did you mean 'format'"]),
        ([{"if": {"format": "LAP"}, "then": {"laptop": True}}], ['"LAP"', "'format'", "labels are", '"TALK"']),
        ([{"if": {"format": "LAB"}, "then": {"laptop": 1}}], ["1 is no label", "true, false"]),
        ([{"if": {"format": "LAB"}, "then": {"laptop": []}}], ["'laptop'", "empty array"]),
        ([{"if": {"format": "LAB"}, "then": {"format": "BOF"}}], ["'format'", "one of them"]),
    ],
)
def test_refused(tmp_path: Path, constraints: Any, parts: list[str]) -> None:
    path = tmp_path / "p.json"
    content = {"id": "p", "title": "P", "description": "", "context": "A text.", "schema": SCHEMA.to_dict()}
    path.write_text(json.dumps({**content, "constraints": constraints}))
    with pytest.raises(SchemaError) as caught:
        load_preset(path)
    assert str(caught.value).startswith(f'{path}: "constraints": ')
    for part in parts:
        assert part in str(caught.value)


def test_a_preset_in_python_is_checked_too() -> None:
    rule = Constraint((Condition("format", ("LAP",)),), (Condition("laptop", (True,)),))
    with pytest.raises(SchemaError, match=r'"constraints": number 1: "if": "LAP" is no label'):
        Preset("p", "P", "", "A text.", SCHEMA, constraints=(rule,))
    with pytest.raises(PresetError, match="tuple or list of"):
        Preset("p", "P", "", "A text.", SCHEMA, constraints=(RULE,))  # type: ignore[arg-type]


# --- Repair ---------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schema, list[Constraint], dict[str, list[float]]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    schema = Schema(tuple(Field(f"f{i}", tuple(f"v{j}" for j in range(size))) for i, size in enumerate(sizes)))
    rules = []
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.permutations(schema.names))
        cut = draw(st.integers(1, len(names) - 1))
        end = draw(st.integers(cut + 1, len(names)))
        conditions = [
            Condition(name, tuple(draw(st.lists(st.sampled_from(schema[name].labels), min_size=1, unique=True))))
            for name in names[:end]
        ]
        rules.append(Constraint(tuple(conditions[:cut]), tuple(conditions[cut:])))
    score = st.one_of(st.floats(-9, 0, width=16), st.just(-np.inf))
    scores = {f.name: draw(st.lists(score, min_size=len(f.labels), max_size=len(f.labels))) for f in schema}
    return schema, rules, scores


@given(problems())
def test_repair_agrees_with_brute_force(problem: tuple[Schema, list[Constraint], dict[str, list[float]]]) -> None:
    schema, rules, scores = problem
    best = -np.inf
    consistent = False
    for picks in itertools.product(*(range(len(f.labels)) for f in schema)):
        values = {f.name: f.labels[i] for f, i in zip(schema, picks, strict=True)}
        if not broken(rules, values):
            consistent = True
            best = max(best, sum(scores[name][i] for name, i in zip(schema.names, picks, strict=True)))
    if not consistent:
        with pytest.raises(SchemaError, match="no object keeps all constraints"):
            most_probable(schema, rules, scores)
        return
    found = most_probable(schema, rules, scores)
    assert not broken(rules, found.values)
    assert found.score == pytest.approx(best)
    free = sum(max(scores[name]) for name in schema.names)
    if np.isfinite(free):
        assert found.loss == pytest.approx(free - best)
        assert found.loss >= 0


def test_consistent_objects_are_left_alone() -> None:
    rules = constraints_from_json([RULE], SCHEMA)
    scores = {"format": [-2, -1, -3], "laptop": [-0.1, -3], "level": [-1, -2, -3], "mixed": [-1, -1, -1]}
    found = most_probable(SCHEMA, rules, scores)
    assert found.values == {"format": "LAB", "laptop": True, "level": "LOW", "mixed": "true"}
    assert found.loss == 0


def test_the_cheapest_of_several_ways_out_is_taken() -> None:
    rules = constraints_from_json([RULE], SCHEMA)
    # The best object is (LAB, false, LOW): changing the format costs 1.0, the laptop 2.0, the level 0.5.
    scores = {"format": [-1.5, -0.5, -9], "laptop": [-2.5, -0.5], "level": [-0.5, -1.0, -4], "mixed": [-1, -2, -3]}
    found = most_probable(SCHEMA, rules, scores)
    assert found.values == {"format": "LAB", "laptop": False, "level": "HIGH", "mixed": "true"}
    assert found.loss == pytest.approx(0.5)


def test_many_labels_and_fields_cost_nothing() -> None:
    # 10^60 objects, of which the first 10^20 or so break a constraint.
    rng = np.random.default_rng(0)
    schema = Schema(tuple(Field(f"f{i}", tuple(range(100))) for i in range(30)))
    scores = {name: np.sort(rng.normal(size=100))[::-1] for name in schema.names}
    rules = [
        Constraint((Condition(f"f{i}", tuple(range(50))),), (Condition(f"f{i + 1}", tuple(range(90, 100))),))
        for i in range(0, 30, 6)
    ]
    found = most_probable(schema, rules, scores)
    assert not broken(rules, found.values)
    # Each rule on its own: the cheaper of leaving the "if" and keeping the "then".
    cost = 0.0
    for i in range(0, 30, 6):
        a, b = scores[f"f{i}"], scores[f"f{i + 1}"]
        cost += min(a[0] - a[50], b[0] - b[90])
    assert found.loss == pytest.approx(cost)


@pytest.mark.parametrize("wrong", [{}, {"f": [0.0]}, {"f": [0.0, np.nan]}, {"f": [[0.0, 1.0]]}])
def test_wrong_scores(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="'f'"):
        most_probable(Schema((Field("f", ("a", "b")),)), [], wrong)
