"""The scikit-learn face: texts in, labels or features out.

`PCDClassifier` answers one field, `PCDFeatures` gives the log-probabilities of every label of every field as a matrix.
Both take lists of texts and work wherever scikit-learn takes a text classifier or a vectoriser. Models are loaded when
they are first needed, once per process, however often an estimator is cloned; a text that was read before under the same
question is not read again. This module knows engines and scikit-learn's conventions; it decides nothing itself.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted

from pcdlab.calibrators import Calibrator
from pcdlab.decide import Normalise, Scorer
from pcdlab.engine import Engine
from pcdlab.errors import ParameterError
from pcdlab.schema import Field, Schema

__all__ = ["PCDClassifier", "PCDFeatures"]

Floats = NDArray[np.float64]

READINGS = 100_000  # label scores of texts kept per engine, so that cross-validation reads a text once

_load = lru_cache(maxsize=2)(Engine.load)
_readings: weakref.WeakKeyDictionary[Engine, OrderedDict[Any, Floats]] = weakref.WeakKeyDictionary()


class _Reader(BaseEstimator):
    """Texts → label scores; what both estimators share."""

    schema: Any
    model: str | Engine
    backend: str
    dtype: str
    instructions: str | None
    scorer: Scorer
    normalise: Normalise

    def __sklearn_clone__(self) -> Self:
        # An engine is weights: it is handed on, where scikit-learn would copy it.
        parameters = self.get_params(deep=False)
        return type(self)(**{k: v if k == "model" else clone(v, safe=False) for k, v in parameters.items()})

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        return tags

    def _engine(self) -> Engine:
        if isinstance(self.model, Engine):
            return self.model
        return _load(self.model, self.backend, self.dtype)

    def _read(self, X: Any, schema: Schema) -> Floats:
        """Label scores of all fields side by side, shape (texts, labels of all fields)."""
        texts = _texts(X)
        engine = self._engine()
        kept = _readings.setdefault(engine, OrderedDict())
        asked = (schema, self.instructions, self.scorer, self.normalise)
        new = [text for text in dict.fromkeys(texts) if (asked, text) not in kept]
        found = engine.extract_many(
            new,
            schema,
            scorer=self.scorer,
            normalise=self.normalise,
            instructions=self.instructions,
            progress=False,
        )
        fresh = {
            text: np.array([score for decision in out.fields.values() for score in decision.log_probs.values()])
            for text, out in zip(new, found, strict=True)
        }
        rows = [fresh[text] if text in fresh else kept[asked, text] for text in texts]
        kept.update({(asked, text): row for text, row in fresh.items()})
        while len(kept) > READINGS:
            kept.popitem(last=False)
        return np.stack(rows)


def _texts(X: Any) -> list[str]:
    if isinstance(X, str) or not isinstance(X, Iterable):
        raise ParameterError(f"X is {type(X).__name__}; give a list, an array or a column of texts")
    shape = getattr(X, "shape", (0,))
    if len(shape) != 1:
        raise ParameterError(f"X has shape {shape}; give one text per document, such as one column of a table")
    texts = list(X)
    if not texts:
        raise ParameterError("X holds no text; give one at least")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ParameterError(f"X: number {place} is {type(text).__name__}, not text; drop or fill it")
    return [str(text) for text in texts]  # NumPy's strings become plain ones


# --- one field as a classifier --------------------------------------------------------------------------------------


class PCDClassifier(ClassifierMixin, _Reader):
    """Answer one field of a schema, as a scikit-learn classifier of texts.

    Without a calibrator that learns from labels it is a zero-shot classifier: `fit` reads no text.

    Parameters
    ----------
    schema : Schema, dict or pydantic model
        Whatever :meth:`pcdlab.schema.Schema.of` takes. All its fields are in the prompt, and all are read.
    field : str, optional
        The field to answer; may be left out where the schema has one only.
    model : str or Engine
        As for :meth:`pcdlab.engine.Engine.load`, or a loaded engine (`backend` and `dtype` are then not looked at).
    backend, dtype : str
        As for :meth:`pcdlab.engine.Engine.load`.
    instructions : str, optional
        Text in front of the catalogue instead of the default: the prompt wording.
    scorer, normalise : str
        As for :meth:`pcdlab.engine.Engine.extract`.
    calibrator : Calibrator, optional
        Cloned and fitted in `fit`, on the texts' log-probabilities and (where it learns from labels) `y`.

    Attributes
    ----------
    classes_ : array, shape (labels,)
        The field's labels, sorted, as scikit-learn has them. See Notes.
    calibrator_ : Calibrator or None

    Notes
    -----
    ``predict`` is the label with the highest ``predict_proba``, which for the scorer ``hybrid`` need not be the engine's value.

    ``cross_val_predict(…, method="predict_proba")`` hands over labels as their places in sorted order. Where no label is a
    number, such a `y` is understood, and ``classes_`` are then the places; it has to reach up to the last label.

    Examples
    --------
    >>> topic = {"topic": {"type": "enum", "choices": ["billing", "delivery"]}}
    >>> PCDClassifier(topic).fit(["You charged me twice!"]).predict(["Where is my parcel?"])  # doctest: +SKIP
    """

    def __init__(
        self,
        schema: Any,
        field: str | None = None,
        model: str | Engine = "smollm2-135m",
        backend: str = "torch",
        dtype: str = "auto",
        instructions: str | None = None,
        scorer: Scorer = "auto",
        normalise: Normalise = "sum",
        calibrator: Calibrator | None = None,
    ) -> None:
        self.schema = schema
        self.field = field
        self.model = model
        self.backend = backend
        self.dtype = dtype
        self.instructions = instructions
        self.scorer = scorer
        self.normalise = normalise
        self.calibrator = calibrator

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self.calibrator is not None and self.calibrator.needs_labels
        return tags

    def fit(self, X: Any, y: ArrayLike | None = None) -> Self:
        """Learn the calibrator, if there is one.

        Parameters
        ----------
        X : sequence of str
        y : array-like, shape (texts,), optional
            Right labels; only for a calibrator that learns from them, but always checked.

        Raises
        ------
        ParameterError
            If `y` holds something that is no label of the field, or a calibrator needs what is not given.
        SchemaError
        """
        texts = _texts(X)
        field = self._field()
        if len(field.labels) < 2:
            raise ParameterError(f"field {field.name!r} has one label; there is nothing to classify")
        ordered = sorted(range(len(field.labels)), key=lambda i: _sortable(field.labels[i]))
        self.classes_ = _array([field.labels[i] for i in ordered])
        places = None
        if y is not None:
            self.classes_, places = _places(y, len(texts), self.classes_, field)
        self.order_ = np.array(ordered)
        self.calibrator_ = None
        if self.calibrator is not None:
            self.calibrator_ = clone(self.calibrator).fit(self._scores(texts), places)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probability of every label, shape (texts, labels), columns as `classes_`."""
        check_is_fitted(self)
        scores = self._scores(X)
        return softmax(scores, axis=1) if self.calibrator_ is None else self.calibrator_.predict_proba(scores)

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable label of every text, shape (texts,)."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def _field(self) -> Field:
        schema = Schema.of(self.schema)
        if self.field is None and len(schema.names) > 1:
            raise ParameterError(f"field is not given; choose one of {', '.join(schema.names)}")
        return schema[schema.names[0] if self.field is None else self.field]

    def _scores(self, X: Any) -> Floats:
        schema, field = Schema.of(self.schema), self._field()
        matrix = self._read(X, schema)
        first = 0
        for item in schema:
            if item.name == field.name:
                break
            first += len(item.labels)
        return matrix[:, first : first + len(field.labels)][:, self.order_]


