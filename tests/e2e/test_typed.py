"""Values of Python types, and strict tools, on the embedded model: complete texts are readable."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic

import rootlace as rl
from rootlace import types

Short = Annotated[str, msgspec.Meta(max_length=8)]
SEEDS = 2


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Line:
    what: Short
    count: Annotated[int, msgspec.Meta(ge=0, le=99)]
    color: Color = Color.RED


class Point(NamedTuple):
    x: Annotated[int, msgspec.Meta(ge=-9, le=9)]
    y: bool


class Options(TypedDict):
    a: bool
    b: Color | None


class Cat(msgspec.Struct, tag=True):
    lives: Literal[7, 9]


class Dog(msgspec.Struct, tag=True):
    good: bool


class Text(pydantic.BaseModel):
    kind: Literal["text"] = "text"
    text: Annotated[str, pydantic.Field(max_length=6)]


class Flag(pydantic.BaseModel):
    kind: Literal["flag"] = "flag"
    on: bool = True


class Message(pydantic.BaseModel):
    part: Annotated[Text | Flag, pydantic.Field(discriminator="kind")]
    day: dt.date
    id: pydantic.UUID4


KINDS: list[Any] = [
    int,
    float,
    bool,
    None,
    Short,
    Color,
    Literal["a", 1, None],
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
    uuid.UUID,
    decimal.Decimal,
    Annotated[bytes, msgspec.Meta(min_length=1, max_length=6)],
    Annotated[list[bool], msgspec.Meta(max_length=3)],
    tuple[bool, Color],
    set[Color],
    dict[Literal["a", "b"], bool],
    Line,
    Point,
    Options,
    Cat | Dog,
    Message,
    Annotated[list[Message], pydantic.Field(max_length=1)],
]


@rl.function
def value(s: Any, kind: Any, seed: int) -> None:
    s += "An example: "
    # The type of None is no type.
    s += rl.gen("x", type=type(None) if kind is None else kind, max_tokens=160, seed=seed)


def test_every_value_can_be_read(runtime: rl.Runtime) -> None:
    jobs = [{"kind": kind, "seed": seed} for kind in KINDS for seed in range(SEEDS)]
    for job, state in zip(jobs, value.run_batch(jobs, backend=runtime), strict=True):
        text = state.text("x")
        # All these types bound their texts, but not a number's digits.
        if state.get_meta_info("x")["finish_reason"]["type"] == "length":
            assert job["kind"] in (int, float)
            continue
        assert state["x"] == types.parse_as(job["kind"], text)


def test_a_closed_type_is_mostly_forced(runtime: rl.Runtime) -> None:
    state = value.run(kind=Line, seed=0, backend=runtime)
    free = value.run(kind=Line, seed=0, backend=runtime, jump_forward="off")
    assert state.get_meta_info("x")["forced_tokens"] > 0
    assert free.get_meta_info("x")["forced_tokens"] == 0
