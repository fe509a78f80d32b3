"""Schemas: what is accepted from each way to write one, what is refused and how the refusal reads."""

from __future__ import annotations

import doctest
import enum
import json
import pickle
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pcdlab.schema
from pcdlab.errors import BackendError, PcdlabError, SchemaError
from pcdlab.schema import Field, Label, Schema, check_text, did_you_mean, json_type, located

# --- Strategies -----------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(bool)
labels = st.one_of(
    names,
    st.sampled_from(
        ["DELIVER", "DELIVER_WITH_WARNING", "deliver", " deliver", '"', "\\", "{}", "\n", "🦜", "猫", "true", "1"]
    ),
    st.booleans(),
    st.none(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Any schema: arbitrary names and labels, dependencies along a random order, so without cycles."""
    keys = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    order = draw(st.permutations(keys))
    fields = []
    for key in keys:
        allowed = st.just([True, False]) | st.lists(labels, min_size=1, max_size=5, unique_by=Field.json)
        earlier = order[: order.index(key)]
        depends_on = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        fields.append(Field(key, tuple(draw(allowed)), draw(texts), tuple(depends_on)))
    return Schema(tuple(fields))


def encoded(schema: Schema) -> list[tuple[str, str, list[str], tuple[str, ...]]]:
    """All a schema says, as text, so that ``True`` and ``1`` cannot pass for each other."""
    return [(f.name, f.description, [f.json(label) for label in f.labels], f.depends_on) for f in schema]


def enum_of(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"f": {"type": "enum", "choices": list(choices), **more}}


def properties(**nodes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": nodes}


def refusal(make: Any, *args: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        make(*args)
    return str(caught.value)


# --- Labels and fields ----------------------------------------------------------------------------------------------


def test_unusual_labels_are_ordinary() -> None:
    unusual = [
        "DELIVER",
        "DELIVER_WITH",
        "deliver",
        '"',
        "\\",
        "{",
        "}",
        "\n",
        "🦜",
        "猫",
        " x",
        "x",
        "<|im_end|>",
        " ",
    ]
    assert Schema.from_dict(enum_of(*unusual))["f"].labels == tuple(unusual)


def test_labels_are_told_apart_by_their_json_text() -> None:
    field = Schema.from_dict(enum_of(True, 1, 1.0, "1", "true", None, "null", 0, False))["f"]
    assert [field.json(label) for label in field.labels] == [
        "true", "1", "1.0", '"1"', '"true"', "null", '"null"', "0", "false",
    ]  # fmt: skip
    assert field.labels[0] is True
    assert field.labels[1] is not True


def test_equality_and_hash_follow_the_json_text() -> None:
    booleans, integers = Field("f", (True, False)), Field("f", (1, 0))
    assert booleans != integers
    assert hash(booleans) != hash(integers)
    assert Schema((booleans,)) != Schema((integers,))
    assert booleans == Field("f", (True, False))
    assert hash(booleans) == hash(Field("f", (True, False)))
    assert Field("f", ("a",)) != Field("f", ("a",), "described")


def test_kind_and_fixed() -> None:
    assert Field("f", (True, False)).kind == "boolean"
    for other in [(False, True), (1, 0), (True,), (True, False, None), ("true", "false")]:
        assert Field("f", other).kind == "enum"
    assert Field("f", ("only",)).fixed
    assert not Field("f", ("a", "b")).fixed


def test_lists_become_tuples() -> None:
    schema = Schema([Field("a", ["x"], depends_on=["b"]), Field("b", ["x"])])  # type: ignore[arg-type]
    assert schema["a"].labels == ("x",)
    assert schema["a"].depends_on == ("b",)
    assert isinstance(schema.fields, tuple)


@settings(deadline=None)
@given(labels)
def test_json_of_a_label_reads_back(label: Label) -> None:
    text = Field.json(label)
    assert json.loads(text) == label
    assert type(json.loads(text)) is type(label)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ([], ["no labels", "at least one"]),
        (["a", "b", "a"], ['"a" is listed twice', "remove one"]),
        ([True, False, True], ["true is listed twice"]),
        ([1.0, 1.0], ["1.0 is listed twice"]),
        (["a", ""], ["empty string", "NONE", "null"]),
        ([["a"]], ["['a'] is array", "a string, boolean, number or null"]),
        ([{"a": 1}], ["is object"]),
        ([b"a"], ["is bytes"]),
        ([Colour.RED], ["is Colour", "a string, boolean"]),
        ([float("nan")], ["nan", "as a string"]),
        ([float("-inf")], ["-inf", "as a string"]),
        ([10**5000], ["thousands of digits", "as a string"]),
        (["a\ud800"], ["surrogate", "index 1", "replace it"]),
    ],
)
def test_refused_labels(bad: list[Any], parts: list[str]) -> None:
    for message in (refusal(Field, "f", tuple(bad)), refusal(Schema.from_dict, enum_of(*bad))):
        assert "field 'f'" in message
        for part in parts:
            assert part in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("", ("a",)), ["empty name", "give it one"]),
        ((3, ("a",)), ["name is integer", "must be a string"]),
        (("\udfff", ("a",)), ["field's name", "surrogate"]),
        (("f", "abc"), ["field 'f'", "labels", "'abc'", "tuple or list"]),
        (("f", {"a", "b"}), ["field 'f'", "labels", "tuple or list"]),
        (("f", ("a",), None), ["field 'f'", "description is null", "must be a string"]),
        (("f", ("a",), "\ud800"), ["field 'f'", "description", "surrogate"]),
        (("f", ("a",), "", "g"), ["field 'f'", "depends_on", "'g'", "even for one"]),
        (("f", ("a",), "", (1,)), ["field 'f'", "depends_on is integer", "must be a string"]),
        (("f", ("a",), "", ("g", "g")), ["field 'f'", "'g' twice", "once"]),
        (("f", ("a",), "", ("f",)), ["field 'f'", "itself", "remove"]),
    ],
)
def test_refused_fields(arguments: tuple[Any, ...], parts: list[str]) -> None:
    message = refusal(Field, *arguments)
    for part in parts:
        assert part in message


# --- Schemas --------------------------------------------------------------------------------------------------------


def test_looking_inside() -> None:
    schema = Schema((Field("b", ("x",)), Field("a", ("y",))))
    assert schema.names == ("b", "a")
    assert len(schema) == 2
    assert [field.name for field in schema] == ["b", "a"]
    assert schema["a"].labels == ("y",)
    assert "a" in schema
    assert schema["a"] in schema
    assert "c" not in schema
    assert pickle.loads(pickle.dumps(schema)) == schema


def test_unknown_field_is_named_with_its_neighbour() -> None:
    message = refusal(Schema.from_dict({"risk": {"type": "boolean"}}).__getitem__, "rsk")
    assert "'rsk'" in message
    assert "did you mean 'risk'" in message


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ((), ["no fields", "add at least one"]),
        (("f",), ["'f'", "pcdlab.schema.Field"]),
        ("f", ["fields", "tuple or list"]),
        ((Field("f", ("a",)), Field("f", ("b",))), ["'f' appears twice", "rename"]),
        (
            (Field("risk", ("a",)), Field("f", ("a",), depends_on=("rsk",))),
            ["field 'f'", "'rsk'", "no field", "did you mean 'risk'", "remove it"],
        ),
    ],
)
def test_refused_schemas(fields: Any, parts: list[str]) -> None:
    message = refusal(Schema, fields)
    for part in parts:
        assert part in message


def test_a_cycle_is_spelled_out() -> None:
    def chain(**depends_on: list[str]) -> dict[str, Any]:
        return {name: {"type": "boolean", "depends_on": on} for name, on in depends_on.items()}

    assert "circle: a → b → a;" in refusal(Schema.from_dict, chain(a=["b"], b=["a"]))
    assert "circle: a → b → c → a;" in refusal(Schema.from_dict, chain(z=[], a=["z", "b"], b=["c"], c=["a"]))
    # x waits for the cycle but is not on it
    assert "circle: a → b → a;" in refusal(Schema.from_dict, chain(x=["a"], a=["b"], b=["a"]))


def test_a_long_chain_needs_no_deep_recursion() -> None:
    fields = [Field(f"f{i}", ("x",), depends_on=(f"f{i + 1}",) if i < 1500 else ()) for i in range(1501)]
    assert Schema(tuple(fields)).waves() == [[f"f{i}"] for i in range(1500, -1, -1)]


@settings(deadline=None)
@given(schemas())
def test_waves_match_their_definition(schema: Schema) -> None:
    def depth(name: str) -> int:
        return max((1 + depth(other) for other in schema[name].depends_on), default=0)

    expected = [[name for name in schema.names if depth(name) == d] for d in range(max(map(depth, schema.names)) + 1)]
    assert schema.waves() == expected


# --- Preset shape ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(schemas())
def test_preset_shape_round_trip(schema: Schema) -> None:
    through_json = json.loads(json.dumps(schema.to_dict()))
    again = Schema.from_dict(through_json)
    assert again == schema
    assert encoded(again) == encoded(schema)
    assert Schema.of(through_json) == schema


def test_preset_shape_in_full() -> None:
    schema = Schema.from_dict(
        {
            "b": {"type": "boolean", "description": "B?"},
            "e": {"type": "enum", "choices": ["x", None], "depends_on": ["b"]},
        }
    )
    assert schema["b"] == Field("b", (True, False), "B?")
    assert schema["e"] == Field("e", ("x", None), depends_on=("b",))


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("boolean", ["is string", "must be an object"]),
        ({}, ['"type" is missing', '"boolean"', '"choices"']),
        ({"choices": ["a"]}, ['"type" is missing', '"enum"']),
        ({"type": "string"}, ["unknown type 'string'", '"boolean"', '"choices"']),
        ({"type": ["boolean"]}, ["unknown type ['boolean']"]),
        ({"type": "enum"}, ['"choices"', "list"]),
        ({"type": "enum", "choices": "abc"}, ['"choices" is string', "array"]),
        ({"type": "enum", "choices": []}, ["no labels"]),
        ({"type": "boolean", "choices": [True]}, ['no "choices"', '"enum"']),
        ({"type": "enum", "values": ["a"]}, ["unknown key 'values'", '"choices"']),
        ({"type": "enum", "enum": ["a"]}, ["unknown key 'enum'", '"choices"']),
        ({"type": "enum", "choises": ["a"]}, ["unknown key 'choises'", "did you mean 'choices'"]),
        ({"type": "boolean", "description": 1}, ["description is integer", "string"]),
        ({"type": "boolean", "depends_on": "g"}, ['"depends_on" is string', "array, even for one"]),
        ({"type": "boolean", "depends_on": ["g"]}, ["'g'", "no field"]),
    ],
)
def test_refused_preset_shapes(spec: Any, parts: list[str]) -> None:
    message = refusal(Schema.from_dict, {"f": spec}, "a.json")
    assert message.startswith("a.json: field 'f'")
    for part in parts:
        assert part in message


def test_preset_shape_must_be_a_mapping() -> None:
    assert refusal(Schema.from_dict, ["f"], "a.json").startswith("a.json: is array; must be an object")
    assert "a.json: the schema has no fields" in refusal(Schema.from_dict, {}, "a.json")


# --- JSON Schema ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(schemas())
def test_json_schema_round_trip(schema: Schema) -> None:
    through_json = json.loads(json.dumps(schema.to_json_schema()))
    jsonschema.Draft202012Validator.check_schema(through_json)
    again = Schema.from_json_schema(through_json)
    assert again == schema
    assert encoded(again) == encoded(schema)
    assert Schema.of(through_json) == schema


@settings(deadline=None)
@given(schemas(), st.data())
def test_json_schema_allows_every_answer_and_no_other(schema: Schema, data: st.DataObject) -> None:
    validator = jsonschema.Draft202012Validator(schema.to_json_schema())
    answer = {field.name: data.draw(st.sampled_from(field.labels)) for field in schema}
    assert validator.is_valid(answer)
    name = data.draw(st.sampled_from(schema.names))
    assert not validator.is_valid({**answer, name: "no such label, too long for one"})
    assert not validator.is_valid({key: value for key, value in answer.items() if key != name})
    assert not validator.is_valid({**answer, "no such field, too long for one": True})


closed_nodes = st.recursive(
    st.one_of(
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"type": ["null", "boolean"]}]
        ),
        st.builds(lambda values: {"enum": values}, st.lists(labels, min_size=1, max_size=4, unique_by=Field.json)),
        st.builds(lambda value: {"const": value, "title": "a title"}, labels),
        st.sampled_from([{"$ref": "#/$defs/Risk"}, {"$ref": "#/$defs/a~1b%25"}, {"$ref": "#/$defs/Nested"}]),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"allOf": [part]}, inner),
    ),
    max_leaves=5,
)
DEFINITIONS = {
    "Risk": {"type": "string", "enum": ["LOW", "HIGH"], "description": "Overall risk"},
    "a/b%": {"const": "slash"},
    "Nested": {"anyOf": [{"$ref": "#/$defs/Risk"}, {"type": "null"}]},
}


@settings(deadline=None)
@given(closed_nodes, labels)
def test_closed_json_schemas_mean_what_a_validator_says(node: dict[str, Any], other: Label) -> None:
    root = {**properties(f=node), "$defs": DEFINITIONS}
    field = Schema.from_json_schema(root)["f"]
    validator = jsonschema.Draft202012Validator(root)
    assert all(validator.is_valid({"f": label}) for label in field.labels)
    # JSON Schema takes 1 and 1.0 for the same number, as Python does; True and 1 it does not
    known = any(isinstance(label, bool) == isinstance(other, bool) and label == other for label in field.labels)
    assert validator.is_valid({"f": other}) == known


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"type": "boolean"}, (True, False)),
        ({"type": ["boolean", "null"]}, (True, False, None)),
        ({"type": ["null", "boolean"]}, (None, True, False)),
        ({"type": "null"}, (None,)),
        ({"type": "string", "enum": ["a", "b"]}, ("a", "b")),
        ({"type": ["string", "null"], "enum": ["a", None]}, ("a", None)),
        ({"enum": [1, True, "a", None, 0.5]}, (1, True, "a", None, 0.5)),
        ({"type": "integer", "enum": [1, 2.0]}, (1, 2.0)),
        ({"type": "number", "enum": [1, 2.5]}, (1, 2.5)),
        ({"const": "a"}, ("a",)),
        ({"const": None}, (None,)),
        ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "description": "B"}]}, ("a", "b")),
        ({"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}, ("a", "b")),
        ({"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ("a", "b", "c")),
        ({"anyOf": [{"const": True}, {"const": 1}]}, (True, 1)),
        ({"anyOf": [{"$ref": "#/$defs/Risk"}, {"type": "null"}]}, ("LOW", "HIGH", None)),
        ({"allOf": [{"$ref": "#/$defs/Risk"}]}, ("LOW", "HIGH")),
        ({"$ref": "#/definitions/Old"}, ("old",)),
        ({"$ref": "#/$defs/a~1b%25"}, ("slash",)),
        (
            {"type": "boolean", "title": "T", "default": True, "examples": [True], "x-other": 1, "format": "f"},
            (True, False),
        ),
    ],
)
def test_closed_kinds(node: dict[str, Any], expected: tuple[Label, ...]) -> None:
    schema = Schema.from_json_schema(
        {**properties(f=node), "$defs": DEFINITIONS, "definitions": {"Old": {"const": "old"}}}
    )
    assert [Field.json(label) for label in schema["f"].labels] == [Field.json(label) for label in expected]


def test_description_is_the_propertys_own_else_the_definitions() -> None:
    nodes = {
        "own": {"$ref": "#/$defs/Risk", "description": "mine"},
        "referred": {"$ref": "#/$defs/Risk"},
        "wrapped": {"allOf": [{"$ref": "#/$defs/Risk"}]},
        "none": {"anyOf": [{"const": "a", "description": "of a label"}]},
    }
    schema = Schema.from_json_schema({**properties(**nodes), "$defs": DEFINITIONS})
    assert [field.description for field in schema] == ["mine", "Overall risk", "Overall risk", ""]


def test_top_level_may_be_a_reference() -> None:
    root = {"$ref": "#/$defs/Model", "$defs": {"Model": properties(f={"type": "boolean"})}}
    assert Schema.from_json_schema(root) == Schema.of(root) == Schema((Field("f", (True, False)),))


def test_x_depends_on() -> None:
    schema = Schema.from_json_schema(properties(a={"type": "boolean", "x-depends-on": ["b"]}, b={"type": "boolean"}))
    assert schema.waves() == [["b"], ["a"]]


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        ({"type": "string"}, ['open "string"', '"enum": ["LOW", "HIGH"]', '"const"', '"anyOf"']),
        ({"type": "string", "pattern": "a|b"}, ['open "string"', "list the allowed values"]),
        ({"type": "integer", "minimum": 1, "maximum": 3}, ['open "integer"', '"enum": [1, 2, 3]']),
        ({"type": "number"}, ['open "number"', "ranges"]),
        ({"type": "array", "items": {"enum": ["a"]}}, ['open "array"', "one boolean property for each item"]),
        ({"type": "object", "properties": {}}, ['open "object"', "top level"]),
        ({"type": ["string", "null"]}, ['open "string"']),
        ({"type": "bool"}, ["unknown type 'bool'", "did you mean 'boolean'"]),
        ({"type": 3}, ['"type" is 3', "name of a type"]),
        ({"type": ["boolean", 3]}, ['"type" is', "array of names"]),
        ({}, ["allows any value", '"enum"']),
        ({"description": "free"}, ["allows any value"]),
        (True, ["is boolean", "must be an object"]),
        ({"enum": "abc"}, ['"enum" is string', "array"]),
        ({"enum": []}, ["no labels"]),
        ({"enum": ["a", "a"]}, ['"a" is listed twice']),
        ({"enum": [["a"]]}, ["['a'] is array"]),
        ({"const": float("inf")}, ["inf", "as a string"]),
        ({"type": "string", "enum": ["a", None]}, ["None is listed", '"string" only', 'widen "type"']),
        ({"type": "boolean", "const": 1}, ["1 is listed", '"boolean" only']),
        ({"type": "integer", "const": 1.5}, ["1.5 is listed"]),
        ({"type": "number", "const": True}, ["True is listed"]),
        ({"enum": ["a"], "const": "a"}, ['combines "const", "enum"', "keep one"]),
        ({"anyOf": {"const": "a"}}, ['"anyOf" is object', "array"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, ['open "string"']),
        ({"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, ['"a" is listed twice']),
        ({"allOf": [{"const": "a"}, {"const": "a"}]}, ['"allOf"', 'write the resulting "enum"']),
        ({"enum": ["a", "bb"], "maxLength": 1}, ['"maxLength" is not supported', "values that remain"]),
        ({"type": "boolean", "not": {"const": True}}, ['"not" is not supported']),
        ({"type": "boolean", "nullable": True}, ['"nullable" is not supported', '{"type": "null"}']),
        ({"type": "boolean", "depends_on": ["g"]}, ['"depends_on" is not supported', '"x-depends-on"']),
        ({"type": "boolean", "x-depends-on": "g"}, ['"x-depends-on" is string', "array"]),
        ({"type": "boolean", "x-depends-on": ["g"]}, ["'g'", "no field"]),
        ({"type": "boolean", "description": None}, ["description is null", "string"]),
        ({"$ref": "other.json"}, ["'other.json'", "of the same schema"]),
        ({"$ref": 3}, ['"$ref" is 3']),
        ({"$ref": "#/$defs/Rsk"}, ["'#/$defs/Rsk'", "did you mean 'Risk'", "correct the reference"]),
        ({"$ref": "#/$defs/Risk/enum/0"}, ["'#/$defs/Risk/enum/0'", "not there"]),
        ({"$ref": "#/$defs/Risk/enum"}, ["is array", "must be an object"]),
        ({"$ref": "#/$defs/Loop"}, ["circle: #/$defs/Loop → #/$defs/Loop", "break it"]),
    ],
)
def test_refused_json_schemas(node: Any, parts: list[str]) -> None:
    root = {**properties(f=node), "$defs": {**DEFINITIONS, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}}
    message = refusal(Schema.from_json_schema, root, "a.json")
    assert message.startswith("a.json: ")
    assert "'f'" in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("root", "parts"),
    [
        ([], ["is array", '"properties"']),
        ({"type": "string"}, ["\"type\" is 'string'", '"properties"', "preset shape"]),
        ({"type": "object"}, ["no fields"]),
        ({"type": "object", "properties": []}, ['"properties" is array', "object"]),
        (
            {"type": "object", "properties": {}, "oneOf": []},
            ['"oneOf" is not supported at the top level', '"properties"'],
        ),
        ({"type": "object", "properties": {"": {"const": 1}}}, ["empty name"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, ["circle"]),
    ],
)
def test_refused_top_levels(root: Any, parts: list[str]) -> None:
    message = refusal(Schema.from_json_schema, root, "a.json")
    assert message.startswith("a.json: ")
    for part in parts:
        assert part in message


# --- Pydantic -------------------------------------------------------------------------------------------------------


class Risk(enum.Enum):
    """How bad it is."""

    LOW = "low"
    HIGH = "high"
    SEVERE = "high"  # an alias of HIGH, not a third member


class Level(enum.IntEnum):
    ONE = 1
    TWO = 2


class Email(pydantic.BaseModel):
    spam: bool
    urgent: bool | None = pydantic.Field(None, description="Is it?")
    action: Literal["KEEP", "DROP"] = pydantic.Field(alias="Action", json_schema_extra={"x-depends-on": ["spam"]})
    mixed: Literal[1, True, "one", None]
    only: Literal["x"]
    risk: Risk
    level: Level | None = pydantic.Field(Level.ONE, description="Of one or two")
    union: Literal["a", "b"] | Literal["b", "c"] | bool


def test_pydantic_model() -> None:
    schema = Schema.from_pydantic(Email)
    assert schema == Schema.of(Email) == Schema(
        (
            Field("spam", (True, False)),
            Field("urgent", (True, False, None), "Is it?"),
            Field("action", ("KEEP", "DROP"), depends_on=("spam",)),
            Field("mixed", (1, True, "one", None)),
            Field("only", ("x",)),
            Field("risk", ("low", "high"), "How bad it is."),
            Field("level", (1, 2, None), "Of one or two"),
            Field("union", ("a", "b", "c", True, False)),
        )
    )  # fmt: skip
    assert [type(label) for label in schema["mixed"].labels] == [int, bool, str, type(None)]


def test_refused_pydantic_models() -> None:
    class Open(pydantic.BaseModel):
        subject: str

    class Undescribed(pydantic.BaseModel):
        callback: Any = pydantic.Field()
        function: type[int]

    class Empty(pydantic.BaseModel):
        pass

    class Listed(pydantic.RootModel[list[bool]]):
        pass

    for model, parts in [
        (Open, ["model Open", "'subject'", 'open "string"', '"enum"']),
        (Undescribed, ["model Undescribed", "'callback'", "any value"]),
        (pydantic.create_model("Unwritable", call=(type(lambda: 0), ...), __config__={"arbitrary_types_allowed": True}),
         ["model Unwritable", "Pydantic cannot describe it", "bool, Literal and Enum"]),
        (Empty, ["model Empty", "no fields"]),
        (Listed, ["model Listed", "'array'"]),
        (int, ["int", "pydantic.BaseModel"]),
        ("Email", ["'Email'", "pydantic.BaseModel"]),
    ]:  # fmt: skip
        message = refusal(Schema.from_pydantic, model)
        for part in parts:
            assert part in message


# --- Any of these ---------------------------------------------------------------------------------------------------


def test_of_tells_the_shapes_apart() -> None:
    schema = Schema.from_dict({"f": {"type": "boolean"}})
    assert Schema.of(schema) is schema
    shapes: list[dict[str, Any]] = [
        {"f": {"type": "boolean"}},
        {"type": "object", "properties": {"f": {"type": "boolean"}}},
        {"properties": {"f": {"type": "boolean"}}},
        {"$defs": {"type": {"type": "boolean"}}, "properties": {"f": {"$ref": "#/$defs/type"}}},
    ]
    for same in shapes:
        assert Schema.of(same) == schema


def test_of_takes_json_schema_words_as_field_names() -> None:
    words = ["type", "properties", "$ref", "$defs", "definitions", "required", "enum"]
    expected = Schema(tuple(Field(word, (True, False)) for word in words))
    fields = {word: {"type": "boolean"} for word in words}
    assert Schema.of(fields) == expected
    assert Schema.of({"properties": fields}) == expected
    for word in words:
        assert Schema.of({word: {"type": "boolean"}}).names == (word,)
        assert Schema.of({"properties": {word: {"type": "boolean"}}}).names == (word,)


def test_of_refuses_the_rest() -> None:
    others: list[tuple[Any, str]] = [
        (["f"], "is array"),
        ("f", "is string"),
        (None, "is null"),
        (object(), "is object"),
    ]
    for other, seen in others:
        message = refusal(Schema.of, other, "here")
        assert message.startswith(f"here: {seen}")
        assert "JSON Schema" in message
    assert "pydantic.BaseModel" in refusal(Schema.of, object)
    assert "here: field 'f'" in refusal(Schema.of, {"f": {"type": "x"}}, "here")
    assert "here: property 'f'" in refusal(Schema.of, properties(f={"type": "string"}), "here")


# --- Helpers --------------------------------------------------------------------------------------------------------


def test_located_keeps_the_class_and_lets_other_errors_be() -> None:
    with pytest.raises(BackendError, match=r"^outer: inner: broken$"), located("outer"), located("inner"):
        raise BackendError("broken")
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"), located("outer"):
        raise ZeroDivisionError("division by zero")


def test_small_helpers() -> None:
    assert did_you_mean("rsk", ["risk"]) == " (did you mean 'risk'?)"
    assert did_you_mean(3, ["risk"]) == did_you_mean("unlike", ["risk"]) == ""
    assert json_type((1,)) == "tuple"
    with pytest.raises(PcdlabError, match="title is null"):
        check_text("title", None, PcdlabError)


def test_documented_examples_run() -> None:
    assert doctest.testmod(pcdlab.schema).failed == 0
