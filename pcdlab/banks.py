"""Labelled data: documents, their right labels, and the schema these labels belong to.

Knows the bank format and where banks lie. Refuses to know where the data come from, models and decisions.

A bank is a folder with two files in UTF-8. ``bank.json``::

    {"id": "…", "title": "…", "description": "…", "synthetic": true, "licence": "…", "citation": "…", "schema": {…}}

with the schema as in a preset, and ``documents.jsonl``, one document a line::

    {"id": "d1", "text": "…", "gold": {"spam": true, "category": null}, "note": "…"}

A field that is missing in ``gold`` was not labelled. ``null`` says that somebody looked and no label of the field is right (the
document is out of scope), unless null is itself a label. ``note`` may be left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pydantic

from pcdlab.errors import BankError, ParameterError
from pcdlab.models import cache_dir
from pcdlab.schema import Field, Schema, did_you_mean

__all__ = [
    "SHIPPED",
    "Bank",
    "Document",
    "banks_folder",
    "list_banks",
    "load_bank",
    "save_bank",
]

SHIPPED = ("goods", "talks", "tickets")
"""Banks written for this project and committed with it."""

_CHECKOUT = Path(__file__).parent.parent
_LISTED = 12  # labels of one field that an error message spells out


class Document(pydantic.BaseModel):
    """One labelled document.

    Attributes
    ----------
    id : str
        Unique in its bank.
    text : str
    gold : dict of str to label
        Field → the right label; None for a field none of whose labels is right. Other fields were not labelled.
    note : str
        What a reader should know about the labels.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = pydantic.Field(min_length=1)
    text: str
    gold: dict[str, str | bool | int | float | None]
    note: str = ""


