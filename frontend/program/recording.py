"""Record of a run: entries with their times, kept while the run goes on, and its timeline."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rootlace.language.failures import Site
from rootlace.language.tools import ToolCall
from rootlace.program.operations import Generation, Selection
from rootlace.timeline import Lane, Span, Stretch, Timeline
from rootlace.wire import protocol
from rootlace.wire.errors import Cancelled

MOST = 20_000
"""Most entries, and most branches, that the record of a run keeps."""
SHOWN = 4_000
"""Most characters of a text in a timeline; a longer text keeps its beginning and its end."""
LONGEST = 40
"""Most characters in the name of a branch."""


@dataclass(frozen=True)
class _Called:
    """A tool was called, and this is when that was over."""

    call: ToolCall
    ended: float


Entry = Generation | Selection | _Called | tuple[protocol.Part, ...]


@dataclass
class _Track:
    """A branch, while its lane is made."""

    parent: int | None
    opened: float
    spans: list[Span] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    ready: float = 0.0
    """When all that it was told so far was done."""

    @property
    def shown(self) -> bool:
        """A mark has nothing of its own, and no lane."""
        return bool(self.spans or self.before) or self.parent is None

    def take_before(self) -> str:
        text = "".join(self.before)
        self.before.clear()
        return _shortened(text)


class Recording:
    """Written by the program; `timeline` may be asked for by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._ended: float | None = None
        self._opened: dict[int, tuple[int | None, float]] = {}
        self._entries: deque[tuple[int, Entry]] = deque(maxlen=MOST)
        self._taken = 0

    def open(self, branch: int, parent: int | None) -> None:
        with self._lock:
            if len(self._opened) < MOST:
                self._opened[branch] = parent, time.perf_counter()

    def take(self, branch: int, entry: Entry) -> None:
        """Text was appended to the branch, an operation asked for, or a tool called."""
        with self._lock:
            self._taken += 1
            self._entries.append((branch, entry))

    def called(self, branch: int, call: ToolCall) -> None:
        self.take(branch, _Called(call, time.perf_counter()))

    def end(self) -> None:
        self._ended = time.perf_counter()

    def timeline(self, program: str, model: str, error: BaseException | None) -> Timeline:
        """The timeline so far."""
        now = self._ended or time.perf_counter()
        with self._lock:
            tracks = {number: _Track(*opened) for number, opened in self._opened.items()}
            entries = [each for each in self._entries if each[0] in tracks]
            forgotten = self._taken - len(entries)
        for number, entry in entries:
            self._add(entry, tracks[number], tracks, now)
        return Timeline(
            program=program,
            model=model,
            seconds=now - self._began,
            lanes=tuple(self._lanes(tracks)),
            error="" if error is None else f"{type(error).__name__}: {error}",
            forgotten=forgotten,
        )

    def _add(self, entry: Entry, track: _Track, tracks: dict[int, _Track], now: float) -> None:
        if isinstance(entry, tuple):
            track.before += [part.text for part in entry if isinstance(part, protocol.Text)]
            return
        if not track.spans and track.parent is not None:
            track.ready = tracks[track.parent].ready if track.parent in tracks else 0.0
        if isinstance(entry, _Called):
            span = self._call(entry)
        else:
            span = self._operation(entry, track, now)
        track.spans.append(span)
        track.ready = self._began + span.end

    def _call(self, entry: _Called) -> Span:
        call, ended = entry.call, entry.ended - self._began
        began = ended - call.seconds
        return Span(
            kind="tool",
            name=call.name,
            state="done" if call.error is None else "failed",
            asked=began,
            start=began,
            end=ended,
            before=_shortened(", ".join(f"{key}={each!r}" for key, each in call.arguments.items())),
            text=_shortened(call.result),
        )

    def _operation(self, operation: Generation | Selection, track: _Track, now: float) -> Span:
        result = operation.result
        timing = protocol.Timing() if result is None else result.timing
        ended = operation.ended or now
        measured = timing.total > 0
        start = ended - timing.total if measured else max(operation.asked, track.ready)
        start = max(min(start, ended), self._began)
        first = operation.first_chunk if isinstance(operation, Generation) else None
        if measured:
            first = start + timing.first_token
        shown: dict[str, Any] = {}
        if isinstance(result, protocol.Generated):
            shown = _generated(result, start - self._began, (first or ended) - self._began)
        elif result is not None:
            shown = {"text": result.choice, "scores": result.scores}
        if isinstance(operation, Selection):
            shown["choices"] = operation.choices
            first = None
        usage = protocol.Usage() if result is None else result.usage
        if result is None and isinstance(operation, Generation):
            usage = protocol.Usage(completion_tokens=operation.streamed)
        return Span(
            kind="select" if isinstance(operation, Selection) else "gen",
            name=operation.name,
            line=_where(operation.site),
            state=_state(operation),
            clock=timing.clock if measured else "client",
            asked=operation.asked - self._began,
            start=start - self._began,
            admitted=start + timing.queued - self._began if measured else None,
            first=None if first is None else first - self._began,
            end=ended - self._began,
            before=track.take_before(),
            error="" if operation.failure is None else str(operation.failure.error),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            forced_tokens=usage.forced_tokens,
            **shown,
        )

    def _lanes(self, tracks: dict[int, _Track]) -> Iterable[Lane]:
        """The branches with at least one entry, each behind its parent."""
        below: dict[int | None, list[int]] = {}
        for number, track in tracks.items():
            if track.shown:
                below.setdefault(_parent_shown(track, tracks), []).append(number)
        index = 0
        # A search tree may be as deep as it likes: a stack, no recursion.
        stack: list[tuple[int, str, int | None]] = [
            (number, "", None) for _, number in _last_first(below.get(None, ()))
        ]
        while stack:
            number, path, parent = stack.pop()
            track = tracks[number]
            children = _last_first(below.get(number, ()))
            stack += [(child, _below(path, at), index) for at, child in children]
            index += 1
            ends = [span.end for span in track.spans]
            opened = track.opened - self._began
            yield Lane(
                name=path or "main",
                parent=parent,
                start=opened,
                end=max([opened, *ends]),
                spans=tuple(track.spans),
                after=track.take_before(),
            )


