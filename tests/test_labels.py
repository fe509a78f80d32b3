"""Lint and rewrites of labels: the numbers are the engine's, faults are found, nothing is lost on the way back."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import as_json, engine, own_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_zoo import codec, tokenizer
from typer.testing import CliRunner

import pcdlab.studies.labels
import pcdlab.studies.rewrites
from pcdlab.cli import app
from pcdlab.decide import FEW
from pcdlab.errors import ParameterError, SchemaError
from pcdlab.presets import load_preset
from pcdlab.prompt import catalogue
from pcdlab.result import FieldDecision
from pcdlab.schema import Field, Label, Schema
from pcdlab.studies.labels import FieldLint, label_parts, lint_schema
from pcdlab.studies.rewrites import (
    Rewrite,
    groups_by_name,
    meaning_first,
    rank_labels,
    restore,
    rewrite_costs,
    rewritten,
    short_aliases,
    shortlisted,
    two_level,
    unlisted,
)

TARIFF = Path(__file__).parent.parent.parent / "shared" / "presets-upstream" / "high_cardinality_255.json"
TEXT = "Dear customer, your order 4711 has been shipped and will arrive in 3 days."

GOODS = ("Fish", "Fruit_&_Nuts", "Dairy", "Steel_Tubes", "Toys", "Clocks")
CODED = Field("goods", tuple(f"CAT_{n:03}_{GOODS[n % 6]}" for n in range(15)), "The kind of goods")
PLAIN = Field("mood", ("ANGRY", "CALM", "ANGRY_AT_US", None))
SCHEMA = Schema((Field("urgent", (True, False)), CODED, Field("risk", ("LOW", "HIGH"), depends_on=("goods",)), PLAIN))


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(pcdlab.studies.labels).failed == 0
    assert doctest.testmod(pcdlab.studies.rewrites).failed == 0


def lint(name: str, *labels: Label) -> FieldLint:
    (found,) = lint_schema(codec(name), Schema((Field("f", labels),)))
    return found


# --- What a field takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm", "qwen", "llama3", "gemma", "bytes"])
def test_tokens_of_labels_are_the_tokenizers_own(name: str) -> None:
    compiled = engine(name).compile(SCHEMA)
    base = compiled.prompt.text(TEXT)
    for found, item in zip(lint_schema(codec(name), SCHEMA), compiled, strict=True):
        start = base + f"{compiled.format.before}{as_json(item.field.name)}: "
        values = [as_json(label) + compiled.format.after for label in item.field.labels]
        lines = [own_ids(name, start + value) for value in values]
        shared = next(d for d in range(len(lines[0])) if len({line[d] for line in lines}) > 1)
        assert [label.label for label in found.labels] == list(item.field.labels)
        for label, line, value in zip(found.labels, lines, values, strict=True):
            # Tokens that end before the value begins; this tokenizer gives every text back.
            before = max(n for n in range(len(line) + 1) if len(tokenizer(name).decode(line[:n])) <= len(start))
            assert label.tokens == len(line) - before
            alone = next(d for d in range(len(line) + 1) if sum(other[:d] == line[:d] for other in lines) == 1)
            assert label.depth == alone - shared
            assert value.startswith(label.decided_by)
            assert start + label.decided_by == tokenizer(name).decode(line[:alone])
            assert label.decided_by.startswith(found.shared)
        members = {}
        for label, line in zip(item.field.labels, lines, strict=True):
            members.setdefault(line[shared], []).append(label)
        assert [list(group) for _, group in found.groups] == [group for group in members.values() if len(group) > 1]


@pytest.mark.parametrize("scorer", ["marginal", "exact", "walk", "hybrid"])
def test_costs_are_what_the_engine_spends(scorer: str) -> None:
    this = engine("qwen")
    # Two first digits with six labels each: wherever hybrid walks, it looks a second time.
    labels = tuple(f"CAT_{n // 6}{n % 6}_{GOODS[n % 6]}" for n in range(12))
    schema = Schema((Field("goods", labels),))
    (found,) = lint_schema(this.codec, schema)
    (cost,) = (cost for cost in found.costs if cost.scorer == scorer)
    this.extract(TEXT, schema, scorer=scorer)  # type: ignore[arg-type]
    stats = this.extract(TEXT, schema, scorer=scorer).stats  # type: ignore[arg-type]
    trunk = len(this.prompt(schema).ids(TEXT)) - stats.cached_tokens
    assert stats.cached_tokens
    if scorer == "hybrid":
        assert len(labels) > FEW
        assert (cost.passes, stats.forward_passes) == (2, 2)
        assert stats.tokens_fed - trunk <= cost.tokens
        return
    assert (cost.passes, cost.tokens) == (stats.forward_passes, stats.tokens_fed - trunk)
    # Rows end where the last token is asked for: for whole lines one per label, else one per first digit.
    assert cost.rows == (12 if scorer == "exact" else 2)


def test_hybrid_is_not_offered_where_it_is_exact() -> None:
    assert [cost.scorer for cost in lint("qwen", "a", "b").costs] == ["marginal", "exact", "walk"]
    assert lint("qwen", *map(str, range(40))).default_scorer == "hybrid"
    assert lint("qwen", "a", "b").default_scorer == "marginal"
    assert lint("qwen", "a").default_scorer == "fixed"


def test_catalogue_tokens() -> None:
    found = lint_schema(codec("qwen"), SCHEMA)
    for item, line in zip(found, catalogue(SCHEMA).split("\n"), strict=True):
        assert item.catalogue_tokens == len(own_ids("qwen", line))


# --- What is wrong with it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "codes"),
    [
        (("LOW", "MEDIUM", "HIGH"), set()),
        ((True, False), set()),
        ((True, False, None), set()),
        (("Java", "Kotlin", "C", "C++", "C#", "Go"), {"prefix-label"}),
        (("NONE", "1-2", "1.5", "-1", "1", "15"), {"prefix-label"}),
        (("1_HOUR", "4_HOURS", "12_HOURS"), set()),  # the number is the meaning
        (("001_Fish", "002_Meat", "003_Fish"), {"same-name", "digits-first"}),
        (("Fish [1]", "Meat [2]", "Fish [3]"), {"same-name"}),
        (("P0_BLOCKER", "P1_MAJOR", "OTHER"), {"digits-first"}),
        (("K-Fish", "K-Meat", "K-Dairy"), {"shared-prefix"}),
        (("K-Fish", "K-Meat", None), set()),
        (("KFish", "KMeat", "KDairy"), set()),
        (("Fish", "FISH", "Meat"), {"case-only"}),
        (("Fish and meat", "Fish_and_meat", "Toys"), {"signs-only"}),
        (("caf\u00e9", "cafe\u0301", "tea"), {"case-only"}),  # the same letter, composed and not
        (("Transport", "Transprot", "Toys"), {"near-duplicate"}),
        (("Zinc & Articles Thereof", "Tin & Articles Thereof"), set()),
        (("available", "unavailable"), set()),
        (("under 10", "under 100"), {"prefix-label"}),
        (("NOW ", "LATER"), {"white-space"}),
        (("RIGHT  NOW", "LATER"), {"white-space"}),
        (("RIGHT\u00a0NOW", "LA\u200bTER"), {"white-space"}),
        (("A\nB", "C"), {"white-space", "escapes"}),
        (('6"', "a\\b", "c"), {"escapes"}),
        (("true", "false"), {"json-word"}),
        (("Null", "x"), {"json-word"}),
        (("1", 1, 2), {"json-word"}),
        (("only",), {"one-label"}),
        (tuple(f"{a}{b}" for a in "ABCDEFG" for b in "kmnrt"), {"many-labels"}),
        (tuple(f"a rather long label that holds the letter {c}" for c in "xyz"), {"shared-prefix"}),
    ],
    ids=str,
)
def test_findings(labels: tuple[Label, ...], codes: set[str]) -> None:
    found = lint("llama3", *labels)
    assert {item.code for item in found.findings} - {"late"} == codes  # the small vocabulary makes most labels late
    for item in found.findings:
        assert item.field == "f"
        assert item.what
        assert item.fix


def test_late_labels() -> None:
    found = lint("bytes", "payment declined", "payment due", "refund")
    (late,) = (item for item in found.findings if item.code == "late")
    assert (late.level, "2 of 3" in late.what, "the last at 10" in late.what) == ("note", True, True)
    assert [label.depth for label in found.labels] == [10, 10, 1]
    assert found.groups == (('"p', ("payment declined", "payment due")),)


def test_the_faults_of_coded_labels() -> None:
    (found,) = lint_schema(codec("qwen"), Schema((CODED,)))
    what = {item.code: item.what for item in found.findings}
    assert "9 of 15 labels repeat" in what["same-name"]
    assert "6 names" in what["same-name"]
    assert "15 of 15 labels are decided by digits" in what["digits-first"]
    assert '"CAT_"' in what["shared-prefix"]
    # The rewrite that the fix names takes two of the three away; what repeats still does.
    (asked,) = lint_schema(codec("qwen"), Schema(meaning_first(CODED).fields))
    assert {item.code for item in asked.findings if item.level == "warning"} == {"same-name"}


def test_one_field_that_cannot_be_asked_does_not_hide_the_others() -> None:
    schema = Schema((Field("fine", (True, False)), Field("tier", ("HIGH", "high", "low"), depends_on=("fine",))))
    fine, tier = lint_schema(codec("wordpiece"), schema)
    assert not fine.findings
    assert fine.costs
    assert (tier.labels, tier.costs) == ((), ())
    assert [(item.code, item.level) for item in tier.findings] == [("cannot-ask", "error"), ("case-only", "warning")]
    assert "same tokens" in tier.findings[0].what
    (equal,) = lint_schema(codec("qwen"), Schema((Field("f", (True, 1, "x")),)))
    assert equal.findings[0].code == "cannot-ask"
    assert "equal in Python" in equal.findings[0].what


def test_the_public_tariff_preset() -> None:
    if not TARIFF.is_file():
        pytest.skip("the public preset files are not here")
    schema = load_preset(TARIFF).schema
    found = lint_schema(codec("smollm"), schema)[0]
    what = {item.code: item.what for item in found.findings if item.level == "warning"}
    assert set(what) == {"same-name", "digits-first", "shared-prefix"}
    assert what["same-name"].startswith(
        "155 of 255 labels repeat the name of another behind a different number: 100 names"
    )
    assert what["digits-first"].startswith("255 of 255 labels are decided by digits")
    assert 'begins with "CAT_"' in what["shared-prefix"]
    assert found.shared.startswith('"CAT_')


# --- pcdlab lint ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer("qwen").save_pretrained(folder)
    return folder


def call(model: Path, schema: Schema, *arguments: str) -> Any:
    path = model / "schema.json"
    path.write_text(json.dumps(schema.to_json_schema()), encoding="utf-8")
    return CliRunner().invoke(app, ["lint", str(path), "--model", str(model), *arguments])


def test_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    done = call(model, SCHEMA)
    assert done.exit_code == 1
    assert "warning goods: every label begins with" in done.stdout
    assert "→ put the name first" in done.stdout
    assert "0 errors, 3 warnings" in done.stdout
    clean = call(model, Schema((Field("risk", ("LOW", "HIGH")), PLAIN)))
    assert clean.exit_code == 0
    assert "note mood" in clean.stdout
    assert "0 errors, 0 warnings, " in clean.stdout


def test_command_as_json(model: Path) -> None:
    done = call(model, SCHEMA, "--json")
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["counts"]["warning"] == 3
    assert [item["field"] for item in data["fields"]] == list(SCHEMA.names)
    assert data["fields"][1] == json.loads(json.dumps(lint_schema(codec("qwen"), SCHEMA)[1].to_dict()))
    error = call(model, Schema((Field("f", (True, 1)),)), "--json")
    assert (error.exit_code, json.loads(error.stdout)["counts"]["error"]) == (1, 1)


def test_command_refuses(model: Path) -> None:
    assert CliRunner().invoke(app, ["lint", "no_such_preset", "--model", str(model)]).exit_code == 2
    assert CliRunner().invoke(app, ["lint", str(model / "no.json"), "--model", str(model)]).exit_code == 2


# --- Rewrites -------------------------------------------------------------------------------------------------------

LABELS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
        st.from_regex(r"(CAT[_-])?[0-9]{1,2}[_ -](Fish|Meat|Fruit)", fullmatch=True),
        st.from_regex(r"(Fish|Meat) \[[0-9]{1,2}[_-]?\]", fullmatch=True),
        st.sampled_from(["Fish", "Meat", "true", "null", "2", "A1", "AA1"]),
        st.sampled_from([True, False, None, 2, 10, 2.5]),
    ),
    min_size=1,
    max_size=12,
    unique_by=as_json,
)


@st.composite
def rewrites(draw: st.DrawFn) -> Rewrite:
    labels = draw(LABELS)
    field = Field("f", tuple(labels), draw(st.sampled_from(["", "What it is", "What is it?"])))
    kind = draw(st.sampled_from(["meaning", "alias", "unlisted", "names", "groups", "short"]))
    if kind == "groups":
        where = [draw(st.sampled_from(["x", "y", "z"])) for _ in labels]
        groups = {g: [label for label, w in zip(labels, where, strict=True) if w == g] for g in dict.fromkeys(where)}
        return two_level(field, groups)
    if kind == "short":
        return shortlisted(field, draw(st.lists(st.sampled_from(labels), min_size=1, unique_by=as_json)))
    return {"meaning": meaning_first, "alias": short_aliases, "unlisted": unlisted, "names": two_level}[kind](field)


def decided(field: Field, rng: np.random.Generator) -> FieldDecision:
    """A decision of the engine's shape with random numbers."""
    if field.fixed:
        return FieldDecision(field.name, field.labels[0], 1.0, None, {field.labels[0]: 0.0}, "fixed")
    scores = rng.normal(size=len(field.labels)) - 3
    shares = np.exp(scores) / np.exp(scores).sum()
    order = np.argsort(-shares)
    return FieldDecision(
        field.name,
        field.labels[order[0]],
        float(shares[order[0]]),
        0.25,
        {label: float(score) for label, score in zip(field.labels, scores, strict=True)},
        "marginal",
        tuple((field.labels[i], float(shares[i])) for i in order[1:]),
    )


