"""Sound backends pass every check; every planted fault fails the check that is there to see it."""

from __future__ import annotations

import copy
import json
import math
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny

from pcdlab.backends import conformance, faults
from pcdlab.backends.conformance import LOW_PRECISION, Check, check_backend, log_softmax, tolerance_for
from pcdlab.backends.torch import TorchBackend
from pcdlab.errors import ParameterError

NAMES = [name for name, _, _ in conformance._CHECKS]


@cache
def backend(kind: str, layout: Any = "auto") -> TorchBackend:
    return TorchBackend(tiny(kind), layout=layout, fingerprint="of a tiny model")


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is False}


def not_run(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is None}


# --- sound backends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout", "skipped"),
    [
        ("llama", "packed", {"sliding window"}),
        ("llama", "rows", {"sliding window", "prefix on disk"}),
        ("qwen3", "auto", {"sliding window"}),
        ("gemma2", "auto", set()),
        ("gemma3", "packed", set()),
        ("gemma3", "rows", {"prefix on disk"}),
        ("lfm2", "auto", {"sliding window", "prefix on disk"}),
    ],
)
def test_a_sound_backend_passes(kind: str, layout: str, skipped: set[str]) -> None:
    lines: list[str] = []
    checks = check_backend(backend(kind, layout), report=lines.append)
    assert [check.name for check in checks] == NAMES
    assert not failed(checks), [check for check in checks if check.passed is False]
    assert not_run(checks) == skipped
    assert [line.split(": ")[1] for line in lines] == NAMES
    for check in checks:
        assert check.compared
        assert check.largest <= (1e-5 if check.name != "repeatability" else 0)  # far inside the limit


@given(st.integers(0, 2**32 - 1), st.integers(40, 90))
@settings(max_examples=4, deadline=None)
def test_with_any_seed_and_size(seed: int, tokens: int) -> None:
    assert not failed(check_backend(backend("gemma3"), seed, tokens))


def test_the_contract_alone_is_enough() -> None:
    class Bare:
        def __init__(self, sound: TorchBackend) -> None:
            for name in (
                "name",
                "model",
                "dtype",
                "layout",
                "vocabulary",
                "max_tokens",
                "fingerprint",
                "keeps_trunks",
                "meter",
            ):
                setattr(self, name, getattr(sound, name))
            for verb in ("prefill", "read", "stream", "save", "load_prefix"):
                setattr(self, verb, getattr(sound, verb))

    checks = check_backend(Bare(backend("llama")))  # type: ignore[arg-type]
    assert not failed(checks)
    assert not_run(checks) == {"tree as plain forward", "sliding window"}


def test_a_vocabulary_smaller_than_the_oversize_tree() -> None:
    config = copy.deepcopy(tiny("llama").config)
    config.vocab_size = 23
    torch.manual_seed(0)
    assert not failed(check_backend(TorchBackend(type(tiny("llama"))(config))))


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_caught_where_it_should_be(name: str, kind: str) -> None:
    plant, by = faults.FAULTS[name]
    checks = {check.name: check for check in check_backend(plant(backend(kind)))}
    assert checks[by].passed is False
    assert math.isfinite(checks[by].largest), checks[by].note  # by its numbers, not by an error
    if name != "jitter":
        assert checks[by].largest > 100 * checks[by].tolerance
    also = {
        "stale position": {"prefix caching", "tree as plain forward"},
        "leaking sibling": {"tree as rows", "tree as stream", "batching", "padding"},
        "padding leak": {"tree as rows", "batching"},
    }.get(name, set())
    assert also <= failed(list(checks.values()))
    assert backend(kind).read(None, SOME).log_probs.tobytes() == REFERENCE[kind]  # the wrapped backend stays sound


SOME = conformance._Lab(backend("llama"), np.random.default_rng(0), 60).tree()
REFERENCE = {kind: backend(kind).read(None, SOME).log_probs.tobytes() for kind in ("llama", "lfm2")}


def test_every_check_that_compares_ways_of_reading_sees_some_fault() -> None:
    elsewhere = {"prefix caching", "tree as rows", "tree as plain forward", "batching"}  # in the test above
    below = {"sliding window", "prefix on disk"}
    assert {by for _, by in faults.FAULTS.values()} | elsewhere | below == set(NAMES)


@pytest.mark.parametrize("verb", ["prefill", "read", "stream"])
def test_a_prefix_mutated_by_any_verb(verb: str) -> None:
    checks = check_backend(faults.mutated_prefix(backend("llama"), verb))
    assert "immutable prefix" in failed(checks)


def test_a_window_that_is_not_kept() -> None:
    sound = backend("gemma3")
    wide = copy.deepcopy(tiny("gemma3"))
    wide.config.sliding_window = 400
    for layer in wide.model.layers:
        layer.self_attn.sliding_window = 400 if layer.self_attn.sliding_window else None
    ignored = faults._Wrapped(TorchBackend(wide), window=7, plain_logits=sound.plain_logits)
    assert {"sliding window", "tree as plain forward"} <= failed(check_backend(ignored))


