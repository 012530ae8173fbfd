"""Schemas and types in examples and documents: the automaton and llguidance agree on each."""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import rootlace as rl
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.llguidance_backend import HybridGrammar
from rootlace.types import schema_of
from rootlace.wire.errors import InvalidConstraint
from scripts.page_blocks import blocks
from tests.structured.random_model import RandomModel, byte_vocabulary
from tests.test_doc_blocks import commands
from tests.test_docs import DOCUMENTS, ROOT

COMPILER = GrammarCompiler(byte_vocabulary())
TYPES = {"object", "array", "string", "integer", "number"}


def code() -> Iterator[tuple[str, str]]:
    """Python of a page or a program, with its name."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield path.stem, path.read_text("utf-8")
    for page in DOCUMENTS:
        yield page.stem, "\n".join(block.code for block in blocks(page, "python"))


def schemas_in(value: Any) -> Iterator[Any]:
    """The outermost schemas of a value."""
    if isinstance(value, dict):
        if value.get("type") in TYPES or isinstance(value.get("properties"), dict):
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from schemas_in(item)


def literals(tree: ast.AST) -> Iterator[Any]:
    """The outermost values that are written out in Python."""
    for node in ast.iter_child_nodes(tree):
        try:
            yield ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, TypeError, SyntaxError):
            yield from literals(node)


def defined(tree: ast.Module) -> Iterator[Any]:
    """Yield the schemas of a module's types, and of functions that it makes into tools."""
    names: dict[str, Any] = {"__name__": __name__}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
            with suppress(ImportError, NameError):  # of other projects, or of what runs before
                exec(compile(ast.Module([node], []), "a document", "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in names:
            with suppress(InvalidConstraint):
                yield schema_of(names[node.name])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "rl.tools":
            for tool in rl.tools(*(names[ast.unparse(given)] for given in node.args)):
                yield tool.parameters


def documented() -> Iterator[tuple[str, Any]]:
    for name, source in code():
        tree = ast.parse(source)
        for value in literals(tree):
            yield from ((name, schema) for schema in schemas_in(value))
        yield from ((name, schema) for schema in defined(tree))
    for page in DOCUMENTS:
        within = re.findall(r"`({[^`]+})`", page.read_text("utf-8"))
        sent = (word for block in blocks(page, "sh") for words in commands(block) for word in words)
        for text in (*within, *sent):
            with suppress(json.JSONDecodeError):
                yield from ((page.stem, schema) for schema in schemas_in(json.loads(text)))


FOUND = {json.dumps(schema): name for name, schema in documented()}


def test_there_are_some_of_each() -> None:
    assert len(FOUND) >= 8
    assert {"quickstart", "language", "serving"} <= set(FOUND.values())


@pytest.mark.parametrize("text", FOUND, ids=list(FOUND.values()))
def test_the_automaton_and_llguidance_agree(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Schemas are taken unchanged, and with unnamed keys, which need llguidance."""
    opened = re.sub(r'(, )?"additionalProperties": false(?(1)|, )', "", text)
    for schema, whitespace in itertools.product((text, opened), ("flexible", "compact")):
        grammar = COMPILER.compile(json_schema=schema, whitespace=whitespace)
        inner = getattr(grammar, "inner", grammar)
        assert schema == text or isinstance(inner, HybridGrammar)
        for seed in range(2):
            RandomModel(COMPILER.vocabulary, seed).generate(grammar)
    assert not [message for message in caplog.messages if "do not agree" in message]
