"""What a program can read: values that may not be there yet.

Everything readable says which operations it `requires`; once they are over, `get` gives the value
or raises the `ProgramError` of the operation that failed. The reader decides how to wait (blocking
or awaiting), so this file knows nothing of threads and loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rootlace import types
from rootlace.client.completion import Completion
from rootlace.language.failures import Failure, ProgramError, Site
from rootlace.wire import protocol
from rootlace.wire.errors import UnreadableValue, from_code

if TYPE_CHECKING:
    from rootlace.program.branch import Branch


class Readable(Protocol):
    """Something that can be read once the operations it requires are over."""

    def requires(self) -> Iterable[Operation]: ...

    def get(self) -> Any: ...

    def written(self) -> Any:
        """As `get`, but generated values as the text that the model wrote."""

    def meta(self) -> Any: ...


class Operation(Completion):
    """One operation on the wire: the sink of its events."""

    __slots__ = ("branch", "failure", "site", "what")

    def __init__(self, branch: Branch, site: Site, what: str) -> None:
        super().__init__()
        self.branch = branch
        self.site = site
        self.what = what
        self.failure: Failure | None = None

    def __call__(self, event: protocol.Event) -> None:
        if isinstance(event, protocol.Chunk):
            self.on_chunk(event)
        else:
            if isinstance(event, protocol.Failed):
                error = from_code(event.code, event.message)
                self.failure = self.branch.failed(self, error)
            else:
                self.on_success(event)
            self.finish()
        self.branch.news()

    def on_chunk(self, chunk: protocol.Chunk) -> None:
        pass

    def on_success(self, event: protocol.Event) -> None:
        pass


class Generation(Operation):
    """The value of a `gen`. With a `type`, texts are read as its JSON whenever they are asked for.

    Streams: `so_far` grows while it runs.
    """

    __slots__ = ("_chunks", "_params", "_type", "n", "result")

    def __init__(
        self,
        branch: Branch,
        site: Site,
        what: str,
        params: protocol.SamplingParams,
        type: Any = None,
    ) -> None:
        super().__init__(branch, site, what)
        self._params = params
        self._type = type
        self.n = params.n
        self.result: protocol.Generated | None = None
        self._chunks: list[protocol.Chunk] = []

    def on_chunk(self, chunk: protocol.Chunk) -> None:
        if chunk.index == 0:
            self._chunks.append(chunk)

    def on_success(self, event: protocol.Event) -> None:
        assert isinstance(event, protocol.Generated)
        self.result = event

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
        """What the branch goes on from: the first sample."""
        return self._outcome().outputs[0].text

    def _outcome(self) -> protocol.Generated:
        if self.failure is not None:
            raise self.failure.exception()
        assert self.result is not None
        return self.result

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
            "completion_tokens": len(output.token_ids),
            "forced_tokens": output.forced_tokens,
            "output_ids": list(output.token_ids),
        }
        if self._params.logprobs:  # also where nothing was generated
            meta.update(logprob_meta("output", output.logprobs, self._params.top_logprobs > 0))
        if result.prompt_logprobs:
            meta.update(logprob_meta("input", result.prompt_logprobs))
        return meta


class Selection(Operation):
    """The value of a `select`."""

    __slots__ = ("choices", "result")

    def __init__(self, branch: Branch, site: Site, what: str, choices: tuple[str, ...]) -> None:
        super().__init__(branch, site, what)
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

    def meta(self) -> dict[str, Any]:
        self.get()
        result = self.result
        assert result is not None
        tokens = [list(map(_triple, choice)) for choice in result.token_logprobs]
        return {
            "choices": list(self.choices),
            "index": result.index,
            "scores": list(result.scores),
            "normalized_prompt_logprobs": [_mean(choice) for choice in result.token_logprobs],
            "input_token_logprobs": tokens,
            **usage_meta(result.usage, result.timing),
        }


class Constant:
    """What `set_var` stored."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def requires(self) -> Iterable[Operation]:
        return ()

    def get(self) -> Any:
        return self.value

    written = get

    def meta(self) -> None:
        return None


class Gathered:
    """A variable of several joined forks: a list, in the order of the forks."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Readable]) -> None:
        self.parts = list(parts)

    def requires(self) -> Iterable[Operation]:
        for part in self.parts:
            yield from part.requires()

    def get(self) -> list[Any]:
        return [part.get() for part in self.parts]

    def written(self) -> list[Any]:
        return [part.written() for part in self.parts]

    def meta(self) -> list[Any]:
        return [part.meta() for part in self.parts]


def usage_meta(usage: protocol.Usage, timing: protocol.Timing) -> dict[str, Any]:
    """Tokens and seconds of an operation, under sglang's names where it has them."""
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
    meta: dict[str, Any] = {f"{kind}_token_logprobs": list(map(_triple, logprobs))}
    if top or any(token.top for token in logprobs):
        meta[f"{kind}_top_logprobs"] = [
            [(logprob, token_id, text) for token_id, logprob, text in token.top]
            for token in logprobs
        ]
    return meta


def _triple(token: protocol.TokenLogprob) -> tuple[float | None, int, str]:
    return (token.logprob, token.token_id, token.text)


def _mean(tokens: Sequence[protocol.TokenLogprob]) -> float | None:
    values = [token.logprob for token in tokens if token.logprob is not None]
    return sum(values) / len(values) if values else None
