"""Runs: every decision of an engine on a bank, in a folder that can be killed, resumed and read without a model.

A run is a folder with

``meta.json``
    what was asked of what: bank, schema, model, options, versions. Written first; never changed.
``decisions.jsonl``
    one row per document and field, in the order of the bank and the schema. The same settings on the same machine give the
    same bytes, however often the run was interrupted.
``timing.jsonl``
    one row per batch: the seconds of its documents, and how long ``decisions.jsonl`` was when it was complete. What lies behind
    the last such mark, or a last line that was cut short, is dropped when the run is resumed.

Knows banks, an engine and its results; refuses to know how good the decisions are.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm.auto import tqdm

import pcdlab
from pcdlab.banks import Bank, Document
from pcdlab.baselines.json_stream import generate, read_object, schema_lines
from pcdlab.errors import BankError, ParameterError, PcdlabError
from pcdlab.result import Extraction
from pcdlab.schema import Field, Label, Schema

if TYPE_CHECKING:
    from pcdlab.decide import Normalise, Scorer
    from pcdlab.engine import Engine

__all__ = ["Mode", "Run", "load_run", "run_study"]

Mode = Literal["isolated", "joint", "grammar"]

META, DECISIONS, TIMING = "meta.json", "decisions.jsonl", "timing.jsonl"
_LOCK = ".lock"
TOKENS_PER_PASS = 1024  # on a CPU as fast as four times as many, and a kill costs a quarter as much work
_PACKAGES = {  # what the numbers depend on, by backend
    "torch": ("torch", "transformers"),
    "mlx": ("mlx", "mlx-lm", "transformers"),
    "llamacpp": ("llama-cpp-python",),
}

# A document's answers as the rows of its fields need them, and its seconds.
_Answer = tuple[dict[str, dict[str, Any]], float | None]


class Run:
    """A run on disk, finished or not.

    Parameters
    ----------
    folder : Path
        A folder that :func:`run_study` wrote.

    Attributes
    ----------
    folder : Path
    meta : dict
        ``bank`` (``id``, ``documents``, ``sha256``), ``schema`` as in a preset, ``model``, ``fingerprint``, ``backend``,
        ``dtype``, ``mode``, ``scorer`` and ``normalise`` (None in mode "grammar"), ``versions``, ``created``.

    Raises
    ------
    BankError
        If `folder` holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = _read_meta(folder)

    @property
    def schema(self) -> Schema:
        """What was asked."""
        return Schema.of(self.meta["schema"], source=str(self.folder / META))

    @property
    def documents(self) -> int:
        """How many documents have been decided so far."""
        return sum(len(batch["seconds"]) for batch in _batches(self.folder))

    @property
    def finished(self) -> bool:
        """Whether every document of the bank has been decided."""
        return self.documents == self.meta["bank"]["documents"]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the rows one by one, as they are in the file.

        Yields
        ------
        dict
            ``document``, ``field``, ``value``, ``probability``, ``candidate_mass``, ``log_probs`` (JSON text of the label →
            score); ``gold`` where the document was labelled, ``error`` where it could not be decided.
        """
        left = _end(self.folder)
        if not left:
            return
        with (self.folder / DECISIONS).open("rb") as file:
            for line in file:
                left -= len(line)
                if left < 0:  # of a batch that was not finished
                    return
                yield json.loads(line)

    def frame(self) -> pd.DataFrame:
        """All decisions as a tidy table.

        Returns
        -------
        pandas.DataFrame
            One row per document and field: ``document``, ``field``, ``value``, ``probability``, ``candidate_mass``, ``gold``,
            ``seconds`` (of the whole document, its share of a pass that it had in common with others; the same in each of its
            rows), ``error`` (None where there was none), ``out_of_scope`` (whether the bank says that no label is right).
            ``value`` and ``gold`` hold labels as they are (text, boolean, number, None); ``gold`` is None without a label, which
            is in doubt only for a field that has null among its labels.
        """
        return self._loaded[0].copy()

    def log_probs(self, field: str) -> tuple[list[Label], NDArray[np.float64], NDArray[np.int64], list[str]]:
        """Scores of every label of one field.

        Parameters
        ----------
        field : str

        Returns
        -------
        labels : list of label
            k labels, in schema order.
        scores : float64 array, shape (n, k)
            As :attr:`pcdlab.result.FieldDecision.log_probs`. Documents that could not be decided are left out.
        gold : int64 array, shape (n,)
            Index of the gold label, -1 where there is none or the document is out of scope.
        documents : list of str
            Their ids.

        Raises
        ------
        ParameterError
            If the run has no such field, or no log-probabilities (mode "grammar").
        """
        if field not in self.schema:
            raise ParameterError(f"field {field!r} is not in the run; it has {', '.join(self.schema.names)}")
        if self.meta["mode"] == "grammar":
            raise ParameterError(f"{self.folder}: a run of mode 'grammar' has no log-probabilities; read another one")
        labels = list(self.schema[field].labels)
        rows = self._loaded[1][field]
        scores = np.array([scores for _, scores, _ in rows], dtype=np.float64).reshape(len(rows), len(labels))
        gold = np.array([index for _, _, index in rows], dtype=np.int64)
        return labels, scores, gold, [document for document, _, _ in rows]

    @cached_property
    def _loaded(self) -> tuple[pd.DataFrame, dict[str, list[tuple[str, NDArray[np.float64], int]]]]:
        """The table, and per field: document, scores, index of the gold label."""
        seconds = {id: value for batch in _batches(self.folder) for id, value in batch["seconds"].items()}
        texts = {field.name: [Field.json(label) for label in field.labels] for field in self.schema}
        names = (
            "document",
            "field",
            "value",
            "probability",
            "candidate_mass",
            "gold",
            "seconds",
            "error",
            "out_of_scope",
        )
        columns: dict[str, list[Any]] = {name: [] for name in names}
        scores: dict[str, list[tuple[str, NDArray[np.float64], int]]] = {name: [] for name in texts}
        for row in self.rows():
            name, gold = row["field"], row.get("gold")
            text = Field.json(gold)
            known = texts[name].index(text) if "gold" in row and text in texts[name] else -1
            row |= {
                "gold": gold,
                "seconds": seconds[row["document"]],
                "error": row.get("error"),
                "out_of_scope": "gold" in row and known < 0,
            }
            for column, cells in columns.items():
                cells.append(row[column])
            if row["log_probs"] is not None:
                found = np.array([row["log_probs"][label] for label in texts[name]])
                scores[name].append((row["document"], found, known))
        kinds = {"probability": float, "candidate_mass": float, "seconds": float, "out_of_scope": bool}
        series = {name: pd.Series(cells, dtype=kinds.get(name, object)) for name, cells in columns.items()}
        return pd.DataFrame(series), scores


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Open a run.

    Parameters
    ----------
    folder : str or path-like

    Returns
    -------
    Run

    Raises
    ------
    BankError
        If `folder` holds no run.
    """
    return Run(Path(folder))


