"""How often the answers are right, and how sure one can be of that.

Works on label numbers and probabilities as arrays, or on a stored run; statistics come from statsmodels and scikit-learn.
Every rate has its interval and its number of documents, every comparison is paired. Knows no model, and nothing of how far
a probability can be trusted (that is :mod:`pcdlab.studies.calibration`'s).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from pcdlab.errors import ParameterError
from pcdlab.schema import Field, Label

if TYPE_CHECKING:
    from pcdlab.studies.runs import Run

__all__ = [
    "Comparison",
    "accuracy_by_confidence",
    "accuracy_of_run",
    "as_labelled",
    "compare",
    "compare_runs",
    "confusion",
    "cross_validated",
    "labelled_fields",
    "score",
    "telling_errors",
    "wilson",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def as_labelled(probabilities: ArrayLike, gold: ArrayLike) -> tuple[Floats, Ints]:
    """Keep the documents whose right label is known.

    Parameters
    ----------
    probabilities : array-like, shape (documents, labels)
        Shares, or any scores whose highest is the answer.
    gold : array-like of int, shape (documents,)
        Column of the right label, -1 where it is not known.

    Returns
    -------
    float64 array, shape (known, labels), and int64 array, shape (known,)

    Raises
    ------
    ParameterError
        If the shapes do not fit, a value is NaN, a number is no column, or no label is known.
    """
    matrix, right = np.asarray(probabilities, dtype=np.float64), np.asarray(gold)
    if matrix.ndim != 2 or right.shape != matrix.shape[:1] or right.dtype.kind not in "iu":
        raise ParameterError(
            f"probabilities of shape {matrix.shape} and gold of type {right.dtype} and shape {right.shape} do not fit; "
            "give a row per document, a column per label, and one column number per document"
        )
    if np.isnan(matrix).any():
        raise ParameterError(f"probabilities: row {int(np.flatnonzero(np.isnan(matrix).any(axis=1))[0])} holds NaN")
    known = right >= 0
    if not known.any():
        raise ParameterError("gold holds no known label; give a labelled bank")
    if right.max() >= matrix.shape[1] or right.min() < -1:
        raise ParameterError(
            f"gold reaches from {right.min()} to {right.max()}; columns go from 0 to {matrix.shape[1] - 1}"
        )
    return matrix[known], right[known].astype(np.int64)


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a rate.

    Parameters
    ----------
    correct, n : int
        Successes, and how many there could have been.
    confidence : float
        Nominal coverage.

    References
    ----------
    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 1927.

    Examples
    --------
    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(correct, n, alpha=1 - confidence, method="wilson")
    return float(low), float(high)


# --- one field ------------------------------------------------------------------------------------------------------


def score(probabilities: ArrayLike, gold: ArrayLike) -> dict[str, float]:
    """Accuracy of one field with what it has to be measured against.

    Parameters
    ----------
    probabilities : array-like, shape (documents, labels)
        Shares, or any scores whose highest is the answer.
    gold : array-like of int, shape (documents,)
        Column of the right label; rows with -1 are left out.

    Returns
    -------
    dict
        ``n``, ``correct``, ``accuracy`` with its 95 % Wilson interval ``low``, ``high``; ``macro_f1`` (labels that are neither
        right nor chosen anywhere do not count); ``majority`` (accuracy of always giving the most frequent label) and
        ``random`` (of choosing blindly among the labels).
    """
    from sklearn.metrics import f1_score

    matrix, right = as_labelled(probabilities, gold)
    chosen = matrix.argmax(axis=1)
    correct, n = int((chosen == right).sum()), len(right)
    low, high = wilson(correct, n)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        "macro_f1": float(f1_score(right, chosen, average="macro", zero_division=0)),
        "majority": float(np.bincount(right).max() / n),
        "random": 1 / matrix.shape[1],
    }


def confusion(probabilities: ArrayLike, gold: ArrayLike, labels: Sequence[Label]) -> pd.DataFrame:
    """Count documents by right label (rows) and chosen label (columns).

    Parameters
    ----------
    probabilities, gold
        As for :func:`score`.
    labels : sequence
        The field's labels, in column order.

    Returns
    -------
    DataFrame of int, shape (labels, labels)
        Index ``right``, columns ``chosen``; text labels as they are, others as their JSON text.
    """
    from sklearn.metrics import confusion_matrix

    matrix, right = as_labelled(probabilities, gold)
    if len(labels) != matrix.shape[1]:
        raise ParameterError(
            f"labels names {len(labels)}, probabilities has {matrix.shape[1]} columns; give one name each"
        )
    names = [label if isinstance(label, str) else Field.json(label) for label in labels]
    counts = confusion_matrix(right, matrix.argmax(axis=1), labels=range(len(labels)))
    return pd.DataFrame(counts, index=pd.Index(names, name="right"), columns=pd.Index(names, name="chosen"))


def accuracy_by_confidence(probabilities: ArrayLike, gold: ArrayLike, bins: int = 5) -> pd.DataFrame:
    """Accuracy of the least sure documents up to the surest.

    Parameters
    ----------
    probabilities, gold
        As for :func:`score`; shares.
    bins : int
        Groups of equal size (to within one document), by the probability of the chosen label.

    Returns
    -------
    DataFrame
        One row per group, least sure first: ``n``, ``from``, ``to`` and ``confidence`` (lowest, highest, mean probability),
        ``accuracy``, ``low``, ``high``.
    """
    matrix, right = as_labelled(probabilities, gold)
    if not 1 <= bins <= len(right):
        raise ParameterError(f"bins={bins} does not fit {len(right)} documents; choose from 1 to {len(right)}")
    confidence, correct = matrix.max(axis=1), matrix.argmax(axis=1) == right
    rows = []
    for group in np.array_split(np.argsort(confidence, kind="stable"), bins):
        low, high = wilson(int(correct[group].sum()), len(group))
        part = confidence[group]
        rows.append(
            {"n": len(group), "from": part[0], "to": part[-1], "confidence": part.mean()}
            | {"accuracy": correct[group].mean(), "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def telling_errors(
    probabilities: ArrayLike, gold: ArrayLike, labels: Sequence[Label], documents: Sequence[Any], count: int = 5
) -> pd.DataFrame:
    """Errors worth reading: the surest ones, and those that gave the right label the least chance.

    Parameters
    ----------
    probabilities, gold, labels
        As for :func:`confusion`.
    documents : sequence, length (documents,)
        What names each document, also those without a known label.
    count : int
        Most errors of each kind.

    Returns
    -------
    DataFrame
        ``why`` ("surest wrong answer" or "right label least likely"), ``document``, ``chosen``, ``right``,
        ``probability`` of the chosen label and ``right_probability``; most telling first within each kind.
    """
    matrix, right = as_labelled(probabilities, gold)
    if len(documents) != len(np.asarray(gold)) or len(labels) != matrix.shape[1]:
        raise ParameterError(
            f"{len(documents)} documents and {len(labels)} labels do not fit probabilities of shape "
            f"{np.shape(probabilities)}; name every row and every column"
        )
    names = [documents[int(i)] for i in np.flatnonzero(np.asarray(gold) >= 0)]
    chosen = matrix.argmax(axis=1)
    wrong = np.flatnonzero(chosen != right)
    by = {
        "surest wrong answer": -matrix[wrong, chosen[wrong]],
        "right label least likely": matrix[wrong, right[wrong]],
    }
    rows = [
        {
            "why": why,
            "document": names[i],
            "chosen": labels[int(chosen[i])],
            "right": labels[int(right[i])],
            "probability": matrix[i, chosen[i]],
            "right_probability": matrix[i, right[i]],
        }
        for why, key in by.items()
        for i in wrong[np.argsort(key, kind="stable")[:count]]
    ]
    columns = ["why", "document", "chosen", "right", "probability", "right_probability"]
    return pd.DataFrame(rows, columns=columns)


def cross_validated(estimator: Any, X: Any, y: ArrayLike, folds: int = 5, repeats: int = 5) -> pd.DataFrame:
    """Cross-fitted accuracy of any scikit-learn classifier, and how much the deal of the folds matters.

    Parameters
    ----------
    estimator : classifier
        Cloned for each fold.
    X : array-like, shape (documents, …)
        Features, or texts.
    y : array-like, shape (documents,)
        Right labels.
    folds : int
        Stratified by label.
    repeats : int
        Deals, with the seeds ``0 … repeats - 1``.

    Returns
    -------
    DataFrame
        One row per deal: ``seed``, ``n``, ``correct``, ``accuracy`` with its 95 % Wilson interval ``low``, ``high``. Deals share
        their documents: the spread between rows says nothing of other documents, the interval does.
    """
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    right = np.asarray(y)
    if not isinstance(repeats, int) or repeats < 1:
        raise ParameterError(f"repeats={repeats!r} is no positive whole number")
    most = int(np.unique(right, return_counts=True)[1].max())
    if not isinstance(folds, int) or not 2 <= folds <= most:
        raise ParameterError(
            f"folds={folds!r} does not fit labels with {most} documents at most; choose from 2 to {most}"
        )
    rows = []
    with warnings.catch_warnings():
        # A label rarer than the folds is in some of them only, which is all that can be done.
        warnings.filterwarnings("ignore", message="The least populated class")
        for seed in range(repeats):
            deal = StratifiedKFold(folds, shuffle=True, random_state=seed)
            correct = int((cross_val_predict(estimator, X, right, cv=deal) == right).sum())
            low, high = wilson(correct, len(right))
            rows.append({"seed": seed, "n": len(right), "correct": correct, "accuracy": correct / len(right)})
            rows[-1] |= {"low": low, "high": high}
    return pd.DataFrame(rows)


# --- two ways, the same documents -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two ways to answer, on the same documents.

    Attributes
    ----------
    n : int
        Documents.
    accuracy_a, accuracy_b : float
    difference, low, high : float
        ``accuracy_b - accuracy_a`` with its 95 % interval, by paired bootstrap.
    only_a, only_b : int
        Documents that only one of the two has right.
    p_value : float
        Exact McNemar test, two-sided: how probable so unequal a split of those is if neither way is better.
    """

    n: int
    accuracy_a: float
    accuracy_b: float
    difference: float
    low: float
    high: float
    only_a: int
    only_b: int
    p_value: float


