"""Small parts in isolation: options, constraints, expressions, prefixes, transcripts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rootlace as rl
from rootlace.client.channel import Completion
from rootlace.language import sampling
from rootlace.language.transcript import Transcript
from rootlace.program.run import PrefixMatcher, ProgramRun, SharedPrefix, merge
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, Constraint, Text, Tokens

# ---------------------------------------------------------------- options


def test_own_options_override_defaults() -> None:
    defaults = sampling.normalise({"max_new_tokens": 10, "stop": "x", "n": 2}, "run()")
    own = sampling.normalise({"stop": ["y", "z"], "temperature": 0}, "gen()")
    asked = sampling.resolve(defaults, own)
    params = asked.params
    assert (params.max_tokens, params.stop, params.n, params.temperature) == (10, ("y", "z"), 2, 0)
    assert asked.constraint is None and not asked.cache_report
    own = sampling.normalise({"return_cache_report": True}, "gen()")
    assert sampling.resolve(defaults, own).cache_report
    with pytest.raises(InvalidRequest, match="must be True or False, not 'no'"):
        sampling.normalise({"return_cache_report": "no"}, "gen()")


def test_an_option_and_its_alias() -> None:
    with pytest.raises(TypeError, match="'max_tokens' twice"):
        sampling.normalise({"max_tokens": 1, "max_new_tokens": 2}, "run()")


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (int, ["3", "-12", "+7 ", "007\n"], ["", "3.5", "x", "3a"]),
        (float, ["3", "-1.5", ".5\n", "2.25 "], ["", "1.", "1.2.3", "e"]),
        (bool, ["True", "False"], ["true", "", "Truee"]),
        (str, ['""', '"a b"', '"say \\"x\\""'], ['"', "a", '"a\nb"', '"a""']),
    ],
)
def test_patterns_of_types(dtype: type, good: list[str], bad: list[str]) -> None:
    for spelled in (dtype, dtype.__name__):
        constraint = sampling.constraint({"dtype": spelled})
        assert constraint is not None and constraint.kind == "regex"
        for text in good:
            assert re.fullmatch(constraint.source, text), text
        for text in bad:
            assert not re.fullmatch(constraint.source, text), text


def test_schemas_of_types() -> None:
    @dataclasses.dataclass
    class City:
        name: str
        size: int

    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, str]:
            return {"type": "string"}

        @classmethod
        def model_validate_json(cls, text: str) -> str:
            return text

    constraint = sampling.constraint({"dtype": City})
    assert constraint is not None and constraint.kind == "json_schema"
    assert "City" in json.loads(constraint.source)["$ref"]
    given = sampling.normalise({"json_schema": Model}, "gen()")
    assert given == {"type": Model}  # a type's schema is read back as the type
    assert sampling.constraint(given) == Constraint("json_schema", '{"type":"string"}')
    assert sampling.constraint({"ebnf": 'root ::= "a"'}) == Constraint("ebnf", 'root ::= "a"')


# ---------------------------------------------------------------- expressions


def test_expressions_are_immutable_and_flat() -> None:
    first = "a" + rl.gen("x")
    second = first + "b" + rl.user("q" + rl.gen("y"))
    assert len(first.parts) == 2 and len(second.parts) == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        rl.gen("x").name = "y"  # type: ignore[misc]


# ---------------------------------------------------------------- prefixes

texts = st.lists(st.builds(Text, st.text("ab", max_size=3), special=st.booleans()), max_size=6)


@given(prefix=texts, program=texts, cuts=st.lists(st.integers(1, 3)))
def test_matcher_agrees_with_comparing_whole_texts(
    prefix: list[Text], program: list[Text], cuts: list[int]
) -> None:
    """Fed in any pieces, the matcher decides as with the whole text, and loses no text."""
    want = merge(prefix)
    if not want:
        return
    whole = merge(program)

    def characters(parts: tuple[Text, ...]) -> list[tuple[str, bool]]:
        return [(c, part.special) for part in parts for c in part.text]

    expected = characters(whole)[: len(characters(want))] == characters(want)
    matcher = PrefixMatcher(SharedPrefix(1, want))
    pieces = iter(program)
    sizes = itertools.chain(cuts, itertools.repeat(1))
    decided: bool | None = None
    rest: list[Text] = []
    for size in sizes:
        group = list(itertools.islice(pieces, size))
        if not group:
            break
        if decided is None:
            decided, out = matcher.feed(group)
            rest.extend(out)  # type: ignore[arg-type]
        else:
            rest.extend(group)
    if decided is None:
        rest.extend(matcher.give_up())
    assert bool(decided) == expected
    kept = characters(want) if decided else []
    assert kept + characters(merge(rest)) == characters(whole)


def test_token_ids_never_match() -> None:
    matcher = PrefixMatcher(SharedPrefix(1, (Text("abc"),)))
    assert matcher.feed([Text("a")]) == (None, ())
    assert matcher.feed([Tokens((1, 2))]) == (False, (Text("a"), Tokens((1, 2))))


# ---------------------------------------------------------------- transcripts


def test_transcripts_share_their_past() -> None:
    root = Transcript()
    root.append("a")
    root.append("b")
    child = Transcript(root)
    root.append("not the child's")
    child.append("c")
    grandchild = Transcript(child)
    child.append("d")
    grandchild.append("e")
    assert list(grandchild.slice(0, len(grandchild))) == ["a", "b", "c", "e"]
    assert list(grandchild.slice(1, 3)) == ["b", "c"]
    assert list(grandchild.slice(3, 9)) == ["e"]
    assert grandchild.excerpt(grandchild.start).get() == "e"
    assert "".join(map(str, root.slice(0, 3))) == "abnot the child's"


def test_a_transcript_as_deep_as_a_long_search() -> None:
    node = Transcript()
    for number in range(5000):
        node.append(str(number % 10))
        node = Transcript(node)
    assert len(node.excerpt().get()) == 5000


def test_callbacks_run_once_before_and_after_the_end() -> None:
    completion = Completion()
    seen: list[str] = []
    completion.add_callback(lambda: seen.append("before"))
    completion.finish()
    completion.add_callback(lambda: seen.append("after"))
    completion.finish()
    completion.wait()
    assert seen == ["before", "after"]


# ---------------------------------------------------------------- token ids


def test_ids_are_whole_numbers() -> None:
    assert rl.ids([1, 2]) == rl.ids(np.array([1, 2])) == rl.ids(token for token in (1, 2))
    assert rl.ids(range(3)).ids == (0, 1, 2)
    with pytest.raises(TypeError, match="token ids"):
        rl.ids([1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="token ids"):
        rl.ids("12")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="token ids"):
        rl.ids(7)  # type: ignore[arg-type]
    with pytest.raises(rl.RootlaceError, match="-3"):
        rl.ids([1, -3])


def test_no_branch_escapes_a_cancellation_while_it_is_closed() -> None:
    cancelled: list[str] = []
    connection = SimpleNamespace(
        model=SimpleNamespace(chat=ChatFormat()),
        next_program=lambda: "program",
        flush=lambda: None,
    )
    run = ProgramRun(SimpleNamespace(connect=lambda: connection), {})  # type: ignore[arg-type]

    class CancelledMeanwhile(dict[int, Any]):
        def pop(self, *args: Any) -> Any:
            found = super().pop(*args)
            run.cancel()  # another thread may cancel
            return found

    run._open = CancelledMeanwhile()
    branch: Any = SimpleNamespace(id=1, cancel=lambda: cancelled.append("it"))
    run.adopt(branch)
    run.release(branch, abandoned=False)
    assert cancelled == ["it"]
