"""Documents: what they link to is there, and the files they name in code exist."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

import rootlace as rl
from rootlace.evaluation.formats import FORMATS
from rootlace.evaluation.scoring import METRICS
from rootlace.evaluation.task import Judge, Shots, Task
from rootlace.testing import Scripted

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file of ours as it is named in running text: `runtime/cache/tree.py`.
NAMED = re.compile(r"`((?:frontend|runtime|kernels|benchmarks|tests|examples|scripts)/[\w./-]+)`")


def headings(path: Path) -> set[str]:
    """The anchors that a document's headings make."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(document: Path) -> list[str]:
    text = document.read_text()
    found = []
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in headings(path)):
            found.append(target)
    for name in NAMED.findall(text):
        if not any((ROOT / f"{name}{suffix}").exists() for suffix in ("", ".py", ".cpp")):
            found.append(name)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_named_is_there(document: Path) -> None:
    assert not missing(document)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One title\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one-title) [b](other.md#another) [c](none.md) `runtime/no/such.py`\n"
    )
    assert missing(page) == ["other.md#another", "none.md", "runtime/no/such.py"]


# ---------------------------------------------------------------- pages whose code runs

LANGUAGE = ROOT / "docs" / "language.md"
EVALUATION = ROOT / "docs" / "evaluation.md"
# Before a block, a comment says what the backend replies, by the names of the variables.
BLOCK = re.compile(
    r"(?:<!-- scripted: (?P<replies>.*) -->\n)?```python\n(?P<code>(?:(?!```).*\n)*)```"
)


@pytest.mark.parametrize(("page", "least"), [(LANGUAGE, 13), (EVALUATION, 4)])
def test_every_block_of_a_page_runs(
    page: Path, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") >= least
    names: dict[str, Any] = {"__name__": page.stem}
    try:
        for block in blocks:
            backend = Scripted(**json.loads(block["replies"] or "{}"))
            rl.set_default_backend(backend)
            line = text[: block.start("code")].count("\n")
            # At its own line, which errors then name.
            exec(
                compile("\n" * line + block["code"], str(page), "exec", dont_inherit=True),
                names,
            )
            assert backend.open_branches == 0
            if block["replies"]:
                assert backend.calls
    finally:
        rl.set_default_backend(None)


def test_the_page_of_evaluation_names_every_key() -> None:
    text = EVALUATION.read_text()
    wanted = {field.name for kind in (Task, Shots, Judge) for field in fields(kind)}
    wanted |= {*FORMATS, *METRICS} - {"questions"}
    assert not [name for name in sorted(wanted) if not re.search(rf"\b{name}\b", text)]


def test_the_languages_page_names_everything() -> None:
    text = LANGUAGE.read_text()
    wanted = {name for name in rl.__all__ if name.islower()} - {"function", "__version__"}
    wanted |= {"Runtime", "Engine", "State", "Checkpoint", "Cache", "Trace", "Tool", "ProgramError"}
    wanted |= {"Timeline"}
    for called in (rl.gen, rl.select, rl.Function.run_batch, rl.best_of, rl.beam, rl.majority):
        wanted |= set(inspect.signature(called).parameters)
    for kind in (rl.ProgramState, rl.Forks):
        wanted |= {name for name in dir(kind) if not name.startswith("_")}
    wanted -= {"self", "name", "s", "step", "kwargs", "options", "batch", "append", "branch"}
    wanted -= {"index", "count"}  # of every sequence
    assert not [name for name in sorted(wanted) if not re.search(rf"\b{name}\b", text)]
