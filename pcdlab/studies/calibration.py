"""How far the probabilities can be trusted, and what may be decided with them.

Measures of calibration, cross-fitting of the calibrators of :mod:`pcdlab.calibrators`, and decisions with a guarantee:
thresholds that hold an error rate, conformal sets. Works on arrays of log-probabilities or probabilities, one row per document
and one column per label, or on a stored run. Knows no model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from scipy.stats import rankdata

from pcdlab.calibrators import Calibration, Calibrator, check_log_probs
from pcdlab.errors import ParameterError
from pcdlab.studies.accuracy import as_labelled, score, wilson

if TYPE_CHECKING:
    from pcdlab.studies.runs import Run

__all__ = [
    "ErrorEstimate",
    "Threshold",
    "aurc",
    "calibrated_run",
    "calibration_error",
    "calibration_table",
    "class_wise_ece",
    "conformal_coverage",
    "conformal_sets",
    "cross_fitted",
    "ece",
    "fit_calibration",
    "losses",
    "out_of_scope_auroc",
    "out_of_scope_of_run",
    "refinement",
    "risk_coverage",
    "threshold_for_error",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BINS = 10  # of equal mass; with few documents there are fewer


# --- cross-fitting --------------------------------------------------------------------------------------------------


def cross_fitted(
    calibrator: Calibrator,
    log_probs: ArrayLike,
    gold: ArrayLike,
    documents: Sequence[Any] | None = None,
    folds: int = 5,
    seed: int = 0,
) -> tuple[Floats, Ints]:
    """Calibrate every document by a calibrator that was fitted on others.

    Documents are dealt to folds by their right label; the calibrator of a fold is fitted on the labelled documents of all other
    folds. Rows of the same document always share a fold.

    Parameters
    ----------
    calibrator : Calibrator
        Cloned for each fold, never fitted itself.
    log_probs : array-like, shape (rows, labels)
    gold : array-like of int, shape (rows,)
        Column of the right label, -1 where unknown: such rows are calibrated, and nothing is learnt from them.
    documents : sequence, length (rows,), optional
        What document each row is of; by default each of its own.
    folds : int
    seed : int
        Deals the documents.

    Returns
    -------
    probabilities : float64 array, shape (rows, labels)
    fold : int64 array, shape (rows,)

    Raises
    ------
    ParameterError
        If the shapes do not fit, or there are too few documents for the folds.
    """
    from sklearn.base import clone

    matrix = check_log_probs(log_probs)
    as_labelled(matrix, gold)
    right = np.asarray(gold)
    fold = _deal(right, documents, folds, seed)
    probabilities = np.empty_like(matrix)
    for number in range(folds):
        held = fold == number
        fitted = clone(calibrator).fit(matrix[~held], right[~held])
        probabilities[held] = fitted.predict_proba(matrix[held])
    return probabilities, fold


def _deal(gold: Ints, documents: Sequence[Any] | None, folds: int, seed: int) -> Ints:
    """The fold of every row, stratified by right label, documents kept together."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    groups = np.arange(len(gold)) if documents is None else pd.factorize(np.asarray(documents, dtype=object))[0]
    if len(groups) != len(gold):
        raise ParameterError(f"documents names {len(groups)} rows, gold has {len(gold)}; name every row")
    count = len(np.unique(groups))
    if not isinstance(folds, int) or not 2 <= folds <= count:
        raise ParameterError(f"folds={folds!r} does not fit {count} documents; choose from 2 to {count}")
    alone = count == len(gold)
    splitter = (StratifiedKFold if alone else StratifiedGroupKFold)(folds, shuffle=True, random_state=seed)
    parts = splitter.split(gold, gold) if alone else splitter.split(gold, gold, groups)
    fold = np.empty(len(gold), dtype=np.int64)
    with warnings.catch_warnings():
        # A label rarer than the folds is in some of them only, which is all that can be done.
        warnings.filterwarnings("ignore", message="The least populated class")
        try:
            for number, (_, held) in enumerate(parts):
                fold[held] = number
        except ValueError:  # no label at all has a document for each fold
            most = int(np.unique(gold, return_counts=True)[1].max())
            raise ParameterError(
                f"folds={folds} is more than the documents of any label ({most} at most); take fewer folds"
            ) from None
    return fold


# --- measures -------------------------------------------------------------------------------------------------------


