"""Rates, intervals, baselines and paired comparisons: against values worked out by hand or by another library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.dummy import DummyClassifier

from pcdlab.errors import ParameterError
from pcdlab.schema import Schema
from pcdlab.studies.accuracy import (
    accuracy_by_confidence,
    accuracy_of_run,
    as_labelled,
    compare,
    compare_runs,
    confusion,
    cross_validated,
    labelled_fields,
    score,
    telling_errors,
    wilson,
)

SHARES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.9, 0.05, 0.05]]
)
GOLD = np.array([0, 1, 0, 1, -1, 1])


def test_score_by_hand() -> None:
    found = score(SHARES, GOLD)
    assert found["n"] == 5
    assert found["correct"] == 2
    assert found["accuracy"] == pytest.approx(0.4)
    assert (found["low"], found["high"]) == wilson(2, 5)
    # Label 0: chosen 3, right 2, both 1 → 2/5. Label 1: chosen 1, right 3, both 1 → 1/2. Label 2: chosen 1, never right → 0.
    assert found["macro_f1"] == pytest.approx((2 / 5 + 1 / 2 + 0) / 3)
    assert found["majority"] == pytest.approx(3 / 5)
    assert found["random"] == pytest.approx(1 / 3)


@given(st.integers(1, 500), st.data())
def test_wilson_against_scipy(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    expected = stats.binomtest(correct, n).proportion_ci(0.95, method="wilson")
    assert wilson(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_confusion_counts_every_labelled_document_once() -> None:
    table = confusion(SHARES, GOLD, ["a", True, None])
    assert table.index.tolist() == ["a", "true", "null"]
    assert table.to_numpy().tolist() == [[1, 0, 1], [2, 1, 0], [0, 0, 0]]
    with pytest.raises(ParameterError, match="labels names 2"):
        confusion(SHARES, GOLD, ["a", "b"])


def test_by_confidence() -> None:
    table = accuracy_by_confidence(SHARES, GOLD, bins=2)
    assert table["n"].tolist() == [3, 2]
    assert table["from"].tolist() == [0.4, 0.8]
    assert table["to"].tolist() == [0.7, 0.9]
    assert table["accuracy"].tolist() == pytest.approx([1 / 3, 1 / 2])
    with pytest.raises(ParameterError, match="bins=6"):
        accuracy_by_confidence(SHARES, GOLD, bins=6)


def test_telling_errors_are_wrong_and_in_order() -> None:
    table = telling_errors(SHARES, GOLD, ["a", "b", "c"], list("uvwxyz"), count=2)
    surest = table[table["why"] == "surest wrong answer"]
    assert surest["document"].tolist() == ["z", "x"]
    assert surest["chosen"].tolist() == ["a", "a"]
    assert surest["right"].tolist() == ["b", "b"]
    least = table[table["why"] == "right label least likely"]
    assert least["right_probability"].tolist() == [0.05, 0.3]
    none = telling_errors(np.eye(3), [0, 1, 2], ["a", "b", "c"], [1, 2, 3])
    assert none.empty
    assert "document" in none.columns


def test_cross_validation_never_asks_about_a_document_it_was_fitted_on() -> None:
    """A classifier that knows by heart has nothing to say about new documents."""
    X, y = np.arange(40.0)[:, None], np.array(["a", "b", "a", "a"] * 10)

    class ByHeart(ClassifierMixin, BaseEstimator):
        def fit(self, X: Any, y: Any) -> Any:
            self.classes_, self.known_ = np.unique(y), dict(zip(X[:, 0], y, strict=True))
            return self

        def predict(self, X: Any) -> Any:
            return np.array([self.known_.get(x, "nothing") for x in X[:, 0]])

    assert cross_validated(ByHeart(), X, y, repeats=2)["correct"].tolist() == [0, 0]
    table = cross_validated(DummyClassifier(), X, y, folds=4, repeats=3)
    assert table["seed"].tolist() == [0, 1, 2]
    assert table["accuracy"].tolist() == [0.75] * 3
    assert (table["low"][0], table["high"][0]) == wilson(30, 40)
    for options, says in (({"folds": 31}, "from 2 to 30"), ({"folds": 1}, "folds=1"), ({"repeats": 0}, "repeats=0")):
        with pytest.raises(ParameterError, match=says):
            cross_validated(DummyClassifier(), X, y, **options)


# --- comparisons ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_is_the_sign_test_of_the_pairs_that_differ(pairs: list[tuple[bool, bool]]) -> None:
    a, b = zip(*pairs, strict=True)
    found = compare(list(a), list(b), resamples=200)
    differing = found.only_a + found.only_b
    expected = stats.binomtest(found.only_a, differing).pvalue if differing else 1.0
    assert found.p_value == pytest.approx(expected, rel=1e-9)
    assert found.difference == pytest.approx(found.accuracy_b - found.accuracy_a)
    assert found.low <= found.difference + 1e-12
    assert found.high >= found.difference - 1e-12
    mirrored = compare(list(b), list(a), resamples=200)
    assert mirrored.p_value == pytest.approx(found.p_value)
    assert mirrored.difference == pytest.approx(-found.difference)


def test_the_bootstrap_interval_is_that_of_resampled_documents() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.random(150) < 0.5, generator.random(150) < 0.6
    found = compare(a, b, resamples=20_000)
    rows = generator.integers(150, size=(20_000, 150))
    low, high = np.quantile(b[rows].mean(axis=1) - a[rows].mean(axis=1), [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def test_the_bootstrap_interval_covers_the_true_difference() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        easy = generator.random(120)  # a shared difficulty: the pairs are correlated
        a, b = easy + 0.3 * generator.random(120) > 0.7, easy + 0.3 * generator.random(120) > 0.6
        found = compare(a, b, resamples=500)
        inside += found.low <= 0.1 <= found.high
    assert stats.binomtest(inside, 300, 0.95).pvalue > 1e-4


@pytest.mark.parametrize(("a", "b"), [([True], [True, False]), ([1, 0], [0, 1]), ([], []), ([[True]], [[True]])])
def test_compare_refuses_what_is_not_paired(a: Any, b: Any) -> None:
    with pytest.raises(ParameterError, match="one length"):
        compare(a, b)


@pytest.mark.parametrize(
    ("shares", "gold", "says"),
    [
        ([[0.5, 0.5]], [0, 1], "do not fit"),
        ([0.5, 0.5], [0, 1], "do not fit"),
        ([[0.5, 0.5]], [0.0], "do not fit"),
        ([[0.5, 0.5]], [2], "columns go from 0 to 1"),
        ([[0.5, 0.5]], [-2], "no known label"),
        ([[0.5, 0.5], [0.5, 0.5]], [-2, 1], "reaches from -2"),
        ([[0.5, 0.5]], [-1], "no known label"),
        ([[0.5, np.nan]], [0], "NaN"),
    ],
)
def test_bad_input_is_named(shares: Any, gold: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        as_labelled(shares, gold)


# --- from runs ------------------------------------------------------------------------------------------------------


class FakeRun:
    """A run's answers in memory."""

    schema = Schema.from_dict(
        {"spam": {"type": "boolean"}, "late": {"type": "boolean"}, "version": {"type": "enum", "choices": [1]}}
    )

    def __init__(self, documents: list[str], log_probs: Any, gold: list[int], mode: str = "isolated") -> None:
        self.parts = [True, False], np.array(log_probs), np.array(gold), documents
        self.meta = {"mode": mode}

    def log_probs(self, field: str) -> Any:
        assert field == "spam"
        assert self.meta["mode"] != "grammar"
        return self.parts

    def rows(self) -> Any:
        labels, log_probs, gold, documents = self.parts
        for document, scores, place in zip(documents, log_probs, gold, strict=True):
            row = {"document": document, "field": "spam", "value": labels[int(scores.argmax())]}
            yield row | ({"gold": labels[place]} if place >= 0 else {})
        yield {"document": "failed", "field": "spam", "value": None, "gold": True, "error": "too long"}
        yield {"document": "strange", "field": "spam", "value": True, "gold": "neither"}
        yield {"document": "fixed", "field": "version", "value": 1, "gold": 1}