def _last_first(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(enumerate(numbers))[::-1]


def _below(path: str, at: int) -> str:
    """The name of a fork: its number behind its parent's name, of which only the end is told where
    the tree is deep (names of all its length would take the square of its depth)."""
    name = f"{path}.{at}" if path else f"{at}"
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _parent_shown(track: _Track, tracks: dict[int, _Track]) -> int | None:
    """The nearest branch above that has a lane."""
    parent = track.parent
    while parent is not None and parent in tracks and not tracks[parent].shown:
        parent = tracks[parent].parent
    return parent if parent in tracks else None


def _where(site: Site) -> str:
    """Without the folder: pages are shown to others."""
    return f"{Path(site.filename).name}:{site.lineno} in {site.function}"


def _state(operation: Generation | Selection) -> Any:
    failure = operation.failure
    if failure is None:
        return "done" if operation.done else "running"
    own = (failure.site, failure.what) == (operation.site, operation.what)
    return "failed" if own and not isinstance(failure.error, Cancelled) else "cancelled"


def _generated(result: protocol.Generated, start: float, first: float) -> dict[str, Any]:
    output = result.outputs[0]
    points = [(start + seconds, tokens) for seconds, tokens in result.timing.progress]
    return {
        "text": _shortened(output.text),
        "samples": len(result.outputs),
        "stretches": tuple(_stretches(points, output, first)),
    }


def _stretches(
    points: Sequence[tuple[float, int]], output: protocol.Output, first: float
) -> Iterable[Stretch]:
    """The tokens that there were at each of the `points`, in time, as runs of one kind. Those of a
    point came evenly since the point before; those of the first point came at once."""
    at, seen = first, 0
    begun: Stretch | None = None
    kinds = {at: protocol.DRAFT_SOURCES[source] for at, source in output.drafted_at}
    kinds |= dict.fromkeys(output.forced_at, "forced")
    for moment, tokens in points:
        step = (moment - at) / max(tokens - seen, 1)
        for index in range(seen, tokens):
            start, end = at + step * (index - seen), at + step * (index + 1 - seen)
            kind = kinds.get(index, "sampled")
            if begun is None or begun.kind != kind:
                if begun is not None:
                    yield begun
                begun = Stretch(start, end, 1, kind)
            else:
                begun = Stretch(begun.start, end, begun.tokens + 1, kind)
        at, seen = moment, tokens
    if begun is not None:
        yield begun


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # half a character fails, and is told
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
