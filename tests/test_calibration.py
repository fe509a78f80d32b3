"""Calibrators, measures and decisions against simulated documents whose truth is known.

A simulated field draws log-probabilities z and then the right label from softmax(z): softmax(z) is then perfectly calibrated, and
whatever is done to z afterwards is a distortion that is known exactly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax, softmax
from sklearn.base import clone
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

from pcdlab.calibrators import (
    BatchCorrection,
    BatchStandardisation,
    Calibration,
    Calibrator,
    ContentFreeCorrection,
    IsotonicCalibrator,
    LogisticCalibrator,
    StructuredScaling,
    TemperatureScaling,
    VectorScaling,
)
from pcdlab.errors import ParameterError
from pcdlab.schema import Schema
from pcdlab.studies import calibration as study

LABELS = 4
FREE = np.log([[0.5, 0.3, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]])
WITHOUT = [BatchCorrection(), BatchStandardisation(), ContentFreeCorrection(FREE)]
WITH = [TemperatureScaling(), VectorScaling(), StructuredScaling(), LogisticCalibrator(), IsotonicCalibrator()]


def name_of(calibrator: Calibrator) -> str:
    return type(calibrator).__name__


def draw(n: int, seed: int, labels: int = LABELS, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Perfectly calibrated log-probabilities, and right labels drawn from them."""
    generator = np.random.default_rng(seed)
    z = log_softmax(generator.normal(0, spread, (n, labels)), axis=1)
    return z, (z + generator.gumbel(size=z.shape)).argmax(axis=1)


# --- calibrators: known answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_temperature_is_recovered_within_its_interval(temperature: float) -> None:
    n = 4000
    z, gold = draw(n, seed=1)
    fitted = TemperatureScaling().fit(z * temperature, gold)
    # Log-loss of scale b at b0: its second derivative is the variance of z under softmax(b0 z), per document.
    shares = softmax(z, axis=1)
    information = n * ((shares * z**2).sum(axis=1) - (shares * z).sum(axis=1) ** 2).mean()
    error = 1 / np.sqrt(information)  # of b, where 1 undoes nothing
    assert abs(temperature / fitted.temperature_ - 1) < 4 * error
    assert error < 0.03


@pytest.mark.parametrize("calibrator", WITH, ids=name_of)
def test_a_calibrated_model_stays(calibrator: Calibrator) -> None:
    z, gold = draw(3000, seed=2)
    test, right = draw(3000, seed=3)
    found = clone(calibrator).fit(z, gold).predict_proba(test)
    before, after = (study.losses(p, right)["log_loss"] for p in (softmax(test, axis=1), found))
    assert after < before + 0.02
    if not isinstance(calibrator, IsotonicCalibrator):  # one label at a time is no full model of four
        assert np.abs(found - softmax(test, axis=1)).mean() < 0.02
    measured = study.calibration_error(found, right, resamples=100)
    assert measured.value < measured.if_calibrated_high + 0.015


@pytest.mark.parametrize("calibrator", WITH, ids=name_of)
def test_what_was_distorted_is_mended_for_other_documents(calibrator: Calibrator) -> None:
    z, gold = draw(3000, seed=4)
    test, right = draw(3000, seed=5)
    found = clone(calibrator).fit(3 * z, gold).predict_proba(3 * test)
    distorted, ideal = (study.losses(softmax(x, axis=1), right)["log_loss"] for x in (3 * test, test))
    assert distorted - ideal > 0.3
    assert study.losses(found, right)["log_loss"] - ideal < 0.1 * (distorted - ideal)


@pytest.mark.parametrize("calibrator", [VectorScaling(), StructuredScaling(), LogisticCalibrator()], ids=name_of)
def test_a_label_that_is_preferred_loses_its_lead(calibrator: Calibrator) -> None:
    z, gold = draw(3000, seed=6)
    biased = z + np.array([2.0, 0, -1, 0])
    found = clone(calibrator).fit(biased, gold).predict_proba(biased)
    ideal = study.losses(softmax(z, axis=1), gold)["log_loss"]
    assert study.losses(found, gold)["log_loss"] - ideal < 0.02


