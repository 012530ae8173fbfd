"""The blocks of documents that run on the embedded model do, and the requests to its server."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from scripts.page_blocks import ADDRESS, blocks
from tests.test_doc_blocks import commands
from tests.test_docs import DOCUMENTS

PAGES = [
    page
    for page in DOCUMENTS
    if any(block.embedded for kind in ("python", "sh") for block in blocks(page, kind))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(
    page: Path, runtime: rl.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Runtimes of the page are this one, so that none is started for it.
    monkeypatch.setattr(rl, "Runtime", lambda: contextlib.nullcontext(runtime))
    found = [block for block in blocks(page, "python") if block.embedded]
    assert found
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in found:
            block.run(names, runtime.url)
    finally:
        rl.set_default_backend(None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_requests_are_answered(page: Path, runtime: rl.Runtime) -> None:
    for block in blocks(page, "sh"):
        for words in commands(block):
            if words[0] == "curl":
                request = urllib.request.Request(words[1].replace(ADDRESS, runtime.url))
                request.data = words[words.index("-d") + 1].encode()
                for at, word in enumerate(words):
                    if word == "-H":
                        request.add_header(*words[at + 1].split(": ", 1))
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer)["choices"]


def test_pages_are_found() -> None:
    assert {"README", "first_program", "cache", "coming_from", "serving"} <= {
        page.stem for page in PAGES
    }
