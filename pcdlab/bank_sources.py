"""Where banks come from: four public data sets, fetched or from files, and a table of one's own.

Each source knows the shape of its files and turns them into documents and a schema; the bank format is
:mod:`pcdlab.banks`'s concern. The network is used by :func:`get_bank` alone.
"""

from __future__ import annotations

import csv
import hashlib
import html.parser
import io
import json
import os
import re
import shutil
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pcdlab.banks import SHIPPED, Bank, Document, banks_folder, save_bank
from pcdlab.errors import BankError, ParameterError
from pcdlab.presets import load_preset
from pcdlab.schema import Field, Label, Schema, did_you_mean, located

__all__ = ["SOURCES", "Content", "Source", "get_bank", "html_to_text", "import_bank", "import_table"]

# --- Sources --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What a source's files hold.

    Attributes
    ----------
    schema : Schema
    documents : list of Document
    description : str
    variant : str
        Part of the bank's name where it is not the usual part of the source; else empty.
    """

    schema: Schema
    documents: list[Document]
    description: str
    variant: str = ""


@dataclass(frozen=True)
class Source:
    """A public data set that becomes a bank.

    Attributes
    ----------
    title, licence, citation : str
    files : str
        What its files are, for people.
    options : tuple of str
        Names of the options it takes.
    urls : callable
        Options → file name → address.
    read : callable
        Paths and options → :class:`Content`.
    """

    title: str
    licence: str
    citation: str
    files: str
    options: tuple[str, ...]
    urls: Callable[..., dict[str, str]]
    read: Callable[..., Content]


def get_bank(kind: str, name: str | None = None, replace: bool = False, **options: Any) -> Bank:
    """Fetch a public data set into a bank.

    Parameters
    ----------
    kind : str
        One of :data:`SOURCES`.
    name : str, optional
        The bank's name; by default the source's.
    replace : bool
        Write it in the place of a bank of the same name, should there be one.
    **options
        ``event`` and ``count`` for devoxx, ``split`` for banking77 and clinc150, ``domain`` for nlupp.

    Returns
    -------
    Bank

    Raises
    ------
    BankError
        If a file cannot be fetched; the message says what to do without a network.
    ParameterError
        For an unknown source or option, or a name that a bank has already.
    """
    source = _source(kind, options)
    with tempfile.TemporaryDirectory() as temporary:
        for file, url in source.urls(**options).items():
            try:
                _download(url, Path(temporary) / file)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                raise BankError(
                    f"{url} cannot be fetched ({reason}). Without a network, bring the files by other means ({source.files}) "
                    f"and run: pcdlab data import {kind} FILES_OR_FOLDER"
                ) from None
        return import_bank(kind, [temporary], name, replace, **options)


def import_bank(
    kind: str,
    paths: Sequence[str | os.PathLike[str]],
    name: str | None = None,
    replace: bool = False,
    **options: Any,
) -> Bank:
    """Make a bank of a public data set's files.

    Parameters
    ----------
    kind : str
        One of :data:`SOURCES`.
    paths : sequence of path-like
        The files, or folders with them.
    name : str, optional
        The bank's name; by default the source's.
    replace, **options
        As for :func:`get_bank`.

    Returns
    -------
    Bank
        Written below :func:`banks_folder`.

    Raises
    ------
    BankError
        If files are missing or have another shape.
    ParameterError
        For an unknown source or option, or a name that a bank has already.
    """
    source = _source(kind, options)
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise BankError(f"there is no file {', '.join(missing)}; {kind} takes {source.files}")
    try:
        content = source.read(files, **options)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BankError(f"{kind}: the files do not have the expected shape ({error!r}); give {source.files}") from error
    about = Bank(
        id=name or kind + content.variant,
        title=source.title,
        description=content.description,
        synthetic=False,
        licence=source.licence,
        citation=source.citation,
        schema=content.schema,
        path=Path(),
    )
    return save_bank(about, content.documents, _target(about.id, replace))


def _source(kind: str, options: Mapping[str, Any]) -> Source:
    if kind not in SOURCES:
        raise ParameterError(f"source {kind!r} is unknown{did_you_mean(kind, SOURCES)}; choose {', '.join(SOURCES)}")
    for option in options:
        if option not in SOURCES[kind].options:
            raise ParameterError(f"{kind} has no option {option!r}; it has {', '.join(SOURCES[kind].options)}")
    return SOURCES[kind]


def _target(name: str, replace: bool) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ParameterError(f"name {name!r}: a bank's name is made of letters, digits, '.', '_' and '-'")
    if name in SHIPPED:
        raise ParameterError(f"name {name!r} is taken by a bank of this project; give another one")
    folder = banks_folder() / name
    if (folder / "bank.json").is_file() and not replace:
        raise ParameterError(
            f"name {name!r} is taken by the bank in {folder}; give another one, or replace that bank (--replace, in Python "
            "replace=True)"
        )
    return folder


def _download(url: str, path: Path) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "pcdlab"})
    with urllib.request.urlopen(request, timeout=60) as answer, path.open("wb") as file:
        shutil.copyfileobj(answer, file)


def _records(path: Path) -> list[Any]:
    """Read the rows of a JSON array, JSON Lines, CSV (every cell text) or Parquet."""
    if path.suffix == ".parquet":
        try:
            import pandas as pd

            return pd.read_parquet(path).to_dict("records")
        except ImportError:
            raise BankError(
                f"{path}: Parquet needs a package more: pip install pyarrow; or save the table as CSV"
            ) from None
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise BankError(f"{path}: cannot be read as Parquet ({error})") from None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BankError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None
    except UnicodeDecodeError as error:
        raise BankError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if path.suffix == ".csv":
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            rows = list(table)
        except csv.Error as error:
            raise BankError(
                f"{path}: line {table.reader.line_num}: not valid CSV ({error}); correct the file there"
            ) from None
        heading = (table.fieldnames or [""])[0]
        if len(table.fieldnames or ()) == 1 and (other := next((mark for mark in ";\t|" if mark in heading), None)):
            raise BankError(
                f"{path}: the heading is one cell, {heading!r}, as if {other!r} stood between columns; save the table with commas"
            )
        if odd := next((n for n, row in enumerate(rows, 1) if None in row or None in row.values()), None):
            raise BankError(f"{path}: row {odd} below the heading has more or fewer cells than it; correct the file")
        return rows
    if path.suffix not in (".json", ".jsonl"):
        raise BankError(f"{path}: unknown kind of table; give .csv, .json, .jsonl or .parquet")
    # Not splitlines: U+2028 and its like end no line of JSON.
    if path.suffix == ".jsonl":
        return [_parsed(path, line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return _parsed(path, text, 1)


def _parsed(path: Path, text: str, line: int) -> Any:
    """Parse JSON that begins on a line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}: line {line + error.lineno - 1}, column {error.colno}"
        raise BankError(f"{where}: not valid JSON ({error.msg}); correct the file there") from None
    except (ValueError, RecursionError) as error:  # a number with more digits, or brackets deeper, than Python takes
        raise BankError(f"{path}: line {line}: not valid JSON ({error}); correct the file") from None