def test_batch_correction_by_hand() -> None:
    X = np.array([[-1.0, -2.0], [-3.0, -6.0]])
    found = BatchCorrection().fit(X).predict_proba(X)
    np.testing.assert_allclose(found, softmax([[1.0, 2.0], [-1.0, -2.0]], axis=1))
    standard = BatchStandardisation().fit(X).predict_proba(X)
    np.testing.assert_allclose(standard, np.full((2, 2), 0.5))
    constant = np.array([[-1.0, -2.0], [-1.0, -4.0]])  # a label whose score never moves
    np.testing.assert_allclose(
        BatchStandardisation().fit(constant).predict_proba(constant), softmax([[0.0, 1.0], [0.0, -1.0]], axis=1)
    )


def test_content_free_by_hand() -> None:
    X = np.log([[0.5, 0.3, 0.1, 0.1]])
    prior = np.array([0.45, 0.35, 0.1, 0.1])
    expected = np.exp(X) / prior
    np.testing.assert_allclose(
        ContentFreeCorrection(FREE).fit(X).predict_proba(X), expected / expected.sum(), rtol=1e-12
    )


def test_content_free_of_whole_labels_by_hand() -> None:
    X, free, lengths = np.log([[0.01, 0.2]]), np.log([[0.04, 0.1]]), np.array([2, 1])
    geometric = np.array([0.1, 0.2]) / (np.array([0.2, 0.1]) / 0.3)
    found = ContentFreeCorrection(free, lengths).fit(X).predict_proba(X)
    np.testing.assert_allclose(found[0], geometric / geometric.sum(), rtol=1e-12)
    with pytest.raises(ParameterError, match="one token at least"):
        ContentFreeCorrection(free, [0, 1]).fit(X)
    with pytest.raises(ParameterError, match="has 2 columns"):
        ContentFreeCorrection(free).fit(FREE)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(WITHOUT))
def test_corrections_without_labels_never_look_at_them(seed: int, calibrator: Calibrator) -> None:
    z, gold = draw(40, seed=seed % 1000)
    shuffled = np.random.default_rng(seed).permutation(gold)
    expected = clone(calibrator).fit(z).predict_proba(z)
    for labels in (gold, shuffled, None):
        np.testing.assert_array_equal(clone(calibrator).fit(z, labels).predict_proba(z), expected)


@pytest.mark.parametrize("calibrator", WITHOUT, ids=name_of)
def test_a_preference_for_labels_is_taken_away(calibrator: Calibrator) -> None:
    z, gold = draw(2000, seed=7)
    bias = np.array([3.0, 0.0, -1.0, 0.5])
    if isinstance(calibrator, ContentFreeCorrection):
        calibrator = ContentFreeCorrection(bias[None])
    found = clone(calibrator).fit(z + bias).predict(z + bias)
    ideal = (z.argmax(axis=1) == gold).mean()
    assert ((z + bias).argmax(axis=1) == gold).mean() < ideal - 0.1
    assert (found == gold).mean() > ideal - 0.02


@pytest.mark.parametrize("calibrator", [*WITHOUT, *WITH], ids=name_of)
def test_probabilities_are_probabilities(calibrator: Calibrator) -> None:
    z, gold = draw(60, seed=8)
    far = np.vstack([z, z * 50 - 300])
    found = clone(calibrator).fit(z, gold).predict_proba(far)
    assert found.shape == far.shape
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-9)


def test_logistic_is_scikit_learns_own_pipeline() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    z, gold = draw(200, seed=9)
    for labels in (gold, gold % 2 + 1):  # the second: two of four labels occur
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=2000)).fit(z, labels)
        found = LogisticCalibrator(C=0.3).fit(z, labels).predict_proba(z)
        np.testing.assert_allclose(found[:, model.classes_], model.predict_proba(z), atol=1e-9)
        assert found[:, np.setdiff1d(range(LABELS), model.classes_)].sum() == 0


