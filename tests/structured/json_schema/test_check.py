"""Refusals before any compilation, and resolution of references."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rootlace.runtime.structured.json_schema.load import NEWEST, CheckedSchema
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.source import parsed_schema
from rootlace.wire.errors import InvalidConstraint
from tests.structured.json_schema.test_regular import compact, matches


@pytest.mark.parametrize(
    ("schema", "start"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type: 'strin'"),
        ({"items": {"minLength": -1}}, "#/items/minLength: -1"),
        ({"properties": {"a/b": 3}}, "#/properties/a~1b: 3"),
        ({"anyOf": []}, "#/anyOf: "),
        ({"required": "a"}, "#/required: 'a'"),
        ({"required": ["a", "a"]}, "#/required: "),
        ({"enum": 3}, "#/enum: 3"),
        ({"not": [1]}, "#/not: "),
        ({"pattern": 3}, "#/pattern: 3"),
        ({"multipleOf": 0}, "#/multipleOf: 0"),
        ({"items": {"$ref": "#/$defs/none"}}, "#/items/$ref: nothing is known of '#/$defs/none'"),
        ({"$ref": "http://example.org/x"}, "#/$ref: nothing is known of 'http://example.org/x'"),
        ({"$ref": "#/title", "title": "t"}, "#/$ref: '#/title' leads to something that is no"),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}},
                "properties": {"x": {"$ref": "#/$defs/a"}},
            },
            "#/$defs/a: the schema refers to itself",
        ),
        ({"type": "strin"}, "#/type: 'strin' is not one of ['array', 'boolean', "),
        ({"type": ["string", "x"]}, "#/type/1: 'x' is not one of ['array', 'boolean', "),
        ({"type": ["any", "strin"]}, "#/type/0: 'strin' is not one of ['array', 'boolean', "),
        ({"items": {"maximum": 10**400}}, "#/items/maximum: a number beyond the range of floats"),
        ({"patternProperties": {"(a)\\1": True}}, "#/patternProperties: '(a)\\\\1': "),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#/$schema: "),
    ],
    ids=str,
)
def test_malformed_schemas_are_refused_with_the_place(schema: Any, start: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        PreparedSchema(schema)
    assert str(caught.value).startswith(f"json_schema: {start}")


DRAFT4 = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"$schema": DRAFT4, "minimum": 1, "exclusiveMinimum": True}, ""),
        ({"$schema": DRAFT4, "minimum": 1, "exclusiveMinimum": 1}, "#/items/exclusiveMinimum: "),
        ({"minimum": 1, "exclusiveMinimum": True}, ""),
        (
            {"$schema": NEWEST.validator.META_SCHEMA["$schema"], "exclusiveMinimum": True},
            "#/items/exclusiveMinimum: ",
        ),
        ({"$schema": DRAFT4, "items": {"$schema": DRAFT4, "type": "x"}}, "#/items/items/type: "),
    ],
    ids=str,
)
def test_a_part_of_another_draft_is_well_formed_in_that_one(schema: Any, wrong: str) -> None:
    if not wrong:
        CheckedSchema({"items": schema}, {})
        return
    with pytest.raises(InvalidConstraint, match=wrong):
        CheckedSchema({"items": schema}, {})


@pytest.mark.parametrize("draft", [4, 6, 7])
@pytest.mark.parametrize(
    "wrong",
    [{"uniqueItems": "yes"}, {"allOf": {"type": "null"}}, {"required": "ab"}, {"maximum": "5"}],
    ids=str,
)
def test_what_is_referred_to_is_checked_wherever_it_stands(draft: int, wrong: Any) -> None:
    """Metaschemas of old drafts know no `$defs`."""
    schema = {
        "$schema": f"http://json-schema.org/draft-0{draft}/schema#",
        "properties": {"q": {"$ref": "#/$defs/a"}},
        "$defs": {"a": wrong},
    }
    with pytest.raises(InvalidConstraint, match=f"json_schema: #/\\$defs/a/{next(iter(wrong))}"):
        CheckedSchema(schema, {})


def test_an_error_beside_a_part_of_another_draft_is_told() -> None:
    other = {"$schema": DRAFT4, "minimum": 1, "exclusiveMinimum": True}
    items = {"minLength": -1, "properties": {"a": other}}
    with pytest.raises(InvalidConstraint, match="#/items/minLength: -1"):
        CheckedSchema({"$schema": "http://json-schema.org/draft-07/schema#", "items": items}, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"\ud800": {}}, "title": "\udfff"},
        {"examples": "no list", "default": {"type": 3}},
        {"description": {"ge": 1}, "title": 3, "deprecated": "no", "type": "integer"},
        {"$schema": DRAFT4, "enum": ["a", "a"]},
        {"$schema": DRAFT4, "properties": {"a": True}},
    ],
    ids=ascii,
)
def test_what_constrains_nothing_is_no_mistake(schema: Any) -> None:
    CheckedSchema(schema, {})


@pytest.mark.parametrize("separator", ["\0", "!", "/", "~2"])
def test_keys_of_users_are_not_taken_for_schemas_of_ours(separator: str) -> None:
    """Which a mask is made of, and which stand below the user's."""
    key = f"a{separator}there"
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, key: {"const": 2}},
        "additionalProperties": False,
        "dependentSchemas": {"a": {"properties": {"a": {"const": 1}}}, key: False},
    }
    for value in ({"a": 1}, {}, {"a": 1, key: 2}, {key: 2}):
        valid = Draft202012Validator(schema).is_valid(value)
        assert matches(schema, compact(value)) == valid == (key not in value)