def run_study(
    bank: Bank,
    engine: Engine,
    out: str | os.PathLike[str],
    *,
    mode: Mode = "isolated",
    scorer: Scorer = "auto",
    normalise: Normalise = "sum",
    progress: bool = True,
) -> Run:
    """Decide every document of a bank, or go on where an earlier call was stopped.

    Documents are decided in batches whose composition does not depend on where a run was interrupted, because a batch's
    composition shows in the last digits; a batch is written once all of it is decided. Memory does not grow with the number of
    documents.

    Parameters
    ----------
    bank : Bank
    engine : Engine
    out : str or path-like
        The run's folder. If it holds an unfinished run with the same settings, that one is continued.
    mode : {"isolated", "joint", "grammar"}
        As for :meth:`pcdlab.engine.Engine.extract`; "grammar" writes the object token by token, each the most probable of those
        the schema allows, and gives values without probabilities.
    scorer, normalise
        As for :meth:`pcdlab.engine.Engine.extract`; they mean nothing in mode "grammar".
    progress : bool
        Show a progress bar.

    Returns
    -------
    Run
        A document that cannot be decided (too long, say) has rows with an error.

    Raises
    ------
    BankError
        If `out` holds a run with other settings (they are named), is being written by another process, or is not a run.
    SchemaError, TokenizationError, ParameterError
        If the engine refuses the schema or the options; nothing is written then.
    """
    decide = _decider(engine, bank.schema, mode, scorer, normalise)
    folder = Path(out)
    meta = _meta(bank, engine, mode, scorer, normalise)
    if not (folder / META).is_file() and folder.exists():
        own = {_LOCK, f"{META}.tmp"}  # of a run that was killed before it began
        if not folder.is_dir() or not own.issuperset(os.listdir(folder)):
            raise BankError(f"{folder}: exists and holds no run; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / _LOCK, timeout=0):
            _claim(folder, meta)
            done = _drop_unfinished(folder)
            with tqdm(total=len(bank), initial=done, unit="doc", disable=not progress) as bar:
                _write(folder, bank, done, decide, bar.update)
    except Timeout:
        raise BankError(f"{folder}: another process is writing this run; wait for it, or give another folder") from None
    return Run(folder)


# --- Writing --------------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    bank: Bank,
    done: int,
    decide: Callable[[Iterator[str]], Iterator[_Answer | PcdlabError]],
    report: Callable[[int], Any],
) -> None:
    """Decide the documents behind the first `done` and append their rows batch by batch."""
    waiting: deque[Document] = deque()  # read, but not written yet
    all_read = False

    def texts() -> Iterator[str]:
        nonlocal all_read
        for document in islice(bank, done, None):
            waiting.append(document)
            yield document.text
        all_read = True

    names = bank.schema.names
    answers: list[_Answer | PcdlabError] = []
    with (folder / DECISIONS).open("ab") as decisions, (folder / TIMING).open("ab") as timing:
        for answer in decide(texts()):
            answers.append(answer)
            # The engine closes a batch when it has read one document more, or there is none: so, a batch is complete when
            # answers are there for all documents but that one. Then and only then would a new call form the same batches.
            if len(answers) < len(waiting) - (not all_read):
                continue
            batch = [(waiting.popleft(), answer) for answer in answers]
            rows = [row for document, answer in batch for row in _rows(document, names, answer)]
            decisions.write(b"".join(map(_line, rows)))
            decisions.flush()
            seconds = {item.id: None if isinstance(answer, PcdlabError) else answer[1] for item, answer in batch}
            timing.write(_line({"end": decisions.tell(), "seconds": seconds}))
            timing.flush()
            report(len(answers))
            answers = []


