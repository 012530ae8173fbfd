"""Timeline of a run: branches as lanes, with generations, selections and tool calls."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Literal

import msgspec

# Page ---------------------------------------------------------------------------------------------


_FOLDER = Path(__file__).with_name("timeline_page")


def timeline_page(title: str, data: str) -> str:
    """Return the page of a timeline; `data` is its JSON."""
    # No text of the model may end the element that the data stands in.
    safe = data.replace("<", "\\u003c")
    return _page(title, _read("timeline.html"), safe)


def graph_page(title: str, drawing: str) -> str:
    """Return a page around `drawing`, which is HTML."""
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
    """Consecutive tokens of one kind. `kind` is "sampled", "forced", or for draft tokens one of
    `DRAFT_SOURCES`."""

    start: float
    end: float
    tokens: int
    kind: str


class Span(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Operation or tool call with its times, in seconds since the run began.

    The program `asked` for the operation when it appended it. At `start` all earlier operations of
    its branch were done. Then it was `admitted` to the running requests, and its `first` token
    came; None if unknown. `end` is the result's arrival. Durations are the server's measurements,
    otherwise by the program's `clock`. `before` is the text appended since the last span; long
    texts are shortened. `stretches` are the first sample's.
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
        """Return tokens per second after the first token of each sample."""
        later = self.completion_tokens - self.samples
        if self.first is None or later <= 0 or self.end <= self.first:
            return None
        return later / (self.end - self.first)


class Lane(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lane of a branch. `parent` is the index of its parent's lane; `after` is the text appended
    after its last span."""

    name: str
    parent: int | None
    start: float
    end: float
    spans: tuple[Span, ...] = ()
    after: str = ""


class Timeline(msgspec.Struct, frozen=True, omit_defaults=True):
    """Timeline of a run. `save(path)` writes a page, `to_json()` returns JSON, and `str()` a short
    text.

    `lanes` are in the order of the tree: forks follow their parent. `forgotten` counts the entries
    left out of a very long run.
    """

    program: str
    model: str
    seconds: float
    lanes: tuple[Lane, ...]
    error: str = ""
    forgotten: int = 0

    @property
    def spans(self) -> list[Span]:
        """Return the spans of all lanes, in order of their start."""
        return sorted((span for lane in self.lanes for span in lane.spans), key=lambda s: s.start)

    def total(self, field: str) -> int:
        """Return the sum over all spans of a count of tokens, such as "cached_tokens"."""
        return sum(getattr(span, field) for lane in self.lanes for span in lane.spans)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def to_html(self) -> str:
        """Return one self-contained page: no server, no other file, no network."""
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
