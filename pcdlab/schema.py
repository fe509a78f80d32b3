"""What is asked: closed fields, their labels, and which field waits for which.

Knows four ways to write a schema down (Python, a preset's ``schema`` mapping, JSON Schema, a Pydantic model) and
checks every one at the door. Refuses to know files, tokens, prompts and models.

A field is *closed*: its labels are a finite list of JSON scalars. Labels are told apart by their JSON text, the text a
model would write, so ``true``, ``1``, ``1.0`` and ``"1"`` are four different labels.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pcdlab.errors import PcdlabError, SchemaError

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["Field", "Label", "Schema", "check_text", "did_you_mean", "json_type", "located"]

Label = str | bool | int | float | None
"""One allowed value of a field: a JSON scalar. Booleans are real booleans."""


# --- Fields and schemas ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One question with a closed list of answers.

    Two fields are equal when name, description, dependencies, listing and the JSON text of their labels are equal; Python's own
    ``True == 1`` does not make ``[true, false]`` the same question as ``[1, 0]``.

    Parameters
    ----------
    name : str
        The key in the JSON object. Any text but the empty one.
    labels : sequence of str, bool, int, float or None
        The allowed values, at least one, no two with the same JSON text, none the empty string. Kept as a tuple.
    description : str, default ""
        What the field means, for the model to read.
    depends_on : sequence of str, default ()
        Names of the fields to be decided before this one. Kept as a tuple.
    listed : bool, default True
        Whether the prompt's catalogue names the labels. A long list costs tokens in every prompt; unlisted labels are
        scored all the same, but the model does not get to read them.

    Raises
    ------
    SchemaError
        If a parameter is outside its domain. That the dependencies exist is checked by `Schema`.

    Examples
    --------
    >>> risk = Field("risk", ("LOW", "HIGH"), "Risk to the recipient")
    >>> risk.kind, risk.fixed
    ('enum', False)
    >>> Field("urgent", (True, False)).kind
    'boolean'
    """

    name: str
    labels: tuple[Label, ...] = field(compare=False)  # compared, and hashed, through _encoded
    description: str = ""
    depends_on: tuple[str, ...] = ()
    listed: bool = True
    _encoded: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        check_text("a field's name", self.name)
        if not self.name:
            raise SchemaError("a field has an empty name; give it one")
        with located(f"field {self.name!r}"):
            check_text("the description", self.description)
            labels = _as_tuple("the labels", self.labels)
            depends_on = _as_tuple("depends_on", self.depends_on)
            encoded = _encode_labels(labels)
            for name in depends_on:
                check_text("a name in depends_on", name)
            if repeated := _first_repeated(depends_on):
                raise SchemaError(f"depends_on names {repeated!r} twice; name it once")
            if self.name in depends_on:
                raise SchemaError("depends_on names the field itself; remove that name")
            if not isinstance(self.listed, bool):
                raise SchemaError(f"listed is {json_type(self.listed)}; write true or false")
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "depends_on", depends_on)
        object.__setattr__(self, "_encoded", encoded)

    @property
    def kind(self) -> str:
        """``"boolean"`` if the labels are exactly ``(True, False)``, in this order, else ``"enum"``."""
        return "boolean" if self._encoded == ("true", "false") else "enum"

    @property
    def fixed(self) -> bool:
        """Whether there is one label only, and so nothing to decide."""
        return len(self.labels) == 1

    @staticmethod
    def json(label: Label) -> str:
        """Write a label as JSON text, non-ASCII characters as they are.

        Parameters
        ----------
        label : str, bool, int, float or None
            The label.

        Returns
        -------
        str
            What a model writes to give this answer.

        Examples
        --------
        >>> Field.json("café"), Field.json(True), Field.json(None)
        ('"café"', 'true', 'null')
        """
        return json.dumps(label, ensure_ascii=False)


