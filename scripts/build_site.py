"""Build the site of docs/ into a folder, and check it: `make docs`.

    python scripts/build_site.py [build/site]

Warnings of Sphinx are errors. Every link between the built pages must lead to a page or anchor, and
no page may load fonts, scripts or pictures from other servers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(r"""(?:@import\s+|url\()\s*["']?([^"')\s;]+)""")
"""What a style sheet loads."""


class Page(HTMLParser):
    """Loads, links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for name in ("src", "poster", "data") if name in given]
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part]
        self.loads += LOADED.findall(given.get("style", ""))
        if "href" in given:
            # A <link> to a page of the site loads nothing.
            (self.links if tag == "a" else self.loads).append(given["href"])


def problems(folder: Path) -> Iterator[str]:
    """Return the faults of the pages in `folder`."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(folder)
        for address in page.loads:
            if urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
                yield f"{name} loads {address}"
        for address in [*page.loads, *page.links]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = pages.get(target)
            anchor = unquote(parts.fragment)
            if not target.exists() or (there and anchor and anchor not in there.anchors):
                yield f"{name} links to {address}"
    for path in sorted(folder.rglob("*.css")):
        for address in LOADED.findall(path.read_text("utf-8")):
            if address.startswith(("http:", "https:", "//")):
                yield f"{path.relative_to(folder)} loads {address}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site of docs/ and check it.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    folder: Path = parser.parse_args().folder
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--fresh-env", "--quiet"]
    kept = ["--doctree-dir", str(ROOT / "build" / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, *kept, str(ROOT / "docs"), str(folder)]
    if subprocess.run(command).returncode != 0:
        return 1
    found = list(problems(folder))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"{folder / 'index.html'}: {len(list(folder.rglob('*.html')))} pages")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