def losses(probabilities: ArrayLike, gold: ArrayLike) -> dict[str, float]:
    """Proper scores: how good probabilities are as a whole.

    Parameters
    ----------
    probabilities : array-like, shape (documents, labels)
        Rows sum to one.
    gold : array-like of int, shape (documents,)
        Column of the right label; rows with -1 are left out.

    Returns
    -------
    dict
        ``log_loss`` (mean of -ln of the right label's probability, zeros lifted to the smallest float) and ``brier`` (mean
        squared distance to the right answer, summed over labels, 0 to 2).
    """
    from sklearn.metrics import brier_score_loss, log_loss

    matrix, right = _shares(probabilities, gold)
    labels = range(matrix.shape[1])
    # With two labels scikit-learn expects the second one's probability, and halves nothing only if told so.
    return {
        "log_loss": float(log_loss(right, matrix, labels=labels)),
        "brier": float(brier_score_loss(right, matrix, labels=labels, scale_by_half=False)),
    }


def ece(probabilities: ArrayLike, gold: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error of the chosen label's probability, with bins of equal mass.

    Documents are sorted by that probability and cut into groups of equal size; the error is the mean distance between a
    group's mean probability and its accuracy, weighted by size.

    Parameters
    ----------
    probabilities, gold
        As for :func:`losses`.
    bins : int
        Most groups; never more than documents.

    Returns
    -------
    float

    Notes
    -----
    Of a perfectly calibrated model it is above zero, the more, the fewer the documents: read it next to what
    :func:`calibration_error` simulates.

    References
    ----------
    M. P. Naeini, G. F. Cooper, M. Hauskrecht, "Obtaining Well Calibrated Probabilities Using Bayesian Binning", AAAI 2015;
    equal mass: K. Nguyen and B. O'Connor, EMNLP 2015.
    """
    matrix, right = _shares(probabilities, gold)
    return _gap(matrix.max(axis=1), matrix.argmax(axis=1) == right, bins)


def class_wise_ece(probabilities: ArrayLike, gold: ArrayLike, bins: int = BINS) -> float:
    """Mean over labels of the calibration error of each label's probability, bins of equal mass.

    Parameters
    ----------
    probabilities, gold, bins
        As for :func:`ece`.

    References
    ----------
    M. Kull et al., "Beyond Temperature Scaling", NeurIPS 2019.
    """
    matrix, right = _shares(probabilities, gold)
    return float(np.mean([_gap(matrix[:, i], right == i, bins) for i in range(matrix.shape[1])]))


def _gap(probability: Floats, happened: Bools, bins: int) -> float:
    if bins < 1:
        raise ParameterError(f"bins={bins} is no positive number")
    order = np.argsort(probability, kind="stable")
    gap = np.array_split((probability - happened)[order], min(bins, len(order)))
    return float(sum(abs(part.sum()) for part in gap) / len(order))


@dataclass(frozen=True)
class ErrorEstimate:
    """A calibration error with what chance alone does to it.

    Attributes
    ----------
    value : float
        The ECE, bins of equal mass.
    low, high : float
        95 % interval by bootstrap over documents (percentiles; resampling adds noise, so it lies high for small errors).
    if_calibrated : float
        Mean ECE of a perfectly calibrated model with these very probabilities, by simulation.
    if_calibrated_high : float
        The 95th percentile of that: above it, chance alone is no good explanation.
    """

    value: float
    low: float
    high: float
    if_calibrated: float
    if_calibrated_high: float


def calibration_error(
    probabilities: ArrayLike, gold: ArrayLike, bins: int = BINS, resamples: int = 1000, seed: int = 0
) -> ErrorEstimate:
    """ECE with a bootstrap interval, and its value for a perfectly calibrated model of the same size.

    Parameters
    ----------
    probabilities, gold, bins
        As for :func:`ece`.
    resamples : int
        Bootstrap samples, and simulations.
    seed : int

    Returns
    -------
    ErrorEstimate

    References
    ----------
    J. Vaicenavicius et al., "Evaluating Model Calibration in Classification", AISTATS 2019 (the comparison with a calibrated
    model by resampling labels).
    """
    matrix, right = _shares(probabilities, gold)
    confidence, correct = matrix.max(axis=1), matrix.argmax(axis=1) == right
    generator = np.random.default_rng(seed)
    n = len(right)
    rows = generator.integers(n, size=(resamples, n))
    again = [_gap(confidence[row], correct[row], bins) for row in rows]
    # A calibrated model is right as often as it says.
    ideal = [_gap(confidence, generator.random(n) < confidence, bins) for _ in range(resamples)]
    low, high = np.quantile(again, [0.025, 0.975])
    return ErrorEstimate(
        _gap(confidence, correct, bins), float(low), float(high), float(np.mean(ideal)), float(np.quantile(ideal, 0.95))
    )


def refinement(probabilities: ArrayLike, gold: ArrayLike, folds: int = 5, seed: int = 0) -> dict[str, float]:
    """Split the log-loss into what recalibration would mend and what it would not.

    Parameters
    ----------
    probabilities, gold
        As for :func:`losses`.
    folds, seed
        The recalibration (temperature scaling) is cross-fitted.

    Returns
    -------
    dict
        ``refinement_loss``, the log-loss after recalibration, and ``calibration_loss``, the log-loss before minus after
        (negative where recalibration made it worse).

    References
    ----------
    E. Berta, D. Holzmüller, M. I. Jordan, F. Bach, "Rethinking Early Stopping: Refine, Then Calibrate", 2025,
    arXiv:2501.19195; computed by probmetrics.
    """
    import torch
    from probmetrics.calibrators import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalProbs
    from probmetrics.metrics import LogLoss, MetricsWithCalibration
    from probmetrics.splitters import CVSplitter

    matrix, right = _shares(probabilities, gold)
    splitter = CVSplitter(folds)
    _deal(right, None, folds, seed)  # says what does not fit
    parts = MetricsWithCalibration(
        LogLoss(), TemperatureScalingCalibrator(), splitter, cal_name="ts", random_state=seed
    )
    truth = CategoricalProbs(torch.eye(matrix.shape[1], dtype=torch.float64)[torch.from_numpy(right)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")
        found = parts.compute_all(truth, CategoricalProbs(torch.from_numpy(matrix)))
    values = {key.split("_")[0]: float(value) for key, value in found.items()}
    return {"refinement_loss": values["refinement"], "calibration_loss": values["calib-err"]}


def aurc(probabilities: ArrayLike, gold: ArrayLike) -> float:
    """Area under the risk–coverage curve: mean error rate over all numbers of surest documents answered.

    Parameters
    ----------
    probabilities, gold
        As for :func:`losses`, or any scores whose highest is the answer and its confidence.

    Returns
    -------
    float
        Low is good. A useless order of documents gives the plain error rate.

    References
    ----------
    Y. Geifman, G. Uziel, R. El-Yaniv, "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers", ICLR 2019.
    """
    return float(risk_coverage(probabilities, gold)["risk"].mean())


def _shares(probabilities: ArrayLike, gold: ArrayLike) -> tuple[Floats, Ints]:
    matrix, right = as_labelled(probabilities, gold)
    if (matrix < 0).any() or not np.allclose(matrix.sum(axis=1), 1, atol=1e-6):
        row = int(np.argmax(np.maximum((matrix < 0).any(axis=1), abs(matrix.sum(axis=1) - 1))))
        raise ParameterError(
            f"probabilities: labelled row {row} sums to {matrix[row].sum():g}; give shares, not log-probabilities"
        )
    return matrix, right


# --- decisions ------------------------------------------------------------------------------------------------------


def risk_coverage(probabilities: ArrayLike, gold: ArrayLike) -> pd.DataFrame:
    """Error rate among the surest documents, for every number of them.

    Parameters
    ----------
    probabilities, gold
        As for :func:`aurc`.

    Returns
    -------
    DataFrame
        One row per number of documents answered: ``threshold`` (the lowest confidence among them), ``coverage`` (their share of
        all) and ``risk`` (their error rate). Documents of equal confidence come in no order: each counts as their mean.
    """
    matrix, right = as_labelled(probabilities, gold)
    confidence = matrix.max(axis=1)
    order = np.argsort(-confidence, kind="stable")
    table = pd.DataFrame(
        {"threshold": confidence[order], "wrong": (matrix.argmax(axis=1) != right)[order].astype(float)}
    )
    wrong = table.groupby("threshold")["wrong"].transform("mean").to_numpy()
    answered = np.arange(1, len(right) + 1)
    return pd.DataFrame(
        {"threshold": table["threshold"], "coverage": answered / len(right), "risk": wrong.cumsum() / answered}
    )


@dataclass(frozen=True)
class Threshold:
    """A confidence above which answers may be taken.

    Attributes
    ----------
    threshold : float or None
        Take an answer whose probability is at least this; None where no threshold can be vouched for.
    coverage : float
        Share of the labelled documents that is taken.
    error, bound : float
        Error rate among those, and its upper confidence bound; NaN where nothing is taken.
    n : int
        Labelled documents.
    """

    threshold: float | None
    coverage: float
    error: float
    bound: float
    n: int


def threshold_for_error(
    probabilities: ArrayLike, gold: ArrayLike, error: float, confidence: float = 0.95, steps: int = 100
) -> Threshold:
    """Find the lowest threshold whose answers hold an error rate, with confidence.

    Thresholds ``1 - 1/steps, …, 1/steps, 0`` are tested one after another, strictest first, and testing stops at the first that
    fails: so all tests together err with a probability of at most ``1 - confidence``, however many they are (fixed-sequence
    testing, the simplest form of learn-then-test). A threshold passes if the one-sided Clopper–Pearson bound of the error rate
    among the documents it takes is at most `error`. Thresholds that take too few documents to pass even without an error are
    skipped; that depends on the probabilities alone, not on labels.

    Parameters
    ----------
    probabilities, gold
        As for :func:`losses`; of documents like those to come, with probabilities from a calibrator that has not seen them.
    error : float
        The wanted error rate among the answers taken, in (0, 1).
    confidence : float
        Probability, over the draw of labelled documents, that the threshold holds it.
    steps : int
        Thresholds tested.

    Returns
    -------
    Threshold

    References
    ----------
    A. N. Angelopoulos, S. Bates, E. J. Candès, M. I. Jordan, L. Lei, "Learn then Test: Calibrating Predictive Algorithms to
    Achieve Risk Control", 2021, arXiv:2110.01052.

    C. J. Clopper and E. S. Pearson, "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial",
    Biometrika 1934.
    """
    from statsmodels.stats.proportion import proportion_confint

    for name, value in (("error", error), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ParameterError(f"{name}={value!r} is no share; choose one between 0 and 1, such as 0.05")
    matrix, right = _shares(probabilities, gold)
    sureness, wrong = matrix.max(axis=1), matrix.argmax(axis=1) != right
    best = Threshold(None, 0.0, float("nan"), float("nan"), len(right))
    for step in range(steps - 1, -1, -1):
        taken = sureness >= step / steps
        count, errors = int(taken.sum()), int(wrong[taken].sum())
        if (1 - error) ** count > 1 - confidence:
            continue
        _, bound = proportion_confint(errors, count, alpha=2 * (1 - confidence), method="beta")
        if bound > error:
            break
        best = Threshold(step / steps, count / len(right), errors / count, float(bound), len(right))
    return best


def conformal_sets(
    calibration: ArrayLike, gold: ArrayLike, probabilities: ArrayLike, level: float | Sequence[float] = 0.9
) -> Bools:
    """Sets of labels that hold the right one with a given probability.

    Split conformal prediction by MAPIE with the score one minus the right label's probability ("lac"): a label is in the set if
    its probability is high enough, where "enough" is what the right labels of the labelled documents had. Coverage is on average
    over documents, not for each label or kind of document. A set may be empty.

    Parameters
    ----------
    calibration : array-like, shape (labelled, labels)
        Probabilities of labelled documents, from a calibrator that has not seen them.
    gold : array-like of int, shape (labelled,)
    probabilities : array-like, shape (documents, labels)
        Of the documents to get sets.
    level : float or sequence of float
        Wanted coverage.

    Returns
    -------
    bool array, shape (documents, labels), or (documents, labels, levels) for a sequence of levels

    Raises
    ------
    ParameterError
        If a level is no share, or there are too few labelled documents for it.

    References
    ----------
    M. Sadinle, J. Lei, L. Wasserman, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels", JASA 2019;
    MAPIE, https://mapie.readthedocs.io.
    """
    from mapie.classification import SplitConformalClassifier

    levels = list(level) if isinstance(level, Sequence) else [level]
    known, right = _shares(calibration, gold)
    for value in levels:
        if not 0 < value < 1:
            raise ParameterError(f"level={value!r} is no share; choose one between 0 and 1, such as 0.9")
        needed = int(max(1 / value, 1 / (1 - value))) + 1  # MAPIE asks for one more than theory does
        if len(right) < needed:
            raise ParameterError(
                f"level={value!r} needs {needed} labelled documents at least, there are {len(right)}; label more, or choose "
                "a level nearer to a half"
            )
    given = _given(known.shape[1])
    conformal = SplitConformalClassifier(given, confidence_level=levels, conformity_score="lac", prefit=True)
    with warnings.catch_warnings():
        # A label that none of the labelled documents has is no news to this score.
        warnings.filterwarnings("ignore", message=".*less labels than your training")
        conformal.conformalize(known, right)
    _, sets = conformal.predict_set(np.asarray(probabilities, dtype=np.float64))
    return sets if isinstance(level, Sequence) else sets[:, :, 0]


def _given(labels: int) -> Any:
    """The identity as a classifier, for libraries that want one: its features are its probabilities."""
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):
        def __init__(self) -> None:
            self.classes_ = np.arange(labels)
            self.is_fitted_ = True

        def fit(self, X: Floats, y: Ints) -> Any:
            return self

        def predict_proba(self, X: Floats) -> Floats:
            return X

        def predict(self, X: Floats) -> Ints:
            return X.argmax(axis=1)

    return Given()


def conformal_coverage(
    probabilities: ArrayLike,
    gold: ArrayLike,
    levels: Sequence[float] = (0.8, 0.9, 0.95),
    folds: int = 5,
    seed: int = 0,
) -> pd.DataFrame:
    """How often conformal sets hold the right label, and how large they are.

    Every document gets its sets from the labelled documents of the other folds.

    Parameters
    ----------
    probabilities, gold
        As for :func:`losses`, from a calibrator that has not seen the documents.
    levels : sequence of float
        Wanted coverages.
    folds, seed
        As for :func:`cross_fitted`.

    Returns
    -------
    DataFrame
        One row per level: ``level``, ``n``, ``coverage`` with its Wilson interval ``low``, ``high``, ``mean_size`` and
        ``single`` (share of sets with exactly one label).
    """
    matrix, right = _shares(probabilities, gold)
    fold = _deal(right, None, folds, seed)
    sets = np.empty((*matrix.shape, len(levels)), dtype=bool)
    for number in range(folds):
        held = fold == number
        sets[held] = conformal_sets(matrix[~held], right[~held], matrix[held], list(levels))
    rows = []
    for i, level in enumerate(levels):
        hits = int(sets[np.arange(len(right)), right, i].sum())
        low, high = wilson(hits, len(right))
        size = sets[:, :, i].sum(axis=1)
        rows.append(
            {"level": level, "n": len(right), "coverage": hits / len(right), "low": low, "high": high}
            | {"mean_size": size.mean(), "single": (size == 1).mean()}
        )
    return pd.DataFrame(rows)


def out_of_scope_auroc(
    mass: ArrayLike, out_of_scope: ArrayLike, resamples: int = 1000, seed: int = 0
) -> dict[str, float]:
    """How well a low candidate mass tells documents for which no label is right.

    Parameters
    ----------
    mass : array-like, shape (documents,)
        Candidate mass, or another score that should be low for them.
    out_of_scope : array-like of bool, shape (documents,)
        Whether no label is right; both kinds must be there.
    resamples : int
        Bootstrap samples, drawn within each kind.
    seed : int

    Returns
    -------
    dict
        ``auroc`` (0.5: no better than chance) with its 95 % interval ``low``, ``high``; ``out_of_scope`` and ``in_scope``
        documents.
    """
    values, outside = np.asarray(mass, dtype=np.float64), np.asarray(out_of_scope)
    if values.ndim != 1 or outside.shape != values.shape or outside.dtype != bool or np.isnan(values).any():
        raise ParameterError(
            f"mass has shape {values.shape}, out_of_scope is {outside.dtype} of shape {outside.shape}; give one number, not NaN, "
            "and one boolean per document"
        )
    if outside.all() or not outside.any():
        raise ParameterError(
            f"{int(outside.sum())} of {len(outside)} documents are out of scope; both kinds are needed"
        )
    generator = np.random.default_rng(seed)
    low_out, low_in = -values[outside], -values[~outside]

    def area(a: Floats, b: Floats) -> float:
        # Mann–Whitney: scikit-learn's own takes 20 ms a call, for the thousand of them that an interval wants.
        ranks = rankdata(np.concatenate([a, b]))[: len(a)]
        return float((ranks.sum() - len(a) * (len(a) + 1) / 2) / (len(a) * len(b)))

    again = [
        area(generator.choice(low_out, len(low_out)), generator.choice(low_in, len(low_in))) for _ in range(resamples)
    ]
    low, high = np.quantile(again, [0.025, 0.975])
    return {
        "auroc": area(low_out, low_in),
        "low": float(low),
        "high": float(high),
        "out_of_scope": len(low_out),
        "in_scope": len(low_in),
    }


# --- side by side, and from runs ------------------------------------------------------------------------------------


def calibration_table(
    log_probs: ArrayLike,
    gold: ArrayLike,
    calibrators: Mapping[str, Calibrator],
    documents: Sequence[Any] | None = None,
    folds: int = 5,
    seed: int = 0,
    resamples: int = 1000,
) -> pd.DataFrame:
    """All measures of the raw scores and of each calibrator, side by side.

    Calibrators that learn from labels are cross-fitted; those that do not are fitted on all documents, without their labels.

    Parameters
    ----------
    log_probs, gold, documents, folds, seed
        As for :func:`cross_fitted`.
    calibrators : dict of str to Calibrator
        Name → unfitted calibrator.
    resamples : int
        As for :func:`calibration_error`.

    Returns
    -------
    DataFrame
        One row for "raw" and each name: ``accuracy``, ``low``, ``high``, ``macro_f1``, ``log_loss``, ``brier``, ``ece`` with
        ``ece_low``, ``ece_high`` and ``ece_if_calibrated``, ``class_wise_ece``, ``refinement_loss``, ``calibration_loss``,
        ``aurc``, ``n``, and whether it used ``labels``.
    """
    from sklearn.base import clone

    matrix = check_log_probs(log_probs)
    ways: dict[str, tuple[Floats, bool]] = {"raw": (softmax(matrix, axis=1), False)}
    for name, calibrator in calibrators.items():
        if calibrator.needs_labels:
            ways[name] = cross_fitted(calibrator, matrix, gold, documents, folds, seed)[0], True
        else:
            ways[name] = clone(calibrator).fit(matrix).predict_proba(matrix), False
    rows = []
    for name, (shares, labels) in ways.items():
        answers = score(shares, gold)
        found = calibration_error(shares, gold, resamples=resamples, seed=seed)
        rows.append(
            {"calibrator": name, **{key: answers[key] for key in ("accuracy", "low", "high", "macro_f1")}}
            | losses(shares, gold)
            | {
                "ece": found.value,
                "ece_low": found.low,
                "ece_high": found.high,
                "ece_if_calibrated": found.if_calibrated,
            }
            | {"class_wise_ece": class_wise_ece(shares, gold)}
            | refinement(shares, gold, folds, seed)
            | {"aurc": aurc(shares, gold), "n": answers["n"], "labels": labels}
        )
    return pd.DataFrame(rows)


def calibrated_run(
    run: Run, name: str, calibrators: Mapping[str, Calibrator], folds: int = 5, seed: int = 0
) -> pd.DataFrame:
    """:func:`calibration_table` of one field of a run."""
    _, log_probs, gold, documents = run.log_probs(name)
    return calibration_table(log_probs, gold, calibrators, documents, folds, seed)


def out_of_scope_of_run(run: Run, name: str) -> dict[str, float]:
    """:func:`out_of_scope_auroc` of the candidate mass of one field, over the labelled documents of a run."""
    frame = run.frame()
    labelled = frame["gold"].notna() | frame["out_of_scope"]
    rows = frame[(frame["field"] == name) & frame["candidate_mass"].notna() & labelled]
    return out_of_scope_auroc(
        rows["candidate_mass"].to_numpy(dtype=np.float64), rows["out_of_scope"].to_numpy(dtype=bool)
    )


def fit_calibration(run: Run, fields: Iterable[str], calibrator: Calibrator) -> Calibration:
    """Fit a calibrator for each of several fields on all documents of a run, to be saved and used on others.

    Parameters
    ----------
    run : Run
    fields : iterable of str
    calibrator : Calibrator
        Cloned for each field.

    Returns
    -------
    Calibration
        Its ``made_with`` holds model, backend, dtype, mode, scorer, normalisation and schema of the run, and that a run has the
        default instructions.
    """
    from sklearn.base import clone

    if isinstance(fields, str):
        raise ParameterError(f"fields is one string, {fields!r}; give a list of names")
    labels, fitted = {}, {}
    for name in fields:
        known, log_probs, gold, _ = run.log_probs(name)
        labels[name] = tuple(known)
        fitted[name] = clone(calibrator).fit(log_probs, gold)
    keys = ("model", "backend", "dtype", "mode", "scorer", "normalise")
    made_with = {key: str(run.meta[key]) for key in keys}
    return Calibration(labels, fitted, {**made_with, "schema": run.schema.to_dict(), "instructions": None})