def _rows(document: Document, names: tuple[str, ...], answer: _Answer | PcdlabError) -> Iterator[dict[str, Any]]:
    nothing = {"value": None, "probability": None, "candidate_mass": None, "log_probs": None}
    for name in names:
        row: dict[str, Any] = {"document": document.id, "field": name}
        row |= nothing if isinstance(answer, PcdlabError) else nothing | answer[0][name]
        if name in document.gold:
            row["gold"] = document.gold[name]
        if isinstance(answer, PcdlabError):
            row["error"] = f"{type(answer).__name__}: {answer}"
        yield row


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


# --- Deciding -------------------------------------------------------------------------------------------------------


def _decider(
    engine: Engine, schema: Schema, mode: Mode, scorer: Scorer, normalise: Normalise
) -> Callable[[Iterator[str]], Iterator[_Answer | PcdlabError]]:
    """A function from texts to answers, in order; refuses here what the engine refuses."""
    if mode == "grammar":
        engine.compile(schema)
        return lambda texts: (_grammar(engine, schema, text) for text in texts)

    def extract(texts: Iterator[str]) -> Iterator[Any]:
        found = engine.extract_many(
            texts, schema, mode, scorer, normalise, errors="return", tokens_per_pass=TOKENS_PER_PASS, progress=False
        )
        return (item if isinstance(item, PcdlabError) else _answer(item) for item in found)

    extract(iter(()))  # checks schema and options
    if normalise == "unconditional" and (mode == "joint" or len(schema.waves()) > 1):
        # The engine keeps the scores under an empty document of all lines it has met, and computes the missing ones in one pass:
        # over many documents, what is in that pass would depend on where the run was interrupted.
        return lambda texts: (answer for text in texts for answer in extract(iter([text])))
    return extract


def _answer(out: Extraction) -> _Answer:
    fields = {
        name: {
            "value": decision.value,
            "probability": decision.probability,
            "candidate_mass": decision.candidate_mass,
            "log_probs": {Field.json(label): score for label, score in decision.log_probs.items()},
        }
        for name, decision in out.fields.items()
    }
    shared = {"head", "score"}  # phases of the whole batch
    seconds = sum(s / (out.stats.documents if phase in shared else 1) for phase, s in out.stats.seconds.items())
    return fields, seconds


