"""The scikit-learn face gives the engine's own numbers, and behaves as scikit-learn expects of a text estimator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from brute_force import engine, fresh_engine
from scipy.special import softmax
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks as checks
from sklearn.utils import get_tags

from pcdlab import estimators
from pcdlab.calibrators import BatchCorrection, LogisticCalibrator, TemperatureScaling
from pcdlab.engine import Engine
from pcdlab.errors import ParameterError
from pcdlab.estimators import PCDClassifier, PCDFeatures
from pcdlab.schema import Schema

NAME = "gpt2"
SCHEMA = Schema.from_dict(
    {
        "urgent": {"type": "boolean"},
        "always": {"type": "enum", "choices": ["here"]},
        "topic": {"type": "enum", "choices": ["delivery", "billing", "other"]},
    }
)
TEXTS = ["Where is my parcel?", "You charged me twice!", "Thanks.", "", "One\ntwo", "No reply for a week. Call me!"] * 3
TEXTS = [f"{text} ({i})" for i, text in enumerate(TEXTS)]
TOPICS = ["delivery", "billing", "other"] * 6


def classifier(**options: Any) -> PCDClassifier:
    return PCDClassifier(SCHEMA, **{"field": "topic", "model": engine(NAME)} | options)


def features(**options: Any) -> PCDFeatures:
    return PCDFeatures(SCHEMA, **{"model": engine(NAME)} | options)


def scores(field: str, texts: list[str], **options: Any) -> np.ndarray:
    found = engine(NAME).extract_many(texts, SCHEMA, progress=False, **options)
    return np.array([list(out.fields[field].log_probs.values()) for out in found])


# --- the engine's own numbers ---------------------------------------------------------------------------------------


def test_probabilities_are_the_engine_s_in_sorted_order() -> None:
    model = classifier().fit(TEXTS)
    assert model.classes_.tolist() == ["billing", "delivery", "other"]
    expected = softmax(scores("topic", TEXTS), axis=1)[:, [1, 0, 2]]
    np.testing.assert_allclose(model.predict_proba(TEXTS), expected, atol=1e-6)
    values = [out.values["topic"] for out in engine(NAME).extract_many(TEXTS, SCHEMA, progress=False)]
    assert model.predict(TEXTS).tolist() == values
    assert model.score(TEXTS, values) == 1


def test_booleans_stay_booleans() -> None:
    model = classifier(field="urgent").fit(TEXTS)
    assert model.classes_.tolist() == [False, True]
    assert model.predict(TEXTS).dtype == bool
    expected = softmax(scores("urgent", TEXTS), axis=1)[:, ::-1]
    np.testing.assert_allclose(model.predict_proba(TEXTS), expected, atol=1e-6)


def test_labels_of_all_kinds_have_a_place() -> None:
    schema = {"type": "object", "properties": {"f": {"enum": ["b", None, 2, True, "a"]}}}
    model = PCDClassifier(schema, model=engine(NAME))
    labels = [None, "a", 2, "b", True, "a"]
    model.fit(TEXTS[:6], labels)
    assert model.classes_.tolist() == [True, 2, "a", "b", None]
    assert set(model.predict(TEXTS).tolist()) <= set(model.classes_.tolist())


def test_features_are_the_engine_s_log_probabilities() -> None:
    model = features()
    found = model.fit_transform(TEXTS)
    assert model.get_feature_names_out().tolist() == [
        "urgent=true",
        "urgent=false",
        'topic="delivery"',
        'topic="billing"',
        'topic="other"',
    ]
    expected = np.hstack([scores("urgent", TEXTS), scores("topic", TEXTS)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"scorer": "exact"}, {"scorer": "exact", "normalise": "length"}, {"instructions": "Answer."}]
)
def test_options_reach_the_engine(options: dict[str, Any]) -> None:
    expected = np.hstack([scores("urgent", TEXTS[:4], **options), scores("topic", TEXTS[:4], **options)])
    np.testing.assert_allclose(features(**options).transform(TEXTS[:4]), expected, atol=1e-5)
    without_the_last = dict(list(options.items())[:-1])
    assert np.abs(features(**without_the_last).transform(TEXTS[:4]) - expected).max() > 1e-3


def test_calibrators_see_their_own_field() -> None:
    raw = scores("topic", TEXTS)[:, [1, 0, 2]]
    batch = classifier(calibrator=BatchCorrection()).fit(TEXTS)
    np.testing.assert_allclose(batch.predict_proba(TEXTS), softmax(raw - raw.mean(axis=0), axis=1), atol=1e-5)
    gold = np.array([1, 0, 2] * 6)
    learnt = classifier(calibrator=LogisticCalibrator()).fit(TEXTS, TOPICS)
    expected = LogisticCalibrator().fit(raw, gold).predict_proba(raw)
    np.testing.assert_allclose(learnt.predict_proba(TEXTS), expected, atol=1e-4)


def test_the_questions_about_talks_ask_for_the_tracks_of_the_bank() -> None:
    folder = Path(__file__).parent.parent / "data" / "talks"
    questions = Schema.of(json.loads((folder / "questions.json").read_text(encoding="utf-8")))
    bank = Schema.of(json.loads((folder / "bank.json").read_text(encoding="utf-8"))["schema"])
    assert questions["track"] == bank["track"]
    assert 30 <= sum(field.kind == "boolean" for field in questions) == len(questions.names) - 1
    columns = PCDFeatures(questions).get_feature_names_out()
    assert len(columns) == len(set(columns)) == 8 + 2 * (len(questions.names) - 1)


# --- scikit-learn's own expectations --------------------------------------------------------------------------------

ESTIMATORS = [classifier(), classifier(calibrator=TemperatureScaling()), features()]


NAMED = [PCDClassifier(SCHEMA, "topic"), PCDClassifier(SCHEMA, calibrator=TemperatureScaling()), PCDFeatures(SCHEMA)]


@pytest.mark.parametrize("estimator", NAMED, ids=["zero-shot", "calibrated", "features"])
@pytest.mark.parametrize(
    "check",
    [
        checks.check_estimator_cloneable,
        checks.check_estimator_repr,
        checks.check_estimator_tags_renamed,
        checks.check_valid_tag_types,
        checks.check_no_attributes_set_in_init,
        checks.check_do_not_raise_errors_in_init_or_set_params,
        checks.check_get_params_invariance,
        checks.check_set_params,
        checks.check_mixin_order,
    ],
    ids=lambda check: check.__name__,
)
def test_scikit_learn_s_checks_that_need_no_matrix(check: Any, estimator: Any) -> None:
    """`check_estimator` itself skips whatever takes texts: these are the checks that do not bring numbers of their own."""
    check(type(estimator).__name__, clone(estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["zero-shot", "calibrated", "features"])
def test_what_its_other_checks_ask_of_texts(estimator: Any) -> None:
    tags = get_tags(estimator)
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array
    before = estimator.get_params()
    fitted = clone(estimator)
    assert fitted.fit(TEXTS, TOPICS) is fitted  # check_estimators_fit_returns_self
    answer = fitted.predict_proba if hasattr(fitted, "predict_proba") else fitted.transform
    first = answer(TEXTS)
    np.testing.assert_array_equal(fitted.fit(TEXTS, TOPICS) and answer(TEXTS), first)  # check_fit_idempotent
    order = np.random.default_rng(0).permutation(len(TEXTS))  # check_methods_sample_order_invariance
    np.testing.assert_array_equal(answer([TEXTS[i] for i in order]), first[order])
    for kind in (tuple, np.array, pd.Series, lambda texts: np.array(texts, dtype=object)):  # containers
        np.testing.assert_array_equal(answer(kind(TEXTS)), first)
    np.testing.assert_allclose(answer(TEXTS[:1]), first[:1], atol=1e-12)  # check_methods_subset_invariance
    after = fitted.get_params()  # check_dont_overwrite_parameters
    assert before.keys() == after.keys()
    assert after["model"] is before["model"]


def test_predicting_before_fitting_is_refused() -> None:
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        classifier().predict(TEXTS)
    assert features().transform(TEXTS[:1]).shape == (1, 5)  # nothing to fit, and its tag says so
    assert not get_tags(features()).requires_fit


def test_in_a_pipeline_and_a_union() -> None:
    model = make_pipeline(features(), StandardScaler(), LogisticRegression()).fit(TEXTS, TOPICS)
    assert model.predict(TEXTS).shape == (18,)
    names = model[:-1].get_feature_names_out()
    assert names.tolist() == features().get_feature_names_out().tolist()
    both = make_union(features(), TfidfVectorizer()).fit(TEXTS)
    assert both.transform(TEXTS).shape[1] > 5
    framed = features().set_output(transform="pandas").fit_transform(TEXTS)
    assert framed.columns.tolist() == names.tolist()


@pytest.mark.parametrize("field", ["topic", "urgent"])
@pytest.mark.parametrize(
    "calibrator", [None, BatchCorrection(), LogisticCalibrator()], ids=["none", "batch", "logistic"]
)
def test_cross_val_predict(field: str, calibrator: Any) -> None:
    gold = TOPICS if field == "topic" else [topic == "billing" for topic in TOPICS]
    model = classifier(field=field, calibrator=calibrator)
    answers = cross_val_predict(model, TEXTS, gold, cv=3)
    shares = cross_val_predict(model, TEXTS, gold, cv=3, method="predict_proba")
    assert answers.tolist() == np.unique(gold)[shares.argmax(axis=1)].tolist()
    if calibrator is None:
        np.testing.assert_array_equal(shares, model.fit(TEXTS).predict_proba(TEXTS))


def test_grid_search_over_wordings() -> None:
    wordings = ["Answer.", "Read the letter and sort it."]
    search = GridSearchCV(classifier(), {"instructions": wordings}, cv=3).fit(TEXTS, TOPICS)
    expected = [np.mean(cross_val_score(classifier(instructions=w), TEXTS, TOPICS, cv=3)) for w in wordings]
    assert search.cv_results_["mean_test_score"].tolist() == expected
    assert search.best_estimator_.instructions == wordings[int(np.argmax(expected))]
    deeper = GridSearchCV(classifier(calibrator=LogisticCalibrator()), {"calibrator__C": [0.01, 10.0]}, cv=3)
    assert deeper.fit(TEXTS, TOPICS).best_estimator_.calibrator.C in (0.01, 10.0)


# --- loading and reading once ---------------------------------------------------------------------------------------


def test_clones_share_one_engine_loaded_when_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(*asked: Any) -> Engine:
        loaded.append(asked)
        return engine(NAME)

    monkeypatch.setattr(estimators, "_load", estimators.lru_cache(maxsize=2)(load))
    model = PCDClassifier(SCHEMA, "topic", model="tiny", dtype="float32")
    zero_shot = clone(clone(model)).fit(TEXTS, TOPICS)
    assert not loaded
    zero_shot.predict(TEXTS)
    cross_val_predict(model, TEXTS, TOPICS, cv=3)
    PCDFeatures(SCHEMA, model="tiny", dtype="float32").transform(TEXTS)
    assert loaded == [("tiny", "torch", "float32")]


def test_a_loaded_engine_is_handed_on_not_copied() -> None:
    given = engine(NAME)
    pipeline = clone(make_pipeline(features(model=given), LogisticRegression()))
    assert pipeline[0].model is given
    assert clone(classifier(model=given)).model is given
    assert clone(classifier(calibrator=(own := LogisticCalibrator()))).calibrator is not own


def test_a_text_is_read_once_under_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fresh_engine(NAME)
    read: list[str] = []
    extract_many = own.extract_many

    def counting(texts: Any, *args: Any, **options: Any) -> Any:
        read.extend(texts)
        return extract_many(texts, *args, **options)

    monkeypatch.setattr(own, "extract_many", counting)
    model = classifier(model=own, calibrator=LogisticCalibrator())
    cross_val_predict(model, TEXTS, TOPICS, cv=3)
    assert sorted(read) == sorted(TEXTS)
    features(model=own).transform([TEXTS[0], TEXTS[0], "new", "new"])
    assert read[len(TEXTS) :] == ["new"]
    features(model=own, instructions="Answer.").transform(TEXTS[:2])
    assert read[len(TEXTS) + 1 :] == TEXTS[:2]
    monkeypatch.setattr(estimators, "READINGS", 3)
    first = features(model=own, scorer="exact").transform(TEXTS)
    assert first.shape == (18, 5)
    features(model=own, scorer="exact").transform(TEXTS[-3:])
    assert read[len(TEXTS) + 3 :] == TEXTS


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "says"),
    [
        ("one text", "X is str"),
        (3, "X is int"),
        ([], "no text"),
        (["a", None], "number 1 is NoneType"),
        (pd.Series(["a", float("nan")]), "number 1 is float"),
        (np.array([["a"]]), "one text per document"),
        (pd.DataFrame({"body": ["a"]}), "one text per document"),
    ],
)
def test_what_is_no_list_of_texts(X: Any, says: str) -> None:
    for estimator in (classifier(), features()):
        with pytest.raises(ParameterError, match=says):
            estimator.fit(X)
    with pytest.raises(ParameterError, match=says):
        features().transform(X)


@pytest.mark.parametrize(
    ("options", "y", "says"),
    [
        ({}, ["delivery"], "X has 2 texts, y has 1"),
        ({}, ["delivery", "parcels"], "'parcels', which is no label of field 'topic'"),
        ({}, ["delivery", float("nan")], "which is no label"),
        ({}, [0, 1], "places from 0 to 1 where field 'topic' has 3 labels"),
        ({}, [-1, 2], "places from -1 to 2"),
        ({"field": None}, None, "choose one of urgent, always, topic"),
        ({"field": "always"}, None, "has one label"),
        ({"calibrator": TemperatureScaling()}, None, "give y"),
    ],
)
def test_what_cannot_be_fitted(options: dict[str, Any], y: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        classifier(**options).fit(TEXTS[:2], y)