@pytest.mark.parametrize("kind", ["svs", "sms", "temp-scaling", "isotonic"])
def test_fitted_numbers_are_the_library_s_model(kind: str) -> None:
    from probmetrics.calibrators import get_calibrator

    mine: dict[str, Calibrator] = {
        "svs": VectorScaling(),
        "sms": StructuredScaling(),
        "temp-scaling": TemperatureScaling(),
        "isotonic": IsotonicCalibrator(),
    }
    z, gold = draw(300, seed=10)
    shares = softmax(2 * z, axis=1)
    theirs = get_calibrator(kind).fit(shares, gold).predict_proba(shares)
    # The library rounds to float32 on its way.
    np.testing.assert_allclose(mine[kind].fit(2 * z, gold).predict_proba(2 * z), theirs, atol=2e-5)


# --- cross-fitting --------------------------------------------------------------------------------------------------


class Witness(Calibrator):
    """Remembers which documents it was fitted on, and refuses to see them again; column 0 names the document."""

    needs_labels = True

    def _fit(self, X: Any, y: Any) -> None:
        self.seen_ = set(X[:, 0])
        self.gold_ = y

    def _probabilities(self, X: Any) -> Any:
        assert not self.seen_ & set(X[:, 0]), "a document is scored by a calibrator that saw it"
        assert len(self.seen_) > 0
        return softmax(X, axis=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 2)), min_size=25, max_size=60),
    st.integers(2, 5),
    st.integers(0, 9),
)
def test_no_document_meets_a_calibrator_that_saw_it(rows: list[tuple[int, int]], folds: int, seed: int) -> None:
    documents = [document for document, _ in rows]
    gold = np.array([label for _, label in rows])
    log_probs = np.array([[-1.0 - document, -1.0, -1.0] for document in documents])
    try:
        found, fold = study.cross_fitted(Witness(), log_probs, gold, documents, folds, seed)
    except ParameterError:  # too few documents of every kind
        return
    np.testing.assert_allclose(found, softmax(log_probs, axis=1))
    assert len({(d, f) for d, f in zip(documents, fold, strict=True)}) == len(set(documents))


def test_each_fold_is_answered_by_what_the_others_taught() -> None:
    z, gold = draw(80, seed=11)
    found, fold = study.cross_fitted(LogisticCalibrator(), z, gold)
    other = gold.copy()
    other[fold == 2] = np.random.default_rng(0).permutation(
        other[fold == 2]
    )  # the deal stays: same labels, same places?
    fitted = LogisticCalibrator().fit(z[fold != 2], gold[fold != 2])
    np.testing.assert_array_equal(found[fold == 2], fitted.predict_proba(z[fold == 2]))
    assert sorted(np.unique(fold)) == [0, 1, 2, 3, 4]


def test_rows_without_a_label_are_calibrated_and_teach_nothing() -> None:
    z, gold = draw(60, seed=12)
    gold[::3] = -1
    found, fold = study.cross_fitted(TemperatureScaling(), z, gold)
    for number in range(5):
        train = (fold != number) & (gold >= 0)
        expected = TemperatureScaling().fit(z[train], gold[train]).predict_proba(z[fold == number])
        np.testing.assert_array_equal(found[fold == number], expected)


def test_chance_is_not_learnt() -> None:
    generator = np.random.default_rng(0)
    z, gold = generator.normal(size=(300, LABELS)), generator.integers(LABELS, size=300)
    found, _ = study.cross_fitted(LogisticCalibrator(C=100.0), z, gold)
    assert stats.binomtest(int((found.argmax(axis=1) == gold).sum()), 300, 0.25).pvalue > 1e-3


