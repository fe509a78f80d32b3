"""Banks: the format and its errors, the four public sources from hand-written files of their shape, tables."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pcdlab import bank_sources, banks
from pcdlab.bank_sources import SOURCES, get_bank, html_to_text, import_bank, import_table
from pcdlab.banks import SHIPPED, Bank, Document, list_banks, load_bank, save_bank
from pcdlab.cli import app
from pcdlab.errors import BankError, ParameterError, SchemaError
from pcdlab.presets import load_preset
from pcdlab.schema import Field, Schema
from pcdlab.studies.rewrites import two_level

ABOUT = {
    "id": "mail", "title": "Mail", "description": "", "synthetic": True, "licence": "Apache-2.0", "citation": "This test",
    "schema": {"spam": {"type": "boolean"}, "kind": {"type": "enum", "choices": ["A", "B"]}},
}  # fmt: skip
DOCUMENTS = [
    {"id": "1", "text": "You have won!", "gold": {"spam": True, "kind": "A"}},
    {"id": "2", "text": "Grüße", "gold": {"spam": False}, "note": "short"},
    {"id": "3", "text": "Qwrt", "gold": {"kind": None}},
]
LONG = "A talk about virtual threads. " * 8


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for banks: pcdlab without a checkout, and an empty cache."""
    monkeypatch.setattr(banks, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setenv("PCDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def write(path: Path, content: Any) -> Path:
    """A file of JSON, of JSON Lines where the name ends so, or of text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl" and not isinstance(content, str):
        content = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in content)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def write_bank(folder: Path, about: Any = ABOUT, documents: Any = DOCUMENTS) -> Path:
    write(folder / "bank.json", about)
    write(folder / "documents.jsonl", documents)
    return folder


# --- the format -------------------------------------------------------------------------------------------------------


def test_a_bank_is_read_from_its_folder_or_by_name(home: Path) -> None:
    write_bank(home / "mail")
    assert list_banks() == [home / "mail"]
    for name in ("mail", home / "mail"):
        bank = load_bank(name)
        assert (bank.id, bank.title, bank.synthetic, bank.licence) == ("mail", "Mail", True, "Apache-2.0")
        assert bank.schema.names == ("spam", "kind")
        assert len(bank) == 3
        assert [item.id for item in bank] == ["1", "2", "3"]
        assert [item.gold for item in bank] == [{"spam": True, "kind": "A"}, {"spam": False}, {"kind": None}]
        assert [item.note for item in bank] == ["", "short", ""]


def test_the_digest_is_of_what_counts(home: Path) -> None:
    bank = load_bank(write_bank(home / "mail"))
    spaced = "\n\n".join(json.dumps({**item, "note": "other"}, indent=None) for item in DOCUMENTS)
    assert load_bank(write_bank(home / "same", documents=spaced)).sha256 == bank.sha256
    changed = [{**DOCUMENTS[0], "gold": {"spam": False, "kind": "A"}}, *DOCUMENTS[1:]]
    assert load_bank(write_bank(home / "other", documents=changed)).sha256 != bank.sha256
    assert bank.first(2).sha256 != bank.sha256
    assert bank.first(9).sha256 == bank.sha256
    assert (len(bank.first(2)), [item.id for item in bank.first(2)]) == (2, ["1", "2"])
    with pytest.raises(ParameterError, match="limit=0"):
        bank.first(0)


@pytest.mark.parametrize(
    ("about", "documents", "wanted"),
    [
        ({**ABOUT, "licence": None}, DOCUMENTS, r"bank\.json: licence: Input should be a valid string"),
        ({k: v for k, v in ABOUT.items() if k != "schema"}, DOCUMENTS, r"bank\.json: schema: Field required"),
        ({**ABOUT, "colour": "red"}, DOCUMENTS, "colour: Extra inputs"),
        ("{", DOCUMENTS, r"bank\.json: Invalid JSON"),
        (ABOUT, [], "holds no documents"),
        (ABOUT, '{"id": "1", "text": "a", "gold": {}}\n{"id": ', r"documents\.jsonl: line 2: Invalid JSON"),
        (ABOUT, [{"id": "1", "text": 3, "gold": {}}], r"line 1: text: Input should be a valid string"),
        (ABOUT, [{"id": "1", "text": "a"}], "line 1: gold: Field required"),
        (ABOUT, [{"id": "1", "text": "a", "gold": {"spam": [1]}}], "line 1: gold.spam"),
        (ABOUT, [DOCUMENTS[0], DOCUMENTS[0]], "two documents have the id '1'"),
        (ABOUT, [{"id": "1", "text": "a", "gold": {"span": True}}], "gold for 'span', which is no field of spam, kind"),
    ],
)
def test_what_is_no_bank(tmp_path: Path, about: Any, documents: Any, wanted: str) -> None:
    with pytest.raises(BankError, match=wanted):
        load_bank(write_bank(tmp_path / "mail", about, documents))


def test_a_schema_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"bank\.json: schema: field 'a'"):
        load_bank(write_bank(tmp_path / "mail", {**ABOUT, "schema": {"a": {"type": "text"}}}))


def test_labels_outside_the_schema_are_listed(tmp_path: Path) -> None:
    gold = [{"kind": "C"}, {"kind": "C", "spam": 1}, {"kind": "a"}, {"kind": "A", "spam": "true"}]
    documents = [{"id": str(i), "text": "x", "gold": item} for i, item in enumerate(gold)]
    with pytest.raises(BankError) as error:
        load_bank(write_bank(tmp_path / "mail", documents=documents))
    assert 'field \'kind\': "C" (2 ×), "a" (1 ×)' in str(error.value)
    assert "field 'spam': 1 (1 ×), \"true\" (1 ×)" in str(error.value)


def test_asking_something_else(tmp_path: Path) -> None:
    bank = load_bank(write_bank(tmp_path / "mail"))
    other = bank.asking(Schema((Field("kind", ("B", "A", "Z")), Field("new", (1, 2)))))
    assert other.schema.names == ("kind", "new")
    assert other.sha256 == bank.sha256
    with pytest.raises(BankError, match=r"field 'kind': \"A\" \(1 ×\)"):
        bank.asking({"kind": {"type": "enum", "choices": ["B", "Z"]}})


def test_a_bank_that_is_not_there(home: Path) -> None:
    write_bank(home / "mail")
    with pytest.raises(BankError, match=r"no bank 'mial' \(did you mean 'mail'\?\); here are mail"):
        load_bank("mial")


def test_saving_is_whole_or_not_at_all(home: Path) -> None:
    bank = load_bank(write_bank(home / "mail"))
    again = save_bank(bank, bank, home / "copy")
    assert (again.sha256, again.schema, again.citation) == (bank.sha256, bank.schema, bank.citation)
    assert [item.note for item in again] == ["", "short", ""]
    with pytest.raises(BankError, match="outside the schema"):
        save_bank(bank, [Document(id="1", text="x", gold={"kind": "C"})], home / "copy")
    assert load_bank("copy").sha256 == bank.sha256
    assert save_bank(bank.first(1), bank.first(1), home / "copy").first(9).sha256 == bank.first(1).sha256
    (home / "thesis").mkdir()
    write(home / "thesis" / "work.txt", "years of it")
    with pytest.raises(BankError, match="is no bank"):
        save_bank(bank, bank, home / "thesis")
    assert sorted(path.name for path in home.iterdir()) == ["copy", "mail", "thesis"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_banks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "_CHECKOUT", Path(__file__).parents[1])
    bank = load_bank(name)
    assert bank.id == name
    assert bank.synthetic
    assert len(bank) >= 60
    assert all(field.description for field in bank.schema)


def test_the_goods_are_those_of_the_preset_and_each_is_in_one_section(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.setattr(banks, "_CHECKOUT", root)
    (field,) = load_bank("goods").schema
    assert field == load_preset(root / "presets/tariff_router.json").schema[field.name]
    sections = json.loads((root / "data/goods/sections.json").read_text(encoding="utf-8"))
    assert len(two_level(field, sections).fields) == 1 + len(sections)
    right = [item.gold[field.name] for item in load_bank("goods")]
    assert len(set(right)) == len(right)


# --- public sources ---------------------------------------------------------------------------------------------------


def talk(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "title": f"Talk {number}",
        "description": f"<p>{LONG}</p>",
        "track": {"name": "Mind the Geek"},
        "sessionType": {"name": "Conference"},
        "audienceLevel": "BEGINNER",
        "totalFavourites": number,
        "speakers": [{"fullName": "Ada"}],
    } | more


TRACKS = ["Architecture & Modernization", "Java Language & Platform", "Agentic Engineering & Tooling"]
TRACKS += ["Cloud Native, Data & Infrastructure", "Security, Trust & Compliance", "Development Practices"]
TRACKS += ["People, Practices & Career", "Mind the Geek"]
TALKS = [
    talk(3),
    talk(9, description="<p>Too short</p>"),
    talk(5, description=f"<p>Fast &amp; <b>safe</b>.</p><p>{LONG}</p>", audienceLevel=None),
    talk(8, sessionType={"name": "Keynote"}),
    talk(7, track={"name": "Sponsored"}),
    talk(6, track=None, description=None),
    talk(1, totalFavourites=None),
]
ONTOLOGY = {
    "intents": {
        "affirm": {"description": "is the intent to affirm something?", "domain": ["general"]},
        "card": {"description": "is the intent to ask about cards?", "domain": ["banking"]},
        "refund": {"description": "is the intent to ask about some refund?", "domain": ["banking", "hotels"]},
        "spa": {"description": "is the intent to ask about the spa?", "domain": ["hotels"]},
    },
    "slots": {"date": {"description": "when?", "domain": ["general"]}},
}
FULL = {
    "val": [["v1", "greeting"]],
    "test": [["how do you say hi", "translate"], ["call, ada", "make_call"]],
    "train": [["hello", "greeting"]],
    "oos_test": [["who won", "oos"]],
    "oos_val": [],
}
POLYAI = "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/master"
WEB: dict[str, Any] = {
    "https://dvbe26.cfp.dev/api/public/talks": TALKS,
    "https://dvbe26.cfp.dev/api/public/tracks": [{"name": name} for name in TRACKS],
    "https://vdz27.cfp.dev/api/public/talks": [talk(1, track={"name": "Robots"}), talk(2)],
    "https://vdz27.cfp.dev/api/public/tracks": [{"name": "Robots"}, {"name": "Java"}],
    f"{POLYAI}/banking_data/categories.json": ["card_arrival", "age_limit"],
    f"{POLYAI}/banking_data/test.csv": 'text,category\n"How old, please?",age_limit\nWhere is\tmy card?,card_arrival\n',
    "https://raw.githubusercontent.com/clinc/oos-eval/master/data/data_full.json": FULL,
    f"{POLYAI}/nlupp/data/ontology.json": ONTOLOGY,
    **{f"{POLYAI}/nlupp/data/{d}/fold{n}.json": [] for d in ("banking", "hotels") for n in range(20)},
    f"{POLYAI}/nlupp/data/banking/fold3.json": [
        {"text": "yes, my card", "intents": ["card", "affirm"], "slots": {"date": {"text": "my", "span": [5, 7]}}},
        {"text": "today"},
    ],
    f"{POLYAI}/nlupp/data/hotels/fold0.json": [{"text": "is there a spa", "intents": ["spa"]}],
}


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The web as far as the sources need it; returns what was asked."""
    asked: list[str] = []

    def download(url: str, path: Path) -> None:
        asked.append(url)
        if url not in WEB:
            raise urllib.error.HTTPError(url, 404, "Not Found", None, None)  # type: ignore[arg-type]
        write(path, WEB[url])

    monkeypatch.setattr(bank_sources, "_download", download)
    return asked


def contents(bank: Bank) -> dict[str, tuple[str, Any]]:
    return {item.id: (item.text, item.gold) for item in bank}


def test_devoxx(web: list[str], home: Path) -> None:
    bank = get_bank("devoxx")
    assert bank.path == home / "devoxx" / "documents.jsonl"
    assert [item.id for item in bank] == ["5", "3", "1"]  # most favourites first
    gold = {"track": "Mind the Geek", "session_format": "Conference"}
    assert contents(bank) == {
        "5": (f"Title: Talk 5\n\nAbstract: Fast & safe.\n\n{LONG.strip()}", gold),
        "3": (f"Title: Talk 3\n\nAbstract: {LONG.strip()}", {**gold, "audience_level": "BEGINNER"}),
        "1": (f"Title: Talk 1\n\nAbstract: {LONG.strip()}", {**gold, "audience_level": "BEGINNER"}),
    }
    assert bank.schema.names[:3] == ("track", "session_format", "audience_level")
    assert "speakers" in bank.licence
    assert [item.id for item in get_bank("devoxx", count=1, name="one")] == ["5"]
    assert load_bank("devoxx").sha256 == bank.sha256


def test_devoxx_of_another_event_has_its_tracks(web: list[str]) -> None:
    bank = get_bank("devoxx", event="vdz27")
    assert bank.id == "devoxx-vdz27"
    assert bank.schema["track"].labels == ("Robots", "Java")
    assert list(contents(bank)) == ["1"]
    with pytest.raises(ParameterError, match="event='a/b'"):
        get_bank("devoxx", event="a/b")


def test_banking77(web: list[str]) -> None:
    bank = get_bank("banking77")
    assert bank.schema["intent"].labels == ("card_arrival", "age_limit")
    assert contents(bank) == {
        "test-0": ("How old, please?", {"intent": "age_limit"}),
        "test-1": ("Where is\tmy card?", {"intent": "card_arrival"}),
    }
    assert "CC BY 4.0" in bank.licence
    assert "2020" in bank.citation
    with pytest.raises(BankError, match=r"dev\.csv cannot be fetched"):
        get_bank("banking77", split="dev")


def test_clinc150(web: list[str]) -> None:
    bank = get_bank("clinc150")
    assert bank.schema["intent"].labels == ("greeting", "make_call", "translate")
    assert contents(bank) == {
        "test-0": ("how do you say hi", {"intent": "translate"}),
        "test-1": ("call, ada", {"intent": "make_call"}),
        "test-2": ("who won", {"intent": None}),
    }
    assert [item.id for item in bank if item.note == "out of scope"] == ["test-2"]
    assert "CC BY 3.0" in bank.licence
    assert list(contents(get_bank("clinc150", split="val", name="val"))) == ["val-0"]
    with pytest.raises(BankError, match="no split 'dev'; they have val, test, train"):
        get_bank("clinc150", split="dev")


def test_nlupp(web: list[str]) -> None:
    bank = get_bank("nlupp")
    assert {field.name: field.description for field in bank.schema} == {
        name: ONTOLOGY["intents"][name]["description"] for name in ("affirm", "card", "refund")
    }
    assert contents(bank) == {
        "fold3-0": ("yes, my card", {"affirm": True, "card": True, "refund": False}),
        "fold3-1": ("today", {"affirm": False, "card": False, "refund": False}),
    }
    assert "CC BY 4.0" in bank.licence
    hotels = get_bank("nlupp", domain="hotels")
    assert hotels.id == "nlupp-hotels"
    assert hotels.schema.names == ("affirm", "refund", "spa")


def test_documents_sorted_by_label_are_shuffled_the_same_way_everywhere(web: list[str], tmp_path: Path) -> None:
    rows = "".join(f"query {i},{'age_limit' if i < 50 else 'card_arrival'}\n" for i in range(100))
    write(tmp_path / "src" / "train.csv", "text,category\n" + rows)
    write(tmp_path / "src" / "categories.json", ["card_arrival", "age_limit"])
    bank = import_bank("banking77", [tmp_path / "src"])
    numbers = [int(item.id.removeprefix("train-")) for item in bank]
    assert sorted(numbers) == list(range(100))
    assert numbers[:3] == [59, 11, 43]
    assert 10 < sum(n < 50 for n in numbers[:50]) < 40


def test_import_takes_the_flat_shapes_too(tmp_path: Path) -> None:
    flat = {
        "id": "7",
        "title": "T",
        "abstract": LONG,
        "track": TRACKS[0],
        "session_format": "BOF",
        "audience_level": "ADVANCED",
    }
    bank = import_bank("devoxx", [write(tmp_path / "talks.jsonl", [flat])])
    assert contents(bank)["7"][1] == {key: flat[key] for key in ("track", "session_format", "audience_level")}

    folder = tmp_path / "clinc"
    write(folder / "domains.json", {"small_talk": ["greeting", "goodbye"], "phone": ["make_call"]})
    write(folder / "val.csv", "text,intent\nhello there,greeting\n")
    write(folder / "oos_val.csv", "text,intent\nwho won,oos\n")
    bank = import_bank("clinc150", [folder])
    assert bank.schema["intent"].labels == ("goodbye", "greeting", "make_call")
    assert contents(bank) == {
        "val-0": ("who won", {"intent": None}),
        "val-1": ("hello there", {"intent": "greeting"}),
    }

    lines = [
        {"text": "yes", "intents": ["affirm"], "slots": [], "fold": 0},
        {"text": "no", "intents": [], "fold": 1},
        {"text": "my card", "intents": ["card"], "fold": 0},
    ]
    files = [write(tmp_path / "banking.jsonl", lines), write(tmp_path / "ontology.json", ONTOLOGY)]
    bank = import_bank("nlupp", files, name="mine")
    assert bank.id == "mine"
    assert sorted(contents(bank)) == ["fold0-0", "fold0-1", "fold1-0"]
    assert contents(bank)["fold0-1"] == ("my card", {"affirm": False, "card": True, "refund": False})


@pytest.mark.parametrize("kind", SOURCES)
def test_without_a_network_the_message_says_what_to_do(kind: str, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(BankError) as error:
        get_bank(kind)
    assert "cannot be fetched (Name or service not known)" in str(error.value)
    assert f"pcdlab data import {kind} FILES_OR_FOLDER" in str(error.value)
    assert SOURCES[kind].files in str(error.value)
    assert not home.exists()


def test_what_sources_refuse(tmp_path: Path, web: list[str]) -> None:
    with pytest.raises(ParameterError, match=r"source 'banking' is unknown \(did you mean 'banking77'\?\)"):
        get_bank("banking")
    with pytest.raises(ParameterError, match="banking77 has no option 'event'; it has split"):
        get_bank("banking77", event="dvbe26")
    with pytest.raises(ParameterError, match="count=0"):
        get_bank("devoxx", count=0)
    with pytest.raises(ParameterError, match="domain='hotel'"):
        import_bank("nlupp", [write(tmp_path / "ontology.json", ONTOLOGY)], domain="hotel")
    with pytest.raises(ParameterError, match="'talks' is taken"):
        get_bank("devoxx", name="talks")
    with pytest.raises(ParameterError, match="a bank's name is made of"):
        get_bank("devoxx", name="../x")
    with pytest.raises(BankError, match=r"categories\.json is missing among the files \(test\.csv\)"):
        import_bank("banking77", [write(tmp_path / "test.csv", "text,category\na,b\n")])
    with pytest.raises(BankError, match=r"there is no file .*gone\.csv; banking77 takes test\.csv"):
        import_bank("banking77", [tmp_path / "gone.csv"])
    with pytest.raises(BankError, match=r"devoxx: the files do not have the expected shape \(KeyError\('title'\)\)"):
        import_bank("devoxx", [write(tmp_path / "talks.json", [{k: v for k, v in talk(1).items() if k != "title"}])])
    write(tmp_path / "b" / "categories.json", ["age_limit"])
    write(tmp_path / "b" / "test.csv", "text,category\nhow old,age_limits\n")
    with pytest.raises(BankError, match=r"outside the schema: field 'intent': \"age_limits\" \(1 ×\)"):
        import_bank("banking77", [tmp_path / "b"])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("plain", "plain"),
        ("<p>a</p><p>b</p>", "a\n\nb"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<p>x</p><ul><li>one</li><li><p>two</p></li></ul>end", "x\n\n- one\n- two\n\nend"),
        ("5 &lt; 6 &amp;&#8217; &eacute;&nbsp;!", "5 < 6 &’ é !"),
        ("<style>p{}</style>a<script>1 < 2</script>b", "ab"),
        ("  <b>bo</b>ld \n <i>it</i>. ", "bold it."),
        ("<p>unclosed <b>tag", "unclosed tag"),
        ("", ""),
    ],
)
def test_html_to_text(source: str, wanted: str) -> None:
    assert html_to_text(source) == wanted


# --- tables -----------------------------------------------------------------------------------------------------------


def table(path: Path) -> Path:
    """The same four rows as CSV, JSON Lines or Parquet."""
    rows = [
        {"nr": "a", "body": "one, two\nthree", "urgent": True, "topic": "NA", "stars": 3},
        {"nr": "b", "body": "Grüße", "urgent": False, "topic": "billing", "stars": None},
        {"nr": "c", "body": "x", "urgent": None, "topic": "billing", "stars": 5},
        {"nr": "d", "body": "y", "urgent": True, "topic": None, "stars": 5},
    ]
    if path.suffix == ".jsonl":
        return write(path, rows)
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame["stars"] = frame["stars"].astype("Int64")
        frame.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table(kind: str, tmp_path: Path) -> None:
    path = table(tmp_path / f"t.{kind}")
    schema = {
        "is_urgent": {"type": "boolean", "description": "Now?"},
        "topic": {"type": "enum", "choices": ["billing", "NA"]},
        "stars": {"type": "enum", "choices": [3, 4, 5]},
    }
    gold = {"is_urgent": "urgent", "topic": "topic", "stars": "stars"}
    bank = import_table(path, "mine", "body", gold, id="nr", schema=schema, licence="mine", citation="me")
    assert (bank.id, bank.licence, bank.citation) == ("mine", "mine", "me")
    assert contents(bank) == {
        "a": ("one, two\nthree", {"is_urgent": True, "topic": "NA", "stars": 3}),
        "b": ("Grüße", {"is_urgent": False, "topic": "billing"}),
        "c": ("x", {"topic": "billing", "stars": 5}),
        "d": ("y", {"is_urgent": True, "stars": 5}),
    }
    assert all(type(item.gold.get("is_urgent", True)) is bool for item in bank)

    free = import_table(path, "free", "body", {"urgent": "urgent", "topic": "topic"})
    assert free.schema == Schema((Field("urgent", (True, False)), Field("topic", ("NA", "billing"))))
    assert list(contents(free)) == ["1", "2", "3", "4"]


def test_a_bank_is_replaced_only_when_asked(web: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "body,topic\na,x\nb,y\n")
    first = import_table(path, "mine", "body", {"topic": "topic"})
    write(path, "body,topic\nc,x\nd,y\n")
    get_bank("devoxx", count=1)
    taken = r"name 'mine' is taken by the bank in .*mine; give another one, or replace that bank \(--replace"
    with pytest.raises(ParameterError, match=taken):
        import_table(path, "mine", "body", {"topic": "topic"})
    with pytest.raises(ParameterError, match="name 'devoxx' is taken"):
        get_bank("devoxx")
    arguments = ("import", "table", path, "--name", "mine", "--text", "body", "--gold", "topic")
    refused = call(*arguments)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert load_bank("mine").sha256 == first.sha256
    assert call(*arguments, "--replace").exit_code == 0
    assert [item.text for item in load_bank("mine")] == ["c", "d"]
    assert len(get_bank("devoxx", replace=True)) == 3


def test_what_tables_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "t.jsonl")
    with pytest.raises(BankError, match=r"no column 'bodi' \(did you mean 'body'\?\); it has nr, body"):
        import_table(path, "mine", "bodi", {"topic": "topic"})
    with pytest.raises(BankError, match=r"field 'topic': \"billing\" \(2 ×\)"):
        import_table(path, "mine", "body", {"topic": "topic"}, schema={"topic": {"type": "enum", "choices": ["NA"]}})
    with pytest.raises(ParameterError, match="gold names topik, which the schema does not have"):
        import_table(path, "mine", "body", {"topik": "topic"}, schema={"topic": {"type": "enum", "choices": ["NA"]}})
    with pytest.raises(ParameterError, match="gold names no column"):
        import_table(path, "mine", "body", {})
    with pytest.raises(BankError, match=r"^bank 'mine': two documents have the id"):
        import_table(path, "mine", "body", {"topic": "topic"}, id="topic")
    with pytest.raises(
        BankError, match=r"^bank 'mine': labels outside the schema: field 'topic': .* where it has true, false;"
    ):
        import_table(path, "mine", "body", {"topic": "topic"}, schema={"topic": {"type": "boolean"}})
    for content, name, wanted in [
        ("body,topic\n,x\n", "t.csv", "row 1: column 'body' holds no text"),
        ("body,topic\na,x,y\n", "t.csv", "row 1 below the heading has more or fewer cells"),
        ("body,topic\n", "t.csv", "holds no rows"),
        ("[1, 2]", "t.json", "holds no rows"),
        ('{"body": ', "t.jsonl", "line 1, column 10: not valid JSON"),
        ('{"body": "a"}\n\n{"body": "b"}\n{"body" "c"}\n', "t.jsonl", "line 4, column 9: not valid JSON"),
        ('[{"body": "a"},\n{"body" "c"}]', "t.json", "line 2, column 9: not valid JSON"),
        (f'{{"body": "a"}}\n{{"body": {"1" * 5000}}}', "t.jsonl", "line 2: not valid JSON"),
        ("body;topic\nhello, you;x\n", "t.csv", "'body;topic', as if ';' stood between columns"),
        ('body,topic\na,x\n"b"c,y\n', "t.csv", "line 3: not valid CSV"),
        ('{"body": ' + "[" * 100_000, "t.jsonl", "line 1: not valid JSON"),
        ("x", "t.txt", "unknown kind of table"),
        ("body,topic\na,\n", "t.csv", "field 'topic'"),
    ]:
        with pytest.raises((BankError, SchemaError), match=wanted):
            import_table(write(tmp_path / name, content), "mine", "body", {"topic": "topic"})
    (tmp_path / "t.csv").write_bytes("body,topic\nGrüße,x\n".encode("latin-1"))
    with pytest.raises(BankError, match="is not UTF-8"):
        import_table(tmp_path / "t.csv", "mine", "body", {"topic": "topic"})
    assert list_banks() == []


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0b"])
def test_what_looks_like_the_end_of_a_line_is_text_in_a_table(mark: str, tmp_path: Path, home: Path) -> None:
    bank = import_table(write(tmp_path / "t.csv", f"body,topic\na{mark}b,x\nc,y\n"), "mine", "body", {"topic": "topic"})
    assert sorted(document.text for document in bank) == [f"a{mark}b", "c"]


# --- the command ------------------------------------------------------------------------------------------------------


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_the_commands(web: list[str], tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = call("get", "devoxx", "--count", 2, "--name", "two")
    assert made.exit_code == 0, made.output
    assert f"{home / 'two'}: 2 documents, 7 fields" in made.stdout
    own = call(
        "import",
        "table",
        table(tmp_path / "t.csv"),
        "--name",
        "own",
        "--text",
        "body",
        "--gold",
        "urgent",
        "--gold",
        "t=topic",
    )
    assert own.exit_code == 0, own.output
    assert "hint: the fields have no descriptions" in own.stderr
    assert str(home / "own" / "bank.json") in own.stderr
    described = write(
        tmp_path / "s.json", {"topic": {"type": "enum", "description": "What about", "choices": ["NA", "billing"]}}
    )
    source = ("table", tmp_path / "t.csv", "--name", "own2", "--text", "body", "--gold", "topic")
    assert call("import", *source, "--schema", described).stderr == ""
    shutil.rmtree(home / "own2")
    assert load_bank("own").schema.names == ("urgent", "t")

    listed = call("list").stdout
    assert "two" in listed
    assert "pcdlab data get banking77" in listed
    found = json.loads(call("list", "--json").stdout)
    assert [row["bank"] for row in found["banks"]] == ["own", "two"]
    assert found["to_fetch"] == list(SOURCES)

    shown = call("show", "own", "--documents", 1).stdout
    for text in ("own (own): 4 documents", "true 2, false 1", "one, two", '{"urgent": true, "t": "NA"}'):
        assert text in shown
    assert "Grüße" not in shown
    found = json.loads(call("show", "own", "--json").stdout)
    assert found["count"] == 4
    assert found["labels"]["urgent"] == {"true": 2, "false": 1}


def test_what_the_commands_refuse(tmp_path: Path) -> None:
    for arguments, wanted in [
        (["import", "devoxx", tmp_path, "--gold", "x"], "--gold belongs to"),
        (["import", "table", tmp_path / "t.csv", "--split", "test"], "--split belongs to"),
        (["import", "table", tmp_path / "t.csv", "--name", "x"], "a table needs one file"),
        (["show", "nothing"], "there is no bank 'nothing'"),
    ]:
        result = call(*arguments)
        assert result.exit_code == 2
        assert wanted in result.stderr
