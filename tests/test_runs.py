"""Runs: the rows are the engine's decisions, and a run that was killed ends in the same bytes as one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import backend, codec, fresh_engine
from filelock import FileLock
from typer.testing import CliRunner

from pcdlab.banks import Bank, Document, save_bank
from pcdlab.cli import app
from pcdlab.engine import Engine
from pcdlab.errors import BankError, ParameterError
from pcdlab.schema import Field, Schema
from pcdlab.studies import runs
from pcdlab.studies.accuracy import wilson
from pcdlab.studies.runs import DECISIONS, META, TIMING, Run, load_run, run_study

NAME = "qwen"
SCHEMA = Schema(
    (
        Field("risk", ("LOW", "HIGH", "MEDIUM"), "Calculated risk"),
        Field("urgent", (True, False)),
        Field("version", ("1.0",)),
        Field("reply", ("yes", "no", None)),
    )
)
CHAIN = Schema((Field("risk", ("LOW", "HIGH")), Field("action", ("keep", "drop", "ask"), depends_on=("risk",))))
WORDS = (("red", "blue"), ("north", "east", "south"), ("one", "two", "six"))
PAIRS = Schema(
    tuple(Field(f"topic{i}", words) for i, words in enumerate(WORDS))
    + tuple(Field(f"action{i}", ("keep", "drop", "ask"), depends_on=(f"topic{i}",)) for i in range(len(WORDS)))
)
MANY = Schema((Field("intent", tuple(f"intent_{i // 7}_{i % 7}" for i in range(40))), Field("urgent", (True, False))))
FILES = (DECISIONS, TIMING, META)


def bank(folder: Path, schema: Schema = SCHEMA, count: int = 30, words: int = 50) -> Bank:
    """Documents of a hundred tokens and more: a few of them share a pass."""
    about = Bank("b", "B", "", True, "Apache-2.0", "", schema, Path())
    name = schema.names[0]
    labels = schema[name].labels
    documents = (
        Document(
            id=f"d{i}",
            text=f"Document {i}: " + " ".join(str((i + 1) * j % 97) for j in range(words + i)),
            gold={name: labels[i % len(labels)]},
        )
        for i in range(count)
    )
    return save_bank(about, documents, folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return bank(tmp_path_factory.mktemp("small") / "b", count=5, words=5)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return bank(tmp_path_factory.mktemp("large") / "b")


@pytest.fixture(scope="module")
def whole(large: Bank, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing interrupted."""
    return study(large, tmp_path_factory.mktemp("whole") / "run")


def study(bank: Bank, out: Path, engine: Engine | None = None, **options: Any) -> Run:
    return run_study(bank, engine or fresh_engine(NAME), out, progress=False, **options)


def decisions(run: Run | Path) -> bytes:
    return ((run if isinstance(run, Path) else run.folder) / DECISIONS).read_bytes()


def batches(folder: Path) -> list[list[str]]:
    """Documents by batch."""
    return [list(json.loads(line)["seconds"]) for line in (folder / TIMING).read_text().splitlines()]


def spied(engine: Engine) -> tuple[Engine, list[str]]:
    """The engine, and the texts it will be given."""
    seen: list[str] = []
    extract_many = engine.extract_many

    def spy(texts: Iterator[str], *arguments: Any, **options: Any) -> Any:
        return extract_many((seen.append(text) or text for text in texts), *arguments, **options)  # type: ignore[func-returns-value]

    engine.extract_many = spy  # type: ignore[method-assign]
    return engine, seen


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_the_engines_decisions(small: Bank, tmp_path: Path) -> None:
    run = study(small, tmp_path / "run", scorer="exact")
    assert run.finished
    assert run.documents == 5
    rows = list(run.rows())
    assert [(row["document"], row["field"]) for row in rows] == [(d.id, f) for d in small for f in SCHEMA.names]
    engine = fresh_engine(NAME)
    frame = run.frame().set_index(["document", "field"])
    for document in small:
        out = engine.extract(document.text, SCHEMA, scorer="exact")
        for field, decision in out.fields.items():
            row = frame.loc[(document.id, field)]
            assert json.dumps(row["value"]) == json.dumps(decision.value)
            assert row["probability"] == pytest.approx(decision.probability, abs=1e-5)
            assert row["error"] is None
            assert row["seconds"] > 0
            if decision.candidate_mass is None:
                assert np.isnan(row["candidate_mass"])
            else:
                assert row["candidate_mass"] == pytest.approx(decision.candidate_mass, abs=1e-5)
            labels, scores, gold, documents = run.log_probs(field)
            place = documents.index(document.id)
            assert labels == list(decision.log_probs)
            np.testing.assert_allclose(scores[place], list(decision.log_probs.values()), atol=1e-5)
            assert gold[place] == (labels.index(document.gold[field]) if field in document.gold else -1)
            assert row["gold"] == document.gold.get(field)
    assert list(run.frame().columns) == [
        "document", "field", "value", "probability", "candidate_mass", "gold", "seconds", "error", "out_of_scope",
    ]  # fmt: skip