@pytest.mark.parametrize(("folds", "says"), [(1, "from 2 to 6"), (7, "from 2 to 6"), (5, "take fewer folds")])
def test_folds_that_do_not_fit(folds: int, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        study.cross_fitted(TemperatureScaling(), np.zeros((6, 3)), np.array([0, 1, 2, 0, 1, 2]), folds=folds)


# --- measures -------------------------------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    shares, gold = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.3, 0.5]]), np.array([0, 1, -1])
    found = study.losses(shares, gold)
    assert found["log_loss"] == pytest.approx(-(np.log(0.7) + np.log(0.3)) / 2)
    assert found["brier"] == pytest.approx(((0.3**2 + 0.2**2 + 0.1**2) + (0.1**2 + 0.7**2 + 0.6**2)) / 2)
    two = study.losses([[0.7, 0.3], [0.4, 0.6]], [0, 0])
    assert two["brier"] == pytest.approx((2 * 0.3**2 + 2 * 0.6**2) / 2)
    assert two["log_loss"] == pytest.approx(-(np.log(0.7) + np.log(0.4)) / 2)


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_ece_against_scikit_learn_s_curve(bins: int) -> None:
    z, gold = draw(200, seed=13)  # a multiple of the bins: all weigh the same
    shares = softmax(2 * z, axis=1)

    def gap(happened: np.ndarray, probability: np.ndarray) -> float:
        frequency, mean = calibration_curve(happened, probability, n_bins=bins, strategy="quantile")
        return float(np.abs(frequency - mean).mean())

    assert study.ece(shares, gold, bins) == pytest.approx(gap(shares.argmax(axis=1) == gold, shares.max(axis=1)))
    expected = np.mean([gap(gold == i, shares[:, i]) for i in range(LABELS)])
    assert study.class_wise_ece(shares, gold, bins) == pytest.approx(expected)


def test_ece_by_hand() -> None:
    shares = np.array([[0.6, 0.4], [0.7, 0.3], [0.1, 0.9], [0.0, 1.0]])
    gold = np.array([0, 1, 1, 1])
    assert study.ece(shares, gold, bins=2) == pytest.approx((abs(0.65 - 0.5) + abs(0.95 - 1)) / 2)
    assert study.ece(shares, gold, bins=1) == pytest.approx(0.8 - 0.75)
    assert study.ece(shares, gold, bins=99) == pytest.approx((0.4 + 0.7 + 0.1 + 0) / 4)


def test_a_calibrated_model_has_the_error_that_chance_explains() -> None:
    above = 0
    for seed in range(100):
        z, gold = draw(150, seed=100 + seed)
        found = study.calibration_error(softmax(z, axis=1), gold, resamples=60, seed=seed)
        above += found.value > found.if_calibrated_high
    assert stats.binomtest(above, 100, 0.05, alternative="greater").pvalue > 1e-3


def test_an_overconfident_model_is_found_out() -> None:
    z, gold = draw(300, seed=14)
    found = study.calibration_error(softmax(3 * z, axis=1), gold, resamples=200)
    assert found.value > 2 * found.if_calibrated_high
    assert found.low < found.value < found.high
    assert found.low > found.if_calibrated_high


def test_refinement_and_calibration_add_up_to_the_loss() -> None:
    z, gold = draw(2000, seed=15)
    ideal = study.losses(softmax(z, axis=1), gold)["log_loss"]
    for distortion in (1.0, 3.0):
        shares = softmax(distortion * z, axis=1)
        found = study.refinement(shares, gold)
        total = found["refinement_loss"] + found["calibration_loss"]
        assert total == pytest.approx(study.losses(shares, gold)["log_loss"], abs=1e-4)
        assert found["refinement_loss"] == pytest.approx(
            ideal, abs=0.01
        )  # no temperature changes what can be told apart


def test_aurc_by_hand() -> None:
    shares = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
    gold = np.array([0, 1, 1, 0])
    assert study.aurc(shares, gold) == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)
    curve = study.risk_coverage(shares, gold)
    assert curve["coverage"].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve["threshold"].tolist() == [0.9, 0.8, 0.7, 0.6]