def test_runs_are_compared_on_what_they_share_whatever_the_order() -> None:
    a = FakeRun(["u", "v", "w", "x"], np.log([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), [0, 0, 1, -1])
    b = FakeRun(["y", "w", "v", "u"], np.log([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.8, 0.2]]), [0, 1, 0, 0])
    found = compare_runs(a, b, "spam")
    assert (found.n, found.only_a, found.only_b) == (3, 0, 2)
    with pytest.raises(ParameterError, match="share no labelled document"):
        compare_runs(a, FakeRun(["z"], np.log([[0.9, 0.1]]), [0]), "spam")
    with pytest.raises(ParameterError, match="different right labels for 'u'"):
        compare_runs(a, FakeRun(["u"], np.log([[0.9, 0.1]]), [1]), "spam")


def test_a_run_shows_raw_and_corrected_side_by_side() -> None:
    log_probs = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    table = accuracy_of_run(FakeRun(list("abcd"), log_probs, [0, 0, 1, 1]), ["spam"])
    assert table["scores"].tolist() == ["raw", "batch-corrected"]
    assert table["accuracy"].tolist() == [0.5, 1.0]


def test_a_run_without_scores_shows_raw_alone() -> None:
    log_probs = np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    table = accuracy_of_run(FakeRun(list("abc"), log_probs, [0, 1, 1], "grammar"), ["spam"])
    assert accuracy_of_run(FakeRun(["a"], log_probs[:1], [0]), ["spam"])["scores"].tolist() == ["raw"]
    with pytest.raises(ParameterError, match="fields is one string, 'spam'"):
        accuracy_of_run(FakeRun(list("abc"), log_probs, [0, 1, 1]), "spam")
    assert table["scores"].tolist() == ["raw"]
    assert table[["n", "correct"]].to_numpy().tolist() == [[3, 2]]


def test_labelled_fields_have_a_choice_and_a_right_label_of_a_decided_document() -> None:
    scores = np.log([[0.9, 0.1]])
    assert labelled_fields(FakeRun(["a"], scores, [0])) == ["spam"]
    assert labelled_fields(FakeRun(["a"], scores, [-1])) == []


@settings(max_examples=20)
@given(st.permutations(range(4)))
def test_no_gold_label_moves_a_corrected_answer(order: list[int]) -> None:
    log_probs = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    gold = np.array([0, 0, 1, 1])[order]
    found = accuracy_of_run(FakeRun(list("abcd"), log_probs, gold.tolist()), ["spam"])
    assert found["correct"][1] == (gold == [0, 0, 1, 1]).sum()
