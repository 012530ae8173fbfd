"""A run in time: its branches as lanes, and on each what was generated, chosen and called."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Literal

import msgspec

# Page ---------------------------------------------------------------------------------------------


_FOLDER = Path(__file__).with_name("timeline_page")


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


# Spans --------------------------------------------------------------------------------------------


class Stretch(msgspec.Struct, frozen=True):
    """Tokens of one kind that came one after the other.

    `kind` is "sampled", "forced", or of drafted ones one of `DRAFT_SOURCES`.
    """

    start: float
    end: float
    tokens: int
    kind: str


class Span(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One thing that took time. Times are seconds since the run began.

    It was `asked` for when the program appended it, and its turn came at `start`, when all before
    it on its branch was done; then it was `admitted` to the running requests, and its `first` token
    came: None where nobody told. `end` is when the result arrived. Durations are the server's where
    it measures them, and else those of the program's `clock`. `before` is the text that was
    appended since the span before it; long texts are shortened. `stretches` are those of the first
    sample.
    """

    kind: Literal["gen", "select", "tool"]
    name: str
    line: str = ""
    state: Literal["done", "running", "failed", "cancelled"] = "done"
    clock: Literal["server", "client"] = "client"
    asked: float
    start: float
    admitted: float | None = None
    first: float | None = None
    end: float
    before: str = ""
    text: str = ""
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    samples: int = 1
    stretches: tuple[Stretch, ...] = ()
    choices: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token of each sample."""
        later = self.completion_tokens - self.samples
        if self.first is None or later <= 0 or self.end <= self.first:
            return None
        return later / (self.end - self.first)


class Lane(msgspec.Struct, frozen=True, omit_defaults=True):
    """A branch. `parent` is the index of the lane that it was forked from; `after` is the text that
    was appended behind its last span."""

    name: str
    parent: int | None
    start: float
    end: float
    spans: tuple[Span, ...] = ()
    after: str = ""


class Timeline(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run in time. `save(path)` writes it as a page, `to_json()` as JSON, and
    `str()` says it in a few lines.

    `lanes` are in the order of the tree: forks stand below what they were forked from. `forgotten`
    counts what is missing of a run that did very much.
    """

    program: str
    model: str
    seconds: float
    lanes: tuple[Lane, ...]
    error: str = ""
    forgotten: int = 0

    @property
    def spans(self) -> list[Span]:
        """The spans of all lanes, in order of their start."""
        return sorted((span for lane in self.lanes for span in lane.spans), key=lambda s: s.start)

    def total(self, field: str) -> int:
        """The sum over all spans of a count of tokens, such as "cached_tokens"."""
        return sum(getattr(span, field) for lane in self.lanes for span in lane.spans)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def to_html(self) -> str:
        """One page that needs nothing else: no server, no other file, no network."""
        return timeline_page(self.program, self.to_json())

    def save(self, path: str | Path) -> None:
        """Write the page to `path`."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def __str__(self) -> str:
        prompt, cached = self.total("prompt_tokens"), self.total("cached_tokens")
        lines = [
            f"{self.program}: {self.seconds:.3f} s, {len(self.lanes)} branches, "
            f"{prompt} prompt tokens ({cached} cached), {self.total('completion_tokens')} written "
            f"({self.total('forced_tokens')} forced)"
        ]
        depth: list[int] = []
        for lane in self.lanes:
            depth.append(0 if lane.parent is None else depth[lane.parent] + 1)
            lines += [f"{'  ' * depth[-1]}{lane.name}", *(_line(s, depth[-1]) for s in lane.spans)]
        return "\n".join(lines)


def _line(span: Span, depth: int) -> str:
    what = f"{'  ' * (depth + 1)}{span.start:8.3f} - {span.end:.3f} s  {span.kind} {span.name}"
    if span.state != "done":
        return f"{what}: {span.state}"
    if span.kind == "tool":
        return what
    rate = span.tokens_per_second
    return (
        f"{what}: {span.cached_tokens} of {span.prompt_tokens} cached"
        + (f", {span.completion_tokens} tokens" if span.kind == "gen" else "")
        + (f", first after {1000 * (span.first - span.start):.0f} ms" if span.first else "")
        + (f", {rate:.0f} tokens/s" if rate else "")
    )