@dataclass(frozen=True)
class Schema:
    """Fields in the order they appear in the JSON object.

    Iterating gives the fields, ``schema["name"]`` one of them, ``in`` takes a name or a field, `len` counts fields.

    Parameters
    ----------
    fields : sequence of Field
        At least one, no two with the same name, dependencies among them and without a cycle. Kept as a tuple.

    Raises
    ------
    SchemaError
        If the fields do not form a schema.

    Examples
    --------
    >>> schema = Schema((Field("spam", (True, False)), Field("action", ("KEEP", "DROP"), depends_on=("spam",))))
    >>> schema.names
    ('spam', 'action')
    >>> schema.waves()
    [['spam'], ['action']]
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        fields = _as_tuple("the fields", self.fields)
        if not fields:
            raise SchemaError("the schema has no fields; add at least one")
        for item in fields:
            if not isinstance(item, Field):
                raise SchemaError(f"fields holds {item!r}; every item must be a pcdlab.schema.Field")
        object.__setattr__(self, "fields", fields)
        if repeated := _first_repeated(self.names):
            raise SchemaError(f"field {repeated!r} appears twice; rename or remove one")
        for item in fields:
            for name in item.depends_on:
                if name not in self._by_name:
                    raise SchemaError(
                        f"field {item.name!r}: depends_on names {name!r}, which is no field of this schema"
                        f"{did_you_mean(name, self.names)}; name one of its fields or remove it"
                    )
        self.waves()  # raises on a cycle

    # Ways in

    @classmethod
    def of(cls, obj: Schema | Mapping[str, Any] | type[BaseModel], source: str = "schema") -> Schema:
        """Make a schema of whatever describes one.

        Parameters
        ----------
        obj : Schema, mapping or Pydantic model class
            A schema (returned as it is), a preset's ``schema`` mapping, a JSON Schema or a model class. In a preset
            mapping every value is a field's mapping; a JSON Schema has ``"type": "object"``, a ``"$ref"``, or
            ``"properties"``/``"$defs"`` that are not themselves fields with a ``"type"``.
        source : str, default "schema"
            What error messages call `obj`.

        Returns
        -------
        Schema

        Raises
        ------
        SchemaError
            If `obj` is something else, or does not describe a schema.

        Examples
        --------
        >>> a = Schema.of({"spam": {"type": "boolean"}})
        >>> b = Schema.of({"type": "object", "properties": {"spam": {"type": "boolean"}}})
        >>> a == b
        True
        """
        if isinstance(obj, Schema):
            return obj
        if isinstance(obj, type):
            return cls.from_pydantic(obj)
        if isinstance(obj, Mapping):
            return cls.from_json_schema(obj, source) if _looks_like_json_schema(obj) else cls.from_dict(obj, source)
        raise SchemaError(
            f"{source}: is {json_type(obj)}; give a Schema, a mapping of fields, a JSON Schema or a Pydantic class"
        )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], source: str = "schema") -> Schema:
        """Read the ``schema`` mapping of a preset.

        Parameters
        ----------
        d : mapping
            ``{name: {"type": "boolean" or "enum", "description": "…", "choices": […], "depends_on": […],
            "listed": true}, …}``. ``choices`` belongs to enums alone, where it is required; the other keys but ``type`` are
            optional.
        source : str, default "schema"
            What error messages call `d`.

        Returns
        -------
        Schema

        Raises
        ------
        SchemaError
            If `d` has another shape.

        Examples
        --------
        >>> Schema.from_dict({"risk": {"type": "enum", "choices": ["LOW", "HIGH"]}})["risk"].labels
        ('LOW', 'HIGH')
        """
        with located(source):
            if not isinstance(d, Mapping):
                raise SchemaError(f'is {json_type(d)}; must be an object {{name: {{"type": …}}}}')
            return cls(tuple(_field_from_dict(name, spec) for name, spec in d.items()))

    @classmethod
    def from_json_schema(cls, d: Mapping[str, Any], source: str = "JSON Schema") -> Schema:
        """Read a JSON Schema whose top level is an object of closed properties.

        Closed are: ``"type": "boolean"``, ``"null"`` or both; ``enum`` and ``const`` of scalars; ``anyOf`` or ``oneOf``
        of closed schemas; an ``allOf`` of one; a ``$ref`` into ``#/$defs`` or ``#/definitions``. A property's
        ``description`` (else the one of the definition it refers to) becomes the field's, its ``"x-depends-on"``
        (names of properties) the dependencies, ``"x-listed": false`` keeps its labels out of the catalogue. Every field
        gets an answer, so ``required``, ``default``, titles and other annotations change nothing and are passed over; a
        keyword that would change which values are allowed is refused, never ignored.

        Parameters
        ----------
        d : mapping
            The JSON Schema (draft 2020-12 or an earlier one).
        source : str, default "JSON Schema"
            What error messages call `d`.

        Returns
        -------
        Schema

        Raises
        ------
        SchemaError
            If a property is open (a free string, a number, an object, …) or `d` has another shape.

        References
        ----------
        JSON Schema draft 2020-12, https://json-schema.org/draft/2020-12

        Examples
        --------
        >>> schema = Schema.from_json_schema({
        ...     "type": "object",
        ...     "properties": {
        ...         "urgent": {"type": ["boolean", "null"]},
        ...         "risk": {"$ref": "#/$defs/Risk", "x-depends-on": ["urgent"]},
        ...     },
        ...     "$defs": {"Risk": {"description": "Overall risk", "type": "string", "enum": ["LOW", "HIGH"]}},
        ... })
        >>> schema["urgent"].labels
        (True, False, None)
        >>> schema["risk"].description, schema["risk"].depends_on
        ('Overall risk', ('urgent',))
        """
        with located(source):
            return cls(tuple(_fields_from_json_schema(d)))

    @classmethod
    def from_pydantic(cls, model: type[BaseModel]) -> Schema:
        """Read a Pydantic 2 model through its own JSON Schema.

        Fields may be `bool`, `typing.Literal`, an `enum.Enum` (its members' values are the labels), or an optional or
        a union of those. Fields go by their Python names, not their aliases. Dependencies are written
        ``Field(json_schema_extra={"x-depends-on": ["name"]})``.

        Parameters
        ----------
        model : type
            A subclass of `pydantic.BaseModel`.

        Returns
        -------
        Schema

        Raises
        ------
        SchemaError
            If `model` is no such class or has an open field.

        Examples
        --------
        >>> from typing import Literal
        >>> from pydantic import create_model
        >>> Email = create_model("Email", spam=(bool, ...), action=(Literal["KEEP", "DROP"] | None, None))
        >>> [field.labels for field in Schema.from_pydantic(Email)]
        [(True, False), ('KEEP', 'DROP', None)]
        """
        import pydantic  # slow to import, and needed here alone
        from pydantic.errors import PydanticUserError

        if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
            raise SchemaError(f"model is {model!r}; give a class that derives from pydantic.BaseModel (Pydantic 2)")
        source = f"model {model.__name__}"
        try:
            described = model.model_json_schema(by_alias=False)
        except PydanticUserError as error:
            raise SchemaError(
                f"{source}: Pydantic cannot describe it ({error.message}); use bool, Literal and Enum fields only, "
                "all defined before the model"
            ) from error
        for definition in described.get("$defs", {}).values():
            if "enum" in definition:  # Pydantic lists an Enum's aliases as members of their own
                definition["enum"] = _unique(definition["enum"])
        return cls.from_json_schema(described, source)

    # Ways out

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Write the schema as a preset's ``schema`` mapping.

        Returns
        -------
        dict
            JSON-ready; `from_dict` gives an equal schema back.

        Examples
        --------
        >>> Schema((Field("spam", (True, False), "Unwanted?"),)).to_dict()
        {'spam': {'type': 'boolean', 'description': 'Unwanted?'}}
        """
        return {item.name: _field_to_dict(item) for item in self.fields}

    def to_json_schema(self) -> dict[str, Any]:
        """Write the schema as JSON Schema: every property required, no others allowed.

        Returns
        -------
        dict
            JSON-ready, draft 2020-12; `from_json_schema` gives an equal schema back.

        Examples
        --------
        >>> Schema((Field("risk", ("LOW", "HIGH")),)).to_json_schema()["properties"]
        {'risk': {'type': 'string', 'enum': ['LOW', 'HIGH']}}
        """
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {item.name: _field_to_json_schema(item) for item in self.fields},
            "required": list(self.names),
            "additionalProperties": False,
        }

    # Looking inside

    @property
    def names(self) -> tuple[str, ...]:
        """The fields' names, in schema order."""
        return tuple(item.name for item in self.fields)

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {item.name: item for item in self.fields}

    def __getitem__(self, name: str) -> Field:
        try:
            return self._by_name[name]
        except KeyError:
            hint = did_you_mean(name, self.names)
            raise SchemaError(f"the schema has no field {name!r}{hint}; its fields are {_listed(self.names)}") from None

    def __contains__(self, item: object) -> bool:
        return item in self.names or item in self.fields

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def waves(self) -> list[list[str]]:
        """Group the fields so that each comes after everything it depends on, as early as it can.

        Returns
        -------
        list of list of str
            Names in schema order within a wave. Wave 0 holds the fields without dependencies; every other field is one
            wave after the latest of its dependencies.

        Examples
        --------
        >>> a, b, c = Field("a", ("x",), depends_on=("c",)), Field("b", ("x",)), Field("c", ("x",))
        >>> Schema((a, b, c)).waves()
        [['b', 'c'], ['a']]
        """
        waves: list[list[str]] = []
        placed: set[str] = set()
        while len(placed) < len(self.fields):
            wave = [f.name for f in self.fields if f.name not in placed and placed.issuperset(f.depends_on)]
            if not wave:
                cycle = " → ".join(self._cycle(placed))
                raise SchemaError(f"depends_on goes in a circle: {cycle}; remove one of these dependencies")
            waves.append(wave)
            placed.update(wave)
        return waves

    def _cycle(self, placed: set[str]) -> list[str]:
        """Follow unplaced dependencies from the first unplaced field until one comes round again."""
        path = [next(name for name in self.names if name not in placed)]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in self[path[-1]].depends_on if name not in placed))
        return path[path.index(path[-1]) :]


