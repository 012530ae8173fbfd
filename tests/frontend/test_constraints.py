"""Constraints in programs: the messages, and the types of the values."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rootlace as rl
from rootlace.language import sampling
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidConstraint, InvalidRequest, UnreadableValue
from rootlace.wire.protocol import Constraint
from tests.frontend.fake_server import FakeServer


@dataclasses.dataclass
class City:
    name: str
    size: int


class Person(pydantic.BaseModel):
    name: str
    age: int


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


ROME = '{"name":"Rome","size":3}'


def script(text: str) -> Callable[[str, protocol.Generate], str]:
    return lambda _, op: text


def constraint(server: FakeServer) -> Constraint:
    (op,) = server.sent(protocol.Generate)
    assert op.constraint is not None
    return op.constraint


@rl.function
def typed(s: Any, type: Any, **options: Any) -> None:  # `type` is the program's own parameter
    s += "A:" + rl.gen("x", type=type, max_tokens=options.pop("limit", None), **options) + "."


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (City, ROME, City("Rome", 3)),
        (Person, '{"name":"Ada","age":36}', Person(name="Ada", age=36)),
        (list[Person], "[]", []),
        (Literal["a", "b"], '"b"', "b"),
        (Color, '"red"', Color.RED),
        (bool, "true", True),
        (str, '"a\\n"', "a\n"),
        (type(None), "null", None),
        (dict[str, int], '{"a":1}', {"a": 1}),
    ],
)
def test_a_value_is_read_back(
    server: FakeServer, backend: rl.RuntimeEndpoint, kind: Any, text: str, value: Any
) -> None:
    server.script = script(text)
    state = typed.run(kind)
    assert state["x"] == value and type(state["x"]) is type(value)
    assert state.get("x") == value
    assert state.text("x") == text
    assert state.text() == f"A:{text}."
    assert state.get_meta_info("x")["finish_reason"]["type"] == "stop"
    sent = constraint(server)
    assert sent.kind == "json_schema"
    jsonschema.validate(json.loads(text), json.loads(sent.source))


@pytest.mark.parametrize(
    ("kind", "text", "value", "good", "bad"),
    [
        (int, "-42 and", -42, ["0", "-7", "12 ", "3\n"], ["07", "+1", "1.5", "", " 1"]),
        (float, "1.5e3\n", 1500.0, ["0", "-1.25", "1e9 "], [".5", "1.", "", "nan"]),
    ],
)
def test_a_bare_number_ends_at_white_space(
    server: FakeServer,
    backend: rl.RuntimeEndpoint,
    kind: Any,
    text: str,
    value: Any,
    good: list[str],
    bad: list[str],
) -> None:
    server.script = script(text)
    state = typed.run(kind, stop="!")
    assert state["x"] == value and type(state["x"]) is kind
    (op,) = server.sent(protocol.Generate)
    assert op.params.stop == ("!", " ", "\n")
    assert op.constraint.kind == "regex"
    assert all(re.fullmatch(op.constraint.source, one) for one in good)
    assert not any(re.fullmatch(op.constraint.source, one) for one in bad)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_bare_float_has_as_many_digits_as_python_writes(value: float) -> None:
    """A float has at most the digits that Python writes; small models would continue with zeros."""
    asked = sampling.constraint({"type": float})
    assert asked is not None and asked.source is not None
    if not abs(value) or 1e-99 <= abs(value) < 1e100:
        assert re.fullmatch(asked.source, repr(value).replace("e+", "e"))
    assert not re.fullmatch(asked.source, "1." + "0" * 22)
    assert not re.fullmatch(asked.source, "1" * 18)


def test_a_bare_int_has_as_many_digits_as_in_a_schema() -> None:
    asked = sampling.constraint({"type": int})
    assert asked is not None and asked.source is not None
    for number in ("0", "-7", "9" * 20):
        assert re.fullmatch(asked.source, number)
    assert not re.fullmatch(asked.source, "1" * 21)


def test_each_reader_gets_a_value_of_its_own(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    server.script = script("[1]")
    state = typed.run(list[int])
    state["x"].append(2)
    assert state["x"] == [1]


def test_a_type_as_schema_is_read_back_and_as_dtype_it_is_not(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    server.script = script(ROME)

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("schema", json_schema=City) + rl.gen("dtype", dtype=City)
        s += rl.gen("plain", json_schema={"type": "object"})

    state = program.run()
    assert state["schema"] == City("Rome", 3)
    assert state["dtype"] == state["plain"] == ROME
    first, second, _ = (op.constraint for op in server.sent(protocol.Generate))
    assert first == second


def test_samples_forks_and_joins(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    server.script = script(ROME)

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("many", type=City, n=2)
        forks = s.fork(2)
        forks += rl.gen("tip", type=City)
        assert forks["tip"] == [City("Rome", 3)] * 2
        forks.join()
        s["own"] = 5
        with s.var_scope("all"):
            s += " then " + rl.gen("last", type=City)

    state = program.run()
    assert state["many"] == state["tip"] == [City("Rome", 3)] * 2
    assert state.text("many") == state.text("tip") == [ROME, ROME]
    assert state.text("own") == state["own"] == 5
    assert state.text("all") == state["all"] == f" then {ROME}"


def test_streams_are_text(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    server.script = script(ROME)
    state = typed.run(City, stream=True)
    assert "".join(state.text_iter("x")) == ROME
    assert state["x"] == City("Rome", 3)
    assert list(typed.run(City).text_iter("x")) == [ROME]


# ---------------------------------------------------------------- missing values


def test_a_value_cut_off_raises_where_it_is_read(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    server.script = script(ROME)

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("x", type=City, max_tokens=5)
        s += " more " + rl.gen("y", max_tokens=3)
        with pytest.raises(rl.ProgramError) as caught:
            s["x"]
        s["line"] = caught.traceback[0].lineno
        s["message"] = str(caught.value)
        assert isinstance(caught.value.__cause__, UnreadableValue)
        assert caught.value.code == "unreadable_value"

    state = program.run()  # the program itself did not fail
    assert state.error() is None
    assert "gen('x')" in state["message"] and "cut off after 5 tokens" in state["message"]
    assert "City" in state["message"] and __file__ in state["message"]
    assert state.text("x") == ROME[:5] and state["y"] == ROME[:3]
    assert state.get_meta_info("x")["finish_reason"]["type"] == "length"
    with pytest.raises(rl.ProgramError, match="cut off"):
        state["x"]


def test_a_value_that_its_type_refuses(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    class Even(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            if n % 2:
                raise ValueError("odd numbers are not even")
            return n

    server.script = script('{"n":3}')
    state = typed.run(Even)
    with pytest.raises(rl.ProgramError, match=r"(?s)cannot be read as .*Even.*odd numbers"):
        state["x"]
    assert state.text("x") == '{"n":3}'


def test_appending_a_value_says_how(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    server.script = script(ROME)

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("x", type=City)
        with pytest.raises(TypeError, match=r"not City; text\(name\)"):
            s += s["x"]
        s += s.text("x")

    assert program.run().text() == ROME + ROME


# ---------------------------------------------------------------- options


def resolved(defaults: dict[str, Any], own: dict[str, Any]) -> sampling.Asked:
    return sampling.resolve(sampling.normalise(defaults, "run()"), sampling.normalise(own, "gen()"))


TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}


@pytest.mark.parametrize(
    ("options", "kind", "source"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"json_schema": ' {"type":"null"}'}, "json_schema", ' {"type":"null"}'),
        ({"json_schema": True}, "json_schema", "true"),
        ({"choices": ["a", "é"]}, "choices", '["a", "é"]'),
        ({"structural_tag": TAG}, "structural_tag", json.dumps(TAG)),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", json.dumps(TAG)),
    ],
)
def test_what_travels(options: dict[str, Any], kind: str, source: str) -> None:
    asked = resolved({}, options)
    assert asked.constraint == Constraint(kind, source)  # type: ignore[arg-type]
    assert asked.type is None


def test_islands_of_a_type() -> None:
    structure = {"begin": "<a>", "schema": City, "end": "</a>"}
    sent = resolved({}, {"structural_tag": {**TAG, "structures": [structure]}}).constraint
    assert sent is not None
    (island,) = json.loads(sent.source)["structures"]
    assert jsonschema.Draft202012Validator(island["schema"]).is_valid({"name": "a", "size": 1})
    assert structure["schema"] is City


def test_how_it_is_enforced() -> None:
    options = {"whitespace": "compact", "strict": True, "jump_forward": "off"}
    expected = Constraint("regex", "a", "compact", True, "off")
    assert resolved({}, {"regex": "a", **options}).constraint == expected
    assert resolved(options, {"regex": "a"}).constraint == expected
    assert resolved({}, {**options}).constraint is None
    for jump, meant in ((False, "off"), (True, "canonical")):
        sent = resolved({"jump_forward": jump}, {"regex": "a"}).constraint
        assert sent is not None and sent.jump_forward == meant


def test_an_own_constraint_replaces_the_programs() -> None:
    asked = resolved({"regex": "a", "strict": True}, {"type": City})
    assert asked.type is City and asked.constraint is not None
    assert asked.constraint.kind == "json_schema" and asked.constraint.strict
    asked = resolved({"type": int}, {"regex": "a"})
    assert asked.type is None and asked.constraint == Constraint("regex", "a")
    assert asked.params.stop == ()
    asked = resolved({"type": City}, {"temperature": 0})
    assert asked.type is City


def test_defaults_of_a_run(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    server.script = script(ROME)

    @rl.function
    def program(s: Any) -> None:
        s += rl.gen("x")

    state = program.run(type=City, whitespace="compact")
    assert state["x"] == City("Rome", 3)
    assert constraint(server).whitespace == "compact"


def test_everyday_words_are_the_programs(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    @rl.function
    def program(s: Any, **kwargs: Any) -> Any:
        s += rl.gen("x")
        return kwargs

    state = program.run(type="a", choices="b", regex="c")
    assert state.ret_value == {"type": "a", "choices": "b"}
    assert constraint(server) == Constraint("regex", "c")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"regex": "a", "type": int}, TypeError, "several constraints"),
        ({"json_schema": City, "dtype": int}, TypeError, "several constraints"),
        ({"type": complex}, InvalidConstraint, "complex"),
        ({"type": "int"}, InvalidConstraint, "the string 'int'"),
        ({"dtype": "number"}, InvalidConstraint, "dtype must be"),
        ({"json_schema": "{"}, InvalidConstraint, "json_schema is not JSON"),
        ({"json_schema": '{"a": 1,\n2}'}, InvalidConstraint, "not JSON: .*line 2 column 1"),
        ({"json_schema": {"a": object()}}, InvalidConstraint, "json_schema is not JSON"),
        ({"regex": 3}, InvalidConstraint, "regex must be a string"),
        ({"structural_tag": 3}, InvalidConstraint, "structural_tag must be"),
        ({"structural_tag": "x"}, InvalidConstraint, "structural_tag is not JSON"),
        ({"regex": "a", "whitespace": "wide"}, InvalidRequest, "there are 'compact', 'flex"),
        ({"strict": "yes"}, InvalidRequest, "strict"),
        ({"jump_forward": "far"}, InvalidRequest, "jump_forward: .* are 'canonical', 'off'"),
        ({"whitspace": "compact"}, TypeError, "did you mean 'whitespace'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampling.normalise(options, "gen()")


@pytest.mark.parametrize("choices", [[], "ab", [1], 3])
def test_wrong_choices(choices: Any) -> None:
    with pytest.raises(InvalidConstraint, match="choices"):
        sampling.normalise({"choices": choices}, "generate()")


def test_a_trace_shows_the_type() -> None:
    trace = typed.trace(City)
    assert "City" in str(trace)
    assert not trace.stopped


def test_what_is_remembered_of_a_text_is_not_mistaken_for_another() -> None:
    asked = {"regex": "[0-9]+", "strict": True}
    first = sampling.constraint(asked)
    assert first == sampling.constraint(dict(asked)) == Constraint("regex", "[0-9]+", strict=True)
    assert sampling.constraint({"regex": "[0-9]+"}) == Constraint("regex", "[0-9]+")
    ebnf = sampling.constraint({"ebnf": "[0-9]+"})
    assert ebnf is not None and ebnf.kind == "ebnf"
    for wrong in ({"strict": 1}, {"strict": []}, {"whitespace": "tabs"}):
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=next(iter(wrong))):
                sampling.constraint({"regex": "[0-9]+", **wrong})


def test_what_is_remembered_is_bounded_and_mutable_schemas_are_read_anew() -> None:
    schema = {"type": "object"}
    before = sampling.constraint({"json_schema": schema})
    schema["type"] = "array"
    after = sampling.constraint({"json_schema": schema})
    assert before is not None and after is not None
    assert (before.source, after.source) == ('{"type": "object"}', '{"type": "array"}')
    for number in range(300):
        sampling.constraint({"regex": f"a{{{number}}}"})
    assert sampling._built_once.cache_info().currsize <= 128
    size = sampling._built_once.cache_info().currsize
    sampling.constraint({"regex": "a" * 2**15})
    assert sampling._built_once.cache_info().currsize == size


def test_a_schema_with_half_a_character_is_the_servers_to_judge() -> None:
    text = r'{"const": "\ud800"}'
    found = sampling.constraint({"json_schema": text})
    assert found is not None and found.source == text


MISSPELT = [
    ({"type": "object", "propertes": {}}, "$.propertes", "properties"),
    ({"properties": {"a": {"minLenght": 3}}}, "$.properties.a.minLenght", "minLength"),
    ({"$defs": {"x": {"anyOf": [{"enums": [1]}]}}}, "$.$defs.x.anyOf[0].enums", "enum"),
    ({"items": [{"requried": []}]}, "$.items[0].requried", "required"),
    ('{"additionalProperty": false}', "$.additionalProperty", "additionalProperties"),
]


@pytest.mark.parametrize(("schema", "path", "meant"), MISSPELT)
def test_misspelt_keywords_of_a_schema_are_told(schema: Any, path: str, meant: str) -> None:
    wrong = re.escape(f"{path} is no keyword; did you mean {meant!r}?")
    with pytest.warns(UserWarning, match=wrong) as seen:
        rl.gen("x", json_schema=schema)
    assert seen[0].filename == __file__
    with pytest.raises(InvalidConstraint, match=wrong):
        rl.gen("x", json_schema=schema, strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"propertes": {}, "requried": True}},
        {"x-require": 1, "descripton": "a note", "enum": [{"requried": 1}]},
        {"const": {"propertes": 1}, "default": {"propertes": 1}, "required": ["typ"]},
        {"type": "array", "items": True, "colour": "red"},
    ],
)
def test_names_and_values_are_no_keywords(schema: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.gen("x", json_schema=schema, strict=True)
