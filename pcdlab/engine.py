"""The engine: documents and schemas in, extractions out.

Ties the parts together: prompt and compiled schema, head cache, tree passes, decisions, waves, joint mode, batches and
statistics. It knows no framework (that is the backend's) and no numbers beyond log-probabilities (that is
:mod:`pcdlab.decide`'s).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from pcdlab import decide as deciding
from pcdlab import models
from pcdlab.backends.base import Backend
from pcdlab.compile import CompiledField, CompiledSchema, compile_schema
from pcdlab.decide import Normalise, Plan, Scorer, Wish
from pcdlab.errors import ContextLengthError, ParameterError, PcdlabError
from pcdlab.heads import HeadCache
from pcdlab.prompt import Prompt
from pcdlab.result import Extraction, FieldDecision, Stats
from pcdlab.schema import Field, Schema
from pcdlab.tokenizer import Codec
from pcdlab.tokentree import join

if TYPE_CHECKING:
    import pandas as pd

    from pcdlab.calibrators import Calibration

__all__ = ["Engine"]

Mode = Literal["isolated", "joint"]

TOKENS_PER_PASS = 4096  # documents are batched up to this many tree nodes
RERUN = 128  # where trunks cannot be kept: longest document that is run again for a second pass in a batch
SCHEMAS = 16  # compiled schemas kept
REFERENCES = 4096  # scores under an empty document kept
NOTHING = deciding.plan([])  # what a document asks that is decided already
LOW_MASS = 0.1  # below this the model would rather have written something else: a warning


class Engine:
    """A model that fills schemas.

    Parameters
    ----------
    backend : Backend
        Runs the model.
    codec : Codec
        Its tokenizer and chat template.
    heads : HeadCache, optional
        Where prompt heads are kept; by default in memory only.
    """

    def __init__(self, backend: Backend, codec: Codec, heads: HeadCache | None = None) -> None:
        self.backend = backend
        self.codec = codec
        self.heads = heads or HeadCache(backend, None)
        self.lock = threading.RLock()  # one batch at a time: its cost is the difference of the backend's counters
        self._compiled: OrderedDict[tuple[Schema, str | None], CompiledSchema] = OrderedDict()

    @classmethod
    def load(cls, name: str = "smollm2-135m", backend: str = "torch", dtype: str = "auto") -> Engine:
        """Load a model.

        Parameters
        ----------
        name : str
            An alias of ``pcdlab models``, a local folder or a Hugging Face id.
        backend : str
            Framework to run it on.
        dtype : str
            ``"auto"`` (the backend's choice, named in every result), ``"float32"``, ``"bfloat16"`` or ``"float16"``.

        Raises
        ------
        ModelError
            If the model cannot be found or loaded.
        BackendError
            If the framework is missing.
        """
        loaded, codec = models.load(name, backend, dtype)
        return cls(loaded, codec, HeadCache(loaded, models.cache_dir() / "heads"))

    # --- what is asked ------------------------------------------------------------------------------------------

    def compile(self, schema: Schema | Mapping[str, Any] | type, instructions: str | None = None) -> CompiledSchema:
        """The schema in this model's tokens; kept for the next call.

        Parameters
        ----------
        schema : Schema, dict or pydantic model
            Whatever :meth:`pcdlab.schema.Schema.of` takes.
        instructions : str, optional
            Text in front of the catalogue instead of the default.
        """
        key = (Schema.of(schema), instructions)
        if key not in self._compiled:
            self._compiled[key] = compile_schema(self.codec, key[0], instructions)
            while len(self._compiled) > SCHEMAS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def prompt(self, schema: Schema | Mapping[str, Any] | type, instructions: str | None = None) -> Prompt:
        """The prompt this engine uses for a schema: what the model reads, as text and as token ids."""
        return self.compile(schema, instructions).prompt

    def tokenise(self, compiled: CompiledSchema, text: str, room: int | None = None) -> tuple[list[int], int]:
        """Token ids of a document's prompt, checked against the model's context, and how many of them are the head.

        Parameters
        ----------
        compiled : CompiledSchema
        text : str
            The document.
        room : int, optional
            Tokens that are to follow it; by default the longest object.

        Returns
        -------
        ids : list of int
        cached : int
            The length of the head; 0 where the tokenizer merged the document's first characters with the text in front of
            them, so that the head is not there.

        Raises
        ------
        ContextLengthError
        """
        head = compiled.prompt.head
        ids = compiled.prompt.ids(text)
        if room is None:
            room = sum(item.longest_line for item in compiled)
        if len(ids) + room > self.backend.max_tokens:
            raise ContextLengthError(
                f"{len(ids)} prompt tokens and up to {room} for the fields do not fit the {self.backend.max_tokens} tokens of "
                f"{self.backend.model!r}. The catalogue takes {len(head)} of them, the document the rest: shorten it, split the "
                "schema, or take a model with a longer context."
            )
        return ids, len(head) if len(ids) > len(head) and tuple(ids[: len(head)]) == head else 0

    # --- one document -------------------------------------------------------------------------------------------

    def extract(
        self,
        text: str,
        schema: Schema | Mapping[str, Any] | type,
        mode: Mode = "isolated",
        scorer: Scorer = "auto",
        normalise: Normalise = "sum",
        instructions: str | None = None,
        calibrator: Calibration | None = None,
    ) -> Extraction:
        """Fill a schema for one document.

        Parameters
        ----------
        text : str
            The document.
        schema : Schema, dict or pydantic model
        mode : {"isolated", "joint"}
            "isolated": every field sees the document and the fields it depends on. "joint": every field also sees the
            answers before it, and the result is the one that deciding the fields one after another gives.
        scorer : {"auto", "marginal", "exact", "walk", "hybrid"}
            See :mod:`pcdlab.decide`. "auto": marginal up to 32 labels, hybrid above.
        normalise : {"sum", "length", "unconditional"}
            Label scores as they are, per token, or minus the score under an empty document. The latter two need every field
            to be scored by ``marginal`` or ``exact``.
        instructions : str, optional
            Text in front of the catalogue instead of the default.
        calibrator : Calibration, optional
            Turns the scores of the fields it knows into probabilities, from which those fields are then decided.

        Returns
        -------
        Extraction

        Raises
        ------
        ContextLengthError
            If prompt and fields are longer than the model's context.
        SchemaError, TokenizationError, ParameterError, NumericsError
        """
        # A failure is returned, not raised, so that the only document does not get a number in the message.
        how = (mode, scorer, normalise, instructions, calibrator)
        result = next(self._extract([text], schema, *how, "return", TOKENS_PER_PASS))
        if isinstance(result, PcdlabError):
            raise result
        return result

    # --- many documents -----------------------------------------------------------------------------------------

    def extract_many(
        self,
        texts: Iterable[str],
        schema: Schema | Mapping[str, Any] | type,
        mode: Mode = "isolated",
        scorer: Scorer = "auto",
        normalise: Normalise = "sum",
        instructions: str | None = None,
        calibrator: Calibration | None = None,
        errors: Literal["raise", "return"] = "raise",
        tokens_per_pass: int = TOKENS_PER_PASS,
        progress: bool = True,
    ) -> Any:
        """Fill a schema for many documents.

        Documents are batched as branches of one tree. In joint mode each takes its own passes; so do long ones where fields
        depend on others or ``hybrid`` looks twice, because a pass of many documents keeps none of them for the next.

        Parameters
        ----------
        texts : sequence or iterator of str
            A sequence gives a list; an iterator gives a generator that holds one batch at a time.
        schema, mode, scorer, normalise, instructions, calibrator
            As for :meth:`extract`.
        errors : {"raise", "return"}
            What to do with a document that cannot be decided: stop, or put the error in its place.
        tokens_per_pass : int
            Most tree nodes in one forward pass.
        progress : bool
            Show a progress bar.

        Returns
        -------
        list or generator of Extraction
            In the order of `texts`; a :class:`~pcdlab.errors.PcdlabError` in place of each failed document where ``errors`` is
            "return".
        """
        if errors not in ("raise", "return"):
            raise ParameterError(f"errors={errors!r} is unknown; choose 'raise' or 'return'")
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            kind = type(texts).__name__
            raise ParameterError(f"texts is {kind}; give a list or an iterator of documents, or use extract for one")
        if not isinstance(tokens_per_pass, int) or tokens_per_pass < 1:
            raise ParameterError(f"tokens_per_pass={tokens_per_pass!r} is no positive whole number")
        total = len(texts) if isinstance(texts, Sized) else None
        how = (mode, scorer, normalise, instructions, calibrator)
        results = map(_without_frames, self._extract(texts, schema, *how, errors, tokens_per_pass))
        shown = tqdm(results, total=total, unit="doc", disable=not progress or total == 1)
        return list(shown) if total is not None else iter(shown)

    def extract_frame(
        self, frame: pd.DataFrame, schema: Schema | Mapping[str, Any] | type, text: str, **options: Any
    ) -> pd.DataFrame:
        """Fill a schema for every row of a table.

        Parameters
        ----------
        frame : pandas.DataFrame
        schema : Schema, dict or pydantic model
        text : str
            The column that holds the documents.
        **options
            As for :meth:`extract_many`.

        Returns
        -------
        pandas.DataFrame
            The table with three columns more per field: ``<field>``, ``<field>_probability`` and
            ``<field>_candidate_mass``. Rows whose document failed (``errors="return"``) hold missing values, and a column
            ``error`` says why.

        Raises
        ------
        ParameterError
            If the column is missing or holds something else than text, or a new column's name is taken.
        """
        if text not in frame.columns:
            raise ParameterError(f"text={text!r} is not a column; the table has {', '.join(map(str, frame.columns))}")
        documents = frame[text].tolist()
        for place, document in enumerate(documents):
            if not isinstance(document, str):
                # pandas may write a missing text as a float.
                kind = "a missing value" if frame[text].isna().iloc[place] else type(document).__name__
                raise ParameterError(
                    f"row {frame.index[place]!r}: column {text!r} holds {kind}, not text; drop or fill it"
                )
        names = [
            n for field in Schema.of(schema).names for n in (field, f"{field}_probability", f"{field}_candidate_mass")
        ]
        if options.get("errors") == "return":
            names.append("error")
        taken = sorted({n for n in names if n in frame.columns or names.count(n) > 1})
        if taken:
            raise ParameterError(
                f"columns {', '.join(taken)} are taken already, by the table or a field; rename one of the two"
            )
        results = self.extract_many(documents, schema, **options)
        new: dict[str, list[Any]] = {}
        for name in Schema.of(schema).names:
            decisions = [r.fields[name] if isinstance(r, Extraction) else None for r in results]
            new[name] = [d.value if d else None for d in decisions]
            new[f"{name}_probability"] = [d.probability if d else None for d in decisions]
            new[f"{name}_candidate_mass"] = [d.candidate_mass if d else None for d in decisions]
        if any(not isinstance(r, Extraction) for r in results):
            new["error"] = [None if isinstance(r, Extraction) else str(r) for r in results]
        return frame.assign(**new)

    # --- how ----------------------------------------------------------------------------------------------------

    def _extract(
        self,
        texts: Iterable[str],
        schema: Any,
        mode: str,
        scorer: str,
        normalise: Any,
        instructions: str | None,
        calibrator: Calibration | None,
        errors: str,
        tokens_per_pass: int,
    ) -> Iterator[Any]:
        deciding.check_options(scorer, normalise)
        if mode not in ("isolated", "joint"):
            raise ParameterError(f"mode={mode!r} is unknown; choose 'isolated' or 'joint'")
        if calibrator is not None:
            from pcdlab.calibrators import Calibration

            if not isinstance(calibrator, Calibration):
                raise ParameterError(
                    f"calibrator is {type(calibrator).__name__}; give a Calibration: fit_calibration's or Calibration.load(path)"
                )
            asked = {"model": self.backend.model, "mode": mode, "scorer": scorer, "normalise": normalise}
            self._check_calibrator(calibrator, Schema.of(schema), {**asked, "instructions": instructions})
        job = _Job(self, self.compile(schema, instructions), scorer, normalise, mode, calibrator, tokens_per_pass)
        return self._batches(job, texts, errors)

    @staticmethod
    def _check_calibrator(calibrator: Calibration, schema: Schema, asked: Mapping[str, Any]) -> None:
        """Refuse a calibrator of other fields or labels, or of scores made in another way; number formats are not compared."""
        known = [name for name in schema.names if name in calibrator.labels]
        if not known:
            raise ParameterError(
                f"calibrator: it was fitted for {', '.join(calibrator.labels) or 'no field'}, and the schema has other fields, "
                f"{', '.join(schema.names)}; give a calibrator of this schema, or leave it out"
            )
        for name in known:
            ours, theirs = schema[name].labels, calibrator.labels[name]
            if [*map(Field.json, ours)] != [*map(Field.json, theirs)]:
                raise ParameterError(
                    f"calibrator: field {name!r} has the labels {list(ours)}, it was fitted on {list(theirs)}; fit one on these"
                )
            for key, value in asked.items():
                made = calibrator.made_with.get(key, value)
                same = made == value
                if key == "scorer":  # two words may mean the same
                    same = deciding.resolve(made, len(ours)) == deciding.resolve(value, len(ours))
                if not same:
                    raise ParameterError(
                        f"calibrator: it was fitted on scores with {key} {made!r}, and this is {key} {value!r}; fit one on such "
                        "scores, or ask as it was fitted"
                    )
        calibrator.check_schema(schema)

    @staticmethod
    def _batches(job: _Job, texts: Iterable[str], errors: str) -> Iterator[Any]:
        batch: list[_Document | PcdlabError] = []
        nodes = 0
        for number, text in enumerate(texts):
            item: _Document | PcdlabError
            try:
                item = job.tokenise(text, number)
            except PcdlabError as error:
                if errors == "raise":
                    raise type(error)(f"document {number}: {error}") from None
                item = error
            size = job.size(item)
            if batch and nodes + size > job.tokens_per_pass:
                yield from job.run(batch, errors)
                batch, nodes = [], 0
            batch.append(item)
            nodes += size
        yield from job.run(batch, errors)


@dataclass
class _Document:
    """A tokenized document on its way through the passes."""

    number: int
    ids: list[int]
    cached: int  # leading ids that are the head
    clock: dict[str, float]
    decisions: dict[str, FieldDecision] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)

    @property
    def trunk(self) -> list[int]:
        return self.ids[self.cached :]


@dataclass(frozen=True)
class _Base:
    """What the plans of some documents hang from: a prefix and, below it, a trunk of each.

    With `kept` the trunks have run, and the prefix stands for all of them.
    """

    prefix: Any
    trunks: Sequence[list[int]]
    kept: bool = False


@contextmanager
def _timed(clock: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        clock[phase] = clock.get(phase, 0.0) + time.perf_counter() - start


class _Job:
    """One schema under one set of options, for any number of documents."""

    def __init__(
        self,
        engine: Engine,
        compiled: CompiledSchema,
        scorer: str,
        normalise: Normalise,
        mode: str,
        calibrator: Calibration | None,
        tokens_per_pass: int,
    ) -> None:
        self.engine = engine
        self.backend = engine.backend
        self.compiled = compiled
        self.schema = compiled.schema
        self.scorer = scorer
        self.normalise = normalise
        self.mode = mode
        self.calibrator = calibrator
        self.tokens_per_pass = tokens_per_pass
        self.references: dict[tuple[str, tuple[int, ...]], Any] = {}
        open_fields = [item.name for item in self.schema if not item.fixed]
        waves = [list(self.schema.names)] if mode == "joint" else self.schema.waves()
        self.waves = [wave for names in waves if (wave := [name for name in names if name in open_fields])]
        # What the first pass asks is the same for every document.
        self.first = deciding.plan([self.wish(name, {}) for name in (self.waves or [[]])[0]])
        deciding.check_normalise([self.wish_after(name, (), {}) for name in open_fields], normalise)
        looks_twice = any(deciding.resolve(scorer, len(self.schema[name].labels)) == "hybrid" for name in open_fields)
        self.one_pass = len(self.waves) <= 1 and not looks_twice
        # Most tokens behind the prompt: a line, and in front of it those it sees.
        lines = {item.field.name: item.longest_line for item in compiled}
        seen = {name: lines[name] + sum(lines[other] for other in self._ancestors(name)) for name in lines}
        self.room = sum(lines.values()) if mode == "joint" else max(seen.values())

    def wish(self, name: str, answers: Mapping[str, FieldDecision]) -> Wish:
        """Ask for a field that sees the answers it depends on."""
        seen = self._ancestors(name)
        return self.wish_after(name, [other for other in self.schema.names if other in seen], answers)

    def wish_after(self, name: str, seen: Sequence[str], answers: Mapping[str, FieldDecision]) -> Wish:
        """Ask for a field that sees the lines of `seen`, in that order."""
        item = self.compiled.fields[name]
        before = tuple(token for other in seen for token in self.line(other, answers))
        return Wish(item, deciding.resolve(self.scorer, len(item.field.labels)), before)

    def line(self, name: str, answers: Mapping[str, FieldDecision]) -> tuple[int, ...]:
        """Tokens of the line that says a field's answer."""
        item = self.compiled.fields[name]
        return item.line(0 if item.field.fixed else item.field.labels.index(answers[name].value))

    def _ancestors(self, name: str) -> set[str]:
        found: set[str] = set()
        waiting = list(self.schema[name].depends_on) if self.mode == "isolated" else []
        while waiting:
            other = waiting.pop()
            if other not in found:
                found.add(other)
                waiting.extend(self.schema[other].depends_on)
        return found

    # --- documents in -------------------------------------------------------------------------------------------

    def tokenise(self, text: Any, number: int = 0) -> _Document:
        """Token ids of the whole prompt, checked against the model's context."""
        if not isinstance(text, str):
            raise ParameterError(f"the document is {type(text).__name__}, not text")
        clock: dict[str, float] = {}
        with _timed(clock, "tokenise"):
            ids, cached = self.engine.tokenise(self.compiled, text, self.room)
        return _Document(number, ids, cached, clock)

    @cached_property
    def empty(self) -> _Document:
        """The empty document, whose scores ``unconditional`` subtracts."""
        return self.tokenise("")

    def size(self, item: _Document | PcdlabError) -> int:
        """Tree nodes a document adds to its batch; a pass of its own where it cannot share one."""
        if isinstance(item, PcdlabError):
            return 1  # nothing to run, but a stream of failures must come out too
        again = not self.one_pass and not self.backend.keeps_trunks
        alone = self.mode == "joint" or not item.cached or (again and len(item.trunk) > RERUN)
        return 1 << 40 if alone else len(item.trunk) + len(self.first.tree)

    # --- results out --------------------------------------------------------------------------------------------

    def run(self, batch: Sequence[_Document | PcdlabError], errors: str) -> Iterator[Extraction | PcdlabError]:
        """Decide a batch; an error that stands for a document stays in its place."""
        documents = [item for item in batch if isinstance(item, _Document)]
        clock: dict[str, float] = {}
        meter = self.backend.meter
        warm = False
        failure: PcdlabError | None = None
        with self.engine.lock:
            before = (meter.forward_passes, meter.tokens_fed)
            try:
                if documents and self.waves:
                    warm = self._decide(documents, clock)
            except PcdlabError as error:
                if errors == "raise" and len(documents) == 1:
                    raise type(error)(f"document {documents[0].number}: {error}") from error
                failure = error
            cost = (meter.forward_passes - before[0], meter.tokens_fed - before[1])
        if failure and len(documents) > 1:
            # One document's garbage fails the whole pass: only alone does each show whether it was the one.
            for item in batch:
                yield from self.run([item], errors)
            return
        for item in batch:
            if isinstance(item, _Document):
                yield failure or self._result(item, cost, clock, warm, len(documents))
            else:
                yield item

    def _decide(self, documents: Sequence[_Document], clock: dict[str, float]) -> bool:
        """Run the passes and note the decisions; whether the head was there already."""
        head, warm = self._head(documents[0], clock)
        with _timed(clock, "score"):
            if self.mode == "isolated":
                self._isolated(documents, head)
            else:
                self._joint(documents[0], head)
        return warm

    def _result(
        self, document: _Document, cost: tuple[int, int], clock: dict[str, float], warm: bool, documents: int
    ) -> Extraction:
        seconds = {**document.clock, **clock}
        with _timed(seconds, "assemble"):
            fields = {
                item.field.name: document.decisions.get(item.field.name) or _fixed(item) for item in self.compiled
            }
            warnings = [
                f"{name}: the model's own continuation reaches an allowed label with probability {decision.candidate_mass:.2g} "
                "only; the document may not fit the labels"
                for name, decision in fields.items()
                if decision.candidate_mass is not None and decision.candidate_mass < LOW_MASS
            ]
        stats = Stats(*cost, document.cached if warm else 0, seconds, documents, tuple(document.changes))
        backend = self.backend
        return Extraction(fields, stats, tuple(warnings), backend.model, backend.name, backend.dtype, self.mode)

    # --- passes -------------------------------------------------------------------------------------------------

    def _head(self, document: _Document, clock: dict[str, float]) -> tuple[Any, bool]:
        """The head's prefix, and whether it was there already."""
        if not document.cached:
            return None, False
        with _timed(clock, "head"):
            return self.engine.heads.state(document.ids[: document.cached])

    def _isolated(self, documents: Sequence[_Document], head: Any) -> None:
        """One pass per wave of fields that depend on one another."""
        base = _Base(head, [document.trunk for document in documents])
        for number, names in enumerate(self.waves):
            plans = [
                deciding.plan([self.wish(name, document.decisions) for name in names]) if number else self.first
                for document in documents
            ]
            base = self._ask(documents, base, plans, keep=number + 1 < len(self.waves))

    def _joint(self, document: _Document, head: Any) -> None:
        """Fixed point: read every field under the drafted answers before it, redraft, until nothing changes.

        A field whose predecessors' answers are final, and that was read under them, is settled; each pass settles at
        least one more, so the loop ends. Only what follows the first change is read again.
        """
        names = self.schema.names
        base = self._ask([document], _Base(head, [document.trunk]), [self.first], keep=True)
        settled = 0 if self.schema[names[0]].fixed else 1  # nothing stands before the first field
        done = 0  # fields whose lines are in the prefix
        while settled < len(names):
            answers = document.decisions
            draft = {name: answers[name].value for name in names[settled:] if name in answers}
            lines = [token for name in names[done:settled] for token in self.line(name, answers)]
            wishes = [
                self.wish_after(name, names[settled:i], answers)
                for i, name in enumerate(names)
                if i >= settled and name in answers
            ]
            if not wishes:
                return
            written = tuple(token for name in names[:settled] for token in self.line(name, answers))
            plan = deciding.plan(wishes)
            base = replace(base, trunks=[[*base.trunks[0], *lines]])
            base = self._ask([document], base, [plan], True, written)
            done = settled
            changed = [name for name, value in draft.items() if answers[name].value != value]
            document.changes.append(len(changed))
            settled = names.index(changed[0]) + 1 if changed else len(names)

    def _ask(
        self,
        documents: Sequence[_Document],
        base: _Base,
        plans: Sequence[Plan],
        keep: bool,
        written: tuple[int, ...] = (),
    ) -> _Base:
        """Run each document's plan below its trunk, twice where a scorer looks twice, and note the decisions.

        `written` are the lines between a document's prompt and its plan. Returns what to ask below next time. With `keep` one
        trunk, or the same of all, becomes part of the prefix; different ones are kept beside it where the backend can, else
        they run again each time.
        """
        looks_twice = any(item.wish.scorer == "hybrid" for plan in plans for item in plan.fields)
        alike = all(trunk == base.trunks[0] for trunk in base.trunks)
        parts = list(self._parts(base, plans))
        # A part of the trunks is nothing to keep.
        whole = base.kept or (len(parts) == 1 and (alike or self.backend.keeps_trunks))
        then, again = base, [NOTHING] * len(plans)
        for part in parts:
            run = range(len(plans)) if base.kept else part  # kept trunks serve trees that begin with all of them
            trunks, trees = [base.trunks[i] for i in run], [(plans[i] if i in part else NOTHING).tree for i in run]
            tree = join(trunks, trees)
            length = tree.shared if whole and (keep or looks_twice) else 0
            reading = self.backend.read(base.prefix, tree, length)
            if length:
                then = _Base(reading.prefix, [[]] * len(plans) if alike else base.trunks, kept=not alike)
            read = 0
            for i in sorted(part):
                log_probs = reading.log_probs[read : read + len(plans[i].tree.candidates)]
                read += len(log_probs)
                again[i] = self._note(documents[i], plans[i], log_probs, written)
        if any(plan.fields for plan in again):
            self._ask(documents, then, again, keep=False)
        return then

    def _parts(self, base: _Base, plans: Sequence[Plan]) -> Iterator[set[int]]:
        """Which documents share a pass: those that ask, in order, as many as `tokens_per_pass` allows."""
        part: set[int] = set()
        nodes = 0
        for i, (trunk, plan) in enumerate(zip(base.trunks, plans, strict=True)):
            if not plan.fields:
                continue
            size = len(plan.tree) + (0 if base.kept else len(trunk))
            if part and nodes + size > self.tokens_per_pass:
                yield part
                part, nodes = set(), 0
            part.add(i)
            nodes += size
        if part:
            yield part

    def _note(self, document: _Document, plan: Plan, log_probs: Any, written: tuple[int, ...]) -> Plan:
        """Note what was decided; a plan for what must be looked at again."""
        wishes = []
        references = self._references(plan, written)
        if self.normalise == "unconditional" and document.ids == self.empty.ids:
            references = [deciding.scores(item, log_probs) for item in plan.fields]  # itself, or rounding would decide
        for item, reference in zip(plan.fields, references, strict=True):
            found = deciding.decide(item, log_probs, self.normalise, reference)
            if isinstance(found, Wish):
                wishes.append(found)
            else:
                document.decisions[found.name] = self._calibrated(found)
        return deciding.plan(wishes)

    def _calibrated(self, decision: FieldDecision) -> FieldDecision:
        """Decide again from a calibrator's probabilities, where there is one."""
        if self.calibrator is None or decision.name not in self.calibrator.calibrators:
            return decision
        shares = self.calibrator.apply(decision.name, decision.log_probs).tolist()
        ranked = sorted(zip(decision.log_probs, shares, strict=True), key=lambda pair: -pair[1])
        (value, probability), *others = ranked
        return replace(decision, value=value, probability=probability, alternatives=tuple(others), calibrated=True)

    def _references(self, plan: Plan, written: tuple[int, ...] = ()) -> list[Any]:
        """Scores of every field of a plan under an empty document and the same lines, None each unless they are asked for."""
        if self.normalise != "unconditional":
            return [None] * len(plan.fields)
        wishes = [replace(item.wish, before=(*written, *item.wish.before)) for item in plan.fields]
        if len(self.references) > REFERENCES:
            self.references.clear()
        keys = [(wish.compiled.field.name, wish.before) for wish in wishes]
        missing = [wish for key, wish in zip(keys, wishes, strict=True) if key not in self.references]
        if missing:
            head, _ = self._head(self.empty, {})
            asked = deciding.plan(missing)
            log_probs = self.backend.read(head, join([self.empty.trunk], [asked.tree])).log_probs
            for item in asked.fields:
                wish = item.wish
                self.references[wish.compiled.field.name, wish.before] = deciding.scores(item, log_probs)
        return [self.references[key] for key in keys]


def _without_frames(result: Any) -> Any:
    """A returned error lives as long as the results do, and its traceback would keep every tensor of the pass alive."""
    if isinstance(result, PcdlabError):
        result.__traceback__ = result.__cause__ = result.__context__ = None
    return result


def _fixed(item: CompiledField) -> FieldDecision:
    label = item.field.labels[0]
    return FieldDecision(item.field.name, label, 1.0, None, {label: 0.0}, "fixed")
