"""Operations of a program, and the record of a run. Each operation is the sink of its own events. A
record keeps entries with their times during the run, and makes the run's timeline."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rootlace import types
from rootlace.client.channel import Completion
from rootlace.language.expressions import TokenIds
from rootlace.language.failures import Failure, ProgramError, Site
from rootlace.language.tools import ToolCall
from rootlace.language.transcript import Marked, SavedValue
from rootlace.timeline import Lane, Span, Stretch, Timeline
from rootlace.types.msgspec_types import name_of
from rootlace.wire import protocol
from rootlace.wire.errors import (
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    RootlaceError,
    UnreadableValue,
    from_code,
)
from rootlace.wire.protocol import Generated, SamplingParams
from rootlace.wire.sampling import Handling

# Budget -------------------------------------------------------------------------------------------


class Budget:
    """Bounds of a run: `timeout` seconds and `tokens`, each None for no bound.

    Forced tokens and lost forks' tokens count; of a cancelled generation, the tokens received so
    far. Tokens are counted when a generation ends. So concurrent generations may each use all
    tokens left at their start.
    """

    def __init__(self, timeout: float | None, tokens: int | None) -> None:
        """Start the timeout. Raises InvalidRequest for a `tokens` below 1."""
        wrong = isinstance(tokens, bool) or not isinstance(tokens, int | None)
        if wrong or (tokens is not None and tokens < 1):
            raise InvalidRequest(f"token_budget must be a number of tokens, not {tokens!r}")
        self._timeout = timeout
        self._deadline = time.monotonic() + (timeout or 0.0)
        self._tokens = tokens
        self._used = 0
        self._lock = threading.Lock()

    def late(self) -> DeadlineExceeded | None:
        """Return the error of a run after its timeout."""
        if self._timeout is None or time.monotonic() < self._deadline:
            return None
        return DeadlineExceeded(f"the run was not done within its timeout of {self._timeout:g} s")

    def in_time(self, handling: Handling) -> Handling:
        """Cut `handling`'s timeout at the run's deadline. Raises DeadlineExceeded after it."""
        if self._timeout is None:
            return handling
        left = self._deadline - time.monotonic()
        late = self.late()
        if late is not None:
            raise late
        timeout = left if handling.timeout is None else min(left, handling.timeout)
        return msgspec.structs.replace(handling, timeout=timeout)

    def bounded(self, params: SamplingParams) -> tuple[SamplingParams, Share | None]:
        """Return (`params` with at most the remaining tokens, the share of one generation). Without
        a bound on tokens the share is None. Raises BudgetExceeded if no token is left."""
        if self._tokens is None:
            return params, None
        limit = (self._tokens - self._used) // params.n
        if limit <= 0:
            raise self._used_up()
        if params.max_tokens is not None and params.max_tokens <= limit:
            return params, Share(self, cut=False)
        least = min(params.min_tokens, limit)
        bounded = msgspec.structs.replace(params, max_tokens=limit, min_tokens=least)
        return bounded, Share(self, cut=True)

    def add(self, tokens: int, short: bool = False) -> BudgetExceeded | None:
        """Count `tokens`. Return the error of a budget that is exceeded, or (`short`) too small for
        the generation."""
        with self._lock:
            self._used += tokens
        exceeded = self._tokens is not None and self._used > self._tokens
        return self._used_up() if short or exceeded else None

    def _used_up(self) -> BudgetExceeded:
        return BudgetExceeded(
            f"the run's budget of {self._tokens} tokens is used up ({self._used} generated)"
        )


@dataclass(frozen=True)
class Share:
    """Share of one generation in a budget; `cut`: the budget lowered its `max_tokens`."""

    budget: Budget
    cut: bool

    def spend(self, result: Generated) -> BudgetExceeded | None:
        """Count the tokens of `result`. Return the error if they exceed the budget."""
        tokens = sum(len(output.token_ids) for output in result.outputs)
        short = self.cut and any(output.finish_reason == "length" for output in result.outputs)
        # Other backends report no token ids.
        return self.budget.add(tokens or result.usage.completion_tokens, short)


# Meta info ----------------------------------------------------------------------------------------
#
# Values of `get_meta_info` for an operation, under sglang's names where sglang has them.


def usage_meta(usage: protocol.Usage, timing: protocol.Timing) -> dict[str, Any]:
    """Return tokens and seconds of an operation."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "forced_tokens": usage.forced_tokens,
        "queue_time": timing.queued,
        "time_to_first_token": timing.first_token,
        "e2e_latency": timing.total,
    }