def test_settings_are_kept(small: Bank, tmp_path: Path) -> None:
    engine = fresh_engine(NAME)
    meta = load_run(study(small, tmp_path / "run", engine, normalise="length").folder).meta
    assert meta["bank"] == {"id": "b", "documents": 5, "sha256": small.sha256}
    assert Schema.of(meta["schema"]) == SCHEMA
    assert (meta["model"], meta["backend"], meta["dtype"]) == ("tiny llama", "torch", "float32")
    assert (meta["mode"], meta["scorer"], meta["normalise"]) == ("isolated", "auto", "length")
    assert {"pcdlab", "numpy", "torch", "transformers"} == meta["versions"].keys()


def test_gold(tmp_path: Path) -> None:
    """Not labelled, null as a label, and null where null is no label are three things."""
    about = Bank("b", "B", "", True, "", "", SCHEMA, Path())
    golds: list[dict[str, Any]] = [{}, {"urgent": True, "reply": None}, {"urgent": None, "reply": "no"}]
    documents = [Document(id=f"d{i}", text=f"text {i}", gold=gold) for i, gold in enumerate(golds)]
    run = study(save_bank(about, documents, tmp_path / "b"), tmp_path / "run")
    assert run.log_probs("urgent")[2].tolist() == [-1, 0, -1]
    assert run.log_probs("reply")[2].tolist() == [-1, 2, 1]
    frame = run.frame()
    assert frame[frame.field == "urgent"].out_of_scope.tolist() == [False, False, True]
    assert frame[frame.field == "reply"].out_of_scope.tolist() == [False, False, False]
    assert frame[frame.field == "urgent"].gold.tolist() == [None, True, None]
    with pytest.raises(ParameterError, match="field 'reply_to' is not in the run"):
        run.log_probs("reply_to")


@pytest.mark.parametrize("mode", ["isolated", "grammar"])
def test_a_document_that_is_too_long_is_a_row_with_an_error(mode: Any, tmp_path: Path) -> None:
    about = Bank("b", "B", "", True, "", "", SCHEMA, Path())
    texts = ["short", "long " * 5000, "short too"]
    documents = [Document(id=f"d{i}", text=text, gold={"urgent": True}) for i, text in enumerate(texts)]
    chosen = save_bank(about, documents, tmp_path / "b")
    run = study(chosen, tmp_path / "run", mode=mode)
    frame = run.frame()
    failed = frame[frame.document == "d1"]
    assert len(failed) == len(SCHEMA)
    assert all(error.startswith("ContextLengthError: ") for error in failed.error)
    assert failed.value.tolist() == [None] * len(SCHEMA)
    assert failed.gold.tolist() == [None, True, None, None]
    assert frame[frame.document != "d1"].error.tolist() == [None] * 2 * len(SCHEMA)
    if mode == "isolated":
        assert run.log_probs("urgent")[3] == ["d0", "d2"]
        assert run.log_probs("urgent")[2].tolist() == [0, 0]
    before = decisions(run)
    assert decisions(study(chosen, tmp_path / "run", mode=mode)) == before


@pytest.mark.parametrize("schema", [SCHEMA, CHAIN])
def test_grammar_writes_the_object_that_joint_mode_walks_to(schema: Schema, tmp_path: Path) -> None:
    chosen = bank(tmp_path / "b", schema, count=4, words=10)
    run = study(chosen, tmp_path / "run", mode="grammar")
    engine = fresh_engine(NAME)
    wanted = [v for d in chosen for v in engine.extract(d.text, schema, mode="joint", scorer="walk").values.values()]
    assert json.dumps(run.frame().value.tolist()) == json.dumps(wanted)
    assert run.frame().probability.isna().all()
    assert (run.frame().seconds > 0).all()
    assert (run.meta["scorer"], run.meta["normalise"]) == (None, None)
    with pytest.raises(ParameterError, match="no log-probabilities"):
        run.log_probs("risk")