@given(st.permutations(range(6)))
def test_aurc_of_equal_confidences_is_no_matter_of_order(order: list[int]) -> None:
    shares = np.tile([0.8, 0.2], (6, 1))
    assert study.aurc(shares[order], np.array([0, 0, 0, 1, 1, 0])[order]) == pytest.approx(1 / 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_risk_ends_at_the_error_rate_and_lies_between_the_best_and_the_worst_order(seed: int) -> None:
    z, gold = draw(50, seed)
    shares = softmax(z, axis=1)
    curve = study.risk_coverage(shares, gold)
    wrong = np.sort(shares.argmax(axis=1) != gold)
    assert curve["risk"].iloc[-1] == pytest.approx(wrong.mean())
    best, worst = ((errors.cumsum() / np.arange(1, 51)).mean() for errors in (wrong, wrong[::-1]))
    assert best - 1e-12 <= study.aurc(shares, gold) <= worst + 1e-12


def test_shares_are_asked_for_not_log_probabilities() -> None:
    with pytest.raises(ParameterError, match="give shares"):
        study.ece(np.log([[0.5, 0.5]]), [0])
    with pytest.raises(ParameterError, match=r"row 1 sums to 0\.9"):
        study.losses([[0.5, 0.5], [0.5, 0.4]], [0, 1])


# --- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_conformal_coverage_within_its_binomial_interval(level: float) -> None:
    """Also of a model that is badly calibrated: coverage needs nothing but like documents."""
    n, m = 2000, 2000
    z, gold = draw(n, seed=16)
    test, right = draw(m, seed=17)
    sets = study.conformal_sets(softmax(3 * z, axis=1), gold, softmax(3 * test, axis=1), level)
    hits = int(sets[np.arange(m), right].sum())
    # Over draws of both, hits follow a beta-binomial distribution (Vovk 2012).
    rank = int(np.ceil((n + 1) * level))
    low, high = stats.betabinom(m, rank, n + 1 - rank).ppf([0.0005, 0.9995])
    assert low <= hits <= high
    assert sets.sum(axis=1).mean() < LABELS


def test_conformal_coverage_table() -> None:
    z, gold = draw(400, seed=18)
    table = study.conformal_coverage(softmax(z, axis=1), gold)
    assert table["level"].tolist() == [0.8, 0.9, 0.95]
    for row in table.itertuples():
        assert stats.binomtest(round(row.coverage * 400), 400, row.level).pvalue > 1e-3
        assert row.low < row.coverage < row.high
    assert table["mean_size"].is_monotonic_increasing


def test_conformal_sets_by_hand() -> None:
    calibration = np.array([[p, 1 - p] for p in (0.9, 0.8, 0.7, 0.6)])
    # Three of four right labels have at least 0.7: ceil(5 * 0.6) = 3.
    found = study.conformal_sets(calibration, [0, 0, 0, 0], [[0.71, 0.29], [0.69, 0.31], [0.2, 0.8]], 0.6)
    assert found.tolist() == [[True, False], [False, False], [False, True]]
    eleven = np.vstack([calibration, calibration, calibration[:3]])
    # ceil(12 * 0.9) = 11 of eleven: the least sure right label, 0.6, is just in.
    assert study.conformal_sets(eleven, np.zeros(11, dtype=int), [[0.61, 0.39], [0.59, 0.41]], 0.9).tolist() == [
        [True, False],
        [False, False],
    ]
    with pytest.raises(ParameterError, match="needs 11 labelled documents at least, there are 10"):
        study.conformal_sets(eleven[:10], np.zeros(10, dtype=int), calibration, [0.5, 0.9])
    with pytest.raises(ParameterError, match="level=1 is no share"):
        study.conformal_sets(eleven, np.zeros(11, dtype=int), calibration, 1)
    with pytest.raises(ParameterError, match="needs 11 labelled"):
        study.conformal_sets(calibration, [0, 0, 0, 0], calibration, 0.9)


@pytest.mark.parametrize("distortion", [1.0, 4.0])
def test_a_threshold_holds_the_error_rate_with_its_confidence(distortion: float) -> None:
    wanted, runs = 0.2, 200
    world, right = draw(50_000, seed=19)
    shares = softmax(distortion * world, axis=1)
    sureness, wrong = shares.max(axis=1), shares.argmax(axis=1) != right
    broken = given_up = 0
    for run in range(runs):
        rows = np.random.default_rng(run).integers(len(right), size=150)
        found = study.threshold_for_error(shares[rows], right[rows], wanted, confidence=0.9)
        if found.threshold is None:
            given_up += 1
        else:
            broken += wrong[sureness >= found.threshold].mean() > wanted
    assert stats.binomtest(broken, runs, 0.1, alternative="greater").pvalue > 1e-3
    assert given_up < runs  # or the test could not fail


def test_the_threshold_of_a_clear_case() -> None:
    # 100 sure and right documents, 100 unsure and wrong ones.
    shares = np.array([[0.95, 0.05]] * 100 + [[0.55, 0.45]] * 100)
    gold = np.array([0] * 100 + [1] * 100)
    found = study.threshold_for_error(shares, gold, error=0.05)
    assert found.threshold == pytest.approx(0.56)
    assert (found.coverage, found.error, found.n) == (0.5, 0.0, 200)
    assert found.bound == pytest.approx(1 - 0.05 ** (1 / 100))
    hopeless = study.threshold_for_error(shares, 1 - gold, error=0.05)
    assert hopeless.threshold is None
    with pytest.raises(ParameterError, match="error=0"):
        study.threshold_for_error(shares, gold, error=0)


def test_out_of_scope_by_hand() -> None:
    found = study.out_of_scope_auroc([0.1, 0.2, 0.3, 0.9], np.array([True, False, True, False]))
    assert found["auroc"] == pytest.approx(3 / 4)
    assert (found["out_of_scope"], found["in_scope"]) == (2, 2)
    sure = study.out_of_scope_auroc([0.1, 0.2, 0.8, 0.9], np.array([True, True, False, False]))
    assert (sure["auroc"], sure["low"], sure["high"]) == (1, 1, 1)
    generator = np.random.default_rng(0)
    mass, outside = generator.integers(0, 8, 90) / 8, generator.random(90) < 0.3
    assert study.out_of_scope_auroc(mass, outside)["auroc"] == pytest.approx(roc_auc_score(outside, -mass))
    frame = pd.DataFrame(
        {
            "field": ["t", "t", "t", "t", "t", "t", "u"],
            "candidate_mass": [0.1, 0.2, 0.3, 0.9, 0.95, np.nan, 0.0],
            "gold": [None, "a", None, "b", None, "a", "a"],
            "out_of_scope": [True, False, True, False, False, False, False],
        }
    )
    run: Any = SimpleNamespace(frame=lambda: frame)
    assert study.out_of_scope_of_run(run, "t") == found
    with pytest.raises(ParameterError, match="both kinds"):
        study.out_of_scope_auroc([0.1, 0.2], np.array([True, True]))


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", [*WITHOUT, *WITH], ids=name_of)
def test_a_saved_calibrator_gives_the_same_probabilities(calibrator: Calibrator, tmp_path: Path) -> None:
    z, gold = draw(50, seed=20)
    gold[gold == 3] = 0  # a label never seen
    fitted = clone(calibrator).fit(z, gold)
    labels = {"topic": ("a", True, 1, None)}
    Calibration(labels, {"topic": fitted}, {"model": "m"}).save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert again.labels == labels
    assert again.made_with == {"model": "m"}
    assert repr(again.calibrators["topic"]) == repr(fitted) or isinstance(calibrator, ContentFreeCorrection)
    for row, expected in zip(z, fitted.predict_proba(z), strict=True):
        np.testing.assert_allclose(again.apply("topic", row), expected, rtol=1e-12)


def test_a_mapping_is_taken_in_label_order() -> None:
    z, _ = draw(50, seed=20)
    calibration = Calibration({"t": ("a", "b", True, None)}, {"t": BatchCorrection().fit(z)})
    mapping = dict(zip(("a", "b", True, None), z[0], strict=True))
    np.testing.assert_array_equal(calibration.apply("t", mapping), calibration.apply("t", z[0]))
    with pytest.raises(ParameterError, match="was fitted on"):
        calibration.apply("t", dict(reversed(mapping.items())))
    with pytest.raises(ParameterError, match="no calibrator for field 'u'"):
        calibration.apply("u", z[0])
    with pytest.raises(ParameterError, match="has 3 columns"):
        calibration.apply("t", z[0, :3])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"made_with": {}}',
        '{"made_with": {}, "calibrators": {"t": {"labels": ["a", "b"], "method": "magic", "parameters": {}, "fitted": {}}}}',
        '{"made_with": {}, "calibrators": {"t": {"labels": ["a", "b"], "method": "batch-mean", "parameters": {}, '
        '"fitted": {"weights": [[1]], "offset": [0], "scale": null}}}}',
        '{"made_with": {}, "calibrators": {"t": {"labels": ["a", "b"], "method": "isotonic", "parameters": {}, '
        '"fitted": {"knots": [[[0], [1]]]}}}}',
    ],
)
def test_what_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ParameterError, match=r"c\.json"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(ParameterError, match=r"nothing\.json"):
        Calibration.load(tmp_path / "nothing.json")


