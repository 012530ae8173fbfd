"""Structural tags whose literals are special tokens: these ids, and never their spelling."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from rootlace.runtime.server.tool_parsers.base import (
    DEEPSEEK,
    DEEPSEEK_31,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_BLANK,
    Answer,
    Format,
)
from rootlace.runtime.server.tool_parsers.harmony import Harmony
from rootlace.runtime.server.tool_parsers.tagged import Tagged
from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint
from tests.structured.random_model import byte_vocabulary

FORMS: dict[str, Format] = {
    "mistral": Tagged(MISTRAL),
    "mistral_blank": Tagged(MISTRAL_BLANK),
    "mistral_args": Tagged(MISTRAL_ARGS, ("[THINK]", "[/THINK]")),
    "deepseek": Tagged(DEEPSEEK),
    "deepseek_31": Tagged(DEEPSEEK_31),
    "harmony": Harmony(),
}
TAGS = (
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *(f"<｜{name}｜>" for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin")),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *(f"<|{name}|>" for name in ("channel", "message", "constrain", "start", "end", "call")),
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {"const": {"utc": True}}}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    """The embedded model's, and all tags are special tokens of it."""
    found = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    found.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|call|>")]
    return GrammarCompiler(tokenizer, eos_token_ids=ends)


def calls_of(form: Format, *names: str) -> list[tuple[str, tool_calls.Content]]:
    return [(form.begin(name), tool_calls.arguments(SCHEMAS[name], True)) for name in names]


def tag_of(form: Format, kind: str) -> dict[str, Any]:
    calls = calls_of(form, *SCHEMAS)
    if kind == "auto":
        return tool_calls.among_text(calls, form.trigger, form.end, form.around)
    if kind == "required":
        return tool_calls.nothing_else(calls, form.end, False, form.around)
    return tool_calls.or_json(calls, form.end, WEATHER, False, form.around, form.answer_prefix(""))


def walk(
    matcher: Matcher,
    compiler: GrammarCompiler,
    begin: list[int],
    rng: random.Random,
    length: int = 16,
) -> list[int] | None:
    """Ids drawn from the masks, tags and what a call begins with the more likely, with some taken
    back; None: they came to no end."""
    special = compiler.vocabulary.special_tokens.values()
    ends = compiler.vocabulary.eos_token_ids
    ids: list[int] = []
    while len(ids) < 6 * length:
        if matcher.is_accepting() and (matcher.is_finished() or len(ids) > length):
            return ids
        allowed = np.flatnonzero(matcher.allowed_mask())
        assert matcher.is_accepting() == (not set(ends).isdisjoint(allowed))
        going = [token for token in allowed if token not in ends]
        tags = [token for token in going if token in special]
        tokens = [int(rng.choice(tags if tags and rng.random() < 0.3 else going))]
        for token in matcher.forced_tokens() or (
            begin if rng.random() < (0.05 if ids else 0.5) else tokens
        ):
            if not matcher.advance(token):
                break  # a call begins elsewhere
            ids.append(token)
        if rng.random() < 0.1:
            count = rng.randrange(len(ids) + 1) // 4
            matcher.rollback(count)
            del ids[len(ids) - count :]
    return None


@pytest.mark.parametrize("kind", ["auto", "required", "or_json"])
@pytest.mark.parametrize("family", FORMS)
def test_what_is_written_is_read(
    tokenizer: Tokenizer, compiler: GrammarCompiler, family: str, kind: str
) -> None:
    form, rng = FORMS[family], random.Random(f"{family} {kind}")
    grammar = compiler.compile(structural_tag=tag_of(form, kind))
    special = compiler.vocabulary.special_tokens
    begin = tokenizer.encode(form.begin("weather"), add_special_tokens=False).ids
    found = ended = 0
    for _ in range(4):
        matcher = grammar.matcher()
        ids = walk(matcher, compiler, begin, rng)
        if ids is None:
            continue
        ended += 1
        text = tokenizer.decode(ids, skip_special_tokens=False)
        parser = form.parser("", SCHEMAS, True)
        answer = Answer.of([*parser.feed(text), *parser.finish()])
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            found += 1
        for content, token in special.items():
            assert text.count(content) == ids.count(token)  # none is spelt
        fresh = grammar.matcher()
        assert all(map(fresh.advance, ids))
        assert np.array_equal(fresh.allowed_mask(), matcher.allowed_mask())
        assert fresh.forced_tokens() == matcher.forced_tokens()
    assert ended > 1
    assert found > 0


