"""Every block of code in a document runs, or is read by what would read it. Those that run on a
model are in e2e/test_doc_blocks.py."""

import argparse
import inspect
import json
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rootlace as rl
from rootlace.cli.app import app
from rootlace.testing import Scripted
from scripts.first_changes import first_changes
from scripts.page_blocks import Block, blocks
from tests.test_docs import DOCUMENTS, EVALUATION, LANGUAGE, ROOT

OTHERS = {"curl", "docker", "echo", "git", "journalctl", "jq", "kubectl", "serve", "sudo"}
"""Commands that are not ours. What they name of the repository has to be there."""

CHANGES = first_changes((ROOT / "CONTRIBUTING.md").read_text())
ADDED = {name for change in CHANGES for name in change.changed}
"""Files of the first changes, which their diffs add."""


def of(language: str) -> list[Block]:
    return [block for page in DOCUMENTS for block in blocks(page, language)]


def scripted(page: Path) -> list[Block]:
    """The blocks that run here."""
    return [block for block in blocks(page, "python") if not block.model and not block.not_ours]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    for page in DOCUMENTS:
        text = page.read_text()
        kinds = set(re.findall(r"^```(.+)$", text, re.M))
        # (scripts/test_first_changes.py applies diffs.)
        assert kinds <= {"python", "sh", "yaml", "toml", "text", "diff", "{eval-rst}"}, page
        assert len(list(blocks(page, "python"))) == text.count("\n```python"), page


@pytest.mark.parametrize(
    "page", [page for page in DOCUMENTS if scripted(page)], ids=lambda page: page.stem
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    try:
        for block in scripted(page):
            backend = Scripted(**block.replies)
            rl.set_default_backend(backend)
            block.run(names)
            assert backend.open_branches == 0
            assert backend.calls or not block.replies
    finally:
        rl.set_default_backend(None)


def test_the_blocks_are_found() -> None:
    assert len(scripted(LANGUAGE)) >= 13
    assert len(scripted(EVALUATION)) >= 4


def test_programs_of_other_projects_are_python() -> None:
    theirs = [block for block in of("python") if block.not_ours]
    assert len(theirs) >= 4
    for block in theirs:
        block.check()
        assert "rootlace" not in block.code


# ---------------------------------------------------------------- commands


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command; a pipe's commands one by one."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("|") if "|" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


class Read(Exception):
    """A program has read its arguments."""


@pytest.mark.parametrize(
    "page", [page for page in DOCUMENTS if any(blocks(page, "sh"))], ids=lambda page: page.stem
)
def test_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "sh"):
        for words in commands(block):
            understood(words, monkeypatch)


def understood(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Fails where the command names what there is not."""
    name = Path(words[0]).name
    for word in words:
        if re.match(r"(examples|benchmarks|scripts|tests)/", word) and ":" not in word:
            assert (ROOT / word).exists() or "SECRET" in words or word in ADDED, words
    if name == "rootlace":
        ours(words[1:])
    elif name == "make":
        targets = {word for word in words[1:] if "=" not in word}
        assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    elif name.startswith("python"):
        python(words[1:], patch)
    elif name == "pip":
        named = [each for word in words for each in re.findall(r"\[([\w,-]+)\]", word)]
        extras = {extra for each in named for extra in each.split(",")}
        metadata = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = \[", metadata, re.M) for extra in extras)
    elif name == "bash":
        assert (ROOT / words[1]).is_file()
    else:
        assert name in OTHERS, words


def ours(words: list[str]) -> None:
    """Have the command line's own parser read them."""
    command: Any = app
    while hasattr(command, "commands") and not (
        command.invoke_without_command and (not words or words[0].startswith("-"))
    ):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context(command.name, list(words))


def python(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Have the program read its arguments, and nothing more."""
    module = words[0] == "-m"
    target = words[1] if module else words[0]
    if target == "pytest" or not (module or target.startswith(("scripts/", "benchmarks/"))):
        return  # a file of the reader's own
    real = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *given: Any) -> Any:
        real(parser, *given)
        raise Read

    with patch.context() as here:
        here.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        given = [word.replace("=PATH", f"={sys.executable}") for word in words[1 + module :]]
        here.setattr(sys, "argv", [target, *given])
        with pytest.raises(Read):
            if module:
                runpy.run_module(target, run_name="__main__")
            else:
                here.syspath_prepend(str(ROOT / "scripts"))
                runpy.run_path(target, run_name="__main__")


def test_a_wrong_command_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        "rootlace serve --no-such-option",
        "rootlace eval",
        "python scripts/build_site.py --no-such-option",
        "docker build -f examples/deploy/NoSuchFile",
        "unknown",
    ):
        with pytest.raises(BaseException, match=r"."):
            understood(shlex.split(wrong), monkeypatch)
    with pytest.raises(AssertionError):
        understood(["make", "no-such-target"], monkeypatch)


def test_options_in_a_file_are_read(tmp_path: Path) -> None:
    found = of("yaml")
    assert found
    for block in found:
        path = tmp_path / "serve.yaml"
        path.write_text(block.code)
        ours(["serve", "--config", str(path)])
        assert yaml.safe_load(block.code)


def test_toml_is_read() -> None:
    found = of("toml")
    assert found
    assert all(tomllib.loads(block.code) for block in found)


def test_bodies_of_requests_are_json() -> None:
    bodies = [
        words[words.index("-d") + 1]
        for block in of("sh")
        for words in commands(block)
        if words[0] == "curl" and "-d" in words
    ]
    assert bodies and all(isinstance(json.loads(body), dict) for body in bodies)


def test_code_in_docstrings_of_the_reference_runs() -> None:
    """There is one such block: that of `retry`."""
    public = [getattr(rl, name) for name in rl.__all__]
    inside = [part for kind in public if isinstance(kind, type) for part in vars(kind).values()]
    told = {text for one in [*public, *inside] if (text := inspect.getdoc(one)) and "::\n" in text}
    (text,) = told
    code = textwrap.dedent(text.partition("::\n\n")[2].partition("\n\n")[0])

    @rl.function
    def program(s: Any) -> None:
        exec(code, {"rl": rl, "s": s, "check": int})

    state = program.run(backend=Scripted(sum=["twelve", "12"], check=False))
    assert state.text() == "12"
