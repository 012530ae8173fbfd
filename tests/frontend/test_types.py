"""Python types: their schemas, checked by jsonschema, and values read back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
)

import annotated_types
import jsonschema
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace import types
from rootlace.types import msgspec_types
from rootlace.wire.errors import InvalidConstraint

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class City:
    name: str
    size: int
    color: Color = Color.RED


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Fork:
    value: int
    left: Fork | City | None
    size: int = 0


@dataclasses.dataclass
class Counted:
    text: str
    length: int = dataclasses.field(init=False)
    kept: int = dataclasses.field(init=False, default=4)

    def __post_init__(self) -> None:
        self.length = len(self.text)


class Size(msgspec.Struct):
    bytes: int


@dataclasses.dataclass
class Stored:
    size: Size
    data: bytes
    kept: int = dataclasses.field(init=False, default=4)


@dataclasses.dataclass
class Bounded:
    size: Annotated[int, msgspec.Meta(ge=0)]


class Point(NamedTuple):
    x: int
    y: int = 0


class Options(TypedDict):
    a: int
    b: NotRequired[str]


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True, rename="camel"):
    good_boy: bool


class Row(msgspec.Struct, array_like=True, tag="row"):
    a: int
    b: str = ""


class Empty(msgspec.Struct):
    pass


class Person(pydantic.BaseModel):
    name: str
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    home: City | None = None


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Text(pydantic.BaseModel):
    kind: Literal["text"] = "text"
    text: str


class Image(pydantic.BaseModel):
    kind: Literal["image"] = "image"
    width: int


class Message(pydantic.BaseModel):
    part: Annotated[Text | Image, pydantic.Field(discriminator="kind")]
    replies: list[Message] = []


class Place(pydantic.BaseModel):
    x: int


class Span(Place):
    length: int = 0


def tag_of(value: Any) -> str:
    return "span" if "length" in value else "place"


PlaceOrSpan = Annotated[
    Annotated[Place, pydantic.Tag("place")] | Annotated[Span, pydantic.Tag("span")],
    pydantic.Discriminator(tag_of),
]


class Wallet(pydantic.BaseModel):
    amount: decimal.Decimal
    by_year: dict[int, str]
    id: pydantic.UUID4
    key: pydantic.SecretStr = pydantic.SecretStr("")
    data: bytes = b""


class Numbers(pydantic.RootModel[list[int]]):
    pass


def _aliased(*path: str, **config: Any) -> type[pydantic.BaseModel]:
    field = pydantic.Field(validation_alias=pydantic.AliasPath(*path))
    return pydantic.create_model("Aliased", __config__=config, x=(int, field))  # type: ignore[call-overload,no-any-return]


@pydantic.dataclasses.dataclass
class Checked:
    x: int


@dataclasses.dataclass
class Mixed:
    person: Person
    size: int


UID = "12345678-1234-4234-9234-123456789012"
ADA = Person(name="Ada", age=36)

# Type, then (text, value) pairs that fit, then texts that the schema must refuse.
CASES: list[tuple[Any, list[tuple[str, Any]], list[str]]] = [
    (int, [("-12", -12)], ["1.5", '"1"', "true"]),
    (float, [("1.5", 1.5), ("2", 2.0)], ['"1"']),
    (Annotated[float, msgspec.Meta(multiple_of=0.25)], [("1.25", 1.25), ("3", 3.0)], ["1.3"]),
    (Annotated[float, pydantic.Field(multiple_of=0.1)], [("1.1", 1.1)], ["0.35"]),
    (Annotated[int, msgspec.Meta(multiple_of=3)], [("9", 9)], ["10"]),
    (bool, [("true", True)], ["1"]),
    (str, [('"é"', "é")], ["1"]),
    (None, [("null", None)], ["0"]),
    (Any, [('{"a":[1]}', {"a": [1]})], []),
    (list, [("[1]", [1])], ["{}"]),
    (list[int], [("[1,2]", [1, 2]), ("[]", [])], ["[1.5]"]),
    (tuple[int, str], [('[1,"a"]', (1, "a"))], ["[1]", '[1,"a",2]', '["a",1]']),
    (tuple[()], [("[]", ())], ["[1]"]),
    (dict[str | int, int], [('{"a":1}', {"a": 1})], ['{"a":"b"}']),
    (tuple[int, ...], [("[1,2,3]", (1, 2, 3))], ['["a"]']),
    (set[int], [("[1,2]", {1, 2})], ["[1,1]"]),
    (Optional[int], [("null", None), ("1", 1)], ['"a"']),  # noqa: UP045 (the spelling is the point)
    (int | str | None, [('"a"', "a"), ("1", 1)], ["[]"]),
    (list[str] | dict[str, int], [('{"tea":3}', {"tea": 3}), ('["tea"]', ["tea"])], ['"tea"']),
    (list[str] | str, [('"tea"', "tea"), ('["tea"]', ["tea"])], ['{"tea":3}']),
    (Literal["a", 1, None], [('"a"', "a"), ("1", 1), ("null", None)], ['"b"', "2"]),
    (Literal["only"], [('"only"', "only")], ['"other"']),
    (Color, [('"red"', Color.RED)], ['"RED"', '"green"']),
    (Level, [("2", Level.HIGH)], ["3"]),
    (dict[str, int], [('{"a":1}', {"a": 1})], ['{"a":"b"}']),
    (dict[int, str], [('{"-5":"a"}', {-5: "a"})], ['{"a":"a"}', '{"01":"a"}']),
    (dict[Color, int], [('{"red":1}', {Color.RED: 1})], ['{"pink":1}', '{"red":"a"}']),
    (dict[Literal["a"], int], [("{}", {})], ['{"b":1}']),
    (dict[uuid.UUID, int], [(f'{{"{UID}":1}}', {uuid.UUID(UID): 1})], ['{"x":1}']),
    (dict[Annotated[str, msgspec.Meta(pattern="^a")], int], [('{"ab":1}', {"ab": 1})], ['{"b":1}']),
    (
        dt.datetime,
        [("2024-02-29T23:59:59Z", dt.datetime(2024, 2, 29, 23, 59, 59, tzinfo=dt.UTC))],
        ['"2023-02-29T00:00:00Z"', '"2024-01-01T23:59:60Z"', '"2024-01-01T00:00:00"'],
    ),
    (
        Annotated[dt.datetime, msgspec.Meta(tz=False)],
        [("2024-01-01T00:00:00", dt.datetime(2024, 1, 1))],
        ['"2024-01-01T00:00:00Z"'],
    ),
    (dt.date, [("2024-12-31", dt.date(2024, 12, 31))], ['"2024-11-31"', '"2024-1-1"']),
    (dt.time, [("10:20:30Z", dt.time(10, 20, 30, tzinfo=dt.UTC))], ['"24:00:00Z"']),
    (dt.timedelta, [("P1DT2H", dt.timedelta(days=1, hours=2))], ['"P1Y"', '"P"', '"PT"']),
    (uuid.UUID, [(UID, uuid.UUID(UID))], []),
    (decimal.Decimal, [("-1.50", decimal.Decimal("-1.50"))], ['"x"', '"1."', "1.5"]),
    (bytes, [("YQ==", b"a"), ("", b""), ("AAA=", b"\0\0")], ['"YQ="', '"YR=="', '"a b="']),
    (Annotated[int, msgspec.Meta(ge=0, lt=10)], [("9", 9)], ["10", "-1"]),
    (Annotated[str, msgspec.Meta(min_length=2, pattern="^a")], [('"ab"', "ab")], ['"a"', '"bb"']),
    (Annotated[list[int], msgspec.Meta(max_length=1)], [("[1]", [1])], ["[1,2]"]),
    (
        City,
        [('{"name":"Rome","size":3}', City("Rome", 3))],
        ['{"name":"Rome"}', '{"name":"Rome","size":3,"more":1}', '{"name":1,"size":3}'],
    ),
    (
        Tree,
        [('{"value":1,"children":[{"value":2}]}', Tree(1, [Tree(2)]))],
        ['{"value":1,"children":[{"x":2}]}'],
    ),
    (
        Tree | City,
        [('{"value":1}', Tree(1)), ('{"name":"Rome","size":3}', City("Rome", 3))],
        ['{"value":1,"name":"Rome"}', '{"name":"Rome","size":"3"}', "null"],
    ),
    (
        Fork,
        [
            ('{"value":1,"left":{"name":"Rome","size":3}}', Fork(1, City("Rome", 3))),
            ('{"value":1,"left":{"value":2,"left":null}}', Fork(1, Fork(2, None))),
        ],
        ['{"value":1}', '{"value":1,"left":{"value":2}}'],
    ),
    (
        Counted,
        [('{"text":"ab"}', Counted("ab"))],
        ['{"text":"ab","length":2}', '{"text":"ab","kept":4}'],
    ),
    (
        Stored,
        [('{"size":{"bytes":1},"data":"YQ=="}', Stored(Size(1), b"a"))],
        ['{"size":{"bytes":1},"data":"YQ==","kept":4}', '{"size":{"bytes":1},"data":"a"}'],
    ),
    (Box[int] | Box[bool], [('{"content":1}', Box(1))], ['{"content":"a"}']),
    (
        dict[str, list[Path]] | None,
        [('{"a":["b/c"]}', {"a": [Path("b/c")]}), ("null", None)],
        ['{"a":[1]}'],
    ),
    (
        tuple[Box[int], Box[str]],
        [('[{"content":1},{"content":"a"}]', (Box(1), Box("a")))],
        ['[{"content":"a"},{"content":1}]'],
    ),
    (Point, [("[1,2]", Point(1, 2)), ("[1]", Point(1))], ["[]", "[1,2,3]"]),
    (Options, [('{"a":1}', {"a": 1}), ('{"a":1,"b":""}', {"a": 1, "b": ""})], ['{"b":""}']),
    (
        Cat | Dog,
        [('{"type":"Cat","lives":9}', Cat(9)), ('{"type":"Dog","goodBoy":true}', Dog(True))],
        ['{"lives":9}', '{"type":"Cat","goodBoy":true}'],
    ),
    (Row, [('["row",1,"x"]', Row(1, "x")), ('["row",1]', Row(1))], ["[1]", '["tow",1]']),
    (Empty, [("{}", Empty())], ['{"a":1}']),
    (
        Person,
        [('{"name":"Ada","age":36}', ADA)],
        ['{"name":"Ada"}', '{"name":"Ada","age":151}', '{"name":"Ada","age":36,"x":1}'],
    ),
    (list[Person] | None, [('[{"name":"Ada","age":36}]', [ADA])], ['[{"name":"Ada"}]']),
    (Mixed, [('{"person":{"name":"Ada","age":36},"size":1}', Mixed(ADA, 1))], ['{"size":1}']),
    (Open, [('{"a":1,"b":2}', Open(a=1, b=2))], ['{"b":2}']),  # type: ignore[call-arg]
    (
        PlaceOrSpan,
        [('{"x":1}', Place(x=1)), ('{"x":1,"length":2}', Span(x=1, length=2))],
        ['{"x":1,"length":"a"}', '{"x":1,"y":2}', "{}"],
    ),
    (
        Message,
        [('{"part":{"kind":"text","text":"x"}}', Message(part=Text(text="x")))],
        # pydantic refuses a missing tag although its own schema admits it.
        ['{"part":{"text":"x"}}', '{"part":{"kind":"image","text":"x"}}'],
    ),
    (
        Wallet,
        [
            (
                f'{{"amount":1.50,"by_year":{{"1999":"x"}},"id":"{UID}"}}',
                Wallet(amount=decimal.Decimal("1.50"), by_year={1999: "x"}, id=uuid.UUID(UID)),
            )
        ],
        [
            f'{{"amount":"x","by_year":{{}},"id":"{UID}"}}',
            f'{{"amount":1,"by_year":{{"x":"x"}},"id":"{UID}"}}',
            f'{{"amount":1,"by_year":{{}},"id":"{UID.replace("-4", "-1")}"}}',
        ],
    ),
    (Numbers, [("[1,2]", Numbers([1, 2]))], ['["a"]']),
    (Checked, [('{"x":1}', Checked(1))], ['{"x":1,"y":2}']),
    (Annotated[int, annotated_types.Gt(3)], [("4", 4)], ["3"]),
]


def validator(kind: Any) -> jsonschema.protocols.Validator:
    schema = json.loads(types.schema_text(kind))
    assert schema == types.schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


# Workers of one run must find the same names, so names contain no address of a function.
NAMES = [msgspec_types.name_of(kind).partition(" at 0x")[0] for kind, _, _ in CASES]


@pytest.mark.parametrize(("kind", "good", "bad"), CASES, ids=NAMES)
def test_schema_and_value(kind: Any, good: list[tuple[str, Any]], bad: list[str]) -> None:
    check = validator(kind)
    quoted = kind in (dt.date, dt.time, dt.timedelta, dt.datetime, bytes, uuid.UUID)
    quoted |= kind is decimal.Decimal or "datetime" in str(kind)
    for written, value in good:
        text = json.dumps(written) if quoted else written
        assert check.is_valid(json.loads(text)), text
        assert types.parse_as(kind, text) == value
        assert type(types.parse_as(kind, text)) is type(value)
    for text in bad:
        assert not check.is_valid(json.loads(text)), text


def test_of_members_that_fit_alike_the_first_is_read() -> None:
    """Python considers unions in another order the same type."""
    first, second = (dataclasses.make_dataclass(name, [("x", int)]) for name in ("A", "B"))
    for kind, cls in ((first | second, first), (second | first, second)):
        assert types.parse_as(list[kind], '[{"x":1}]') == [cls(1)]  # type: ignore[valid-type]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="its syntax")
def test_types_that_newer_pythons_write() -> None:
    names: dict[str, Any] = {"__name__": __name__, "TypedDict": TypedDict}
    source = (
        "type Json = dict[str, Json] | list[Json] | int\n"
        "class A(TypedDict):\n    a: int\n"
        "class B(TypedDict):\n    b: Json\n"
    )
    exec(compile(source, __file__, "exec", dont_inherit=True), names)
    cases = (names["Json"], '{"a":[1,{"b":2}]}'), (names["A"] | names["B"], '{"b":[1]}')
    for kind, text in cases:
        assert validator(kind).is_valid(json.loads(text))
        assert types.parse_as(kind, text) == json.loads(text)
        assert not validator(kind).is_valid({"a": "b"})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (complex, "complex"),
        (object, "object"),
        (City | Options, "City | .*Options.*one dict-like"),
        (City | Bounded, "one dataclass"),  # pydantic would ignore the bound
        (str | dt.date, "one str-like"),
        (list["Nowhere"], "Nowhere"),  # type: ignore[name-defined]  # noqa: F821
        ("int", "the string 'int'"),
        (5, "5"),
        (list[complex], "complex"),
        (dict[tuple[int, int], int], "key"),
        (dict[Annotated[int, msgspec.Meta(ge=0)], int], "key of IntType"),
        (enum.Enum("Odd", {"A": 1.5}), "Odd"),
        (Annotated[float, msgspec.Meta(multiple_of=0.1)], "few multiples of 0.1"),
        (pydantic.create_model("Bad", f=(Callable[[], int], ...)), "Bad"),
        (pydantic.create_model("Bad", f=(dict[Literal[1, 2], int], ...)), "no key of JSON"),
        (_aliased("a", "b"), "'x' is read from within another field"),
        (Annotated[str, pydantic.Field(pattern="(?!a)b")], "look-around, .*, is not supported$"),
    ],
)
def test_what_has_no_schema(kind: Any, reason: str) -> None:
    with pytest.raises(InvalidConstraint, match=reason):
        types.schema_text(kind)


@pytest.mark.parametrize("kind", [City, Person, Checked, int, Cat | Dog, Message])
@pytest.mark.parametrize("text", ["", "{", "[", '{"name": "x", "size": "y"}', "nul", "\ud800"])
def test_what_cannot_be_read(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        types.parse_as(kind, text)


@settings(max_examples=60, deadline=None)
@given(st.dates(min_value=dt.date(1000, 1, 1)), st.integers(1, 12), st.integers(0, 32))
def test_dates_are_those_there_are(date: dt.date, month: int, day: int) -> None:
    pattern = types.schema_of(dt.date)["pattern"]
    assert re.search(pattern, date.isoformat())
    text = f"{date.year:04}-{month:02}-{day:02}"
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        assert not re.search(pattern, text)
    else:
        assert re.search(pattern, text)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=12), st.integers(0, 9), st.integers(0, 9))
def test_base64_of_bounded_length(data: bytes, low: int, more: int) -> None:
    kind = Annotated[bytes, msgspec.Meta(min_length=low, max_length=low + more)]
    text = msgspec.json.encode(data).decode()
    fits = validator(kind).is_valid(json.loads(text))
    assert fits == (low <= len(data) <= low + more)
    if fits:
        assert types.parse_as(kind, text) == data


def test_properties_keep_their_order() -> None:
    for kind in (City, Person, Options):
        schema = types.schema_of(kind)
        root = schema["$defs"][kind.__name__] if "$ref" in schema else schema
        assert list(root["properties"]) == list(kind.__annotations__)


def test_pydantics_own_formats_are_not_left_in() -> None:
    properties = types.schema_of(Wallet)["properties"]
    assert not any("format" in schema for schema in properties.values())
    assert types.parse_as(Wallet, f'{{"amount":1,"by_year":{{}},"id":"{UID}","data":"é"}}')


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            pydantic.HttpUrl,
            ["https://a-b.example.com:8080/x?y=1#z", "http://localhost", "http://u:p@a.b?x"],
            [
                "ftp://a.b",
                "http:a.b",
                "https://",
                "http://1.2.3.999",
                "http://xn--a.b",
                "http://a b",
            ],
        ),
        (pydantic.FileUrl, ["file:///a/b.txt"], ["http://a.b", "file:a"]),
        (
            pydantic.PostgresDsn,
            ["postgresql+asyncpg://u:p@a.b:5432,c.d/x", "postgres://localhost"],
            ["mysql://a.b/x", "postgres:", "postgres://a b"],
        ),
        (pydantic.NaiveDatetime, ["2024-02-29T01:02:03.5"], ["2024-02-29T01:02:03Z"]),
        (pydantic.Base64Bytes, ["YQ==", ""], ["YQ=", "a-_b", "a b="]),
        (pydantic.Base64UrlBytes, ["a-_b"], ["a+/b", "YQ="]),
        (
            ipaddress.IPv4Network,
            ["10.0.0.0/8", "1.2.3.0/24", "1.2.3.4/32"],
            ["10.0.0.1/8", "256.0.0.0/8", "1.2.3.0/33"],
        ),
        (ipaddress.IPv6Network, ["2001:db8::/32", "a::/16"], ["2001:db8::1/32", "x::/16"]),
        (ipaddress.IPv4Interface, ["1.2.3.4/30"], ["1.2.3/8", "1.2.3.4/33"]),
        (ipaddress.IPv6Interface, ["1:2:3:4:5:6:7:8/127"], ["1:2:3:4:5:6:7:8/129"]),
        (pydantic.IPvAnyAddress, ["1.2.3.4", "1:2:3:4:5:6:7:8"], ["1.2.3", "x"]),
        (
            pydantic.condecimal(max_digits=4, decimal_places=2, gt=0),
            [9.99, 99, 0.5],
            [100, 9.999, 1e5, 0],
        ),
        (pydantic.condecimal(decimal_places=0), [3, 1234], [3.5]),
        (pydantic.condecimal(max_digits=2), [99, 9.9, 0.25], [100, 12.5, 0.125]),
        (pydantic.condecimal(max_digits=2, decimal_places=2), [0.25, -0.5], [0, 1, 0.125]),
        (pydantic.condecimal(max_digits=1, decimal_places=3), [0.5], [0, 0.25]),
        (pydantic.condecimal(multiple_of=5, decimal_places=2), [10], [0.01, 7]),
        (pydantic.condecimal(multiple_of=decimal.Decimal("0.25"), decimal_places=1), [0.5], [0.25]),
        (pydantic.condecimal(max_digits=400, decimal_places=400), [0.5], [1]),
        (
            Annotated[pydantic.AnyUrl, pydantic.UrlConstraints(allowed_schemes=["file", "https"])],
            ["file:///a", "https://a.b:80/"],
            ["file://a.b:80/", "http://a.b"],
        ),
        (pydantic.Base64Str, ["YQ==", "YWI=", "fn5+"], ["/w==", "gICA", "YYA="]),
        (pydantic.Base64UrlStr, ["fn5-"], ["fn5+"]),
        (Annotated[pydantic.Base64Bytes, pydantic.Field(min_length=2)], ["YWI="], ["YQ=="]),
        (Annotated[pydantic.Base64Str, pydantic.Field(max_length=3)], ["YWJj"], ["YWJjZA=="]),
        (dict[bool, int], [{"true": 1}], [{"yes, please": 1}]),
        (dict[Level, int], [{"1": 1, "2": 2}], [{"3": 1}, {"LOW": 1}]),
        (dict[Literal["a", 1], int], [{"a": 1}], [{"1": 1}]),
        (dict[Annotated[str, pydantic.Field(pattern="^x")], int], [{"x1": 1}], [{"a": 1}]),
        (
            dt.timedelta,
            ["P99999Y99999M99999DT99999H99999M99999S", "P99999W", "PT1H", "P1D"],
            ["P999999999Y", "P999999999W", "P1000000D", "1D", "P", "PT"],
        ),
    ],
)
def test_what_fits_a_pydantic_type_s_schema_is_one_of_its_values(
    kind: Any, good: list[Any], bad: list[Any]
) -> None:
    """pydantic's own schemas name unknown formats, or omit requirements."""
    model = pydantic.create_model("Model", v=(kind, ...))
    check = validator(model)
    for value in good:
        assert check.is_valid({"v": value}), value
        types.parse_as(model, json.dumps({"v": value}))
    for value in bad:
        assert not check.is_valid({"v": value}), value