@pytest.mark.parametrize("family", FORMS)
def test_a_call_is_forced_as_the_tokenizer_writes_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler, family: str
) -> None:
    form = FORMS[family]
    calls, end = calls_of(form, "now"), form.end
    tag = tool_calls.nothing_else(calls, end, True, form.around)
    behind = form.around[2]
    text = f'{form.begin("now")}{{"utc":true}}{end.removesuffix(behind)}{behind}'
    text = text.removesuffix("<|call|>")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    matcher = compiler.compile(structural_tag=tag, whitespace="compact").matcher()
    assert matcher.forced_tokens() == ids
    assert text.encode().startswith(matcher.forced_text())
    assert all(map(matcher.advance, ids)) and matcher.is_finished()
    assert matcher.forced_tokens() == []
    matcher.rollback(1)
    assert matcher.forced_tokens() == ids[-1:]


@pytest.mark.parametrize("family", FORMS)
def test_what_is_forced_along_a_call(
    tokenizer: Tokenizer, compiler: GrammarCompiler, family: str
) -> None:
    form = FORMS[family]
    grammar = compiler.compile(structural_tag=tag_of(form, "auto"), whitespace="compact")
    behind = form.around[2]
    call = f'{form.begin("weather")}{{"city":"Oslo","days":12}}{form.end.removesuffix(behind)}'
    call += behind
    ids = tokenizer.encode(f"So: {call}".removesuffix("<|call|>"), add_special_tokens=False).ids
    matcher, at, jumped = grammar.matcher(), 0, 0
    while at < len(ids):
        forced = matcher.forced_tokens()
        assert forced == ids[at : at + len(forced)]
        jumped += len(forced)
        for token in forced or ids[at : at + 1]:
            assert matcher.allowed_mask()[token] and matcher.advance(token), matcher.error()
        at += max(len(forced), 1)
    assert matcher.is_accepting()
    assert jumped > 5


def spelt(compiler: GrammarCompiler, text: str) -> list[int]:
    """The text's ids, token by token of one byte each but for its special ones."""
    special = compiler.vocabulary.special_tokens
    for content, token in special.items():
        text = text.replace(content, f"\x00{token}\x00")
    ids: list[int] = []
    for at, part in enumerate(text.split("\x00")):
        ids += [int(part)] if at % 2 else (compiler.vocabulary.bytewise(part.encode()) or [])
    return ids


@pytest.mark.parametrize(
    ("text", "taken", "complete"),
    [
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant", True, True),
        ("<|channel|>commentary to=x", True, True),
        ("<|channel|>commentary to=functions.x", False, False),
        ("<|channel|>commentary to=functions.now", True, False),
        ("commentary to=functions.x", True, True),
        ("<|message|>commentary to=functions.x", True, True),
        ("<|channel|>x<|channel|>commentary to=functions.y", False, False),
        ("<|channel|><|channel|>commentary to=functions.n", True, False),
        ('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"utc"', True, False),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|call|>", False, False),
        ("[TOOL_CALLS] <｜tool▁sep｜>", True, True),
    ],
)
def test_free_text(compiler: GrammarCompiler, text: str, taken: bool, complete: bool) -> None:
    matcher = compiler.compile(structural_tag=tag_of(Harmony(), "auto")).matcher()
    assert all(map(matcher.advance, spelt(compiler, text))) == taken
    if taken:
        assert matcher.is_accepting() == complete


@pytest.mark.parametrize("kind", ["auto", "required", "or_json"])
def test_nothing_follows_the_end_of_the_sequence(compiler: GrammarCompiler, kind: str) -> None:
    matcher = compiler.compile(
        structural_tag=tag_of(Harmony(), kind), whitespace="compact"
    ).matcher()
    eos, call = compiler.vocabulary.eos_token_ids
    ids = spelt(compiler, Harmony().begin("now") + '{"utc":true}')
    for token in ids:
        assert matcher.advance(token)
        inside = token != ids[-1]
        assert not (inside and matcher.is_accepting() and len(matcher.forced_tokens()))
    assert matcher.is_finished()
    assert sorted(np.flatnonzero(matcher.allowed_mask())) == sorted((eos, call))
    assert matcher.advance(call) and not matcher.allowed_mask().any()
    matcher.rollback(2)
    assert not matcher.is_accepting() and not matcher.advance(call)
    assert matcher.forced_text() == b"}"


def test_any_text_may_hold_special_tokens(compiler: GrammarCompiler) -> None:
    def takes(text: str, end: str) -> bool | None:
        tag = {"type": "tag", "begin": "[THINK]", "content": {"type": "any_text"}, "end": end}
        matcher = compiler.compile(structural_tag={"format": tag}).matcher()
        taken = all(map(matcher.advance, spelt(compiler, text)))
        return matcher.is_accepting() if taken else None

    assert takes("[THINK]a[ARGS]b", "[/THINK]") is False
    assert takes("[THINK]a[ARGS][/THINK]", "[/THINK]") is True
    assert takes("[THINK][/THINK]a", "[/THINK]") is None
    assert takes("a", "[/THINK]") is None
    assert takes("[THINK]a[ARGS]b[/THINK]", "b[/THINK]") is True
    assert takes("[THINK]a[/THINK]b[/THINK]x", "b[/THINK]") is None
    assert takes("[THINK]a[THINK]", "[/THINK]") is None
    assert takes("[THINK]a[ARGS]", "<|call|>") is takes("[THINK]", "<|call|>") is True
    assert takes("[THINK]ab[ARGS]x", "x<|call|>") is True
    assert takes("[THINK]ab[ARGS]", "x<|call|>") is False
    assert takes("[THINK]ab", "[ARGS]x<|call|>") is False
    assert takes("[THINK]ab[ARGS]x", "[ARGS]x<|call|>") is True
    assert takes("[THINK]ab[ARGS]x", "x[ARGS]x<|call|>") is None


