"""From label scores to probabilities: corrections of a model's label preferences, and calibrators fitted on labels.

Every calibrator is a scikit-learn estimator over the matrix of log-probabilities, one row per document and one column per
label. The libraries that fit them are only asked for numbers: a fitted calibrator is a few arrays, which are written as JSON
and applied with NumPy alone. :class:`Calibration` holds one per field. This module knows matrices, labels and JSON; it does
not know models, engines, runs, or how good a calibrator is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from pcdlab.errors import ParameterError
from pcdlab.schema import Label, Schema

__all__ = [
    "CONTENT_FREE_TEXTS",
    "BatchCorrection",
    "BatchStandardisation",
    "Calibration",
    "Calibrator",
    "ContentFreeCorrection",
    "IsotonicCalibrator",
    "LogisticCalibrator",
    "StructuredScaling",
    "TemperatureScaling",
    "VectorScaling",
    "check_log_probs",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONTENT_FREE_TEXTS = ("N/A", "[MASK]", "")
"""Documents that say nothing, as in Zhao et al. (2021)."""


def check_log_probs(log_probs: ArrayLike, name: str = "log_probs") -> Floats:
    """Return a matrix of label scores, or say what is wrong with it.

    Parameters
    ----------
    log_probs : array-like, shape (documents, labels)
        Natural logarithms; rows need not sum to one.
    name : str
        What an error calls it.

    Raises
    ------
    ParameterError
        If it is no finite matrix with a row and at least two columns.
    """
    matrix = np.asarray(log_probs, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] < 1 or matrix.shape[1] < 2:
        raise ParameterError(
            f"{name} has shape {matrix.shape}; give one row per document and one column per label, two labels at least"
        )
    if not np.isfinite(matrix).all():
        row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
        raise ParameterError(f"{name}: row {row} holds a value that is not finite; leave that document out")
    return matrix


# --- what they share ------------------------------------------------------------------------------------------------


class Calibrator(ClassifierMixin, BaseEstimator):
    """Base of the calibrators: classes are the column numbers of the matrix of log-probabilities.

    Attributes
    ----------
    needs_labels : bool
        Whether `fit` learns from `y`. Those that do not never look at it.
    classes_ : int64 array, shape (labels,)
        ``0 … labels - 1``, after `fit`.
    """

    needs_labels = False

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Fit on documents.

        Parameters
        ----------
        X : array-like, shape (documents, labels)
            Log-probabilities.
        y : array-like of int, shape (documents,), optional
            Column number of each document's right label, -1 where it is not known (such rows are left out). Required where
            `needs_labels`, else not looked at.

        Raises
        ------
        ParameterError
        """
        matrix = check_log_probs(X)
        self.classes_ = np.arange(matrix.shape[1])
        self.n_features_in_ = matrix.shape[1]
        if self.needs_labels:
            self._fit(*self._labelled(matrix, y))
        else:
            self._fit(matrix, np.empty(0, dtype=np.int64))
        return self

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probability of every label, float64, shape (documents, labels); rows sum to one."""
        check_is_fitted(self)
        matrix = check_log_probs(X)
        if matrix.shape[1] != self.n_features_in_:
            raise ParameterError(
                f"log_probs has {matrix.shape[1]} columns, {type(self).__name__} was fitted on {self.n_features_in_}; "
                "give the labels of the same field"
            )
        return self._probabilities(matrix)

    def predict(self, X: ArrayLike) -> Ints:
        """Column number of the most probable label, shape (documents,)."""
        return self.predict_proba(X).argmax(axis=1)

    def _labelled(self, matrix: Floats, y: ArrayLike | None) -> tuple[Floats, Ints]:
        name = type(self).__name__
        if y is None:
            raise ParameterError(f"{name} learns from labels; give y, or take a correction that needs none")
        gold = np.asarray(y)
        if gold.shape != matrix.shape[:1] or gold.dtype.kind not in "iu":
            raise ParameterError(
                f"y is {gold.dtype} of shape {gold.shape}; give {len(matrix)} column numbers, -1 where unknown"
            )
        if gold.min() < -1 or gold.max() >= matrix.shape[1]:
            raise ParameterError(
                f"y reaches from {gold.min()} to {gold.max()}; columns go from 0 to {matrix.shape[1] - 1}"
            )
        known = gold >= 0
        if len(np.unique(gold[known])) < 2:
            raise ParameterError(f"y holds fewer than two different labels; {name} has nothing to learn from that")
        return matrix[known], gold[known].astype(np.int64)

    def _fit(self, X: Floats, y: Ints) -> None:
        raise NotImplementedError

    def _probabilities(self, X: Floats) -> Floats:
        raise NotImplementedError

    def _fitted(self) -> dict[str, Any]:
        """The fitted numbers and nothing else, JSON-ready."""
        raise NotImplementedError

    def _restore(self, numbers: Mapping[str, Any], labels: int) -> None:
        """The reverse of `_fitted`."""
        raise NotImplementedError


class _Affine(Calibrator):
    """softmax(weights · x + offset), where x is the log-probabilities.

    With a `scale`, x is log((1 - blend) · softmax(scale · log-probabilities) + blend / labels) instead.
    """

    def _set(self, weights: Floats, offset: Floats, scale: float | None = None, blend: float = 0.0) -> None:
        self.weights_ = np.asarray(weights, dtype=np.float64)  # (labels, labels)
        self.offset_ = np.asarray(offset, dtype=np.float64)  # (labels,); -inf for a label never seen
        self.scale_ = scale
        self.blend_ = blend

    def _probabilities(self, X: Floats) -> Floats:
        x = X
        if self.scale_ is not None:
            x = log_softmax(self.scale_ * X, axis=1)
        if self.blend_:
            x = np.log((1 - self.blend_) * np.exp(x) + self.blend_ / X.shape[1])
        return softmax(x @ self.weights_.T + self.offset_, axis=1)

    def _fitted(self) -> dict[str, Any]:
        offset = [float(value) if np.isfinite(value) else None for value in self.offset_]
        return {"weights": self.weights_.tolist(), "offset": offset, "scale": self.scale_, "blend": self.blend_}

    def _restore(self, numbers: Mapping[str, Any], labels: int) -> None:
        offset = [-np.inf if value is None else float(value) for value in numbers["offset"]]
        self._set(np.array(numbers["weights"], dtype=np.float64), np.array(offset), numbers["scale"], numbers["blend"])
        if self.weights_.shape != (labels, labels) or self.offset_.shape != (labels,):
            raise ValueError(f"weights of shape {self.weights_.shape} for {labels} labels")


# --- without labels -------------------------------------------------------------------------------------------------


class BatchCorrection(_Affine):
    """Subtract each label's mean log-probability over the batch it is fitted on.

    What the model prefers whatever the document says is the same in every document, and so in the mean. The right labels
    should be spread over the batch: a label that is right everywhere loses its lead too.

    References
    ----------
    H. Zhou et al., "Batch Calibration: Rethinking Calibration for In-Context Learning and Prompt Engineering", 2023,
    arXiv:2309.17249.

    Examples
    --------
    >>> X = np.log([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
    >>> BatchCorrection().fit(X).predict(X)
    array([0, 0, 1])
    """

    def _fit(self, X: Floats, y: Ints) -> None:
        self._set(np.eye(X.shape[1]), -X.mean(axis=0))


class BatchStandardisation(_Affine):
    """Subtract each label's mean log-probability over the batch, and divide by its standard deviation there.

    Labels whose score hardly moves count as much as labels whose score swings. Own method; the scale of its shares means
    nothing until a calibrator with labels has seen them.
    """

    def _fit(self, X: Floats, y: Ints) -> None:
        spread = X.std(axis=0)
        spread[spread == 0] = 1.0  # a score that never moves says nothing, at any scale
        self._set(np.diag(1 / spread), -X.mean(axis=0) / spread)


class ContentFreeCorrection(_Affine):
    """Divide each label's probability by the one it has under documents that say nothing.

    Parameters
    ----------
    content_free : array-like, shape (texts, labels)
        Log-probabilities under content-free documents such as `CONTENT_FREE_TEXTS`, read like those to be corrected.
    lengths : array-like of int, shape (labels,), optional
        Tokens of each label. With them, log-probabilities of whole labels (scorer ``exact``) are first divided by the
        length, under the document and under the content-free ones: normalized contextual calibration.

    Notes
    -----
    Probabilities under a content-free document are normalised over the labels, then averaged over the documents. `fit`
    looks at neither its documents nor their labels, except for the number of columns.

    References
    ----------
    T. Zhao et al., "Calibrate Before Use: Improving Few-Shot Performance of Language Models", ICML 2021, arXiv:2102.09690.

    M. Sanz-Guerrero and K. von der Wense, "Mitigating Label Length Bias in Large Language Models", 2025, arXiv:2511.14385.
    """

    def __init__(self, content_free: ArrayLike, lengths: ArrayLike | None = None) -> None:
        self.content_free = content_free
        self.lengths = lengths

    def _fit(self, X: Floats, y: Ints) -> None:
        content_free = check_log_probs(self.content_free, "content_free")
        lengths = np.ones(X.shape[1]) if self.lengths is None else np.asarray(self.lengths, dtype=np.float64)
        if content_free.shape[1] != X.shape[1] or lengths.shape != X.shape[1:]:
            raise ParameterError(
                f"content_free has {content_free.shape[1]} columns and lengths has shape {lengths.shape}; "
                f"the field has {X.shape[1]} labels"
            )
        if not (lengths >= 1).all():
            raise ParameterError(f"lengths holds {lengths.min():g}; a label has one token at least")
        prior = softmax(content_free / lengths, axis=1).mean(axis=0)
        self._set(np.diag(1 / lengths), -np.log(prior))


# --- with labels ----------------------------------------------------------------------------------------------------


class TemperatureScaling(_Affine):
    """One number that makes all probabilities sharper or flatter; never changes the order of labels.

    Fitted by probmetrics (bisection on the gradient of the log-loss).

    References
    ----------
    C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
    """

    needs_labels = True

    def _fit(self, X: Floats, y: Ints) -> None:
        from probmetrics.calibrators import TemperatureScalingCalibrator  # brings torch

        fitted = TemperatureScalingCalibrator().fit(softmax(X, axis=1), y)
        self._set(np.eye(X.shape[1]), np.zeros(X.shape[1]), float(fitted.invtemp_))

    @property
    def temperature_(self) -> float:
        """What log-probabilities are divided by."""
        assert self.scale_ is not None
        return 1 / self.scale_


class VectorScaling(_Affine):
    """A temperature, then a factor and an offset per label, drawn towards one and zero the more, the fewer the documents.

    Fitted by probmetrics (its ``SVSCalibrator`` with the ridge penalty).

    References
    ----------
    E. Berta, D. Holzmüller, M. I. Jordan, F. Bach, "Structured Matrix Scaling for Multi-Class Calibration", AISTATS 2026;
    without the penalty Guo et al. 2017.
    """

    needs_labels = True

    def _fit(self, X: Floats, y: Ints) -> None:
        from probmetrics.calibrators import SVSCalibrator

        fitted = SVSCalibrator().fit(softmax(X, axis=1), y)
        self._set(np.diag(np.asarray(fitted.v_, dtype=np.float64)), fitted.b_, *_first_stage(fitted.ts_))


class StructuredScaling(_Affine):
    """A temperature, then a whole matrix and an offset per label; entries off the diagonal are penalised most.

    Fitted by probmetrics (its ``SMSCalibrator`` with the ridge penalty).

    References
    ----------
    E. Berta, D. Holzmüller, M. I. Jordan, F. Bach, "Structured Matrix Scaling for Multi-Class Calibration", AISTATS 2026.
    """

    needs_labels = True

    def _fit(self, X: Floats, y: Ints) -> None:
        from probmetrics.calibrators import SMSCalibrator

        fitted = SMSCalibrator().fit(softmax(X, axis=1), y)
        matrix = np.asarray(fitted.W_, dtype=np.float64)  # (labels, labels + 1), the offset last
        self._set(matrix[:, :-1], matrix[:, -1], *_first_stage(fitted.ts_))


def _first_stage(mixture: Any) -> tuple[float, float]:
    """Scale and blend of what probmetrics begins with: temperature scaling, mixed with a little of the uniform distribution."""
    return float(mixture.cal_.invtemp_), mixture.output_constant / (mixture.n_samples_ + 1)


class LogisticCalibrator(_Affine):
    """Logistic regression on the standardised vector of log-probabilities.

    It may learn that a high score of one label speaks for another. A label that no document was fitted on gets
    probability zero.

    Parameters
    ----------
    C : float
        Inverse strength of the L2 penalty, as in :class:`sklearn.linear_model.LogisticRegression`.
    """

    needs_labels = True

    def __init__(self, C: float = 0.1) -> None:
        self.C = C

    def _fit(self, X: Floats, y: Ints) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(X)
        model = LogisticRegression(C=self.C, max_iter=2000).fit(scaler.transform(X), y)
        slopes, at = model.coef_, model.intercept_
        if len(model.classes_) == 2:  # one row, for the second of the two
            slopes, at = np.vstack([-slopes / 2, slopes / 2]), np.concatenate([-at / 2, at / 2])
        weights, offset = np.zeros((X.shape[1], X.shape[1])), np.full(X.shape[1], -np.inf)
        weights[model.classes_] = slopes / scaler.scale_
        offset[model.classes_] = at - weights[model.classes_] @ scaler.mean_
        self._set(weights, offset)


class IsotonicCalibrator(Calibrator):
    """A rising step function from each label's share to the frequency with which it is right; then shares sum to one again.

    Fitted by scikit-learn, one label against the rest. Needs some hundred documents; probabilities of exactly zero happen.

    References
    ----------
    B. Zadrozny and C. Elkan, "Transforming Classifier Scores into Accurate Multiclass Probability Estimates", KDD 2002.
    """

    needs_labels = True

    def _fit(self, X: Floats, y: Ints) -> None:
        from sklearn.isotonic import IsotonicRegression

        shares = softmax(X, axis=1)
        curves = [IsotonicRegression().fit(shares[:, i], y == i) for i in range(X.shape[1])]
        self.knots_ = [(np.asarray(c.X_thresholds_), np.asarray(c.y_thresholds_)) for c in curves]

    def _probabilities(self, X: Floats) -> Floats:
        shares = softmax(X, axis=1)
        raw = np.stack([np.interp(shares[:, i], *knots) for i, knots in enumerate(self.knots_)], axis=1)
        raw[raw.sum(axis=1) == 0] = 1.0  # every curve says never: no label is preferred, as in scikit-learn
        return raw / raw.sum(axis=1, keepdims=True)

    def _fitted(self) -> dict[str, Any]:
        return {"knots": [[x.tolist(), y.tolist()] for x, y in self.knots_]}

    def _restore(self, numbers: Mapping[str, Any], labels: int) -> None:
        self.knots_ = [(np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)) for x, y in numbers["knots"]]
        if len(self.knots_) != labels or any(len(x) != len(y) or not len(x) for x, y in self.knots_):
            raise ValueError(f"{len(self.knots_)} curves for {labels} labels, or one with unequal or no points")


# --- one per field, as JSON -----------------------------------------------------------------------------------------

_METHODS: dict[str, type[Calibrator]] = {
    "batch-mean": BatchCorrection,
    "batch-standard": BatchStandardisation,
    "content-free": ContentFreeCorrection,
    "temperature": TemperatureScaling,
    "vector": VectorScaling,
    "structured": StructuredScaling,
    "logistic": LogisticCalibrator,
    "isotonic": IsotonicCalibrator,
}


@dataclass(frozen=True)
class Calibration:
    """Fitted calibrators of a schema's fields, ready to be applied or saved.

    Parameters
    ----------
    labels : dict of str to tuple
        Field → its labels, in the order of the columns the calibrator was fitted on.
    calibrators : dict of str to Calibrator
        Field → its fitted calibrator; the same keys.
    made_with : dict
        What the log-probabilities came from, JSON-ready (``model``, ``scorer``, …; ``schema`` as in a preset): a calibrator fits
        no other source. What is not in it is not checked.

    Raises
    ------
    ParameterError
        If the keys differ, or a calibrator is not fitted on as many labels.

    Examples
    --------
    >>> X = np.log([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
    >>> calibration = Calibration({"spam": (True, False)}, {"spam": BatchCorrection().fit(X)}, {"model": "smollm2-135m"})
    >>> again = Calibration.from_json(calibration.to_json())
    >>> again.apply("spam", X[2]).round(2)
    array([0.28, 0.72])
    """

    labels: dict[str, tuple[Label, ...]]
    calibrators: dict[str, Calibrator]
    made_with: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.labels.keys() != self.calibrators.keys():
            odd = ", ".join(sorted(self.labels.keys() ^ self.calibrators.keys()))
            raise ParameterError(f"labels and calibrators name different fields ({odd}); give both for every field")
        for name, calibrator in self.calibrators.items():
            fitted = getattr(calibrator, "n_features_in_", None)
            if fitted != len(self.labels[name]):
                raise ParameterError(
                    f"field {name!r} has {len(self.labels[name])} labels, its calibrator is fitted on {fitted}; fit it on them"
                )

    def apply(self, name: str, log_probs: Mapping[Label, float] | Sequence[float] | Floats) -> Floats:
        """Probabilities of a field's labels.

        Parameters
        ----------
        name : str
            The field.
        log_probs : sequence of float, or mapping
            One score per label, in label order; a decision's ``log_probs`` is one such mapping.

        Returns
        -------
        float64 array, shape (labels,)

        Raises
        ------
        ParameterError
            If the field has no calibrator, or the scores are not those of its labels.
        """
        if name not in self.calibrators:
            known = ", ".join(map(repr, self.calibrators))
            raise ParameterError(f"there is no calibrator for field {name!r}; there is one for {known}")
        if isinstance(log_probs, Mapping):
            if list(map(json.dumps, log_probs)) != list(map(json.dumps, self.labels[name])):
                raise ParameterError(
                    f"field {name!r} has the labels {list(log_probs)}, its calibrator was fitted on {list(self.labels[name])}"
                )
            log_probs = list(log_probs.values())
        return self.calibrators[name].predict_proba(np.asarray(log_probs, dtype=np.float64)[None])[0]

    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema other than the one whose scores the calibrators were fitted on, if that is on record.

        A field's scores depend on the whole prompt, which lists every field with its description and labels.

        Raises
        ------
        ParameterError
            The message names the fields that differ.
        """
        if "schema" not in self.made_with:
            return
        ours, theirs = schema.to_dict(), Schema.of(self.made_with["schema"], "calibrator: its schema").to_dict()
        if json.dumps(ours) == json.dumps(theirs):
            return
        odd = [name for name in {**ours, **theirs} if json.dumps(ours.get(name)) != json.dumps(theirs.get(name))]
        raise ParameterError(
            "calibrator: it was fitted on scores under another schema, which differs in "
            f"{', '.join(odd) or 'the order of fields'}; every score depends on the whole prompt, so ask with that schema "
            "(the calibrator's made_with holds it), or fit one on scores under this one"
        )

    def to_json(self) -> str:
        """The whole as JSON text; `from_json` gives the same probabilities back."""
        methods = {cls: method for method, cls in _METHODS.items()}
        fields = {
            name: {
                "labels": list(self.labels[name]),
                "method": methods[type(calibrator)],
                "parameters": {key: np.asarray(value).tolist() for key, value in calibrator.get_params().items()},
                "fitted": calibrator._fitted(),
            }
            for name, calibrator in self.calibrators.items()
        }
        return json.dumps({"made_with": self.made_with, "calibrators": fields}, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "calibration") -> Calibration:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
        source : str
            What an error calls it.

        Raises
        ------
        ParameterError
            If it is something else.
        """
        try:
            data = json.loads(text)
            labels, calibrators = {}, {}
            for name, item in data["calibrators"].items():
                labels[name] = tuple(item["labels"])
                calibrator = _METHODS[item["method"]](**item["parameters"])
                calibrator.classes_ = np.arange(len(labels[name]))
                calibrator.n_features_in_ = len(labels[name])
                calibrator._restore(item["fitted"], len(labels[name]))
                calibrators[name] = calibrator
            return cls(labels, calibrators, dict(data["made_with"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParameterError(f"{source}: is no saved calibration ({error!r}); fit and save it again") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a saved file; raises ParameterError with its path."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(
                f"{path}: cannot be read ({error}); give a file that Calibration.save wrote"
            ) from error
        return cls.from_json(text, str(path))