class _About(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    id: str = pydantic.Field(pattern=r"^[\w.-]+$")
    title: str
    description: str
    synthetic: bool
    licence: str
    citation: str
    fields: dict[str, Any] = pydantic.Field(alias="schema")


@dataclass(frozen=True)
class Bank:
    """Documents with gold labels. Iterating reads them from disk one by one; `len` counts them.

    Attributes
    ----------
    id, title, description : str
    synthetic : bool
        Whether the documents were written for the purpose, rather than collected.
    licence, citation : str
        Of the documents and their labels.
    schema : Schema
        What is asked of the documents.
    path : pathlib.Path
        The file with the documents.
    limit : int or None
        Only this many documents, from the first.
    """

    id: str
    title: str
    description: str
    synthetic: bool
    licence: str
    citation: str
    schema: Schema
    path: Path = field(compare=False)
    limit: int | None = None

    def __iter__(self) -> Iterator[Document]:
        return islice(_documents(self.path), self.limit)

    def __len__(self) -> int:
        return self._summary[0]

    @property
    def sha256(self) -> str:
        """Digest of ids, texts and gold labels in order; notes and layout of the file do not count."""
        return self._summary[1]

    @cached_property
    def _summary(self) -> tuple[int, str]:
        digest, count = hashlib.sha256(), 0
        for count, item in enumerate(self, start=1):  # noqa: B007
            line = json.dumps([item.id, item.text, item.gold], ensure_ascii=False, sort_keys=True)
            digest.update(line.encode() + b"\n")
        return count, digest.hexdigest()

    def first(self, limit: int) -> Bank:
        """Return the bank of the first `limit` documents.

        Raises
        ------
        ParameterError
            If `limit` is not positive.
        """
        if limit < 1:
            raise ParameterError(f"limit={limit} is no positive number of documents")
        return replace(self, limit=limit)

    def asking(self, schema: Schema | Mapping[str, Any] | type) -> Bank:
        """Return the same documents under another schema; gold labels of fields it lacks no longer count.

        Raises
        ------
        BankError
            If gold labels of one of its fields are outside that field's labels.
        """
        bank = replace(self, schema=Schema.of(schema))
        _check_labels(bank, unknown_fields=False)
        return bank


# --- Reading and writing --------------------------------------------------------------------------------------------


def banks_folder() -> Path:
    """Return where banks lie: ``data/`` of a checkout; else, where pcdlab was installed without one, in the cache."""
    return _CHECKOUT / "data" if (_CHECKOUT / "pyproject.toml").is_file() else cache_dir() / "data"


def list_banks() -> list[Path]:
    """Return the folders of the banks that are here, by name."""
    return sorted(path.parent for path in banks_folder().glob("*/bank.json"))


def load_bank(name: str | os.PathLike[str]) -> Bank:
    """Read a bank and check all of it.

    Parameters
    ----------
    name : str or path-like
        A name of :func:`list_banks`, or a bank's folder.

    Returns
    -------
    Bank

    Raises
    ------
    BankError
        If there is no such bank, a file does not have a bank's shape, two documents share an id, or gold labels are
        outside the schema; the message lists them.
    SchemaError
        If ``bank.json`` has no valid schema.
    """
    folder = Path(name)
    if not (folder / "bank.json").is_file():
        folder = banks_folder() / name
    if not (folder / "bank.json").is_file():
        here = [path.name for path in list_banks()]
        raise BankError(
            f"there is no bank {os.fspath(name)!r}{did_you_mean(os.fspath(name), here)}; here are {', '.join(here) or 'none'}. "
            "`pcdlab data list` names those that can be fetched; or give a bank's folder"
        )
    about_path = folder / "bank.json"
    try:
        about = _About.model_validate_json(about_path.read_bytes())
    except pydantic.ValidationError as error:
        raise BankError(f"{about_path}: {_faults(error)}; a bank has {', '.join(_keys())}") from None
    keys = about.model_dump(exclude={"fields"})
    bank = Bank(**keys, schema=Schema.of(about.fields, source=f"{about_path}: schema"), path=folder / "documents.jsonl")
    _check_labels(bank, unknown_fields=True)
    return bank


def save_bank(bank: Bank, documents: Iterable[Document], folder: str | os.PathLike[str]) -> Bank:
    """Write a bank, whole or not at all; one that was there is replaced.

    Parameters
    ----------
    bank : Bank
        What ``bank.json`` says; its own documents are not read.
    documents : iterable of Document
    folder : str or path-like

    Returns
    -------
    Bank
        As read back.

    Raises
    ------
    BankError
        If the documents do not fit the schema, or `folder` holds something else than a bank.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "bank.json").is_file():
        raise BankError(f"{folder} exists and is no bank; give another name, or remove it")
    about = {key: getattr(bank, key) for key in _keys()} | {"schema": bank.schema.to_dict()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as temporary:
        fresh = Path(temporary) / folder.name
        fresh.mkdir()
        with (fresh / "documents.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for item in documents:
                line = item.model_dump(exclude_defaults=True)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        text = json.dumps(about, ensure_ascii=False, indent=2) + "\n"
        (fresh / "bank.json").write_text(text, encoding="utf-8", newline="\n")
        try:
            load_bank(fresh)
        except BankError as error:  # the user knows nothing of that place
            raise BankError(str(error).replace(str(fresh / "documents.jsonl"), f"bank {folder.name!r}")) from None
        if folder.exists():
            os.replace(folder, Path(temporary) / "old")
        os.replace(fresh, folder)
    return load_bank(folder)


def _keys() -> list[str]:
    return [item.alias or name for name, item in _About.model_fields.items()]


def _faults(error: pydantic.ValidationError) -> str:
    """Say in one line what pydantic found."""
    found = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ") for fault in error.errors()]
    return "; ".join(found)


def _documents(path: Path) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield Document.model_validate_json(line)
                except pydantic.ValidationError as error:
                    wanted = '{"id": …, "text": …, "gold": {field: label}}'
                    raise BankError(f"{path}: line {number}: {_faults(error)}; a document is {wanted}") from None
    except OSError as error:
        raise BankError(
            f"{path}: cannot be read ({error.strerror}); a bank has bank.json and documents.jsonl"
        ) from None


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else "")


def _check_labels(bank: Bank, unknown_fields: bool) -> None:
    """Refuse repeated ids and gold that is outside the schema; where asked, also gold of fields it does not have."""
    labels = {item.name: [Field.json(label) for label in item.labels] for item in bank.schema}
    outside: dict[str, Counter[str]] = {}
    ids: set[str] = set()
    for item in bank:
        if item.id in ids:
            raise BankError(f"{bank.path}: two documents have the id {item.id!r}; rename one")
        ids.add(item.id)
        for name, value in item.gold.items():
            text = Field.json(value)
            if name not in labels:
                if unknown_fields:
                    known = ", ".join(labels)
                    raise BankError(
                        f"{bank.path}: document {item.id!r}: gold for {name!r}, which is no field of {known}"
                    )
            elif text not in labels[name] and value is not None:
                outside.setdefault(name, Counter())[text] += 1
    if not ids:
        raise BankError(f"{bank.path}: holds no documents; add one JSON object a line")
    if outside:
        found = "; ".join(
            f"field {name!r}: {_some([f'{text} ({count} ×)' for text, count in counts.most_common()])} where it has "
            f"{_some(labels[name])}"
            for name, counts in outside.items()
        )
        raise BankError(f"{bank.path}: labels outside the schema: {found}; correct them, or add them to the schema")