def test_a_trigger_that_ends_within_a_special_token(compiler: GrammarCompiler) -> None:
    structures = [{"begin": begin, "schema": True, "end": ""} for begin in ("[ARGS]x", "[a")]
    tag = {"structures": structures, "triggers": ["["]}
    matcher = compiler.compile(structural_tag=tag).matcher()
    for text, taken in (("[b", False), ("[a1", True), ("[ARGS]y", False), ("[ARGS]x1", True)):
        matcher.reset()
        assert all(map(matcher.advance, spelt(compiler, f"[THINK]{text}"))) == taken


def reference(symbols: str, triggers: list[str]) -> bool | None:
    """Whether free text that is complete may consist of these symbols, in which each trigger is
    followed by `!`; None if nothing may begin so."""
    at = free = 0
    while at < len(symbols):
        at += 1
        if any(symbols[free:at].endswith(trigger) for trigger in triggers):
            if at == len(symbols):
                return False
            if symbols[at] != "!":
                return None
            at = free = at + 1
    return True


def test_where_free_text_ends() -> None:
    """Against a search through what was written: X and Y are special tokens, a and b are not."""
    rng, kept = random.Random(6), 0
    compiler = GrammarCompiler(byte_vocabulary("XY"))
    special = compiler.vocabulary.special_tokens
    symbol = {**special, **{c: compiler.vocabulary.byte_tokens[ord(c)] for c in "ab!"}}
    for _ in range(60):
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        triggers = ["".join(rng.choices("abXY", k=length)) for length in lengths]
        if any(one in other for i, one in enumerate(triggers) for other in triggers[:i]) or any(
            other in one for i, one in enumerate(triggers) for other in triggers[:i]
        ):
            continue
        content = {"type": "const_string", "value": "!"}
        tags = [{"begin": trigger, "content": content, "end": ""} for trigger in triggers]
        tag = {"type": "triggered_tags", "tags": tags, "triggers": triggers}
        matcher = compiler.compile(structural_tag={"format": tag}).matcher()
        for _ in range(15):
            matcher.reset()
            written = ""
            while len(written) < 12:
                asked = reference(written, triggers)
                assert matcher.is_accepting() == asked, (triggers, written)
                mask = matcher.allowed_mask()
                for one, token in symbol.items():
                    may = reference(written + one, triggers) is not None
                    assert mask[token] == may, (triggers, written, one)
                forced = asked is False and rng.random() < 0.9
                one = "!" if forced else rng.choice("abXY")
                taken = matcher.advance(symbol[one])
                assert taken == (reference(written + one, triggers) is not None)
                if taken:
                    written += one
                kept += 1
    assert kept > 3000


@pytest.mark.parametrize(
    "asked",
    [
        {"json_schema": {}},
        {"regex": "(?s).*"},
        {"ebnf": "start: /(?s:.)*/"},
        {"ebnf": "start: OTHER\nOTHER: ~/b/"},
        {"choices": ["[ARGS]"]},
    ],
)
def test_elsewhere_special_tokens_are_never_text(
    compiler: GrammarCompiler, asked: dict[str, Any]
) -> None:
    matcher = compiler.compile(**asked).matcher()
    inner = [*compiler.vocabulary.special_token_ids - {*compiler.vocabulary.eos_token_ids}]
    assert not matcher.allowed_mask()[inner].any()
    assert not any(map(matcher.advance, inner))


@pytest.mark.parametrize(
    ("format_", "place"),
    [
        ({"type": "const_string", "value": "a<|call|>b"}, "format.value"),
        (
            {"type": "tag", "begin": "<|call|>", "content": {"type": "any_text"}, "end": "x"},
            "format.begin",
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<|call|>"],
                "tags": [{"begin": "<|call|>", "content": {"type": "any_text"}, "end": "x"}],
            },
            "triggers[0]",
        ),
    ],
)
def test_what_goes_on_behind_the_end_is_refused(
    compiler: GrammarCompiler, format_: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidConstraint, match="behind the end of the sequence") as caught:
        compiler.compile(structural_tag={"format": format_})
    assert str(caught.value).startswith(f"structural_tag: {place}: ")