def _shuffled(documents: Iterable[Document]) -> list[Document]:
    """Put documents that are sorted by label into an order that says nothing, the same everywhere: the first n are a sample."""
    return sorted(documents, key=lambda item: hashlib.sha256(item.id.encode()).digest())


class _Text(html.parser.HTMLParser):
    HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
    BLOCKS = (
        *HEADINGS,
        "article",
        "blockquote",
        "br",
        "div",
        "hr",
        "li",
        "ol",
        "p",
        "pre",
        "section",
        "table",
        "tr",
        "ul",
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style")
        if tag in self.BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n" if tag in ("br", "tr") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self.hidden = max(0, self.hidden - 1)
        if tag in self.BLOCKS and tag not in ("li", "br", "tr"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def html_to_text(source: str) -> str:
    r"""Write HTML as plain text: blocks as paragraphs, items of lists behind a dash, entities as characters.

    Parameters
    ----------
    source : str
        HTML, well-formed or not.

    Returns
    -------
    str

    Examples
    --------
    >>> html_to_text("<p>Fast&nbsp;&amp; <b>safe</b>.</p><ul><li>one</li><li>two</li></ul>")
    'Fast & safe.\n\n- one\n- two'
    """
    parser = _Text()
    parser.feed(source)
    parser.close()
    lines = [re.sub(r"[ \xa0]+", " ", line).strip() for line in "".join(parser.parts).split("\n")]
    text = re.sub(r"(?m)^-\n+", "- ", "\n".join(lines))  # an item whose text is a paragraph
    return re.sub(r"\n{3,}", "\n\n", text).strip()


# --- Devoxx: talks of a conference ----------------------------------------------------------------------------------

_SHORTEST = 200  # characters of an abstract that says something


def _devoxx_urls(event: str = "dvbe26", count: int = 100) -> dict[str, str]:
    if not re.fullmatch(r"[a-z0-9-]+", event):
        raise ParameterError(
            f"event={event!r} is no event of the CFP site; give the name in its address, such as dvbe26"
        )
    address = f"https://{event}.cfp.dev/api/public"
    return {"talks.json": f"{address}/talks", "tracks.json": f"{address}/tracks"}


def _devoxx(files: Sequence[Path], event: str = "dvbe26", count: int = 100) -> Content:
    """Talk objects of the CFP API, or flat ones: id, title, abstract, track, session_format, audience_level."""
    if count < 1:
        raise ParameterError(f"count={count} is no positive number of talks")
    schema = load_preset("talk_routing").schema
    tracks = [item["name"] for path in files if path.stem == "tracks" for item in _records(path)]
    if tracks and set(tracks) != set(schema["track"].labels):
        fields = [replace(item, labels=tuple(tracks)) if item.name == "track" else item for item in schema]
        schema = Schema(tuple(fields))
    found: list[tuple[int, Document]] = []
    for talk in (talk for path in files if path.stem != "tracks" for talk in _records(path)):
        abstract = talk["abstract"] if "abstract" in talk else html_to_text(talk.get("description") or "")
        gold = {
            "track": _name(talk.get("track")),
            "session_format": _name(talk.get("session_format", talk.get("sessionType"))),
            "audience_level": talk.get("audience_level", talk.get("audienceLevel")),
        }
        gold = {name: value for name, value in gold.items() if value in schema[name].labels}
        if "track" in gold and "session_format" in gold and len(abstract) >= _SHORTEST:
            text = f"Title: {talk['title'].strip()}\n\nAbstract: {abstract}"
            found.append((talk.get("totalFavourites") or 0, Document(id=str(talk["id"]), text=text, gold=gold)))
    found.sort(key=lambda item: -item[0])  # keeps the order among equals
    documents = [item for _, item in found[:count]]
    description = (
        f"Talks of the conference {event} with the track, format and level its organisers filed them under, most favourites "
        f"first. Taken are talks of a known track and format with an abstract of {_SHORTEST} characters or more."
    )
    return Content(schema, documents, description, "" if event == "dvbe26" else f"-{event}")


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, Mapping) else value


# --- Banking77 and CLINC150: one intent -----------------------------------------------------------------------------

_POLYAI = "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/master"
_CLINC = "https://raw.githubusercontent.com/clinc/oos-eval/master/data"


def _banking77_urls(split: str = "test") -> dict[str, str]:
    return {file: f"{_POLYAI}/banking_data/{file}" for file in (f"{split}.csv", "categories.json")}


def _banking77(files: Sequence[Path], split: str | None = None) -> Content:
    labels = _records(_one(files, "categories.json"))
    splits = {
        path.stem: [(r["text"], r["category"]) for r in _records(path)] for path in files if path.suffix == ".csv"
    }
    split = _split(splits, split)
    schema = Schema((Field("intent", tuple(labels), "What the customer of an online bank wants or asks about"),))
    description = (
        f"Queries of an online bank's customers, one of {len(labels)} intents each ({split} split), in random order."
    )
    return Content(schema, _intents(split, splits[split]), description)


def _clinc150_urls(split: str = "test") -> dict[str, str]:
    return {"data_full.json": f"{_CLINC}/data_full.json"}


def _clinc150(files: Sequence[Path], split: str | None = None) -> Content:
    splits: dict[str, list[tuple[str, str]]] = {}
    labels: list[str] = []
    for path in files:
        if path.name == "domains.json":
            domains: Any = _records(path)
            labels = [label for domain in domains.values() for label in domain]
        else:
            parts: Any = _records(path)
            if path.suffix == ".csv":
                parts = {path.stem: [(row["text"], row["intent"]) for row in parts]}
            for part, rows in parts.items():
                splits.setdefault(part.removeprefix("oos_"), []).extend((text, label) for text, label in rows)
    split = _split(splits, split)
    labels = labels or [label for rows in splits.values() for _, label in rows if label != "oos"]
    # Sorted, so that the schema does not depend on which of the files are there.
    schema = Schema((Field("intent", tuple(sorted(set(labels))), "What the user wants from the voice assistant"),))
    description = (
        f"Queries to a voice assistant, one of {len(set(labels))} intents each, and queries that are out of scope: there no "
        f"intent is right and the gold label is null ({split} split, in random order)."
    )
    return Content(schema, _intents(split, splits[split]), description)


def _intents(split: str, rows: Sequence[tuple[str, str]]) -> list[Document]:
    return _shuffled(
        Document(id=f"{split}-{number}", text=text, gold={"intent": None}, note="out of scope")
        if label == "oos"
        else Document(id=f"{split}-{number}", text=text, gold={"intent": label})
        for number, (text, label) in enumerate(rows)
    )


def _split(splits: Mapping[str, Any], wanted: str | None) -> str:
    """Choose a split: the one asked for, else test, else the only one."""
    choice = wanted or ("test" if "test" in splits or len(splits) != 1 else next(iter(splits)))
    if choice not in splits:
        raise BankError(
            f"the files have no split {choice!r}; they have {', '.join(splits) or 'none'}: choose with split"
        )
    return choice


def _one(files: Sequence[Path], name: str) -> Path:
    for path in files:
        if path.name == name:
            return path
    raise BankError(f"{name} is missing among the files ({', '.join(path.name for path in files)}); add it")


# --- NLU++: many yes/no intents -------------------------------------------------------------------------------------


def _nlupp_urls(domain: str = "banking") -> dict[str, str]:
    folds = {f"fold{n}.json": f"{_POLYAI}/nlupp/data/{domain}/fold{n}.json" for n in range(20)}
    return {"ontology.json": f"{_POLYAI}/nlupp/data/ontology.json", **folds}


def _nlupp(files: Sequence[Path], domain: str = "banking") -> Content:
    """Fold files, or all folds in one file with their number in each line."""
    ontology: Any = _records(_one(files, "ontology.json"))
    asked = {
        name: intent["description"]
        for name, intent in ontology["intents"].items()
        if not {"general", domain}.isdisjoint(intent["domain"])
    }
    if not any(domain in intent["domain"] for intent in ontology["intents"].values()):
        raise ParameterError(f"domain={domain!r} is not in the ontology; choose banking or hotels")
    schema = Schema(tuple(Field(name, (True, False), question) for name, question in asked.items()))
    documents: list[Document] = []
    numbers: Counter[str] = Counter()
    for path in files:
        for item in [] if path.name == "ontology.json" else _records(path):
            fold = f"fold{item['fold']}" if "fold" in item else path.stem
            present = item.get("intents", [])
            # An intent of another domain becomes gold of an unknown field, which the check of the bank reports.
            gold: dict[str, Label] = {name: name in present for name in asked} | dict.fromkeys(
                set(present) - set(asked), True
            )
            documents.append(Document(id=f"{fold}-{numbers[fold]}", text=item["text"], gold=gold))
            numbers[fold] += 1
    description = f"Queries in the {domain} domain, {len(asked)} yes/no intents each, in random order."
    return Content(schema, _shuffled(documents), description, "" if domain == "banking" else f"-{domain}")


SOURCES: dict[str, Source] = {
    "devoxx": Source(
        "Talks of Devoxx",
        "The texts belong to their speakers. For local use only; do not pass them on.",
        "Devoxx call for papers, public API, https://dvbe26.cfp.dev/api/public/talks",
        "the answers of …cfp.dev/api/public/talks and …/tracks as talks.json and tracks.json",
        ("event", "count"),
        _devoxx_urls,
        _devoxx,
    ),
    "banking77": Source(
        "Banking77",
        "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/)",
        "I. Casanueva, T. Temčinas, D. Gerz, M. Henderson, I. Vulić (2020). Efficient Intent Detection with Dual Sentence "
        "Encoders. Proceedings of the 2nd Workshop on NLP for Conversational AI. https://github.com/PolyAI-LDN/"
        "task-specific-datasets",
        "test.csv or train.csv, and categories.json, of banking_data/ in github.com/PolyAI-LDN/task-specific-datasets",
        ("split",),
        _banking77_urls,
        _banking77,
    ),
    "clinc150": Source(
        "CLINC150",
        "CC BY 3.0 (https://creativecommons.org/licenses/by/3.0/)",
        "S. Larson, A. Mahendran, J. J. Peper, C. Clarke, A. Lee, P. Hill, J. K. Kummerfeld, K. Leach, M. A. Laurenzano, "
        "L. Tang, J. Mars (2019). An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction. "
        "EMNLP-IJCNLP 2019. https://github.com/clinc/oos-eval",
        "data_full.json of data/ in github.com/clinc/oos-eval",
        ("split",),
        _clinc150_urls,
        _clinc150,
    ),
    "nlupp": Source(
        "NLU++",
        "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/)",
        "I. Casanueva, I. Vulić, G. Spithourakis, P. Budzianowski (2022). NLU++: A Multi-Label, Slot-Rich, Generalisable Dataset "
        "for Natural Language Understanding in Task-Oriented Dialogue. Findings of NAACL 2022. https://github.com/PolyAI-LDN/"
        "task-specific-datasets",
        "fold0.json to fold19.json of a domain and ontology.json, of nlupp/data/ in github.com/PolyAI-LDN/task-specific-datasets",
        ("domain",),
        _nlupp_urls,
        _nlupp,
    ),
}
"""Public data sets that :func:`get_bank` and :func:`import_bank` know."""


# --- A table of one's own -------------------------------------------------------------------------------------------


def import_table(
    path: str | os.PathLike[str],
    name: str,
    text: str,
    gold: Mapping[str, str],
    id: str | None = None,
    schema: Schema | Mapping[str, Any] | type | None = None,
    licence: str = "",
    citation: str = "",
    replace: bool = False,
) -> Bank:
    """Make a bank of a table.

    Parameters
    ----------
    path : str or path-like
        CSV, JSON Lines or Parquet; the ending of the name says which.
    name : str
        The bank's name.
    text : str
        The column with the documents.
    gold : mapping of str to str
        Field → the column with its labels. An empty cell means that the document was not labelled.
    id : str, optional
        The column with the documents' ids; by default they are numbered.
    schema : Schema, mapping or pydantic model, optional
        By default one field for each column of `gold`, its labels those that occur, sorted; ``true`` and ``false`` (in any
        case) make a boolean.
    licence, citation : str
        Of the data.
    replace : bool
        Write it in the place of a bank of the same name, should there be one.

    Returns
    -------
    Bank
        Written below :func:`banks_folder`.

    Raises
    ------
    BankError
        If the file cannot be read, a column is missing, a text is empty, or labels are outside the schema (they are listed).
    ParameterError
        If `name` is not one a bank can have or one has already, or `gold` names nothing or a field that the schema does not have.
    """
    path = Path(path)
    target = _target(name, replace)
    if not gold:
        raise ParameterError("gold names no column with labels; name at least one")
    rows = _records(path)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise BankError(f"{path}: holds no rows of named columns")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in (text, *gold.values(), *([id] if id else [])):
        if column not in columns:
            raise BankError(
                f"{path}: there is no column {column!r}{did_you_mean(column, columns)}; it has {', '.join(columns)}"
            )
    cells = {name: [_cell(row.get(column)) for row in rows] for name, column in gold.items()}
    with located(str(path)):
        asked = Schema.of(schema) if schema is not None else Schema(tuple(_field_of(*item) for item in cells.items()))
    if unknown := [name for name in gold if name not in asked]:
        raise ParameterError(
            f"gold names {', '.join(unknown)}, which the schema does not have; it has {', '.join(asked.names)}"
        )
    documents = []
    for number, row in enumerate(rows):
        words = row.get(text)
        if not isinstance(words, str) or not words.strip():
            raise BankError(f"{path}: row {number + 1}: column {text!r} holds no text; fill it or remove the row")
        labels = {name: _label(cells[name][number], asked[name]) for name in gold if cells[name][number] is not None}
        documents.append(Document(id=str(row[id]) if id else str(number + 1), text=words, gold=labels))
    about = Bank(
        id=name,
        title=name,
        description=f"Imported from {path.name}.",
        synthetic=False,
        licence=licence,
        citation=citation,
        schema=asked,
        path=Path(),
    )
    return save_bank(about, documents, target)


def _cell(value: Any) -> Label:
    """A cell as JSON would hold it; None where it is empty."""
    if hasattr(value, "item"):  # numpy's numbers and booleans
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas makes floats of whole numbers where a cell is empty
    missing = value is None or value == "" or value != value  # NaN is not itself
    return None if missing else value if isinstance(value, str | bool | int | float) else str(value)


def _field_of(name: str, values: Sequence[Label]) -> Field:
    texts = {Field.json(value): value for value in values if value is not None}
    if texts and {str(value).lower() for value in texts.values()} <= {"true", "false"}:
        return Field(name, (True, False))
    return Field(name, tuple(texts[text] for text in sorted(texts)))


def _label(value: Label, item: Field) -> Label:
    """The field's label that a cell stands for, be it as text (``"True"``, ``"3"``); the cell itself where it stands for none."""
    same = [label for label in item.labels if Field.json(label) == Field.json(value)]
    as_text = [label for label in item.labels if not isinstance(label, str) and Field.json(label) == str(value).lower()]
    return (same + as_text + [value])[0]
