"""Texts written for a format are values of the format, by an independent parser of it."""

import json
import re
from pathlib import Path

import pytest

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
