"""Forced text and forced tokens of every backend, along random texts of many constraints."""

import random
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler
from tests.conftest import ROOT
from tests.structured.forced_walk import check_any, check_canonical, random_text
from tests.structured.test_canonical import random_language, vocabulary_of

CLOSED = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob's", "é"]},
        "age": {"type": "integer"},
        "is_valid": {"type": "boolean"},
    },
    "required": ["name", "age", "is_valid"],
    "additionalProperties": False,
}
OPEN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "score": {"type": "number", "multipleOf": 0.5},
    },
    "required": ["name", "tags"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
REGULAR: dict[str, dict[str, Any]] = {
    "date": {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    "contractions": {"regex": r"(They|It)'(s|re|red|x) (a|an|the) (cat|don't)( and [a-z]+)*\."},
    "white space": {"regex": r"x +y\n+ *z\t?"},
    "any": {"regex": r"The answer is: .{0,20}"},
    "marks": {"regex": "caf(e|é|e\u0301)? (中文|한국)+[^a]"},
    "thoughts": {"regex": "(<think>\n[a-z ]*</think>\n\n)?ok!"},
    "choices": {"choices": ["yes", "yesterday", "no", "nobody's", "it's", "it'll", "  x"]},
    "closed schema": {"json_schema": CLOSED},
}
OTHERS: dict[str, dict[str, Any]] = {
    "open schema": {"json_schema": OPEN},
    "any object": {"json_schema": {"type": "object"}},
    "recursive schema": {"json_schema": TREE},
    "flexible white space": {"json_schema": CLOSED, "whitespace": "flexible"},
    "ebnf": {"ebnf": 'start: "(" start ")" | NAME "; it\'s"\nNAME: /[a-z_]+/'},
}
# Marks may compose (NFC), and what an object holds is free.
NOTHING_FORCED = {"any object", "marks"}
TEXTS = 3
MAX_WALKS = 60
TOKENIZERS = ("demo", "qwen3", "stories3M")
"""Names of tokenizers. test_canonical.py tests the cuts of GPT-2's pattern."""


@pytest.fixture(scope="module")
def folders(demo_model: Path) -> dict[str, Path]:
    data = ROOT.parent / "shared" / "data"
    places = {"qwen3": "tokenizers", "stories3M": "models"}
    return {"demo": demo_model, **{name: data / place / name for name, place in places.items()}}


def compiler_of(name: str, folders: dict[str, Path], backend: str) -> GrammarCompiler:
    if not (folders[name] / "tokenizer.json").exists():
        pytest.skip(f"needs the shared data beside the checkout ({folders[name]})")
    return made_compiler(name, folders[name], backend)


@cache
def made_compiler(name: str, folder: Path, backend: str) -> GrammarCompiler:
    config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
    return GrammarCompiler(vocabulary_of(name, folder), config=config)


# An index of outlines-core takes seconds for a large vocabulary.
PAIRS = [
    *product(["auto"], (*REGULAR, *OTHERS)),
    *product(["llguidance"], REGULAR),
    *product(["outlines_core"], ("date", "contractions", "choices")),
]
# With the demo model's small vocabulary always; `make check` leaves the others out.
CASES = [
    pytest.param(tokenizer, *pair, marks=() if tokenizer == "demo" else pytest.mark.slow)
    for tokenizer, pair in product(TOKENIZERS, PAIRS)
    if tokenizer == "demo" or pair[0] == "auto" or (tokenizer, pair[0]) == ("qwen3", "llguidance")
]


@pytest.mark.parametrize(("tokenizer", "backend", "name"), CASES)
def test_nothing_unsound_is_forced(
    folders: dict[str, Path], tokenizer: str, backend: str, name: str
) -> None:
    compiler = compiler_of(tokenizer, folders, backend)
    grammar = compiler.compile(**(REGULAR | OTHERS)[name])
    rng = random.Random(4)
    counts: Counter[str] = Counter()
    for _ in range(MAX_WALKS):
        if counts["texts"] - counts["not spelled"] == TEXTS:
            break
        tokens = random_text(grammar, compiler.vocabulary, rng)
        if tokens is None:
            continue
        counts["texts"] += 1
        text = b"".join(compiler.vocabulary.token_bytes[token] for token in tokens)
        assert check_canonical(grammar, compiler.vocabulary, text, counts) == []
        assert check_any(grammar, compiler.vocabulary, tokens, counts) == []
    assert counts["texts"] - counts["not spelled"] == TEXTS
    assert counts["tokens"] >= TEXTS
    if name not in NOTHING_FORCED:
        assert counts["forced"] > 0


@pytest.mark.slow
def test_special_tokens_are_forced_with_the_text_around_them(folders: dict[str, Path]) -> None:
    """The tokenizer itself finds the special tokens in the text."""
    compiler = compiler_of("qwen3", folders, "auto")
    tokenizer = Tokenizer.from_file(str(folders["qwen3"] / "tokenizer.json"))
    begin = '<|box_start|>[{"name": "it\'s", "arguments": '
    end = "}]<|box_end|>Ok<|box_end|>\n then"
    content = {"type": "json_schema", "json_schema": {"const": {"utc": True}}}
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    matcher = compiler.compile(structural_tag={"format": tag}, whitespace="compact").matcher()
    ids = tokenizer.encode(f'{begin}{{"utc":true}}{end}', add_special_tokens=False).ids
    assert matcher.forced_tokens() == ids
    assert all(map(matcher.advance, ids)) and matcher.is_finished()


@pytest.mark.parametrize("backend", ["automaton", "llguidance"])
@pytest.mark.parametrize(
    "tokenizer",
    ["demo", "stories3M", pytest.param("qwen3", marks=pytest.mark.slow)],
)
def test_choices_that_are_cut_in_odd_places(
    folders: dict[str, Path], tokenizer: str, backend: str
) -> None:
    compiler = compiler_of(tokenizer, folders, backend)
    rng = random.Random(5)
    counts: Counter[str] = Counter()
    for _ in range(8):
        language = random_language(rng)
        grammar = compiler.compile(choices=[text.decode() for text in language.texts])
        assert grammar.backend == backend
        for text in language.texts:
            assert check_canonical(grammar, compiler.vocabulary, text, counts) == []
    assert counts["positions"] > 80
    assert counts["forced"] > counts["tokens"] / 2