def logprob_meta(
    kind: str, logprobs: Sequence[protocol.TokenLogprob], top: bool = False
) -> dict[str, Any]:
    """Return log-probabilities as (logprob, id, text), and the best alternatives if there are any
    or `top` requires them."""
    meta: dict[str, Any] = {f"{kind}_token_logprobs": list(map(triple, logprobs))}
    if kind == "output":
        meta["output_token_logprobs_length"] = len(logprobs)
    if top or any(token.top for token in logprobs):
        meta[f"{kind}_top_logprobs"] = [
            [(logprob, token_id, text) for token_id, logprob, text in token.top]
            for token in logprobs
        ]
    return meta


def triple(token: protocol.TokenLogprob) -> tuple[float | None, int, str]:
    return (token.logprob, token.token_id, token.text)


def mean_logprob(tokens: Sequence[protocol.TokenLogprob]) -> float | None:
    values = [token.logprob for token in tokens if token.logprob is not None]
    return sum(values) / len(values) if values else None


# Operations ---------------------------------------------------------------------------------------


class Owner(Protocol):
    """Branch of an operation, as its operations see it."""

    @property
    def failure(self) -> Failure | None: ...

    def late(self) -> DeadlineExceeded | None:
        """Return the error of a run after its timeout."""

    def failed(self, operation: Operation, error: RootlaceError) -> Failure:
        """Record that `operation` failed with `error`. Return the failure for its readers."""

    def cancel(self) -> None:
        """Abort the running and queued operations."""

    def notify(self) -> None:
        """Record that an event arrived for an operation of the branch."""


class Operation(Completion):
    """Operation on the wire: the sink of its events. `ended` is the time of the last event, in
    seconds of `time.perf_counter`; 0.0 before."""

    __slots__ = ("ended", "failure", "owner", "site", "what")

    def __init__(self, owner: Owner, site: Site, what: str) -> None:
        super().__init__()
        self.owner = owner
        self.site = site
        self.what = what
        self.ended = 0.0
        self.failure: Failure | None = None

    def __call__(self, event: protocol.Event) -> None:
        if isinstance(event, protocol.Chunk):
            self.on_chunk(event)
        else:
            self.ended = time.perf_counter()
            if isinstance(event, protocol.Failed):
                error = from_code(event.code, event.message, event.param)
                self.failure = self.owner.failed(self, error)
                self.on_failure()
            else:
                self.on_success(event)
            self.finish()
        self.owner.notify()

    def late(self) -> DeadlineExceeded | None:
        return self.owner.late()

    def on_chunk(self, chunk: protocol.Chunk) -> None:
        pass

    def on_success(self, event: protocol.Event) -> None:
        pass

    def on_failure(self) -> None:
        pass


class Quoting(Operation):
    """Append that quotes other branches."""

    __slots__ = ("sources",)

    def __init__(self, owner: Owner, site: Site, sources: Sequence[Owner]) -> None:
        super().__init__(owner, site, "join()")
        self.sources = tuple(sources)