# --- Preset shape ---------------------------------------------------------------------------------------------------

_KEYS = ("type", "description", "choices", "depends_on", "listed")


def _field_from_dict(name: str, spec: Any) -> Field:
    with located(f"field {name!r}"):
        if not isinstance(spec, Mapping):
            raise SchemaError(f'is {json_type(spec)}; must be an object with "type": "boolean" or "enum"')
        for key in spec:
            if key not in _KEYS:
                raise SchemaError(f"unknown key {key!r}{did_you_mean(key, _KEYS)}; a field has {_listed(_KEYS)}")
        if "type" not in spec:
            raise SchemaError('"type" is missing; write "type": "boolean", or "type": "enum" with "choices"')
        kind = spec["type"]
        if kind not in ("boolean", "enum"):
            raise SchemaError(f'unknown type {kind!r}; write "boolean", or "enum" with "choices"')
        if kind == "boolean" and "choices" in spec:
            raise SchemaError('a boolean has no "choices"; remove them, or write "type": "enum"')
        if kind == "enum" and "choices" not in spec:
            raise SchemaError('an enum needs "choices"; list its allowed values')
        labels = (True, False) if kind == "boolean" else _json_array('"choices"', spec["choices"])
        depends_on = _json_array('"depends_on"', spec.get("depends_on", []))
    return Field(name, tuple(labels), spec.get("description", ""), tuple(depends_on), spec.get("listed", True))