def test_documents_are_read_as_they_are_needed(large: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = spied(fresh_engine(NAME))
    ahead: list[int] = []
    rows = runs._rows
    written = iter(range(1000))
    monkeypatch.setattr(runs, "_rows", lambda *item: ahead.append(len(seen) - next(written)) or rows(*item))
    run = study(large, tmp_path / "run", engine)
    longest = max(map(len, batches(run.folder)))
    assert 3 <= longest < 20
    assert max(ahead) <= longest + 1


# --- killed, and resumed ----------------------------------------------------------------------------------------------

WHERE = ("in a pass", "in front of a mark")
KILLED = """
    import os, signal, sys
    from pathlib import Path

    sys.path.insert(0, {tests!r})
    from brute_force import fresh_engine
    from pcdlab.banks import load_bank
    from pcdlab.studies import runs

    def third_time(real, counts=lambda *arguments: True):
        calls = 0

        def call(*arguments):
            nonlocal calls
            calls += counts(*arguments)
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return call

    for where in {where!r}:  # one process each, but what they import is imported once
        child = os.fork()
        if not child:
            engine = fresh_engine({name!r})
            if where == "in a pass":
                engine.backend.read = third_time(engine.backend.read)
            else:
                runs._line = third_time(runs._line, lambda row: "end" in row)
            runs.run_study(load_bank({bank!r}), engine, Path({out!r}, where), progress=False)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


@pytest.fixture(scope="module")
def killed_runs(large: Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs whose process got a SIGKILL, by where it was then."""
    out = tmp_path_factory.mktemp("killed")
    values = {"tests": str(Path(__file__).parent), "bank": str(large.path.parent), "out": str(out)}
    code = textwrap.dedent(KILLED).format(**values, where=WHERE, name=NAME)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("where", WHERE)
def test_killed_and_resumed_the_bytes_are_the_same(where: str, killed_runs: Path, large: Bank, whole: Run) -> None:
    out = killed_runs / where
    killed = load_run(out)
    kept = killed.documents
    assert 0 < kept < len(large)
    assert not killed.finished
    assert len(killed.frame()) == kept * len(SCHEMA)  # readable as it is
    rows = decisions(out)
    assert len(rows) > len(b"".join(map(runs._line, killed.rows()))) or where == "in a pass"
    meta = (out / META).read_bytes()

    engine, seen = spied(fresh_engine(NAME))
    run = study(large, out, engine)
    assert seen == [document.text for document in large][kept:]  # nothing is decided twice
    assert run.finished
    assert decisions(run) == decisions(whole)
    assert batches(out) == batches(whole.folder)
    assert (out / META).read_bytes() == meta


def test_batches_show_in_the_bytes(large: Bank, whole: Run, tmp_path: Path) -> None:
    """Otherwise the tests here would prove nothing: other batches do give other last digits."""
    engine = fresh_engine(NAME)
    extract_many = engine.extract_many
    engine.extract_many = lambda *a, **o: extract_many(*a, **{**o, "tokens_per_pass": 1})  # type: ignore[method-assign]
    alone = study(large, tmp_path / "run", engine)
    assert decisions(alone) != decisions(whole)
    ours, theirs = (run.log_probs("risk")[1] for run in (alone, whole))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def interrupted(real: Any, left: Iterator[int]) -> Any:
    """The function, with Ctrl-C in place of a call once `left` is used up."""

    def call(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    return call


@pytest.mark.parametrize(
    ("schema", "options"),
    [
        (SCHEMA, {"mode": "joint"}),
        (SCHEMA, {"mode": "grammar"}),
        (SCHEMA, {"normalise": "unconditional"}),
        (PAIRS, {"normalise": "unconditional"}),
        (CHAIN, {"normalise": "unconditional", "mode": "joint"}),
        (MANY, {}),
    ],
    ids=str,
)
def test_interrupted_in_every_mode(schema: Schema, options: Any, tmp_path: Path) -> None:
    chosen = bank(tmp_path / "b", schema, count=6, words=10)
    expected = study(chosen, tmp_path / "whole", **options)
    out = tmp_path / "run"
    for limit in range(8, 40):
        engine = fresh_engine(NAME)
        this, read, stream = engine.backend, engine.backend.read, engine.backend.stream
        before = load_run(out).documents if out.exists() else 0
        left = iter(range(limit))
        this.read, this.stream = interrupted(read, left), interrupted(stream, left)  # type: ignore[method-assign]
        try:
            run = study(chosen, out, engine, **options)
            break
        except KeyboardInterrupt:
            assert load_run(out).documents >= before
        finally:
            this.read, this.stream = read, stream  # type: ignore[method-assign]
    assert run.finished
    assert decisions(run) == decisions(expected)
    assert batches(out) == batches(expected.folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / DECISIONS, -5),
        lambda folder: cut(folder / TIMING, -5),
        lambda folder: cut(folder / DECISIONS, 10),
        lambda folder: append(folder / DECISIONS, b'{"document": "d2'),
        lambda folder: append(folder / TIMING, b'{"end": 12'),
        lambda folder: [path.unlink() for path in (folder / DECISIONS, folder / TIMING)],
    ],
    ids=["rows cut", "marks cut", "almost all rows gone", "half a row", "half a mark", "only settings left"],
)
def test_what_is_torn_is_decided_again(damage: Any, large: Bank, whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in FILES:
        (out / name).write_bytes((whole.folder / name).read_bytes())
    damage(out)
    kept = load_run(out)
    assert len(kept.frame()) == kept.documents * len(SCHEMA) <= len(large) * len(SCHEMA)
    assert decisions(study(large, out)) == decisions(whole)
    assert batches(out) == batches(whole.folder)


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def append(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)


def test_what_is_finished_is_not_run_again(large: Bank, whole: Run) -> None:
    before = {name: (whole.folder / name).read_bytes() for name in FILES}
    engine = fresh_engine(NAME)
    passes = engine.backend.meter.forward_passes
    assert study(large, whole.folder, engine).finished
    assert engine.backend.meter.forward_passes == passes
    assert {name: (whole.folder / name).read_bytes() for name in FILES} == before


# --- refused ----------------------------------------------------------------------------------------------------------


def test_other_settings_are_named(small: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = study(small, tmp_path / "run").folder
    before = decisions(out)
    with pytest.raises(BankError, match="scorer is 'auto' there and 'exact' here"):
        study(small, out, scorer="exact")
    with pytest.raises(
        BankError, match=r"mode is 'isolated' there and 'grammar' here; scorer is 'auto' there and None here"
    ):
        study(small, out, mode="grammar")
    with pytest.raises(BankError, match=r"bank\.documents is 5 there and 3 here; the bank held other"):
        study(small.first(3), out)
    item = next(iter(small))
    relabelled = save_bank(small, [item.model_copy(update={"gold": {}}), *islice(small, 1, None)], tmp_path / "b")
    changed = r"settings: the bank held other documents or right labels then\. Give another folder \(out, --out\), remove this"
    with pytest.raises(BankError, match=changed):
        study(relabelled, out)
    with pytest.raises(BankError, match="settings: another schema"):
        study(small.asking(Schema((SCHEMA["risk"],))), out)
    with pytest.raises(BankError, match="settings: another schema"):
        study(small.asking(Schema(tuple(reversed(SCHEMA.fields)))), out)  # the order of fields counts
    with pytest.raises(BankError, match="model is 'tiny llama' there and 'tiny qwen2' here"):
        study(small, out, Engine(backend(NAME, "qwen2"), codec(NAME)))
    monkeypatch.setattr("pcdlab.__version__", "9")
    with pytest.raises(BankError, match=r"versions\.pcdlab is '.*' there and '9' here"):
        study(small, out)
    assert decisions(out) == before


def test_what_is_refused_before_anything_is_written(small: Bank, tmp_path: Path) -> None:
    for options in (
        {"scorer": "best"},
        {"mode": "both"},
        {"normalise": "mean"},
        {"scorer": "walk", "normalise": "length"},
    ):
        with pytest.raises(ParameterError):
            study(small, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_folders_that_are_no_runs(small: Bank, large: Bank, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "work.txt").write_text("years of it")
    with pytest.raises(BankError, match="exists and holds no run"):
        study(small, tmp_path / "thesis")
    assert os.listdir(tmp_path / "thesis") == ["work.txt"]
    with pytest.raises(BankError, match="holds no run"):
        load_run(tmp_path / "thesis")
    (tmp_path / "empty").mkdir()
    out = study(small, tmp_path / "empty").folder
    with FileLock(out / ".lock"), pytest.raises(BankError, match="another process is writing this run"):
        study(small, out)
    (out / TIMING).unlink()
    for read in (lambda: load_run(out).frame(), lambda: study(small, out)):
        with pytest.raises(BankError, match=r"timing\.jsonl is missing"):
            read()
    (out / META).write_text("{}")
    with pytest.raises(BankError, match="cannot be read as a run's settings"):
        load_run(out)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, *a, **o: fresh_engine(NAME)))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["study", *map(str, arguments)])


