"""Scenarios on disk: a document, a schema and what they are about, in one JSON file.

Knows the preset file format and the presets folder of a checkout; what a schema is, `pcdlab.schema` knows. Refuses to
know models, prompts and labelled data.

A preset file is a JSON object in UTF-8::

    {
      "id": "spam_email",
      "title": "Spam triage",
      "description": "Decide what an inbound email is.",
      "context": "From: …",
      "schema": {"spam": {"type": "boolean", "description": "…"}},
      "samples": [{"title": "A newsletter", "context": "From: …"}],
      "constraints": [{"if": {"spam": true}, "then": {"action": ["DROP", "QUARANTINE"]}}]
    }

``schema`` may also be a JSON Schema. ``samples``, more documents for the same schema, and ``constraints`` between its fields
(see :mod:`pcdlab.constraints`) may be left out.
"""

from __future__ import annotations

import difflib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pcdlab.constraints import Constraint, constraints_from_json
from pcdlab.errors import PresetError
from pcdlab.schema import Schema, check_text, did_you_mean, json_type, located

__all__ = ["PRESETS_FOLDER", "Preset", "Sample", "list_presets", "load_preset", "save_preset"]

PRESETS_FOLDER = Path(__file__).parent.parent / "presets"
"""Where a checkout keeps its presets: next to the package."""

_REQUIRED = ("id", "title", "description", "context", "schema")
_KEYS = (*_REQUIRED, "samples", "constraints")
_SAMPLE_KEYS = ("title", "context")


@dataclass(frozen=True)
class Sample:
    """One more document for a preset's schema.

    Parameters
    ----------
    title : str
        A few words for a menu or a heading; not empty.
    context : str
        The document; not blank.

    Raises
    ------
    PresetError
        If either is not such a text.
    """

    title: str
    context: str

    def __post_init__(self) -> None:
        _check_text("title", self.title)
        _check_text("context", self.context)


