"""Every decision computed the slow way, from the text: what the engine is compared with.

Nothing here uses the engine's own tokens, tries, plans or numbers. Prompt and lines are put together as text, encoded by
the original tokenizer, and each label gets a plain forward pass of its own.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import hash_of, tiny
from tokenizers_zoo import codec, controls, tokenizer

from pcdlab.backends.torch import TorchBackend
from pcdlab.engine import Engine
from pcdlab.result import Extraction, FieldDecision
from pcdlab.schema import Label, Schema
from pcdlab.tokenizer import Piece

# --- engines over tiny random models --------------------------------------------------------------------------------


@cache
def random_model(kind: str, vocabulary: int, positions: int = 4096) -> Any:
    """The tiny model of that architecture for another vocabulary and length; the same weights in every process."""
    config = copy.deepcopy(tiny(kind).config)
    config.vocab_size = vocabulary
    config.max_position_embeddings = positions
    torch.manual_seed(hash_of(kind))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Layers that outweigh the embeddings: answers then depend on what stands far in front of them.
                parameter.normal_(0.0, 0.05 if any(parameter is end for end in ends) else 0.2)
    return model.eval()


@cache
def backend(name: str, kind: str = "llama", positions: int = 4096) -> TorchBackend:
    """A backend whose vocabulary is that of the zoo's tokenizer `name`."""
    return TorchBackend(random_model(kind, len(tokenizer(name)), positions), name=f"tiny {kind}")


def fresh_engine(name: str, kind: str = "llama") -> Engine:
    """An engine that has seen nothing yet."""
    return Engine(backend(name, kind), codec(name))


engine = cache(fresh_engine)


# --- text and the tokenizer's own ids ---------------------------------------------------------------------------------


def own_ids(name: str, text: str) -> list[int]:
    """What the tokenizer itself gives for a text."""
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def spells_control(name: str, text: str) -> bool:
    """Whether a control token is spelled out in a text: there the tokenizer itself is no reference."""
    return any(spelling.lower() in text.lower() for spelling in controls(name))


def as_json(value: Label) -> str:
    return json.dumps(value, ensure_ascii=False)


def write(compiled: Any, name: str, text: str) -> str:
    """The line of a field with the JSON text of a value."""
    return f"{compiled.format.before}{as_json(name)}: {text}{compiled.format.after}"


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """A decision by brute force; `margin` is how far the runner-up was away at the closest choice made."""

    labels: tuple[Label, ...]
    scores: np.ndarray
    shares: np.ndarray
    chosen: int
    mass: float
    method: str
    margin: float

    @property
    def value(self) -> Label:
        return self.labels[self.chosen]


def log_sum(values: Iterable[float]) -> float:
    return float(np.logaddexp.reduce(np.fromiter(values, dtype=np.float64)))


def margin(scores: Sequence[float]) -> float:
    """Distance of the two best."""
    best = sorted(scores)[-2:]
    return best[1] - best[0] if len(best) == 2 else np.inf