def test_a_window_too_long_to_be_checked_is_said() -> None:
    patient = faults._Wrapped(backend("llama"), window=4096)
    check = next(check for check in check_backend(patient) if check.name == "sliding window")
    assert check.passed is None
    assert "4096" in check.note


def test_a_prefix_that_comes_back_from_disk_as_another() -> None:
    sound = backend("llama")
    other = sound.prefill([3] * 24)
    assert failed(check_backend(faults._Wrapped(sound, load_prefix=lambda path: other))) == {"prefix on disk"}


def test_lengths_are_checked() -> None:
    sound = backend("llama")

    def prefill(tokens: Any, parent: Any = None) -> Any:
        longer = sound.prefill(tokens, parent)
        return faults._Wrapped(longer, length=longer.length + 1)

    checks = {check.name: check for check in check_backend(faults._Wrapped(sound, prefill=prefill))}
    assert "says it has" in checks["prefix caching"].note


# --- the checks themselves --------------------------------------------------------------------------------------------


def test_a_call_that_fails_is_a_finding_and_the_rest_still_runs() -> None:
    def stream(prefix: Any) -> Any:
        raise RuntimeError("no kernel for this")

    checks = {check.name: check for check in check_backend(faults._Wrapped(backend("llama"), stream=stream))}
    assert failed(list(checks.values())) == {"tree as stream", "immutable prefix", "stream rollback"}
    assert checks["tree as stream"].note == "RuntimeError: no kernel for this"
    assert json.loads(json.dumps(checks["tree as stream"].to_dict(), allow_nan=False))["largest"] is None


def test_numbers_that_are_none_fail() -> None:
    sound = backend("llama")

    def read(prefix: Any, tree: Any, keep: int = 0) -> Any:
        reading = sound.read(prefix, tree, keep)
        return replace(reading, log_probs=np.where(reading.log_probs < -6, np.nan, reading.log_probs))

    checks = {check.name: check for check in check_backend(faults._Wrapped(sound, read=read))}
    assert checks["tree as rows"].passed is False
    assert "not finite" in checks["tree as rows"].note


def test_low_precision_is_compared_by_total_variation() -> None:
    half = TorchBackend(copy.deepcopy(tiny("qwen3")).to(torch.bfloat16), layout="packed")
    checks = check_backend(half)
    assert not failed(checks)
    assert checks[0].tolerance == LOW_PRECISION.limit
    assert checks[0].note.startswith("in total variation")
    for name in ("stale position", "leaking sibling", "mutated prefix", "padding leak", "short trunk"):
        plant, by = faults.FAULTS[name]
        assert by in failed(check_backend(plant(half))), name


@pytest.mark.parametrize(
    ("dtype", "measure"), [("float32", "log-probability"), ("float16", "total variation"), ("Q4_1", "total variation")]
)
def test_the_tolerance_goes_with_the_number_format(dtype: str, measure: str) -> None:
    assert tolerance_for(dtype).measure == measure


def test_differences_by_hand() -> None:
    one = np.log([[0.5, 0.5 - 1e-9, 1e-9]])
    other = np.log([[0.25, 0.75 - 1e-7, 1e-7]])
    in_log, in_mass = conformance._differences(one, other)  # the third token is too rare to count in the first
    assert in_log == pytest.approx(math.log(2), rel=1e-6)
    assert in_mass == pytest.approx(0.25, rel=1e-6)


@given(st.lists(st.floats(-80, 80), min_size=2, max_size=9), st.floats(-500, 500))
def test_log_softmax_is_one(logits: list[float], shift: float) -> None:
    row = np.array(logits)
    np.testing.assert_allclose(np.exp(log_softmax(row)).sum(), 1)
    np.testing.assert_allclose(log_softmax(row + shift), log_softmax(row), atol=1e-9)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ParameterError, match="tokens=12"):
        check_backend(backend("llama"), tokens=12)


# --- the documentation ------------------------------------------------------------------------------------------------


def test_the_backend_in_the_documentation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    block = next(block for block in page.split("```python\n")[1:] if "class PlainBackend" in block).split("```")[0]
    names: dict[str, Any] = {"__name__": "documentation"}
    monkeypatch.setitem(sys.modules, "documentation", types.ModuleType("documentation"))  # dataclasses look there
    exec(block, names)
    plain = names["PlainBackend"](backend("llama").plain_logits, "tiny", backend("llama").vocabulary, 512)
    checks = check_backend(plain)
    assert not failed(checks)
    assert not_run(checks) == {"sliding window", "prefix on disk"}


def test_the_documentation_names_every_check() -> None:
    page = (Path(__file__).parents[1] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    table = page.split("| checks |")[1].split("\n\n")[0]
    for name in NAMES:
        assert name.removeprefix("tree ") in table, name
