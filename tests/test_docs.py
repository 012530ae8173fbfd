"""Documents: what they link to is there, and the files they name in code exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