def test_a_calibration_knows_the_schema_of_its_scores() -> None:
    z, _ = draw(50, seed=20, labels=2)
    asked = {"spam": {"type": "boolean", "description": "Unwanted?"}, "urgent": {"type": "boolean"}}
    calibration = Calibration({"spam": (True, False)}, {"spam": BatchCorrection().fit(z)}, {"schema": asked})
    again = Calibration.from_json(calibration.to_json())
    again.check_schema(Schema.of(asked))
    for other, says in [
        ({**asked, "spam": {"type": "boolean"}}, "differs in spam;"),
        ({"spam": asked["spam"]}, "differs in urgent;"),
        ({**asked, "late": {"type": "boolean"}}, "differs in late;"),
        (dict(reversed(asked.items())), "differs in the order of fields;"),
    ]:
        with pytest.raises(ParameterError, match=says):
            again.check_schema(Schema.of(other))
    before_it_was_on_record = Calibration(calibration.labels, calibration.calibrators, {"model": "m"})
    before_it_was_on_record.check_schema(Schema.of({"spam": {"type": "boolean"}}))


def test_fields_without_a_fitted_calibrator_are_refused() -> None:
    z, _ = draw(50, seed=20)
    with pytest.raises(ParameterError, match="different fields"):
        Calibration({"t": ("a", "b")}, {})
    with pytest.raises(ParameterError, match="fitted on None"):
        Calibration({"t": ("a", "b")}, {"t": BatchCorrection()})
    with pytest.raises(ParameterError, match="fitted on 4"):
        Calibration({"t": ("a", "b")}, {"t": BatchCorrection().fit(z)})


