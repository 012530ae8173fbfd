"""The operations that a program reads from or waits for: each is the sink of its own events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rootlace import types
from rootlace.client.channel import Completion
from rootlace.language.expressions import TokenIds
from rootlace.language.failures import Failure, ProgramError, Site
from rootlace.language.transcript import Marked, SavedValue
from rootlace.wire import protocol
from rootlace.wire.errors import (
    BudgetExceeded,
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

    Forced tokens count, and so do those of lost forks; of a cancelled generation, the tokens that
    had come. Tokens are counted when a generation ends, so generations side by side may each use
    what was left when they began.
    """

    def __init__(self, timeout: float | None, tokens: int | None) -> None:
        """Raises InvalidRequest for a budget of nothing."""
        wrong = isinstance(tokens, bool) or not isinstance(tokens, int | None)
        if wrong or (tokens is not None and tokens < 1):
            raise InvalidRequest(f"token_budget must be a number of tokens, not {tokens!r}")
        self._timeout = timeout
        self._deadline = time.monotonic() + (timeout or 0.0)
        self._tokens = tokens
        self._used = 0
        self._lock = threading.Lock()

    def in_time(self, handling: Handling) -> Handling:
        """With a timeout that ends with the run's. Raises DeadlineExceeded if that has passed."""
        if self._timeout is None:
            return handling
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"the run was not done within its timeout of {self._timeout:g} s"
            )
        timeout = left if handling.timeout is None else min(left, handling.timeout)
        return msgspec.structs.replace(handling, timeout=timeout)

    def bounded(self, params: SamplingParams) -> tuple[SamplingParams, Share | None]:
        """(`params` with at most the tokens that are left, the share of one generation).

        Without a bound on tokens the share is None. Raises BudgetExceeded if nothing is left.
        """
        if self._tokens is None:
            return params, None
        most = (self._tokens - self._used) // params.n
        if most <= 0:
            raise self._used_up()
        if params.max_tokens is not None and params.max_tokens <= most:
            return params, Share(self, cut=False)
        least = min(params.min_tokens, most)
        bounded = msgspec.structs.replace(params, max_tokens=most, min_tokens=least)
        return bounded, Share(self, cut=True)

    def add(self, tokens: int, short: bool = False) -> BudgetExceeded | None:
        """Count `tokens`. Gives the error of having used too many, or (`short`) of wanting more
        than were left."""
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
    """One generation's part of a budget; `cut`: the generation got fewer tokens than it wanted."""

    budget: Budget
    cut: bool

    def spend(self, result: Generated) -> BudgetExceeded | None:
        """Count the tokens of `result`. Gives the error if they exceed the budget."""
        told = sum(len(output.token_ids) for output in result.outputs)
        short = self.cut and any(output.finish_reason == "length" for output in result.outputs)
        # Other backends tell no ids.
        return self.budget.add(told or result.usage.completion_tokens, short)


# Meta info ----------------------------------------------------------------------------------------
#
# What `get_meta_info` says of an operation, under sglang's names where sglang has them.


def usage_meta(usage: protocol.Usage, timing: protocol.Timing) -> dict[str, Any]:
    """Tokens and seconds of an operation."""
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
    """Log-probabilities as (logprob, id, text), and the best alternatives if there are some (or
    `top` says that they were asked for)."""
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
    """The branch that an operation belongs to, as far as its operations know it."""

    @property
    def failure(self) -> Failure | None: ...

    def failed(self, operation: Operation, error: RootlaceError) -> Failure:
        """Note that `operation` failed with `error`. Gives the failure that its readers see."""

    def cancel(self) -> None:
        """Abort what runs and what is queued."""

    def notify(self) -> None:
        """Note that an event came for an operation of the branch."""


class Operation(Completion):
    """One operation on the wire: the sink of its events. `ended`: when the last of them came, in
    seconds of `time.perf_counter`; 0.0 until then."""

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

    def on_chunk(self, chunk: protocol.Chunk) -> None:
        pass

    def on_success(self, event: protocol.Event) -> None:
        pass

    def on_failure(self) -> None:
        pass


class Quoting(Operation):
    """An append that quotes other branches."""

    __slots__ = ("sources",)

    def __init__(self, owner: Owner, site: Site, sources: Sequence[Owner]) -> None:
        super().__init__(owner, site, "join()")
        self.sources = tuple(sources)


class Generation(Operation):
    """The value of a `gen`. With a `type`, each reading parses the text as JSON of that type.

    `share` is told the outcome, and gives the error with which it fails for all that. While it
    runs, `chunks_from` gives what has come so far of a stream, and `streamed` how many tokens that
    is. `asked` and `first_chunk` are times, as `ended` is.
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
        """The sample's value. Raises a ProgramError with an UnreadableValue if it has none."""
        if self._type is None:
            return output.text
        try:
            # Read anew each time: readers must not share a value that one of them may change.
            return types.parse_as(self._type, output.text)
        except ValueError as error:
            name = types.name_of(self._type)
            reason = f"cannot be read as {name}: {error}"
            if output.finish_reason == "length":
                count = len(output.token_ids)
                reason = f"was cut off after {count} tokens and is no {name} yet"
            unreadable = UnreadableValue(f"the text (which text(name) gives) {reason}")
            unreadable.__cause__ = error
            raise ProgramError(self.site, self.what, unreadable) from unreadable

    def samples(self) -> list[tuple[str, dict[str, Any]]]:
        """Text and meta information of each sample."""
        result = self._outcome()
        return [(output.text, self._meta_of(result, output)) for output in result.outputs]

    def text(self) -> str:
        """Text of the first sample, from which the branch goes on."""
        return self._outcome().outputs[0].text

    def _outcome(self) -> protocol.Generated:
        if self.failure is not None:
            raise self.failure.exception()
        assert self.result is not None
        return self.result

    def pieces(self) -> Iterable[str]:
        output = self._outcome().outputs[0]
        ids = output.token_ids
        # Of what a stop string ended, the branch has not all tokens; other backends tell no ids.
        if isinstance(output.matched, str) or not ids:
            return (output.text,)
        if output.matched is not None and not self._params.no_stop_trim:
            ids = ids[:-1]
        return (Marked(output.text, TokenIds(ids, self.site)),)

    def saved(self) -> SavedValue:
        return SavedValue(self.written(), self.meta(), self._type or str)

    def chunks_from(self, index: int) -> list[protocol.Chunk]:
        """Chunks of the first sample that came so far, from number `index` on."""
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
    """The value of a `select`."""

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