@dataclass(frozen=True)
class Preset:
    """A scenario: one document, the schema to fill from it, and what it is about.

    Parameters
    ----------
    id : str
        Short name; not empty.
    title : str
        One line for people; not empty.
    description : str
        What the scenario shows; may be empty.
    context : str
        The document; not blank.
    schema : Schema
        What is asked of it.
    samples : sequence of Sample, default ()
        More documents for the same schema. Kept as a tuple.
    constraints : sequence of Constraint, default ()
        What must hold between its fields. Kept as a tuple.
    path : pathlib.Path or None, default None
        The file it was read from. Does not count when presets are compared.

    Raises
    ------
    PresetError
        If a parameter is outside its domain.

    Examples
    --------
    >>> schema = Schema.from_dict({"spam": {"type": "boolean"}})
    >>> Preset("mail", "Mail", "", "You have won!", schema).schema.names
    ('spam',)
    """

    id: str
    title: str
    description: str
    context: str
    schema: Schema
    samples: tuple[Sample, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    path: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_text("id", self.id)
        _check_text("title", self.title)
        _check_text("description", self.description, may_be_blank=True)
        _check_text("context", self.context)
        if not isinstance(self.schema, Schema):
            raise PresetError(f'"schema" is {json_type(self.schema)}; must be a Schema (Schema.of makes one)')
        if not isinstance(self.samples, tuple | list) or not all(isinstance(item, Sample) for item in self.samples):
            raise PresetError('"samples" must be a tuple or list of pcdlab.presets.Sample')
        object.__setattr__(self, "samples", tuple(self.samples))
        if not isinstance(self.constraints, tuple | list) or not all(
            isinstance(item, Constraint) for item in self.constraints
        ):
            raise PresetError('"constraints" must be a tuple or list of pcdlab.constraints.Constraint')
        with located('"constraints"'):  # that they fit the schema
            constraints_from_json([item.to_json() for item in self.constraints], self.schema)
        object.__setattr__(self, "constraints", tuple(self.constraints))


def list_presets() -> list[Path]:
    """Find the preset files of the checkout.

    Returns
    -------
    list of pathlib.Path
        The JSON files of `PRESETS_FOLDER`, by name; calibrations, which lie beside their preset, left out.

    Raises
    ------
    PresetError
        If there is no such folder, as when the package was installed without its checkout.
    """
    if not PRESETS_FOLDER.is_dir():
        raise PresetError(
            f"there is no presets folder at {PRESETS_FOLDER}; install pcdlab from a checkout (pip install -e .), "
            "or give the path of a preset file"
        )
    return sorted(path for path in PRESETS_FOLDER.glob("*.json") if not path.name.endswith(".calibration.json"))


def load_preset(path_or_name: str | os.PathLike[str]) -> Preset:
    """Read a preset file and check all of it.

    Parameters
    ----------
    path_or_name : str or path-like
        The path of a preset file. A bare name, without a folder or ``.json``, means that preset of the checkout.

    Returns
    -------
    Preset
        With `path` set.

    Raises
    ------
    PresetError
        If the file is missing, is not JSON in UTF-8 (a byte-order mark is fine), repeats a key, or does not have the
        shape of a preset.
    SchemaError
        If the preset's ``schema`` is not one. Either message begins with the path of the file.

    Examples
    --------
    >>> load_preset("spam_email").path.name  # doctest: +SKIP
    'spam_email.json'
    """
    name = os.fspath(path_or_name)
    is_path = name.endswith(".json") or Path(name).name != name
    path = Path(name) if is_path else _path_of(name)
    with located(str(path)):
        return _preset_from_json(_read_json(path), path)


def save_preset(preset: Preset, path: str | os.PathLike[str]) -> None:
    """Write a preset file, whole or not at all.

    The text goes to a temporary file in the same folder, which then takes the place of `path` in one step; if anything
    fails, an older file at `path` is as it was.

    Parameters
    ----------
    preset : Preset
        What to write. `load_preset` gives an equal preset back.
    path : str or path-like
        Where to; ends in ``.json``. Its folder must exist.

    Raises
    ------
    PresetError
        If `path` has another ending or cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise PresetError(f'{path}: a preset file ends in ".json"; rename it')
    text = json.dumps(_preset_to_json(preset), indent=2, ensure_ascii=False) + "\n"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the text is on disk before the name points at it
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise PresetError(f"{path}: cannot be written ({error.strerror}); check that its folder takes files") from error
    finally:
        temporary.unlink(missing_ok=True)  # still there only if something failed


# --- Reading --------------------------------------------------------------------------------------------------------


def _path_of(name: str) -> Path:
    known = {path.stem: path for path in list_presets()}
    if name not in known:
        raise PresetError(
            f"there is no preset {name!r} in {PRESETS_FOLDER}{did_you_mean(name, known)}; "
            f"its presets are {', '.join(known) or 'none'}"
        )
    return known[name]


def _read_json(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # -sig: some editors put a byte-order mark in front
    except FileNotFoundError:
        raise PresetError(f"there is no such file{_near(path)}; correct the path") from None
    except OSError as error:
        raise PresetError(f"cannot be read ({error.strerror}); give the path of a readable JSON file") from error
    except UnicodeDecodeError as error:
        raise PresetError(f"is not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    try:
        return json.loads(text, object_pairs_hook=_unrepeated)
    except json.JSONDecodeError as error:
        raise PresetError(
            f"line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}); correct the file there"
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of nested brackets
        raise PresetError(f"JSON beyond what Python reads ({error}); simplify the file") from error


def _near(path: Path) -> str:
    """Say which file may have been meant: one beside `path`, else a preset of the checkout."""
    beside = [item.name for item in path.parent.glob("*.json")]
    if near := difflib.get_close_matches(path.name, beside, n=3):
        return f" (near it: {', '.join(near)})"
    if (PRESETS_FOLDER / path.name).is_file():
        return f' (load_preset("{path.stem}") reads the preset of the checkout from any folder)'
    return ""


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing the repeated keys that `json` would silently merge."""
    built: dict[str, Any] = {}
    for key, value in pairs:
        if key in built:
            raise PresetError(f"key {key!r} appears twice in one object; rename or remove one")
        built[key] = value
    return built


def _preset_from_json(data: Any, path: Path) -> Preset:
    _check_keys("the preset", data, _REQUIRED, _KEYS)
    if not isinstance(data["schema"], Mapping):
        raise PresetError(f'"schema" is {json_type(data["schema"])}; must be an object of fields or a JSON Schema')
    samples = data.get("samples", [])
    if not isinstance(samples, list):
        raise PresetError(f'"samples" is {json_type(samples)}; must be an array of {{"title": …, "context": …}}')
    schema = Schema.of(data["schema"], source='"schema"')
    with located('"constraints"'):
        constraints = constraints_from_json(data.get("constraints", []), schema)
    return Preset(
        id=data["id"],
        title=data["title"],
        description=data["description"],
        context=data["context"],
        schema=schema,
        samples=tuple(_sample_from_json(number, item) for number, item in enumerate(samples, start=1)),
        constraints=constraints,
        path=path,
    )


def _sample_from_json(number: int, data: Any) -> Sample:
    with located(f'"samples", number {number}'):
        _check_keys("the sample", data, _SAMPLE_KEYS, _SAMPLE_KEYS)
        return Sample(data["title"], data["context"])


def _check_keys(what: str, data: Any, required: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping):
        raise PresetError(f"{what} is {json_type(data)}; must be an object with the keys {', '.join(required)}")
    for key in data:
        if key not in allowed:
            raise PresetError(f"unknown key {key!r}{did_you_mean(key, allowed)}; the keys are {', '.join(allowed)}")
    if missing := [key for key in required if key not in data]:
        raise PresetError(f"{what} lacks {', '.join(map(repr, missing))}; add it")


def _check_text(key: str, text: object, may_be_blank: bool = False) -> None:
    check_text(f'"{key}"', text, PresetError)
    if not may_be_blank and not str(text).strip():
        raise PresetError(f'"{key}" is empty; fill it in')


# --- Writing --------------------------------------------------------------------------------------------------------


def _preset_to_json(preset: Preset) -> dict[str, Any]:
    data: dict[str, Any] = {key: getattr(preset, key) for key in ("id", "title", "description", "context")}
    data["schema"] = preset.schema.to_dict()
    if preset.samples:
        data["samples"] = [{"title": sample.title, "context": sample.context} for sample in preset.samples]
    if preset.constraints:
        data["constraints"] = [item.to_json() for item in preset.constraints]
    return data