def test_calibrations_come_from_runs() -> None:
    z, gold = draw(60, seed=21, labels=2)

    class FakeRun:
        schema = Schema.from_dict({"spam": {"type": "boolean"}})
        meta = dict.fromkeys(("model", "backend", "dtype", "mode", "scorer", "normalise"), "x")

        def log_probs(self, field: str) -> Any:
            return [True, False], z, gold, list(range(60))

    run: Any = FakeRun()
    with pytest.raises(ParameterError, match="fields is one string, 'spam'"):
        study.fit_calibration(run, "spam", LogisticCalibrator())
    found = study.fit_calibration(run, ["spam"], LogisticCalibrator())
    np.testing.assert_array_equal(found.apply("spam", z[3]), LogisticCalibrator().fit(z, gold).predict_proba(z[3:4])[0])
    made_with = json.loads(found.to_json())["made_with"]
    assert made_with["model"] == "x"
    assert (made_with["schema"], made_with["instructions"]) == ({"spam": {"type": "boolean"}}, None)
    table = study.calibrated_run(run, "spam", {"temperature": TemperatureScaling(), "batch": BatchCorrection()})
    assert table["calibrator"].tolist() == ["raw", "temperature", "batch"]
    assert table["labels"].tolist() == [False, True, False]
    expected, _ = study.cross_fitted(TemperatureScaling(), z, gold, list(range(60)))
    assert table["log_loss"][1] == study.losses(expected, gold)["log_loss"]


@pytest.mark.parametrize(
    ("X", "y", "says"),
    [
        ([[0.0]], [0], "two labels at least"),
        (np.zeros((0, 2)), [], "two labels at least"),
        ([[0.0, -np.inf]], [0], "row 0 holds a value that is not finite"),
        ([[0.0, 1.0]], None, "give y"),
        ([[0.0, 1.0]], [0.5], "column numbers"),
        ([[0.0, 1.0]], [0, 1], "column numbers"),
        ([[0.0, 1.0]], [2], "columns go from 0 to 1"),
        ([[0.0, 1.0], [1.0, 0.0]], [1, 1], "fewer than two"),
        ([[0.0, 1.0], [1.0, 0.0]], [-1, 1], "fewer than two"),
    ],
)
def test_bad_documents_are_named(X: Any, y: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        TemperatureScaling().fit(X, y)


def test_applying_a_calibration_loads_no_framework() -> None:
    code = "import sys, pcdlab.calibrators, pcdlab.studies.calibration; print({'torch', 'mapie', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