def other_spellings(labels: Sequence[Label]) -> list[tuple[int, str]]:
    """JSON texts in another case that stand for one label only, and are the JSON text of none."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for i, label in enumerate(labels):
        body = label if isinstance(label, str) else as_json(label)
        for other in (body.lower(), body.upper(), body.capitalize()):
            wanted[as_json(other) if isinstance(label, str) else other].add(i)
    texts = {as_json(label) for label in labels}
    # A backslash begins an escape, whose letters have no other case.
    return [(min(w), t) for t, w in wanted.items() if len(w) == 1 and t not in texts and "\\" not in t]


@lru_cache(maxsize=1000)
def log_probs_from(backend: Any, ids: tuple[int, ...], first: int) -> np.ndarray:
    """Next-token log-probabilities after each id from number `first` on, by one plain forward pass."""
    return torch.log_softmax(torch.from_numpy(backend.plain_logits(ids)[first:]).double(), -1).numpy()


def brute_force(
    engine: Engine,
    name: str,
    schema: Schema,
    field: str,
    document: str,
    scorer: str = "marginal",
    normalise: str = "sum",
    seen: Sequence[tuple[str, Label]] = (),
) -> Expected:
    """Decide one field by plain forward passes of prompt, the lines `seen`, and each label's line."""
    compiled = engine.compile(schema)
    labels = schema[field].labels
    written = "".join(write(compiled, n, as_json(v)) for n, v in seen)
    outside = f"{document}{schema.to_dict()}"
    prompt = compiled.prompt.text(document)

    def encode(text: str) -> list[int]:
        # The one thing not taken from the tokenizer itself: where a control token must be plain text.
        if spells_control(name, outside):
            return codec(name).encode([*compiled.prompt.pieces(document), Piece(text, False)])
        return own_ids(name, prompt + text)

    base = encode(written)

    def tokens(value: str) -> tuple[int, ...]:
        ids = encode(written + write(compiled, field, value))
        assert ids[: len(base)] == base
        return tuple(ids[len(base) :])

    lines = [tokens(as_json(label)) for label in labels]
    after: dict[tuple[int, ...], np.ndarray] = {}  # beginning of a line → log-probabilities of the next token
    through: dict[tuple[int, ...], set[int]] = defaultdict(set)  # beginning of a line → labels whose line begins so
    for i, line in enumerate(lines):
        table = log_probs_from(engine.backend, (*base, *line), len(base) - 1)
        for d in range(len(line) + 1):
            through[line[:d]].add(i)
            after.setdefault(line[:d], table[d])
    shared = next(d for d in range(len(lines[0])) if len({line[: d + 1] for line in lines}) > 1)

    def probability(path: tuple[int, ...]) -> float:
        return sum(after[path[:d]][path[d]] for d in range(shared, len(path)))

    identifying = [
        next(line[:d] for d in range(shared + 1, len(line) + 1) if len(through[line[:d]]) == 1) for line in lines
    ]
    claims: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for i, text in other_spellings(labels):
        line = tokens(text)
        leaves = next((line[: d + 1] for d in range(len(line)) if line[: d + 1] not in through), ())
        if len(leaves) > shared and len(through[leaves[:-1]]) > 1:
            claims[leaves].add(i)
    paths = [[identifying[i], *(path for path, by in claims.items() if by == {i})] for i in range(len(labels))]
    marginal = np.array([log_sum(map(probability, ways)) for ways in paths])
    exact = np.array([probability(line) for line in lines])
    mass = float(np.exp(marginal).sum())

    def local(path: tuple[int, ...]) -> float:
        """Log-share of a path when at every step only tokens that lead to a label are allowed."""
        return sum(
            after[path[:d]][path[d]] - log_sum(after[path[:d]][t] for t in next_tokens(path[:d]))
            for d in range(shared, len(path))
        )

    def next_tokens(path: tuple[int, ...]) -> set[int]:
        return {line[len(path)] for line in lines if line[: len(path)] == path}

    few = {"walk": 1, "hybrid": 8}.get(scorer, len(labels))
    if scorer == "auto":
        scorer = "marginal" if len(labels) <= 32 else "hybrid"
        few = len(labels) if scorer == "marginal" else 8
    if scorer == "hybrid" and len(labels) <= 8:
        scorer = "exact"
    if scorer in ("marginal", "exact"):
        scores = marginal if scorer == "marginal" else exact
        if normalise == "length":
            ends = identifying if scorer == "marginal" else lines
            scores = scores / [len(end) - shared for end in ends]
        if normalise == "unconditional":
            assert document, "the reference is the empty document"
            empty = brute_force(engine, name, schema, field, "", scorer, seen=seen)
            scores = scores - empty.scores
        shares = np.exp(scores - log_sum(scores))
        return Expected(labels, scores, shares, int(scores.argmax()), mass, scorer, margin(scores.tolist()))
    logs = np.array([local(path) for path in identifying])
    path, closest = lines[0][:shared], np.inf
    while len(through[path]) > few:
        choices = sorted(next_tokens(path), key=lambda token: after[path][token])
        closest = min(closest, margin([after[path][token] for token in choices]))
        path = (*path, choices[-1])
    left = sorted(through[path])
    if scorer == "hybrid" and len(left) > 1:
        closest = min(closest, margin(exact[left].tolist()))
        logs[left] = log_sum(logs[left]) + exact[left] - log_sum(exact[left])
        chosen = left[int(exact[left].argmax())]
    else:
        (chosen,) = left
    return Expected(labels, logs, np.exp(logs), chosen, mass, scorer, closest)


def assert_decision(decision: FieldDecision, expected: Expected, atol: float = 1e-5) -> None:
    """Every number of a decision is the expected one; where two labels tie, either may be the value."""
    assert decision.method == expected.method
    assert tuple(map(as_json, decision.log_probs)) == tuple(map(as_json, expected.labels))
    np.testing.assert_allclose(list(decision.log_probs.values()), expected.scores, atol=atol, rtol=0)
    np.testing.assert_allclose(decision.candidate_mass, min(1.0, expected.mass), atol=atol, rtol=0)
    if expected.margin > 10 * atol:
        assert as_json(decision.value) == as_json(expected.value)
    share_of = {as_json(label): share for label, share in zip(expected.labels, expected.shares, strict=True)}
    answers = [(decision.value, decision.probability), *decision.alternatives]
    assert sorted(as_json(label) for label, _ in answers) == sorted(share_of)
    np.testing.assert_allclose(
        [share for _, share in answers], [share_of[as_json(label)] for label, _ in answers], atol=atol, rtol=0
    )
    assert abs(sum(share for _, share in answers) - 1) < 1e-9
    others = [share for _, share in decision.alternatives]
    assert others == sorted(others, reverse=True)


def assert_extraction(out: Extraction, expected: dict[str, Expected], atol: float = 1e-5) -> None:
    """The decisions of all fields that are not fixed."""
    for name, decision in out.fields.items():
        if decision.method == "fixed":
            assert name not in expected
        else:
            assert_decision(decision, expected[name], atol)
