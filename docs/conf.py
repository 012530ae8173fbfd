"""The site: `make docs` has Sphinx make it of these pages, in build/site.

The pages are plain Markdown, to be read in a repository too. What the site needs beyond that is
made here: its navigation, from the lists of index.md, and pages of the files that are linked to.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "Rootlace"
add_module_names = False
smartquotes = False
release = metadata.version("rootlace")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["screens", "site"]
myst_heading_anchors = 4
myst_url_schemes = {
    "http": None,
    "https": None,
    "source": {"url": "source/{{path}}.html#{{fragment}}"},
}
default_role = "code"  # docstrings are plain text with `code` in it
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"
python_maximum_signature_line_length = 88
html_theme = "furo"
html_title = "Rootlace"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

OUTSIDE = re.compile(r"(?<!!)(\[(?:[^\[\]]|\n)*\])\(\.\./([^)\s#]+)(#[^)\s]*)?\)")
"""A link, not a picture, to a file or folder of the repository that is no page."""


def prepared(app: Any, page: str, source: list[str]) -> None:
    """The page as the site has it."""
    text = OUTSIDE.sub(lambda link: f"{link[1]}(source:{link[2].rstrip('/')})", source[0])
    source[0] = text + navigation(text) if page == "index" else text


def navigation(index: str) -> str:
    """What stands beside all pages: the links of each section of the index."""
    parts = []
    for section in index.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        pages = "\n".join(re.findall(r"\]\((\w+)\.md\)", body))
        parts.append(f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n")
    return "".join(parts)


def linked_files() -> set[str]:
    """The files of the repository that the pages link to, and all those of linked folders."""
    named = {
        link[2].rstrip("/")
        for page in DOCS.glob("*.md")
        for link in OUTSIDE.finditer(page.read_text("utf-8"))
    }
    folders = [name for name in named if (ROOT / name).is_dir()]
    inside = {
        str(path.relative_to(ROOT))
        for name in folders
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return named | inside


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    files = linked_files()
    for name in sorted(files):
        path = ROOT / name
        body = listed(name, files) if path.is_dir() else shown(path)
        title = html.escape(name)
        yield f"source/{name}", {"title": name, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def listed(folder: str, files: set[str]) -> str:
    inside = sorted(name for name in files if name.startswith(f"{folder}/"))
    above = len(folder) - len(folder.rpartition("/")[2])
    items = [f'<li><a href="{name[above:]}.html">{name}</a></li>' for name in inside]
    return f"<ul>{''.join(items)}</ul>"


def shown(path: Path) -> str:
    text = path.read_text("utf-8")
    try:
        written = highlight(text, get_lexer_for_filename(path.name), HtmlFormatter(nowrap=True))
    except ClassNotFound:
        written = html.escape(text)
    return f'<div class="highlight"><pre>{written}</pre></div>'


def setup(app: Any) -> None:
    app.connect("source-read", prepared)
    app.connect("html-collect-pages", source_pages)