def test_a_field_has_a_name_by_which_it_is_read() -> None:
    """pydantic's own schemas name a field read by a path after the field, whatever is read."""
    for kind, text in (
        (_aliased("a"), '{"a": 1}'),
        (_aliased("a", "b", populate_by_name=True), '{"x": 1}'),
        (_aliased("a", "b", validate_by_name=True), '{"x": 1}'),
    ):
        assert validator(kind).is_valid(json.loads(text))
        assert types.parse_as(kind, text).x == 1


@pytest.mark.parametrize(("read", "bad"), [("utf8", "abcde"), ("base64", "YWJjZGU=")])
def test_bytes_are_held_as_they_are_read_not_as_they_are_written(read: Any, bad: str) -> None:
    class Bytes(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes=read)
        v: bytes = pydantic.Field(max_length=4)

    check = validator(Bytes)
    assert check.is_valid({"v": "YWJj"}) and not check.is_valid({"v": bad})
    assert check.is_valid({"v": "é é"}) == (read == "utf8")


def test_an_object_composed_by_hand_is_left_open() -> None:
    class Composed(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra={"anyOf": [{"required": ["b"]}]})
        a: int

    assert "additionalProperties" not in types.schema_of(Composed)


def test_pydantic_is_not_imported() -> None:
    code = (
        "import sys, dataclasses, rootlace; from rootlace import types\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "assert types.parse_as(A, '{\"x\":1}') == A(1) and types.schema_of(A)\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_order_of_a_typed_dict_is_that_of_its_fields() -> None:
    class Person(TypedDict):
        name: str
        age: int

    class Employee(Person, total=False):
        employer: str
        born: int

    class Page(TypedDict, Generic[T]):
        items: list[T]
        first: int

    def properties(kind: Any) -> list[str]:
        (definition,) = types.schema_of(kind)["$defs"].values()
        return list(definition["properties"])

    assert properties(Person) == ["name", "age"]
    assert properties(Employee) == ["name", "age", "employer", "born"]
    assert properties(Page[int]) == ["items", "first"]
