"""Preset files: what loads, what is refused and how the refusal reads, and that saving is all or nothing."""

from __future__ import annotations

import doctest
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pcdlab.presets
from pcdlab.errors import PresetError, SchemaError
from pcdlab.presets import Preset, Sample, list_presets, load_preset, save_preset
from pcdlab.schema import Schema

SCHEMA = Schema.from_dict({"spam": {"type": "boolean"}, "risk": {"type": "enum", "choices": ["LOW", "HIGH"]}})
PRESET = Preset("mail", "Mail triage", "What is it?", "You have won 🦜!", SCHEMA, (Sample("Dull", "Hello."),))
UPSTREAM = Path(__file__).parent.parent.parent / "shared" / "presets-upstream"


def data(**changes: Any) -> dict[str, Any]:
    """A preset file's content; a change to ... drops the key."""
    full = {
        "id": "mail",
        "title": "Mail triage",
        "description": "What is it?",
        "context": "You have won!",
        "schema": {"spam": {"type": "boolean"}},
        **changes,
    }
    return {key: value for key, value in full.items() if value is not ...}


def written(folder: Path, content: Any, name: str = "mail.json") -> Path:
    """A file holding `content`: bytes and text as they are, the rest as JSON."""
    path = folder / name
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A presets folder of our own in place of the checkout's."""
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(pcdlab.presets, "PRESETS_FOLDER", folder)
    for name in ("spam_email", "code_security"):
        save_preset(PRESET, folder / f"{name}.json")
    return folder


# --- Reading --------------------------------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    path = written(tmp_path, data(samples=[{"title": "Dull", "context": "Hello."}]))
    preset = load_preset(path)
    assert (preset.id, preset.title, preset.description, preset.context) == (
        "mail", "Mail triage", "What is it?", "You have won!",
    )  # fmt: skip
    assert preset.schema.names == ("spam",)
    assert preset.samples == (Sample("Dull", "Hello."),)
    assert preset.path == path
    assert load_preset(str(path)) == preset


def test_schema_may_be_a_json_schema(tmp_path: Path) -> None:
    path = written(tmp_path, data(schema={"type": "object", "properties": {"spam": {"type": "boolean"}}}))
    assert load_preset(path) == load_preset(written(tmp_path, data(), "other.json"))


def test_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert load_preset(written(tmp_path, b"\xef\xbb\xbf" + json.dumps(data()).encode())).id == "mail"


def test_names_look_in_the_checkout_and_paths_do_not(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_presets() == [checkout / "code_security.json", checkout / "spam_email.json"]
    assert load_preset("spam_email").path == checkout / "spam_email.json"
    monkeypatch.chdir(checkout.parent)
    assert load_preset("presets/spam_email.json").path == Path("presets/spam_email.json")
    with pytest.raises(PresetError, match=r'^spam_email.json: there is no such file.*load_preset\("spam_email"\)'):
        load_preset("spam_email.json")


def test_unknown_name_and_missing_file_name_their_neighbours(checkout: Path) -> None:
    with pytest.raises(PresetError, match=r"'spam_mail'.*did you mean 'spam_email'.*code_security, spam_email"):
        load_preset("spam_mail")
    with pytest.raises(PresetError, match=r"spam_mail.json: there is no such file.*near it: spam_email.json.*correct"):
        load_preset(checkout / "spam_mail.json")
    with pytest.raises(PresetError, match=r"no such file; correct the path"):
        load_preset(checkout / "nowhere" / "unlike.json")


def test_absent_presets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcdlab.presets, "PRESETS_FOLDER", tmp_path / "presets")
    for call in (list_presets, lambda: load_preset("spam_email")):
        with pytest.raises(PresetError, match=r"no presets folder at .*presets; install pcdlab from a checkout"):
            call()


