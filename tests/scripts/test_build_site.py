"""What the check of the site finds."""

from pathlib import Path

import pytest

from scripts.build_site import problems


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="b.html#there">b</a> <a href="https://example.org/x">out</a>', []),
        ('<a href="b.html#nowhere">b</a>', ["a.html links to b.html#nowhere"]),
        ('<a href="none.html">b</a> <a href="#none">c</a>', ["none.html", "#none"]),
        ('<script src="https://example.org/x.js"></script>', ["a.html loads https://example.org"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["a.html loads //example.org"]),
        ('<img src="x.png" srcset="http://example.org/x.png 2x">', ["loads http", "to x.png"]),
        ("<p style=\"background: url('https://example.org/x.png')\">", ["a.html loads https"]),
        ('<img src="data:image/png;base64,AA=="><a href="mailto:x@example.org">x</a>', []),
    ],
)
def test_pages(body: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<html><body>{body}</body></html>")
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    told = list(problems(tmp_path))
    assert len(told) == len(found)
    assert all(part in said for part, said in zip(found, told, strict=True)), told


def test_style_sheets(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@import "https://example.org/font.css"; a { b: url(x.png) }')
    assert list(problems(tmp_path)) == ["a.css loads https://example.org/font.css"]