def compare(correct_a: ArrayLike, correct_b: ArrayLike, resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two ways to answer the same documents.

    Parameters
    ----------
    correct_a, correct_b : array-like of bool, shape (documents,)
        Whether each has each document right.
    resamples : int
        Bootstrap samples of documents.
    seed : int

    Returns
    -------
    Comparison

    References
    ----------
    Q. McNemar, "Note on the Sampling Error of the Difference Between Correlated Proportions or Percentages",
    Psychometrika 1947.

    Examples
    --------
    >>> found = compare([True, False, False, False], [True, True, True, False])
    >>> found.difference, found.only_b, found.p_value
    (0.5, 2, 0.5)
    """
    from statsmodels.stats.contingency_tables import mcnemar

    a, b = np.asarray(correct_a), np.asarray(correct_b)
    if a.ndim != 1 or a.shape != b.shape or not len(a) or a.dtype != bool or b.dtype != bool:
        raise ParameterError(
            f"correct_a ({a.dtype}, {a.shape}) and correct_b ({b.dtype}, {b.shape}) are not two lists of booleans of one "
            "length; give both for the same documents, in the same order"
        )
    n, only_a, only_b = len(a), int((a & ~b).sum()), int((~a & b).sum())
    both = int((a & b).sum())
    p_value = mcnemar([[both, only_a], [only_b, n - both - only_a - only_b]], exact=True).pvalue
    # Resampling documents draws the four kinds of pair from a multinomial; only two of them count.
    drawn = np.random.default_rng(seed).multinomial(n, [only_b / n, only_a / n, 1 - (only_a + only_b) / n], resamples)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / n, [0.025, 0.975])
    return Comparison(
        n,
        float(a.mean()),
        float(b.mean()),
        (only_b - only_a) / n,
        float(low),
        float(high),
        only_a,
        only_b,
        float(p_value),
    )


# --- from runs ------------------------------------------------------------------------------------------------------


def labelled_fields(run: Run) -> list[str]:
    """Name the fields with a choice, in schema order, whose right label is known for a document that was decided."""
    labels = {field.name: _texts(field) for field in run.schema if not field.fixed}
    found = {row["field"] for row in run.rows() if _is_labelled(row, labels.get(row["field"], set()))}
    return [name for name in labels if name in found]


def accuracy_of_run(run: Run, fields: Sequence[str]) -> pd.DataFrame:
    """Accuracy of fields of a run, as read and with each label's mean log-probability over the run subtracted.

    Parameters
    ----------
    run : Run
    fields : sequence of str
        Fields with known labels.

    Returns
    -------
    DataFrame
        Two rows per field: ``field``, ``scores`` ("raw" or "batch-corrected"), and what :func:`score` gives. The correction
        sees all documents of the run and none of their labels. One document has no mean but itself, and a run of mode
        "grammar" no scores to correct: one row per field, ``scores`` being "raw".
    """
    from pcdlab.calibrators import BatchCorrection

    if isinstance(fields, str):
        raise ParameterError(f"fields is one string, {fields!r}; give a list of names")
    rows: list[dict[str, Any]] = []
    for name in fields:
        if run.meta["mode"] == "grammar":
            texts = [Field.json(label) for label in run.schema[name].labels]
            answers = np.array([[texts.index(text) for text in pair] for pair in _answers(run, name).values()])
            chosen, right = answers.reshape(-1, 2).T
            rows.append({"field": name, "scores": "raw", **score(np.eye(len(texts))[chosen], right)})
            continue
        _, log_probs, gold, _ = run.log_probs(name)
        rows.append({"field": name, "scores": "raw", **score(softmax(log_probs, axis=1), gold)})
        if len(log_probs) == 1:
            continue  # a document less its own mean is nothing
        corrected = BatchCorrection().fit(log_probs).predict_proba(log_probs)
        rows.append({"field": name, "scores": "batch-corrected", **score(corrected, gold)})
    return pd.DataFrame(rows)


def compare_runs(run_a: Run, run_b: Run, name: str) -> Comparison:
    """Compare the answers of two runs on the documents that both decided and whose right label is known.

    Parameters
    ----------
    run_a, run_b : Run
        Over one bank, in any mode and any order.
    name : str
        The field.

    Raises
    ------
    ParameterError
        If they share no such document, or disagree about a right label.
    """
    a, b = _answers(run_a, name), _answers(run_b, name)
    shared = [document for document in a if document in b]
    if not shared:
        raise ParameterError(f"field {name!r}: the runs share no labelled document; give two runs over one bank")
    if odd := [document for document in shared if a[document][1] != b[document][1]]:
        raise ParameterError(
            f"field {name!r}: the runs have different right labels for {odd[0]!r}; give runs over one bank"
        )
    correct_a, correct_b = ([part[d][0] == part[d][1] for d in shared] for part in (a, b))
    return compare(correct_a, correct_b)


def _answers(run: Run, name: str) -> dict[str, tuple[str, str]]:
    """Document → JSON text of the chosen and of the right label; without those for which no label is right."""
    labels = _texts(run.schema[name])
    return {
        row["document"]: (Field.json(row["value"]), Field.json(row["gold"]))
        for row in run.rows()
        if row["field"] == name and _is_labelled(row, labels)
    }


def _is_labelled(row: Mapping[str, Any], labels: set[str]) -> bool:
    """Whether a row was decided and its right label is among those, given as JSON text."""
    return "error" not in row and "gold" in row and Field.json(row["gold"]) in labels


def _texts(field: Field) -> set[str]:
    return {Field.json(label) for label in field.labels}