class Generation(Operation):
    """Value of a `gen`. With a `type`, each reading parses the text as JSON of that type.

    `share` counts the tokens, and may fail a successful generation. `chunks_from` returns the
    streamed chunks so far, and `streamed` is their number of tokens. `asked` and `first_chunk` are
    times like `ended`.
    """

    __slots__ = (
        "_chunks", "_params", "_share", "_type", "asked", "first_chunk", "n", "name", "result",
        "streamed",
    )  # fmt: skip

    def __init__(
        self,
        owner: Owner,
        site: Site,
        what: str,
        name: str | None,
        params: protocol.SamplingParams,
        type: Any = None,
        share: Share | None = None,
    ) -> None:
        super().__init__(owner, site, what)
        self.name = name or ""
        self.asked = time.perf_counter()
        self.first_chunk: float | None = None
        self._params = params
        self._type = type
        self._share = share
        self.streamed = 0
        self.n = params.n
        self.result: protocol.Generated | None = None
        self._chunks: list[protocol.Chunk] = []

    def on_chunk(self, chunk: protocol.Chunk) -> None:
        if self.first_chunk is None:
            self.first_chunk = time.perf_counter()
        self.streamed += len(chunk.token_ids)
        if chunk.index == 0:
            self._chunks.append(chunk)

    def on_success(self, event: protocol.Event) -> None:
        assert isinstance(event, protocol.Generated)
        self.result = event
        if self._share is not None and (error := self._share.spend(event)) is not None:
            self.failure = self.owner.failed(self, error)
            self.owner.cancel()

    def on_failure(self) -> None:
        if self._share is not None:
            self._share.budget.add(self.streamed)

    def requires(self) -> Iterable[Operation]:
        return (self,)

    def get(self) -> Any:
        values = [self._value(output) for output in self._outcome().outputs]
        return values if self.n > 1 else values[0]

    def written(self) -> str | list[str]:
        texts = [output.text for output in self._outcome().outputs]
        return texts if self.n > 1 else texts[0]

    def _value(self, output: protocol.Output) -> Any:
        """Return the sample's value. Raises ProgramError (of an UnreadableValue) if none."""
        if self._type is None:
            return output.text
        try:
            # Read anew each time: readers must not share a value that one of them may change.
            return types.parse_as(self._type, output.text)
        except ValueError as error:
            name = name_of(self._type)
            reason = f"cannot be read as {name}: {error}"
            if output.finish_reason == "length":
                count = len(output.token_ids)
                reason = f"was cut off after {count} tokens and is no {name} yet"
            unreadable = UnreadableValue(f"the text (which text(name) gives) {reason}")
            unreadable.__cause__ = error
            raise ProgramError(self.site, self.what, unreadable) from unreadable

    def samples(self) -> list[tuple[str, dict[str, Any]]]:
        """Return text and meta information of each sample."""
        result = self._outcome()
        return [(output.text, self._meta_of(result, output)) for output in result.outputs]

    def text(self) -> str:
        """Return the first sample's text, from which the branch goes on."""
        return self._outcome().outputs[0].text

    def _outcome(self) -> protocol.Generated:
        if self.failure is not None:
            raise self.failure.exception()
        assert self.result is not None
        return self.result

    def pieces(self) -> Iterable[str]:
        output = self._outcome().outputs[0]
        ids = output.token_ids
        # A stop string cuts tokens off the branch; other backends report no token ids.
        if isinstance(output.matched, str) or not ids:
            return (output.text,)
        if output.matched is not None and not self._params.no_stop_trim:
            ids = ids[:-1]
        return (Marked(output.text, TokenIds(ids, self.site)),)

    def saved(self) -> SavedValue:
        return SavedValue(self.written(), self.meta(), self._type or str)

    def chunks_from(self, index: int) -> list[protocol.Chunk]:
        """Return the first sample's chunks so far, from index `index` on."""
        return self._chunks[index:]

    def meta(self) -> dict[str, Any] | list[dict[str, Any]]:
        metas = [meta for _, meta in self.samples()]
        return metas if self.n > 1 else metas[0]

    def _meta_of(self, result: protocol.Generated, output: protocol.Output) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": {"type": output.finish_reason, "matched": output.matched},
            **usage_meta(result.usage, result.timing),
            "completion_tokens": len(output.token_ids) or result.usage.completion_tokens // self.n,
            "forced_tokens": output.forced_tokens,
            "output_ids": list(output.token_ids),
        }
        if self._params.logprobs:  # also where nothing was generated
            meta.update(logprob_meta("output", output.logprobs, self._params.top_logprobs > 0))
        if result.prompt_logprobs:
            meta.update(logprob_meta("input", result.prompt_logprobs))
        if result.usage.accepted or result.usage.rejected:
            meta["accepted_prediction_tokens"] = result.usage.accepted
            meta["rejected_prediction_tokens"] = result.usage.rejected
        if result.usage.drafts:
            meta["drafts"] = {
                source: {"accepted": accepted, "rejected": rejected}
                for source, (accepted, rejected) in result.usage.drafts.items()
            }
        if result.facts.pin:
            meta["cache_pin"] = result.facts.pin
        if result.facts.report is not None:
            meta["cache_report"] = msgspec.structs.asdict(result.facts.report)
        return meta