def test_the_command(call: Any, small: Bank, tmp_path: Path) -> None:
    folder = small.path.parent
    result = call(folder, "--limit", 2, "--baseline", "grammar", "--scorer", "exact", "--json")
    assert result.exit_code == 0, result.output
    name = "reports/runs/b-smollm2-135m-exact-2"
    told = json.loads(result.stdout)
    assert [list(run.values())[:4] for run in told] == [[name, 2, 4, 0], [f"{name}-grammar", 2, 4, 0]]
    rates = [[(rate["field"], rate["scores"], rate["n"]) for rate in run["accuracy"]] for run in told]
    assert rates == [[("risk", "raw", 2), ("risk", "batch-corrected", 2)], [("risk", "raw", 2)]]
    assert load_run(tmp_path / name).meta["scorer"] == "exact"
    assert load_run(f"{tmp_path / name}-grammar").meta["mode"] == "grammar"

    schema = tmp_path / "s.json"
    schema.write_text(json.dumps({"urgent": {"type": "boolean"}}))
    result = call(folder, "--schema", schema, "--out", "mine")
    assert result.stdout == "mine: 5 documents of 1 fields\n"  # none of them labelled
    assert load_run("mine").schema.names == ("urgent",)
    result = call(folder, "--schema", schema, "--out", "mine", "--mode", "joint")
    assert result.exit_code == 2
    assert "mode is 'isolated' there and 'joint' here" in result.stderr