def _sortable(label: Any) -> Any:
    # Numbers and booleans among themselves, then text, then null: as NumPy sorts where it can.
    return (0, label) if isinstance(label, bool | int | float) else (1, label) if isinstance(label, str) else (2, "")


def _array(labels: list[Any]) -> NDArray[Any]:
    """Labels of one kind as NumPy's own type, so that they compare and print as such; mixed ones as objects."""
    if len({type(label) for label in labels}) == 1 and labels[0] is not None:
        return np.array(labels)
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _places(y: Any, texts: int, classes: NDArray[Any], field: Field) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The classes that `y` speaks of, and each entry's place among them."""
    values = [value.item() if isinstance(value, np.generic) else value for value in y]
    if len(values) != texts:
        raise ParameterError(f"X has {texts} texts, y has {len(values)} labels; give one label per text")
    place = {Field.json(label): i for i, label in enumerate(classes.tolist())}
    if all(map(_is_whole, values)) and not any(isinstance(label, float) or _is_whole(label) for label in field.labels):
        if min(values) < 0 or max(values) != len(classes) - 1:
            raise ParameterError(
                f"y holds places from {min(values)} to {max(values)} where field {field.name!r} has {len(classes)} labels; "
                "give the labels themselves, or a schema without the labels that do not occur"
            )
        return np.arange(len(classes)), np.array(values)
    for value in values:
        if not isinstance(value, str | bool | int | float | None) or Field.json(value) not in place:
            raise ParameterError(f"y holds {value!r}, which is no label of field {field.name!r}; map or drop it")
    return classes, np.array([place[Field.json(value)] for value in values])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- all fields as features -----------------------------------------------------------------------------------------