@given(rewrites(), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_rewrites_are_bijective_and_lossless(rewrite: Rewrite, seed: int) -> None:
    field = rewrite.original
    assert rewrite.fields[0].name == field.name
    Schema(rewrite.fields)
    # Each label asked for has answers of its own, and every answer at an end stands for a label.
    asked = [label for label, path in zip(field.labels, rewrite.paths, strict=True) if path is not None]
    gold = [rewrite.gold(label) for label in asked]
    assert len({json.dumps(g) for g in gold}) == len(asked)
    grouped = {path[0][1] for path in rewrite.paths if path is not None and len(path) > 1}
    ends = sum(len(part.labels) for part in rewrite.fields) - len(grouped)
    assert ends == len(asked)

    decisions = {part.name: decided(part, np.random.default_rng(seed + i)) for i, part in enumerate(rewrite.fields)}
    back = rewrite.restore(decisions)
    assert back.name == field.name
    texts = [as_json(label) for label in asked]
    assert [as_json(label) for label in back.log_probs] == texts
    assert as_json(back.value) in texts
    assert sorted(as_json(label) for label, _ in [(back.value, 0), *back.alternatives]) == sorted(texts)
    assert back.probability + sum(share for _, share in back.alternatives) == pytest.approx(1)
    shares = {as_json(back.value): back.probability, **{as_json(a): share for a, share in back.alternatives}}
    for label, answers in zip(asked, gold, strict=True):
        product = 1.0
        for name, answer in answers.items():
            part = decisions[name]
            spelled = {as_json(k): v for k, v in [(part.value, part.probability), *part.alternatives]}
            product *= spelled[as_json(answer)]
        assert shares[as_json(label)] == pytest.approx(product)
    assert back.probability == pytest.approx(max(shares.values()))
    if len(rewrite.fields) == 1:
        own = decisions[field.name]
        assert list(back.log_probs.values()) == list(own.log_probs.values())
        assert (back.probability, back.candidate_mass, back.method) == (own.probability, own.candidate_mass, own.method)


def test_meaning_first() -> None:
    asked = meaning_first(CODED).fields[0]
    assert asked.labels[:3] == ("Fish [000]", "Fruit_&_Nuts [001]", "Dairy [002]")
    assert (asked.name, asked.description, asked.depends_on) == ("goods", "The kind of goods", ())
    assert meaning_first(PLAIN).fields[0] == PLAIN
    # A text that is another label's own stays that label's.
    assert meaning_first(Field("f", ("1 a", "a [1]", "2-a", "2_a"))).fields[0].labels == ("1 a", "a [1]", "2-a", "2_a")


def test_short_aliases_are_short_and_no_beginnings_of_each_other() -> None:
    asked = short_aliases(Field("f", tuple(range(300)))).fields[0]
    assert {len(label) for label in asked.labels} == {3}
    few = short_aliases(CODED).fields[0]
    assert few.labels[:10] == ("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "B1")
    line = catalogue(Schema((few,)))
    assert line.startswith('- "goods": The kind of goods. One of: "A1" for "CAT_000_Fish", "A2" for')
    assert line.count('"A1"') == 1
    assert set(label for label in CODED.labels if label in line) == set(CODED.labels)


def test_two_level_by_name_and_by_hand() -> None:
    assert list(groups_by_name(CODED)) == list(GOODS)
    asked = two_level(CODED).fields
    assert asked[0].labels == GOODS
    assert asked[1].labels == ("CAT_000_Fish", "CAT_006_Fish", "CAT_012_Fish")
    by_hand = two_level(PLAIN, {"bad": ["ANGRY", "ANGRY_AT_US"], "good": ["CALM"], "unknown": [None]})
    assert [item.name for item in by_hand.fields] == ["mood", "mood of bad"]
    assert by_hand.gold("ANGRY") == {"mood": "bad", "mood of bad": "ANGRY"}
    assert by_hand.gold(None) == {"mood": "unknown"}
    for groups in (
        {"a": ["ANGRY"]},
        {"a": [*PLAIN.labels, "x"]},
        {"a": PLAIN.labels, "b": ["CALM"]},
        {"a": PLAIN.labels, "b": []},
    ):
        with pytest.raises(ParameterError, match="mood"):
            two_level(PLAIN, groups)


def test_shortlist() -> None:
    rewrite = shortlisted(PLAIN, [None, "CALM"])
    assert rewrite.fields[0].labels == ("CALM", None)
    assert rewrite.gold(None) == {"mood": None}
    for call, part in (
        (lambda: rewrite.gold("ANGRY"), "not among"),
        (lambda: rewrite.gold("sad"), "not among"),
        (lambda: shortlisted(PLAIN, ["sad"]), "no label"),
        (lambda: shortlisted(PLAIN, []), "empty"),
        (lambda: shortlisted(PLAIN, rank_labels(PLAIN, ["calm"])[0, :1]), r"int64\); give labels of field"),
        (lambda: rank_labels(PLAIN, "calm"), "texts is one string"),
    ):
        with pytest.raises(ParameterError, match=part):
            call()


def test_labels_that_python_takes_for_equal_are_refused() -> None:
    with pytest.raises(SchemaError, match="equal in Python"):
        short_aliases(Field("f", (True, 1)))


def test_ranking() -> None:
    texts = ["Two crates of apples, nuts and other fruits", "welded steel tube", "", "STEEL TUBES for toys"]
    order = rank_labels(CODED, texts)
    assert order.shape == (4, 15)
    assert (np.sort(order, axis=1) == np.arange(15)).all()
    best = [{label_parts(CODED)[CODED.labels[i]].name for i in row[:2]} for row in order]
    assert best[:2] == [{"Fruit_&_Nuts"}, {"Steel_Tubes"}]
    assert best[3] == {"Steel_Tubes"}
    assert order[2].tolist() == list(range(15))  # nothing to go by: the field's order
    assert rank_labels(CODED, []).shape == (0, 15)
    assert rank_labels(PLAIN, ["calm"])[0, 0] == 1
    for labels in (("a", "b"), (" ", "\t")):
        assert rank_labels(Field("f", labels), ["c"]).tolist() == [[0, 1]]


# --- With an engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [meaning_first, short_aliases, unlisted, two_level])
def test_an_extraction_comes_back_in_the_users_schema(way: Any) -> None:
    this = engine("qwen")
    ways = [way(CODED), unlisted(PLAIN)]
    schema = rewritten(SCHEMA, ways)
    out = this.extract(TEXT, schema, scorer="exact")
    back = restore(SCHEMA, ways, out)
    if way is not unlisted:  # which keeps the labels
        for rewrites, other in (([], out), (ways, this.extract(TEXT, SCHEMA, scorer="exact"))):
            with pytest.raises(ParameterError, match="the extraction is not of what these rewrites ask: field"):
                restore(SCHEMA, rewrites, other)
    assert tuple(back.fields) == SCHEMA.names
    assert back.fields["urgent"] == out.fields["urgent"]
    assert (back.stats, back.model) == (out.stats, out.model)
    assert back.fields["mood"] == out.fields["mood"]
    for name, decision in back.fields.items():
        assert decision.name == name
        assert tuple(decision.log_probs) == SCHEMA[name].labels
        assert decision.value in SCHEMA[name].labels
        assert decision.probability + sum(share for _, share in decision.alternatives) == pytest.approx(1)
    goods = back.fields["goods"]
    if way is two_level:
        groups = dict([(out.values["goods"], out.fields["goods"].probability), *out.fields["goods"].alternatives])
        members = out.fields["goods of Dairy"]
        dairy = dict([(members.value, members.probability), *members.alternatives])
        got = dict([(goods.value, goods.probability), *goods.alternatives])
        assert got["CAT_008_Dairy"] == pytest.approx(groups["Dairy"] * dairy["CAT_008_Dairy"])
        masses = [out.fields[f"goods of {name}"].candidate_mass for name in GOODS]
        expected = out.fields["goods"].candidate_mass * sum(groups[n] * m for n, m in zip(GOODS, masses, strict=True))
        assert goods.candidate_mass == pytest.approx(expected)
    else:
        assert goods.probability == out.fields["goods"].probability
        assert ways[0].gold(goods.value) == {"goods": out.values["goods"]}


def test_rewrites_of_another_schema_are_refused() -> None:
    for ways, part in (
        ([unlisted(CODED), two_level(CODED)], "same field"),
        ([unlisted(Field("goods", ("a", "b")))], "not of this schema"),
        ([unlisted(Field("other", ("a", "b")))], "'other'"),
    ):
        with pytest.raises(ParameterError, match=part):
            rewritten(SCHEMA, ways)


def test_costs_of_ways() -> None:
    ways = {
        "as it is": [],
        "meaning first": [meaning_first(CODED)],
        "two steps": [two_level(CODED)],
        "unlisted": [unlisted(CODED)],
        "short": [shortlisted(CODED, CODED.labels[:3])],
    }
    table = rewrite_costs(codec("qwen"), SCHEMA, ways)
    assert list(table.index) == list(ways)
    assert table["fields"].tolist() == [4, 4, 10, 4, 4]
    assert table.at["unlisted", "head"] < table.at["short", "head"] < table.at["as it is", "head"]
    plain = lint_schema(codec("qwen"), SCHEMA)
    assert table.at["as it is", "depth"] == np.mean([label.depth for label in plain[1].labels])
    marginal = [cost.tokens for item in plain for cost in item.costs if cost.scorer == "marginal"]
    assert table.at["as it is", "tokens"] == sum(marginal)
    assert set(table["passes"]) == {1}


# --- Unlisted fields ------------------------------------------------------------------------------------------------


def test_an_unlisted_field() -> None:
    field = unlisted(CODED).fields[0]
    assert field != CODED
    schema = Schema((field, PLAIN))
    assert catalogue(schema).split("\n")[0] == '- "goods": The kind of goods.'
    assert catalogue(Schema((unlisted(PLAIN).fields[0],))) == '- "mood":'
    for copy in (Schema.of(schema.to_dict()), Schema.of(schema.to_json_schema())):
        assert copy == schema
        assert not copy["goods"].listed
        assert copy["mood"].listed
    assert "listed" not in json.dumps(Schema((CODED, PLAIN)).to_dict())
    out = engine("qwen").extract(TEXT, schema)
    assert tuple(out.fields["goods"].log_probs) == CODED.labels
    with pytest.raises(SchemaError, match=r"field 'f': listed is string; write true or false"):
        Schema.of({"f": {"type": "boolean", "listed": "no"}})