def _field_to_dict(item: Field) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": item.kind}
    if item.description:
        spec["description"] = item.description
    if item.kind == "enum":
        spec["choices"] = list(item.labels)
    if item.depends_on:
        spec["depends_on"] = list(item.depends_on)
    if not item.listed:
        spec["listed"] = False
    return spec


# --- JSON Schema ----------------------------------------------------------------------------------------------------

# The keywords that say which values are allowed; a node may have one of them, with or without "type".
_VALUE_KEYWORDS = ("const", "enum", "anyOf", "oneOf", "allOf", "$ref")

# Keywords that would narrow or widen a closed list further. "nullable" is OpenAPI's, "depends_on" the preset's word.
_NARROWING_KEYWORDS = {
    "not", "if", "then", "else", "nullable", "depends_on", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip

# The same for the object at the top level, where a schema is a plain list of properties.
_TOP_KEYWORDS = {
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "nullable", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "depends_on", "x-depends-on",
}  # fmt: skip

_CLOSED = '"boolean", "null", "enum", "const", "anyOf"/"oneOf" of these, "$ref" to one'

_HOW_TO_CLOSE = {
    "string": 'list the allowed values, e.g. "enum": ["LOW", "HIGH"]',
    "integer": 'list the allowed values, e.g. "enum": [1, 2, 3]',
    "number": 'list the allowed values or ranges of them, e.g. "enum": ["under 10", "10 to 100", "over 100"]',
    "array": "make it one boolean property for each item it may hold",
    "object": "lift its properties to the top level",
}


def _looks_like_json_schema(d: Mapping[str, Any]) -> bool:
    # In preset shape each value is a field: a mapping whose "type" is a string. A JSON Schema's "properties" maps names
    # to schemas, so even a property called "type" has no string there.
    if isinstance(d.get("type"), str) or isinstance(d.get("$ref"), str):
        return True
    blocks = (d.get(key) for key in ("properties", "$defs", "definitions"))
    return any(isinstance(block, Mapping) and not isinstance(block.get("type"), str) for block in blocks)


def _fields_from_json_schema(root: Any) -> Iterator[Field]:
    if not isinstance(root, Mapping):
        raise SchemaError(f'is {json_type(root)}; must be an object with "type": "object" and "properties"')
    top = root
    trail: tuple[str, ...] = ()
    while "$ref" in top:
        trail, target = _follow(top, root, trail)
        top = {**target, **{key: value for key, value in top.items() if key != "$ref"}}
    if top.get("type", "object") != "object":
        raise SchemaError(
            f'"type" is {top["type"]!r}; the top level must be "object" with the fields in "properties" '
            '(or, in preset shape, a mapping {name: {"type": …}})'
        )
    if refused := sorted(_TOP_KEYWORDS.intersection(top)):
        raise SchemaError(f'keyword "{refused[0]}" is not supported at the top level; list the fields in "properties"')
    properties = top.get("properties", {})
    if not isinstance(properties, Mapping):
        raise SchemaError(f'"properties" is {json_type(properties)}; must be an object {{name: schema}}')
    for name, node in properties.items():
        with located(f"property {name!r}"):
            labels = _closed_values(node, root, ())
            depends_on = _json_array('"x-depends-on"', node.get("x-depends-on", []))
            description = _description(node, root)
        yield Field(name, tuple(labels), description, tuple(depends_on), node.get("x-listed", True))


def _closed_values(node: Any, root: Mapping[str, Any], trail: tuple[str, ...]) -> list[Any]:
    """List the values a schema node allows, in its order; `trail` holds the references followed so far."""
    if not isinstance(node, Mapping):
        raise SchemaError(f"is {json_type(node)}; must be an object of a closed kind: {_CLOSED}")
    keywords = [key for key in _VALUE_KEYWORDS if key in node]
    if len(keywords) > 1:
        raise SchemaError(f"combines {_listed(keywords)}; keep one of them")
    types = _types(node)
    match keywords:
        case []:
            values = _values_of_types(types)
        case ["const"]:
            values = [node["const"]]
        case ["enum"]:
            values = _json_array('"enum"', node["enum"])
        case ["$ref"]:
            followed, target = _follow(node, root, trail)
            values = _closed_values(target, root, followed)
        case [keyword]:
            parts = _json_array(f'"{keyword}"', node[keyword])
            if keyword == "allOf" and len(parts) != 1:
                raise SchemaError('an "allOf" of several schemas is not supported; write the resulting "enum"')
            values = [value for part in parts for value in _closed_values(part, root, trail)]
            if keyword == "anyOf":  # branches may overlap; in a oneOf that would allow neither, and Field objects
                values = _unique(values)
    for value in values:
        if types and not _has_type(value, types):
            raise SchemaError(
                f'{value!r} is listed, but "type" allows {_listed(types)} only; remove the value or widen "type"'
            )
    if narrowing := sorted(_NARROWING_KEYWORDS.intersection(node)):
        hint = {
            "nullable": 'write "anyOf": [{…}, {"type": "null"}], or list null in "enum"',
            "depends_on": 'write "x-depends-on"',
        }.get(narrowing[0], "leave it out and list exactly the values that remain")
        raise SchemaError(f'keyword "{narrowing[0]}" is not supported; {hint}')
    return values


def _types(node: Mapping[str, Any]) -> tuple[str, ...]:
    types = node.get("type", ())
    if isinstance(types, str):
        return (types,)
    if not isinstance(types, Sequence) or not all(isinstance(name, str) for name in types):
        raise SchemaError(f'"type" is {types!r}; must be the name of a type or an array of names')
    return tuple(types)


def _values_of_types(types: tuple[str, ...]) -> list[Any]:
    if not types:
        raise SchemaError(f"allows any value; closed kinds are {_CLOSED}")
    values: list[Any] = []
    for name in types:
        if name == "boolean":
            values += [True, False]
        elif name == "null":
            values += [None]
        elif name in _HOW_TO_CLOSE:
            raise SchemaError(f'an open "{name}" has no list of labels; {_HOW_TO_CLOSE[name]} (closed: {_CLOSED})')
        else:
            known = ("boolean", "null", *_HOW_TO_CLOSE)
            raise SchemaError(f"unknown type {name!r}{did_you_mean(name, known)}; closed kinds are {_CLOSED}")
    return values


def _has_type(value: Any, types: tuple[str, ...]) -> bool:
    name = json_type(value)
    if name == "integer" or (name == "number" and value.is_integer()):
        return "integer" in types or "number" in types
    return name in types


def _follow(
    node: Mapping[str, Any], root: Mapping[str, Any], trail: tuple[str, ...]
) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Give the trail with this node's ``$ref`` added, and the definition it points at."""
    ref = node["$ref"]
    if not isinstance(ref, str) or not ref.startswith(("#/$defs/", "#/definitions/")):
        raise SchemaError(f'"$ref" is {ref!r}; only "#/$defs/…" and "#/definitions/…" of the same schema are followed')
    if ref in trail:
        raise SchemaError(f'"$ref" goes in a circle: {" → ".join((*trail, ref))}; break it')
    target: Any = root
    for part in ref[2:].split("/"):  # a JSON pointer (RFC 6901) in a URI fragment
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            hint = did_you_mean(key, target) if isinstance(target, Mapping) else ""
            raise SchemaError(f'"$ref" points at {ref!r}, which is not there{hint}; add it or correct the reference')
        target = target[key]
    if not isinstance(target, Mapping):
        raise SchemaError(f'"$ref" points at {ref!r}, which is {json_type(target)}; must be an object')
    return (*trail, ref), target


def _description(node: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    # The values were read first, so references are sound and an allOf has one part.
    while "description" not in node and ("$ref" in node or "allOf" in node):
        node = _follow(node, root, ())[1] if "$ref" in node else node["allOf"][0]
    return node.get("description", "")


def _field_to_json_schema(item: Field) -> dict[str, Any]:
    node: dict[str, Any] = {}
    if item.description:
        node["description"] = item.description
    if item.kind == "boolean":
        node["type"] = "boolean"
    else:
        if all(isinstance(label, str) for label in item.labels):
            node["type"] = "string"
        node["enum"] = list(item.labels)
    if item.depends_on:
        node["x-depends-on"] = list(item.depends_on)
    if not item.listed:
        node["x-listed"] = False
    return node


# --- Checks and messages --------------------------------------------------------------------------------------------


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put a place in front of every pcdlab error raised inside, keeping its class.

    Parameters
    ----------
    where : str
        The file, field or key the code inside works on.

    Examples
    --------
    >>> with located("a.json"):
    ...     Schema(())
    Traceback (most recent call last):
    pcdlab.errors.SchemaError: a.json: the schema has no fields; add at least one
    """
    try:
        yield
    except PcdlabError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Name the known word nearest to a mistyped one, for an error message.

    Parameters
    ----------
    word : object
        What was written. Anything but a string has no near match.
    known : iterable of str
        What could have been meant.

    Returns
    -------
    str
        ``" (did you mean '…'?)"``, or ``""`` if nothing is near.

    Examples
    --------
    >>> did_you_mean("choises", ["type", "choices"])
    " (did you mean 'choices'?)"
    >>> did_you_mean("values", ["type", "choices"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""


def json_type(value: object) -> str:
    """Name a value's type as JSON calls it, or as Python does where JSON has no such value.

    Parameters
    ----------
    value : object
        Any value.

    Returns
    -------
    str

    Examples
    --------
    >>> [json_type(value) for value in (True, 1, 0.5, "a", None, [], {}, b"")]
    ['boolean', 'integer', 'number', 'string', 'null', 'array', 'object', 'bytes']
    """
    if isinstance(value, Mapping):
        return "object"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return names.get(type(value), type(value).__name__)


def check_text(what: str, text: object, error: type[PcdlabError] = SchemaError) -> None:
    """Refuse what is no string, or a string that no UTF-8 file or prompt can carry.

    Parameters
    ----------
    what : str
        What error messages call the text.
    text : object
        The value to check.
    error : type, default SchemaError
        The class of the error.

    Raises
    ------
    PcdlabError
        Of class `error`, if `text` is not a string or holds half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise error(f"{what} is {json_type(text)}; must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as reason:
        raise error(
            f"{what} has half of a surrogate pair, {text[reason.start]!r}, at index {reason.start}, which UTF-8 cannot "
            "carry; replace it"
        ) from None


def _encode_labels(labels: tuple[Any, ...]) -> tuple[str, ...]:
    if not labels:
        raise SchemaError("has no labels; list at least one allowed value")
    encoded = []
    for label in labels:
        if type(label) not in (str, bool, int, float, type(None)):
            raise SchemaError(f"label {label!r} is {json_type(label)}; a label is a string, boolean, number or null")
        if label == "":
            raise SchemaError('a label is the empty string; name the absence, e.g. "NONE", or use null')
        if isinstance(label, str):
            check_text(f"label {label!r}", label)
        try:
            encoded.append(json.dumps(label, ensure_ascii=False, allow_nan=False))
        except ValueError:  # NaN, infinity, or more decimal digits than Python writes
            number = repr(label) if isinstance(label, float) else "an integer of thousands of digits"
            raise SchemaError(f"a label is {number}, which JSON cannot carry; write it as a string") from None
    if repeated := _first_repeated(encoded):
        raise SchemaError(f"label {repeated} is listed twice; remove one")
    return tuple(encoded)


def _as_tuple(what: str, items: Any) -> tuple[Any, ...]:
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise SchemaError(f"{what}: found {items!r}; give a tuple or list, even for one")
    return tuple(items)


def _json_array(what: str, items: Any) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise SchemaError(f"{what} is {json_type(items)}; must be an array, even for one")
    return list(items)


def _first_repeated(items: Iterable[str]) -> str | None:
    return next((item for item, count in Counter(items).items() if count > 1), None)


def _unique(values: Iterable[Any]) -> list[Any]:
    """Drop repeats, keeping the first; by type and text, since ``True == 1`` in Python and not in JSON."""
    first: dict[tuple[type, str], Any] = {}
    for value in values:
        first.setdefault((type(value), repr(value)), value)
    return list(first.values())


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)