def test_a_refused_keyword_is_named_where_it_stands() -> None:
    prepared = PreparedSchema({"properties": {"x\0y": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(InvalidConstraint) as caught:
        prepared.refuse_residuals("here")
    assert "#/properties/x~2y/uniqueItems: no mask can hold 'uniqueItems' here" in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "unused"),
    [
        ("draft-07/schema#", {"prefixItems": [{"$ref": "#/nowhere"}]}),
        ("draft-04/schema#", {"if": {"$ref": "#"}}),
        ("draft-04/schema#", {"then": {"$ref": "#/nowhere"}}),
        ("draft-04/schema#", {"propertyNames": {"patternProperties": {"(": {}}}}),
    ],
)
def test_what_a_draft_does_not_know_is_not_looked_into(draft: str, unused: Any) -> None:
    schema = {"$schema": f"http://json-schema.org/{draft}", "type": "null", **unused}
    assert PreparedSchema(schema).regex("compact")


def test_what_is_not_json_is_refused() -> None:
    for source in ("{", "3", '"a"', '{"a": NaN}', ""):
        with pytest.raises(InvalidConstraint, match="json_schema"):
            parsed_schema(source)


@pytest.mark.parametrize(
    ("anchor", "wanted"),
    [("$dynamicAnchor", ["http://example.org/strict", "tree"]), ("$anchor", ["tree"])],
)
def test_where_a_dynamic_reference_may_lead(anchor: str, wanted: list[str]) -> None:
    """The outermost schema with the anchor's name comes first, if the reference leads to a dynamic
    anchor."""
    items = {"$dynamicRef": "#node"}
    tree = {"$id": "tree", anchor: "node", "properties": {"below": {"items": items}}}
    checked = CheckedSchema(
        {
            "$id": "http://example.org/strict",
            "$dynamicAnchor": "node",
            "$ref": "tree",
            "$defs": {"tree": tree, "other": {"$dynamicAnchor": "leaf"}},
        },
        {},
    )
    place = checked.target(checked.root)
    for path, below in (("/properties/below", {"items": items}), ("/items", items)):
        place = checked.child(place, path, below)
    assert [found.schema["$id"] for found in checked.dynamic_targets(place)] == wanted


def test_references_are_followed_however_they_are_written() -> None:
    checked = CheckedSchema(
        {
            "$id": "http://example.org/root",
            "prefixItems": [
                {"$ref": "#/$defs/a"},
                {"$ref": "#named"},
                {"$ref": "other"},
                {"$ref": "http://example.org/given#/x"},
                {"$ref": "https://json-schema.org/draft/2020-12/schema"},
            ],
            "$defs": {
                "a": {"const": 1},
                "b": {"$anchor": "named", "const": 2},
                "c": {"$id": "http://example.org/other", "const": 3},
            },
        },
        {"http://example.org/given": {"x": {"const": 4}}},
    )
    found = [
        checked.target(checked.child(checked.root, f"/prefixItems/{index}", item))
        for index, item in enumerate(checked.schema["prefixItems"])  # type: ignore[index]
    ]
    assert [one.schema.get("const") for one in found] == [1, 2, 3, 4, None]
    assert [one.pointer for one in found[:4]] == [
        "#/$defs/a",
        "#/$defs/b",
        "#/$defs/c",
        "http://example.org/given#/x",
    ]


def test_the_metaschema_itself_can_be_asked_for() -> None:
    prepared = PreparedSchema({"$ref": "https://json-schema.org/draft/2020-12/schema"})
    assert prepared.mask_schema["$defs"]


def test_recursion_that_makes_progress_is_fine() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert PreparedSchema(tree).residuals == ()


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^.a(?<n>b)\k<n>$", r"a back-reference ('\\k<n>' at position 10) is not supported"),
        ("a)|(b", "unbalanced parenthesis at position 1"),
        ("^.$(", "missing ), unterminated subpattern at position 3"),
        (".{3}[a", "unterminated character set at position 4"),
        (r"^\d\d(?<=ab)c", "look-behind of other than one character ('(?<=' at position 5)"),
        (r"^\w.\d(?:x){3,2}", "min repeat greater than max repeat at position 12"),
        (r"\u{1F600}.(\w)\1", r"a back-reference ('\\1' at position 14)"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_told_of_what_the_user_wrote(
    pattern: str, reason: str
) -> None:
    for schema in ({"patternProperties": {pattern: {}}}, {"pattern": pattern, "type": "string"}):
        with pytest.raises(InvalidConstraint) as caught:
            _ = PreparedSchema(schema).residuals
        assert str(caught.value).startswith(f"json_schema: #/{next(iter(schema))}: {pattern!r}: ")
        assert reason in str(caught.value)