class PCDFeatures(TransformerMixin, _Reader):
    """The log-probabilities of every label of every field, as a feature matrix of texts.

    Many cheap questions about a document, asked in one pass, make a description from which a plain classifier learns with few
    labelled documents. Standardise the columns first (their scales differ), and take a classifier that is regularised: there are
    more columns than documents teach about.

    Parameters
    ----------
    schema : Schema, dict or pydantic model
        Whatever :meth:`pcdlab.schema.Schema.of` takes. Fields with one label give no feature.
    model, backend, dtype, instructions, scorer, normalise
        As for :class:`PCDClassifier`.

    Examples
    --------
    >>> questions = {"angry": {"type": "boolean"}, "topic": {"type": "enum", "choices": ["billing", "delivery"]}}
    >>> PCDFeatures(questions).get_feature_names_out().tolist()
    ['angry=true', 'angry=false', 'topic="billing"', 'topic="delivery"']
    >>> from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> shrunk = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    >>> model = make_pipeline(PCDFeatures(questions), StandardScaler(), shrunk)
    >>> model.fit(texts, labels).predict(new_texts)  # doctest: +SKIP
    """

    def __init__(
        self,
        schema: Any,
        model: str | Engine = "smollm2-135m",
        backend: str = "torch",
        dtype: str = "auto",
        instructions: str | None = None,
        scorer: Scorer = "auto",
        normalise: Normalise = "sum",
    ) -> None:
        self.schema = schema
        self.model = model
        self.backend = backend
        self.dtype = dtype
        self.instructions = instructions
        self.scorer = scorer
        self.normalise = normalise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the texts and the schema; there is nothing to learn."""
        _texts(X)
        Schema.of(self.schema)
        return self

    def transform(self, X: Any) -> Floats:
        """Read texts.

        Parameters
        ----------
        X : sequence of str

        Returns
        -------
        float64 array, shape (texts, features)
            Natural logarithms, columns as `get_feature_names_out`.
        """
        schema = Schema.of(self.schema)
        matrix = self._read(X, schema)
        return matrix[:, [not field.fixed for field in schema for _ in field.labels]]

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """``field=label`` for every column, the label as JSON text; `input_features` is not looked at."""
        schema = Schema.of(self.schema)
        names = [f"{field.name}={field.json(label)}" for field in schema if not field.fixed for label in field.labels]
        return np.array(names, dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return True
