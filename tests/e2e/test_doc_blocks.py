"""Blocks of documents that run on a model do run, and print what they claim; their server answers
all requests."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from scripts.page_blocks import ADDRESS, MODELS, blocks
from tests.test_doc_blocks import commands
from tests.test_docs import DOCUMENTS

PAGES = [
    (page, model)
    for page in DOCUMENTS
    for model in MODELS
    if any(block.model == model for kind in ("python", "sh") for block in blocks(page, kind))
]
each_page = pytest.mark.parametrize(
    ("page", "model"), PAGES, ids=[f"{page.stem}-{model}" for page, model in PAGES]
)


@pytest.fixture
def started(model: str, request: pytest.FixtureRequest) -> rl.Runtime:
    """Start a runtime with the page's model."""
    runtime: rl.Runtime = request.getfixturevalue("runtime" if model == "embedded" else model)
    return runtime


@each_page
def test_python_runs(
    page: Path,
    model: str,
    started: rl.Runtime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def named(name: str = "embedded") -> Any:
        """Replace the page's runtimes by this one, so that none is started."""
        assert name == model
        return contextlib.nullcontext(started)

    monkeypatch.setattr(rl, "Runtime", named)
    found = [block for block in blocks(page, "python") if block.model == model]
    assert found
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in found:
            block.run(names, started.url)
            printed = capsys.readouterr().out.splitlines()
            assert [line for line in printed if line in block.claims] == block.claims
    finally:
        rl.set_default_backend(None)


@each_page
def test_requests_are_answered(page: Path, model: str, started: rl.Runtime) -> None:
    for block in blocks(page, "sh"):
        for words in commands(block):
            if words[0] == "curl":
                request = urllib.request.Request(words[1].replace(ADDRESS, started.url))
                request.data = words[words.index("-d") + 1].encode()
                for at, word in enumerate(words):
                    if word == "-H":
                        request.add_header(*words[at + 1].split(": ", 1))
                with urllib.request.urlopen(request, timeout=60) as answer:
                    said = json.load(answer)["choices"]
                assert said
                assert model == "embedded" or "Tokyo" in said[0]["message"]["content"]


def test_pages_are_found() -> None:
    pages = {(page.stem, model) for page, model in PAGES}
    assert {("README", "smollm2"), ("first_program", "smollm2")} <= pages
    assert {(name, "embedded") for name in ("cache", "coming_from", "serving")} <= pages