@pytest.mark.parametrize("mode", ["isolated", "grammar"])
def test_the_command_tells_the_accuracy_and_what_comes_next(call: Any, small: Bank, mode: str) -> None:
    lines = call(small.path.parent, "--limit", 4, "--out", "mine", "--mode", mode).stdout.splitlines()
    run = load_run("mine")
    frame = run.frame()
    risk = frame[frame["field"] == "risk"]
    correct = int((risk["value"] == risk["gold"]).sum())
    low, high = wilson(correct, 4)
    assert lines[0] == "mine: 4 documents of 4 fields"
    assert lines[2].startswith("risk")
    assert f"{25 * correct} % [{100 * low:.0f}, {100 * high:.0f}]" in lines[2]
    assert lines[2].split()[-3:] == ["50", "%", "4"]
    assert lines[-2:] == [
        f"next: pcdlab report 03 -p bank={small.path.parent} -p documents=4",
        "or in Python: pcdlab.studies.runs.load_run('mine')",
    ]


def test_what_comes_next_is_of_this_run(call: Any, small: Bank, tmp_path: Path) -> None:
    """Notebook 03 has no parameter for a scorer; and a shell cuts at spaces."""
    folder = tmp_path / "a bank"
    save_bank(small, small, folder)
    assert f"-p 'bank={folder}'" in call(folder, "--out", "one").stdout
    for number, other in enumerate([("--scorer", "exact"), ("--backend", "mlx")]):
        told = call(folder, "--out", f"other{number}", *other).stdout
        assert "pcdlab report" not in told
        assert f"load_run('other{number}')" in told


def test_what_the_command_refuses(call: Any, small: Bank, tmp_path: Path) -> None:
    folder = small.path.parent
    (tmp_path / "s.json").write_text(json.dumps({"risk": {"type": "enum", "choices": ["LOW", "HIGH"]}}))
    for arguments, wanted in [
        (["nothing"], "there is no bank 'nothing'"),
        ([folder, "--baseline", "prompt"], "--baseline prompt"),
        ([folder, "--baseline", "grammar", "--mode", "grammar"], "leave one of the two out"),
        ([folder, "--schema", "s.json"], "labels outside the schema: field 'risk': \"MEDIUM\""),
    ]:
        result = call(*arguments)
        assert result.exit_code == 2
        assert wanted in " ".join(result.stderr.split())
    assert not (tmp_path / "reports").exists()


def test_ctrl_c_says_how_to_go_on(call: Any, small: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_rows", interrupt)
        result = call(small.path.parent, "--out", "mine")
    assert result.exit_code == 130
    assert "stopped; mine keeps what was decided: run the same command again to go on" in result.stderr
    assert not load_run("mine").finished
    assert call(small.path.parent, "--out", "mine").exit_code == 0
    assert load_run("mine").finished
