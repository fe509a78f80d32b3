"""`pcdlab check` and the module behind it, on tiny models with every kind of tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from brute_force import backend, fresh_engine
from tokenizers_zoo import codec
from typer.testing import CliRunner

from pcdlab import check, models
from pcdlab.backends import faults
from pcdlab.backends.conformance import check_backend
from pcdlab.cli import app
from pcdlab.engine import Engine

EXTRACTION = ["labels in place", "scorers", "exact scores"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on a tiny model, with a fault planted if one is named."""

    def run(*arguments: str, fault: str | None = None) -> Any:
        asked: list[Any] = []

        def load(*names: str) -> Any:
            print("a library talks on stdout while it loads")
            asked.append(names)
            made = backend("smollm")
            return (faults.FAULTS[fault][0](made) if fault else made), codec("smollm")

        monkeypatch.setattr(models, "load", load)
        monkeypatch.setenv("COLUMNS", "200")
        result = CliRunner().invoke(app, ["check", *arguments])
        result.asked = asked
        return result

    return run


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_sound_model_passes(run: Any) -> None:
    result = run("tiny", "--backend", "mlx", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert result.asked == [("tiny", "mlx", "float32")]
    rows = result.stdout.splitlines()
    assert sum("PASS" in row for row in rows) == 16 + 3 - 2
    assert sum("not run" in row for row in rows) == 2  # no window, no prefixes on disk
    assert "FAIL" not in result.stdout
    assert rows[-1].startswith(
        "tiny llama, torch, float32, packed layout (reproduces plain forward passes): 17 of 17 checks"
    )
    assert "a library talks" not in result.stdout
    progress = result.stderr.splitlines()
    assert "check 1 of 16: prefix caching" in progress
    assert progress[-1] == "extraction: exact scores"


def test_a_fault_fails_and_says_by_how_much(run: Any) -> None:
    result = run(fault="leaking sibling")
    assert result.exit_code == 1
    assert result.asked == [("smollm2-135m", "torch", "auto")]
    failed = {
        row.split("FAIL")[0].strip(): row.split("FAIL")[1].split()[:2]
        for row in result.stdout.splitlines()
        if "FAIL" in row
    }
    assert {"sibling isolation", "tree as rows", "exact scores"} <= failed.keys()
    assert all(float(largest) > float(tolerance) for largest, tolerance in failed.values())


@pytest.mark.parametrize("fault", [None, "stale position"])
def test_json_is_one_object(run: Any, fault: str | None) -> None:
    result = run("--json", fault=fault)
    found = json.loads(result.stdout)
    assert {name: found[name] for name in ("model", "backend", "dtype", "layout")} == {
        "model": "tiny llama", "backend": "torch", "dtype": "float32", "layout": "packed",
    }  # fmt: skip
    assert found["passed"] is (fault is None)
    assert result.exit_code == (1 if fault else 0)
    names = [item["name"] for item in found["checks"]]
    assert names == [item.name for item in check_backend(backend("smollm"))] + EXTRACTION
    for item in found["checks"]:
        assert set(item) == {"name", "compared", "largest", "tolerance", "passed", "note"}
        if item["passed"] is not None:
            assert item["passed"] is (item["largest"] is not None and item["largest"] <= item["tolerance"])
    assert found["seconds"] >= 0


def test_an_unknown_model_is_bad_input() -> None:
    result = CliRunner().invoke(app, ["check", "no-such-model"])
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "no-such-model" in result.stderr


# --- extraction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "qwen", "llama2", "gemma", "unigram", "characters"])
def test_colliding_labels_pass_under_every_kind_of_tokenizer(name: str) -> None:
    found = check.check_extraction(fresh_engine(name))
    assert [item.name for item in found] == EXTRACTION
    assert all(item.passed for item in found), found


def test_the_labels_do_collide() -> None:
    compiled = fresh_engine("smollm").compile(check.SCHEMA)
    lines = {field.field.name: [field.line(i) for i in range(len(field.field.labels))] for field in compiled}
    assert any(field.identified_at(0) > 1 for field in compiled)  # the first token tells nobody apart
    for name, labels in (("action", ("DELIVER", "DELIVER_WITH_WARNING")), ("reason", ("label", "label missing"))):
        assert set(labels) <= set(check.SCHEMA[name].labels)
    state = check.SCHEMA["state"].labels
    assert len({str(label).lower() for label in state}) < len(state) == len(set(lines["state"]))


@pytest.mark.parametrize(
    "fault", ["stale position", "leaking sibling", "mutated prefix", "raw logits", "softmax of candidates"]
)
def test_faults_of_the_backend_reach_the_scores(fault: str) -> None:
    faulty = faults.FAULTS[fault][0](backend("smollm"))
    found = {item.name: item for item in check.check_extraction(Engine(faulty, codec("smollm")))}
    assert found["exact scores"].passed is False
    assert found["labels in place"].passed


def test_a_tokenizer_that_cannot_tell_labels_apart_is_a_finding() -> None:
    found = {item.name: item for item in check.check_extraction(fresh_engine("wordpiece"))}
    assert found["labels in place"].passed is False
    assert "TokenizationError" in found["labels in place"].note
    assert "state" in found["labels in place"].note  # lower-cased, its labels are one


def test_lines_that_differ_in_place_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh_engine("smollm")
    compiled = engine.compile(check.SCHEMA)
    item = compiled.fields["urgent"]
    object.__setattr__(item, "spellings", item.spellings[::-1])
    found = {item.name: item for item in check.check_extraction(engine)}
    assert found["labels in place"].largest >= 1
    assert found["labels in place"].passed is False