def _grammar(engine: Engine, schema: Schema, text: str) -> _Answer | PcdlabError:
    """Write the object token by token along the schema."""
    start = time.perf_counter()
    compiled = engine.compile(schema)
    try:
        ids, cached = engine.tokenise(compiled, text)
        prefix = engine.heads.state(ids[:cached])[0] if cached else None
        steps = generate(engine.backend, prefix, ids[cached:], schema_lines(compiled), together=True)
        written = compiled.prompt.opening + engine.codec.decode([step.token for step in steps])
    except PcdlabError as error:
        return error
    values = read_object(written)
    assert values is not None, "the grammar allows nothing but an object"
    fields = {name: {"value": values[name]} for name in schema.names}
    return fields, time.perf_counter() - start


# --- Settings and marks ---------------------------------------------------------------------------------------------


def _meta(bank: Bank, engine: Engine, mode: Mode, scorer: Scorer, normalise: Normalise) -> dict[str, Any]:
    backend = engine.backend
    packages = ("numpy", *_PACKAGES.get(backend.name, ()))
    return {
        "bank": {"id": bank.id, "documents": len(bank), "sha256": bank.sha256},
        "schema": bank.schema.to_dict(),
        "model": backend.model,
        "fingerprint": backend.fingerprint,
        "backend": backend.name,
        "dtype": backend.dtype,
        "mode": mode,
        "scorer": None if mode == "grammar" else scorer,
        "normalise": None if mode == "grammar" else normalise,
        "versions": {"pcdlab": pcdlab.__version__} | {name: metadata.version(name) for name in packages},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _claim(folder: Path, meta: dict[str, Any]) -> None:
    """Write the settings, or compare them with those of the run that is there."""
    path = folder / META
    if not path.is_file():
        temporary = folder / f"{META}.tmp"
        temporary.write_text(json.dumps(meta, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return
    there = _read_meta(folder)
    differences = list(_differences({**there, "created": ""}, {**meta, "created": ""}))
    if differences:
        raise BankError(
            f"{folder}: holds a run with other settings: {'; '.join(differences)}. Give another folder (out, --out), remove "
            "this one, or ask with its settings"
        )


def _differences(there: Any, asked: Any, where: str = "") -> Iterator[str]:
    if where == "schema":  # long; that it is another one says enough
        if json.dumps(there) != json.dumps(asked):
            yield "another schema"
    elif where == "bank.sha256":
        if there != asked:
            yield "the bank held other documents or right labels then"
    elif isinstance(there, Mapping) and isinstance(asked, Mapping):
        for key in dict.fromkeys([*there, *asked]):
            yield from _differences(there.get(key), asked.get(key), f"{where}.{key}".lstrip("."))
    elif there != asked:
        yield f"{where} is {there!r} there and {asked!r} here"


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not {"bank", "schema", "mode"} <= found.keys():
            raise ValueError("it lacks bank, schema or mode")
    except FileNotFoundError:
        raise BankError(f"{folder}: holds no run ({META} is missing); make one with `pcdlab study`") from None
    except (OSError, ValueError) as error:
        raise BankError(
            f"{path}: cannot be read as a run's settings ({error}); restore it, or make the run again"
        ) from None
    return found


def _batches(folder: Path) -> Iterator[dict[str, Any]]:
    """The marks of complete batches whose rows are all there."""
    rows, marks = folder / DECISIONS, folder / TIMING
    size = rows.stat().st_size if rows.is_file() else 0
    if size and not marks.is_file():
        raise BankError(
            f"{folder}: {TIMING} is missing, without which {DECISIONS} is no run; restore it, or remove both"
        )
    if not size:
        return
    with marks.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (mark := json.loads(line))["end"] > size:
                return
            yield mark


def _end(folder: Path) -> int:
    """Bytes of the rows of complete batches."""
    return max((mark["end"] for mark in _batches(folder)), default=0)


def _drop_unfinished(folder: Path) -> int:
    """Cut off what was not finished; return how many documents are left."""
    rows, marks = folder / DECISIONS, folder / TIMING
    done = length = 0
    end = _end(folder)
    for mark in _batches(folder):
        done += len(mark["seconds"])
        length += len(_line(mark))
    for path, size in ((rows, end), (marks, length)):
        with path.open("ab") as file:
            file.truncate(size)
    return done
