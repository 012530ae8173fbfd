"""Pages that need nothing but themselves: style, script and data stand in one file."""

from __future__ import annotations

import html
from pathlib import Path

_FOLDER = Path(__file__).with_name("page")


def timeline_page(title: str, data: str) -> str:
    """The page of a timeline, of which `data` is the JSON."""
    # No text of the model may end the element that the data stands in.
    safe = data.replace("<", "\\u003c")
    return _page(title, _read("timeline.html"), safe)


def graph_page(title: str, drawing: str) -> str:
    """A page around `drawing`, which is HTML."""
    return _page(title, drawing, None)


def _page(title: str, body: str, data: str | None) -> str:
    scripts = ""
    if data is not None:
        scripts = (
            f'<script type="application/json" id="data">{data}</script>\n'
            f"<script>\n{_read('timeline.js')}</script>\n"
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>
{_read("style.css")}</style>
</head>
<body>
{body}{scripts}</body>
</html>
"""  # noqa: E501


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