def test_a_folder_is_not_a_preset(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=r"cannot be read .*readable JSON file"):
        load_preset(tmp_path)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"id": "a",\n "title": }', ["line 2, column 11", "not valid JSON"]),
        ("", ["line 1, column 1", "not valid JSON"]),
        ("caf\u00e9".encode("latin-1"), ["not UTF-8", "byte 3", "save the file as UTF-8"]),
        ('{"id": "a", "id": "b"}', ["'id' appears twice", "rename or remove"]),
        ('{"schema": {"spam": {"type": "boolean"}, "spam": {"type": "boolean"}}}', ["'spam' appears twice"]),
        ("[" * 200_000, ["beyond what Python reads", "simplify"]),
        ('{"id": ' + "1" * 5000 + "}", ["beyond what Python reads", "simplify"]),
        ([], ["preset is array", "must be an object", "id, title"]),
        (data(context=...), ["lacks 'context'", "add it"]),
        (data(id=..., schema=...), ["lacks 'id', 'schema'"]),
        (data(contxt="x"), ["unknown key 'contxt'", "did you mean 'context'", "samples"]),
        (data(answers=[]), ["unknown key 'answers'", "the keys are id"]),
        (data(id=3), ['"id" is integer', "must be a string"]),
        (data(id=" "), ['"id" is empty', "fill it in"]),
        (data(title=None), ['"title" is null']),
        (data(description=[]), ['"description" is array']),
        (data(context=""), ['"context" is empty', "fill it in"]),
        (data(context=" \n"), ['"context" is empty']),
        (data(context="a\ud800"), ['"context" has half of a surrogate pair', "index 1", "replace it"]),
        (data(schema=[]), ['"schema" is array', "JSON Schema"]),
        (data(samples={}), ['"samples" is object', "array"]),
        (data(samples=["x"]), ['"samples", number 1', "is string", "title, context"]),
        (data(samples=[{"title": "A", "context": "B"}, {"title": "A"}]), ['"samples", number 2', "lacks 'context'"]),
        (data(samples=[{"title": "A", "contxt": "B"}]), ["number 1", "'contxt'", "did you mean 'context'"]),
        (data(samples=[{"title": "A", "context": ""}]), ["number 1", '"context" is empty']),
    ],
)
def test_refused_files(tmp_path: Path, content: Any, parts: list[str]) -> None:
    path = written(tmp_path, content)
    with pytest.raises(PresetError) as caught:
        load_preset(path)
    assert str(caught.value).startswith(f"{path}: ")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({}, ["no fields"]),
        ({"f": {"type": "enum", "choices": ["a", "a"]}}, ["field 'f'", '"a" is listed twice']),
        ({"f": {"type": "enum", "choices": [float("nan")]}}, ["field 'f'", "nan"]),
        ({"type": "object", "properties": {"f": {"type": "string"}}}, ["property 'f'", 'open "string"']),
    ],
)
def test_schema_errors_name_the_file(tmp_path: Path, schema: Any, parts: list[str]) -> None:
    path = written(tmp_path, data(schema=schema))
    with pytest.raises(SchemaError) as caught:
        load_preset(path)
    assert str(caught.value).startswith(f'{path}: "schema": ')
    for part in parts:
        assert part in str(caught.value)


def test_refused_arguments() -> None:
    with pytest.raises(PresetError, match=r'"schema" is object; must be a Schema'):
        Preset("a", "a", "", "a", {"spam": {"type": "boolean"}})  # type: ignore[arg-type]
    with pytest.raises(PresetError, match=r'"samples" must be .*Sample'):
        Preset("a", "a", "", "a", SCHEMA, ("text",))  # type: ignore[arg-type]


def test_public_presets_run_unchanged(tmp_path: Path) -> None:
    paths = sorted(UPSTREAM.glob("*.json"))
    if not paths:
        pytest.skip("the public preset files are not here")
    for path in paths:
        preset = load_preset(path)
        original = json.loads(path.read_text(encoding="utf-8"))
        assert preset.schema.to_dict() == original["schema"]
        assert preset.context == original["context"]
        save_preset(preset, tmp_path / path.name)
        assert json.loads((tmp_path / path.name).read_text(encoding="utf-8")) == original


def test_the_checkouts_own_presets_load() -> None:
    if not pcdlab.presets.PRESETS_FOLDER.is_dir():
        pytest.skip("no presets folder yet")
    for path in list_presets():
        assert load_preset(path.stem).path == path


# --- Writing --------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
filled = texts.filter(str.strip)
choices = st.lists(filled | st.booleans() | st.none() | st.integers(), min_size=1, max_size=4, unique_by=json.dumps)
schemas = st.dictionaries(
    texts.filter(bool),
    st.builds(lambda c, d: {"type": "enum", "choices": c, "description": d}, choices, texts),
    min_size=1,
).map(Schema.from_dict)
samples = st.lists(st.builds(Sample, filled, filled), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.builds(Preset, filled, filled, texts, filled, schemas, samples))
def test_round_trip(preset: Preset) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "preset.json"
        save_preset(preset, path)
        assert load_preset(path) == preset
        assert os.listdir(folder) == ["preset.json"]


def test_saved_text_is_for_people(tmp_path: Path) -> None:
    save_preset(PRESET, tmp_path / "a.json")
    text = (tmp_path / "a.json").read_bytes()
    assert "🦜".encode() in text
    assert text.startswith(b'{\n  "id": "mail",\n')
    assert text.endswith(b"\n}\n")
    assert b"\r" not in text


def test_saving_over_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = written(tmp_path, data())
    path.chmod(0o640)
    save_preset(PRESET, path)
    assert load_preset(path) == PRESET
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    path = written(tmp_path, data())
    before = path.read_bytes()
    monkeypatch.setattr(os, step, fail)
    expected = PresetError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        save_preset(PRESET, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["mail.json"]
    if expected is PresetError:
        assert str(path) in str(caught.value)
        assert "No space left on device" in str(caught.value)
    with pytest.raises(expected):
        save_preset(PRESET, tmp_path / "new.json")
    assert os.listdir(tmp_path) == ["mail.json"]


def test_refused_destinations(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=r'a.txt: a preset file ends in ".json"'):
        save_preset(PRESET, tmp_path / "a.txt")
    with pytest.raises(PresetError, match=r"nowhere.a.json: cannot be written .*check that its folder"):
        save_preset(PRESET, tmp_path / "nowhere" / "a.json")
    assert os.listdir(tmp_path) == []


def test_documented_examples_run() -> None:
    assert doctest.testmod(pcdlab.presets).failed == 0