class Selection(Operation):
    """Value of a `select`."""

    __slots__ = ("asked", "choices", "name", "result")

    def __init__(
        self, owner: Owner, site: Site, what: str, name: str | None, choices: tuple[str, ...]
    ) -> None:
        super().__init__(owner, site, what)
        self.name = name or ""
        self.asked = time.perf_counter()
        self.choices = choices
        self.result: protocol.Selected | None = None

    def on_success(self, event: protocol.Event) -> None:
        assert isinstance(event, protocol.Selected)
        self.result = event

    def requires(self) -> Iterable[Operation]:
        return (self,)

    def get(self) -> str:
        if self.failure is not None:
            raise self.failure.exception()
        assert self.result is not None
        return self.result.choice

    text = written = get

    def pieces(self) -> Iterable[str]:
        return (self.get(),)

    def saved(self) -> SavedValue:
        return SavedValue(self.get(), self.meta())

    def meta(self) -> dict[str, Any]:
        self.get()
        result = self.result
        assert result is not None
        tokens = [list(map(triple, choice)) for choice in result.token_logprobs]
        means = [mean_logprob(choice) for choice in result.token_logprobs]
        return {
            "choices": list(self.choices),
            "index": result.index,
            "scores": list(result.scores),
            "normalized_prompt_logprobs": means,
            "input_token_logprobs": tokens,
            **usage_meta(result.usage, result.timing),
        }


MOST = 20_000
"""Maximum number of entries, and of branches, in the record of a run."""
SHOWN = 4_000
"""Maximum number of characters of a text in a timeline; its middle is left out."""
LONGEST = 40
"""Maximum number of characters in the name of a branch."""


@dataclass(frozen=True)
class _Called:
    """Tool call, and the time of its end."""

    call: ToolCall
    ended: float


Entry = Generation | Selection | _Called | tuple[protocol.Part, ...]


@dataclass
class _Track:
    """Branch, while its lane is made."""

    parent: int | None
    opened: float
    spans: list[Span] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    ready: float = 0.0
    """Time at which all recorded operations were done."""

    @property
    def shown(self) -> bool:
        """Return whether the branch has a lane; a mark has no entries, so no lane."""
        return bool(self.spans or self.before) or self.parent is None

    def take_before(self) -> str:
        text = "".join(self.before)
        self.before.clear()
        return _shortened(text)


class Recording:
    """Record of a run: written by the program; any thread may call `timeline`."""

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
        """Record appended text, a requested operation or a tool call of the branch."""
        with self._lock:
            self._taken += 1
            self._entries.append((branch, entry))

    def called(self, branch: int, call: ToolCall) -> None:
        self.take(branch, _Called(call, time.perf_counter()))

    def end(self) -> None:
        self._ended = time.perf_counter()

    def timeline(self, program: str, model: str, error: BaseException | None) -> Timeline:
        """Return the timeline so far."""
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
        """Yield the lanes of branches with entries, each after its parent."""
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
    """Return a fork's name: its parent's name and its number. Deep in the tree only the end is
    kept, since full names would take the square of the depth."""
    name = f"{path}.{at}" if path else f"{at}"
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _parent_shown(track: _Track, tracks: dict[int, _Track]) -> int | None:
    """Return the nearest ancestor with a lane."""
    parent = track.parent
    while parent is not None and parent in tracks and not tracks[parent].shown:
        parent = tracks[parent].parent
    return parent if parent in tracks else None


def _where(site: Site) -> str:
    """Return the line without the folder, since pages are shown to others."""
    return f"{Path(site.filename).name}:{site.lineno} in {site.function}"


def _state(operation: Generation | Selection) -> Any:
    failure = operation.failure
    if failure is None:
        return "done" if operation.done else "running"
    is_cause = (failure.site, failure.what) == (operation.site, operation.what)
    return "failed" if is_cause and not isinstance(failure.error, Cancelled) else "cancelled"


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
    text = text.encode("utf-8", "replace").decode()  # half a character fails later, with an error
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
