"""What we write for a format is a value of that format, by whoever knows it best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import idna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.json_schema import pattern
from rootlace.wire.protocol import Constraint
from tests.structured.random_model import accepts, byte_vocabulary

EXAMPLES = {
    "hostname": ["localhost", "www.example.com", "a-b.c", "x" * 63, ".".join("abcdefgh")],
    "idn-hostname": ["example.com", "пример.example", "日本語", "bücher.example"],
    "idn-email": ["joe@example.com", "用户@例子.example"],
    "uri-reference": ["//example.com/a?b#c", "a/b", "#part", "", "http://x/y"],
    "iri": ["http://例子.example/ü?q=é"],
    "iri-reference": ["ü/é#ñ"],
    "uri-template": ["http://x/{a,b}/{?q*,r:3}", "plain"],
    "json-pointer": ["", "/a/0/~0~1", "//"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "regex": ["^a+b?$", r"\d{3}-[a-z0-9]*", "a|b"],
}


def _known(name: str) -> list[Callable[[str], object]]:
    """Checks of the format that were made by others."""
    if name == "idn-hostname":
        return [idna.encode]
    if name == "idn-email":
        return [lambda text: idna.encode(text.rsplit("@", 1)[1])]
    check, _ = Draft202012Validator.FORMAT_CHECKER.checkers.get(name, (bool, ()))
    return [check] if check is not bool else []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(pattern.FORMATS))
def test_what_is_written_passes_the_checks_of_others(name: str) -> None:
    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(st.from_regex(re.compile(pattern.pattern_of_format(name)[1:-1]), fullmatch=True))
    def check(text: str) -> None:
        for known in _known(name):
            assert known(text) is not False, text
        if name == "hostname":
            assert len(text) <= 253
            assert all(0 < len(label) <= 63 for label in text.split("."))

    check()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_are_written(name: str) -> None:
    for text in EXAMPLES[name]:
        assert re.fullmatch(pattern.pattern_of_format(name), text), text


def test_no_invalid_value_of_the_test_suite_is_accepted(shared_dir: Path) -> None:
    """The suite's schemas leave the type open, so llguidance masks; with a type, our automata."""
    vocabulary = byte_vocabulary()
    compiler = GrammarCompiler(vocabulary)
    folder = shared_dir / "data/json-schema-test-suite/tests/draft2020-12/optional/format"
    counted = 0
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            for schema in (group["schema"], {**group["schema"], "type": "string"}):
                grammar = compiler.compile(Constraint("json_schema", json.dumps(schema)))
                for case in group["tests"]:
                    if not case["valid"]:
                        text = json.dumps(case["data"], ensure_ascii=False)
                        found = accepts(grammar, vocabulary, text.encode())
                        assert not found, (path.name, case["data"])
                        counted += 1
    assert counted > 700
