"""sglang's native `POST /generate`.

Two differences are intended. sglang gives no log-probability for the first reported prompt token,
wherever the report begins; here only the prompt's first token has none. If nothing is generated,
log-probabilities without `logprob_start_len` cover the whole prompt, as the unconditional choice of
sglang's frontend expects.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec.structs import replace

from rootlace.runtime.server.auth import owner
from rootlace.runtime.server.http import generation
from rootlace.runtime.server.http.body import Body, ignored, refused, with_fields
from rootlace.runtime.server.http.constraints import ConstraintBody, sglang_constraint
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.logprobs import finite, in_parts, rows_of
from rootlace.runtime.server.http.replies import Drafted, Reports, Stream, drafts_of, report_of
from rootlace.runtime.server.http.request_fields import (
    HandlingBody,
    Prompt,
    adapter_of,
    check_samples,
    handling_of,
    make_params,
    parse_prompts,
    sampling_fields,
    sglang_names,
    with_sampling,
)
from rootlace.runtime.server.http.sglang_sessions import SessionParams, Sessions, Turn
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import call_for
from rootlace.wire.protocol import Chunk, Generated, ModelInfo, Output, SamplingParams, TokenLogprob

T = TypeVar("T")


@with_sampling("generate")
@with_fields(
    (ignored("it concerns slow tokenizers"), bool, "spaces_between_special_tokens"),
    (ignored("the server's --stream-interval counts"), int, "stream_interval"),
    (refused("there are no custom logit processors"), Any, "custom_params"),
)
class SamplingParamsBody(ConstraintBody):
    """`sampling_params` of `/generate`, without the fields that `with_sampling` adds.

    Null means the default; for `max_new_tokens`, no limit.
    """

    max_new_tokens: int | None = 128


_Start = Annotated[int, msgspec.Meta(ge=-1)]
_ONE_PROCESS = refused("prompts are computed where tokens are sampled")


@with_fields(
    (ignored("every event has the counts in meta_info"), dict[str, Any], "stream_options"),
    (ignored("counters count every request"), bool, "log_metrics"),
    (ignored("texts are never logged"), bool, "no_logs"),
    (ignored("every request is waited for"), bool, "background"),
    (ignored("replies are JSON"), bool, "return_bytes"),
    (refused("give text or input_ids"), Any, "input_embeds"),
    (refused("only text is served"), Any, "image_data audio_data video_data modalities"),
    (refused("give top_logprobs_num"), Any, "token_ids_logprob"),
    (refused("hidden states are not returned"), Any, "return_hidden_states"),
    (refused("experts are not reported"), Any, "return_routed_experts"),
    (refused("nothing that is sent is executed"), Any, "custom_logit_processor"),
    (_ONE_PROCESS, Any, "bootstrap_host bootstrap_port bootstrap_room"),
)
class GenerateBody(HandlingBody):
    """Body of `POST /generate`. In a batch, every field may be a list with one entry per prompt."""

    one_of: ClassVar = ("text", "input_ids")
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParamsBody | list[SamplingParamsBody] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: _Start | list[_Start] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    return_cache_report: bool | None = None
    session_params: SessionParams | None = None

    model: str | None = None
    lora_path: str | list[str | None] | None = None


TokenLikelihood = tuple[float | None, int, str | None]
"""(log-probability, id, text if requested)."""


class Finish(TypedDict):
    """End of a sample: `matched` is the stop string, pattern or token."""

    type: Literal["stop", "length", "abort"]
    length: NotRequired[int]
    matched: NotRequired[str | int | None]
    message: NotRequired[str]


class MetaInfo(Reports):
    """Facts of a sample beside its text."""

    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    forced_tokens: NotRequired[int]
    drafts: NotRequired[dict[str, Drafted]]
    e2e_latency: NotRequired[float]
    input_token_logprobs: NotRequired[list[TokenLikelihood]]
    output_token_logprobs: NotRequired[list[TokenLikelihood]]
    output_token_logprobs_length: NotRequired[int]
    input_top_logprobs: NotRequired[list[list[TokenLikelihood] | None]]
    output_top_logprobs: NotRequired[list[list[TokenLikelihood] | None]]


class GenerateReply(TypedDict):
    """Sample; in a stream, as far as it has come."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


# Aborts -------------------------------------------------------------------------------------------
#
# Requests that can be ended by their id (`rid`): `POST /abort`, and sglang's `/abort_request`.


class AbortBody(Body):
    """Body of `POST /abort`."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: Annotated[str | None, ignored("the reason is always 'abort'")] = None


class Aborted(msgspec.Struct):
    """Number of ended requests."""

    aborted: int
    success: bool = True


class Aborts:
    """Running requests by id, and the handler that ends those of the same API key."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Callable[[], None]]] = {}

    @contextmanager
    def running(self, named: Sequence[tuple[str, Callable[[], None]]]) -> Iterator[None]:
        """Let each id end its request while the block runs. Ids may repeat."""
        keys = [((owner(), rid), abort) for rid, abort in named]
        for key, abort in keys:
            self._running.setdefault(key, []).append(abort)
        try:
            yield
        finally:
            for key, abort in keys:
                self._running[key].remove(abort)
                if not self._running[key]:
                    del self._running[key]

    async def handle(self, body: AbortBody) -> Aborted:
        if not body.rid and not body.abort_all:
            raise InvalidParameter("rid", "give rid, or abort_all")
        asker = owner()
        found = [
            abort
            for key, aborts in self._running.items()
            if key[0] == asker and (body.abort_all or key[1] == body.rid)
            for abort in aborts
        ]
        for abort in found:
            abort()
        return Aborted(len(found))


# Generate -----------------------------------------------------------------------------------------


_NAMES = sglang_names()


class _Request(msgspec.Struct, frozen=True):
    """Prompt of a body, checked and parsed."""

    prompt: Prompt
    job: generation.GenerateRequest
    rid: str
    texts: bool

    def id_of(self, index: int) -> str:
        """Return the id of one of its samples."""
        return f"{self.rid}-{index}" if index else self.rid


class Generate:
    """Handler of `/generate`."""

    def __init__(self, served: ServedModel, aborts: Aborts, sessions: Sessions) -> None:
        self._served = served
        self._aborts = aborts
        self._sessions = sessions

    async def handle(self, body: GenerateBody) -> dict[str, Any] | list[dict[str, Any]] | Stream:
        begun = time.monotonic()
        requests, turn = await self._in_session(body, self._parse(body))
        if body.stream:
            return Stream(self._stream(body, requests, turn, begun))
        with self._running(body, requests, turn) as shots:
            results = await shots.results()
            if turn is not None:
                self._sessions.end(turn, results[0].outputs[0], shots)
        elapsed = time.monotonic() - begun
        replies = await call_for(rows_of(results), _replies, requests, results, elapsed)
        return replies if _is_batch(body, requests) else replies[0]

    def _parse(self, body: GenerateBody) -> list[_Request]:
        model = check_name(self._served.model_info, body.model)
        info = self._served.model_info
        vocab_size = info.vocab_size
        if body.text is not None:
            prompts = parse_prompts(body.text, "text", vocab_size)
        else:
            prompts = parse_prompts(body.input_ids or [], "input_ids", vocab_size)
        count = len(prompts)
        sampling = _per_prompt(body.sampling_params, count, "sampling_params", SamplingParamsBody())
        rids = _per_prompt(body.rid, count, "rid", "")
        logprobs = _per_prompt(body.return_logprob, count, "return_logprob", False)
        starts = _per_prompt(body.logprob_start_len, count, "logprob_start_len", -1)
        tops = _per_prompt(body.top_logprobs_num, count, "top_logprobs_num", 0)
        salts = _per_prompt(body.cache_salt, count, "cache_salt", "")
        keys = _per_prompt(body.extra_key, count, "extra_key", "")
        paths = _per_prompt(body.lora_path, count, "lora_path", None)
        shared = isinstance(body.rid, str) and count > 1
        handling = handling_of(body)
        requests = []
        for i, prompt in enumerate(prompts):
            listed = isinstance(body.sampling_params, list)
            param = f"sampling_params[{i}]" if listed else "sampling_params"
            settings = sampling[i]
            fields = sampling_fields(settings, "generate")
            fields["max_tokens"] = settings.max_new_tokens
            if logprobs[i]:
                fields["logprobs"] = True
                fields["top_logprobs"] = tops[i]
                start = starts[i]
                if body.logprob_start_len is None and settings.max_new_tokens == 0:
                    start = 0
                if start != -1:
                    fields["prompt_logprobs_from"] = start
            job = generation.GenerateRequest(
                prompt.parts(),
                _params(fields, info, param),
                sglang_constraint(settings, param),
                salts[i] or keys[i],
                bool(body.return_cache_report),
                adapter_of(self._served, model, paths[i], "lora_path"),
                handling,
                param=_prompt_field(body, i),
                sampling=param,
            )
            rid = f"{rids[i]}-{i}" if shared else rids[i] or uuid.uuid4().hex
            texts = bool(body.return_text_in_logprobs)
            requests.append(_Request(prompt, job, rid, texts))
        check_samples(sum(request.job.params.n for request in requests), "sampling_params")
        return requests

    async def _in_session(
        self, body: GenerateBody, requests: list[_Request]
    ) -> tuple[list[_Request], Turn | None]:
        """Put the prompt behind the session's earlier turns, if the body names a session."""
        params = body.session_params
        if params is None:
            return requests, None
        if _is_batch(body, requests):
            raise InvalidParameter("session_params", "session_params: give one prompt, and n: 1")
        (request,) = requests
        turn = await self._sessions.begin(params, request.prompt, request.rid)
        prompt = Prompt(ids=tuple(turn.prompt))
        # An unshared branch ends with the request.
        job = replace(request.job, parts=prompt.parts(), keep=request.job.handling.cache.share)
        return [replace(request, prompt=prompt, job=job)], turn

    @contextmanager
    def _running(
        self, body: GenerateBody, requests: list[_Request], turn: Turn | None
    ) -> Iterator[generation.GenerationStream]:
        """Run the prompts while the block runs; clients may end them by id."""
        jobs = [request.job for request in requests]
        with ExitStack() as stack:
            if turn is not None:
                stack.enter_context(self._sessions.running(turn))
            shots = generation.GenerationStream(self._served, jobs, stream=bool(body.stream))
            stack.enter_context(shots)
            stack.enter_context(self._aborts.running(_named(body, requests, shots)))
            if turn is not None:
                turn.abort = partial(shots.abort, 0)
            yield shots

    async def _stream(
        self, body: GenerateBody, requests: list[_Request], turn: Turn | None, begun: float
    ) -> AsyncGenerator[object, None]:
        batch = _is_batch(body, requests)
        jobs = [request.job for request in requests]
        # Choices are numbered through the batch; prompts may ask for different n.
        first = [sum(job.params.n for job in jobs[:i]) for i in range(len(jobs))]
        counts: dict[int, int] = {}
        grown: dict[int, _Grown] = {}
        cached: dict[int, int] = {}
        with self._running(body, requests, turn) as shots:
            async for prompt, event in shots:
                request = requests[prompt]
                if isinstance(event, Chunk):
                    if turn is not None:
                        turn.output.extend(event.token_ids)
                    if prompt not in counts:  # not before: now the prompt is known to fit
                        counts[prompt] = await self._prompt_tokens(request.prompt)
                    if event.cached_tokens is not None:
                        cached[prompt] = event.cached_tokens
                    choice = first[prompt] + event.index
                    sample = grown.setdefault(choice, _Grown(counts[prompt]))
                    replies = {choice: sample.add(request, event, cached.get(prompt, 0))}
                else:
                    if turn is not None:
                        self._sessions.end(turn, event.outputs[0], shots)
                    elapsed = time.monotonic() - begun
                    made = await call_for(rows_of([event]), _replies, [request], [event], elapsed)
                    replies = dict(enumerate(made, first[prompt]))
                for choice, reply in replies.items():
                    yield {**reply, "index": choice} if batch else reply

    async def _prompt_tokens(self, prompt: Prompt) -> int:
        """Count the prompt's tokens, which sglang's streams have in every event."""
        if prompt.ids is not None:
            return len(prompt.ids)
        text, tokenizer = prompt.text or "", self._served.tokenizer
        return len(await self._served.tokenize(len(text), tokenizer.encode, text))


@dataclass
class _Grown:
    """Growing text of one sample: sglang's streams repeat it in every event."""

    prompt_tokens: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, request: _Request, chunk: Chunk, cached: int) -> dict[str, Any]:
        self.text += chunk.text
        self.ids += chunk.token_ids
        meta: dict[str, Any] = {
            "id": request.id_of(chunk.index),
            "finish_reason": None,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": cached,
        }
        if request.job.params.logprobs:
            for name, new in _logprobs("output", chunk.logprobs, request).items():
                meta[name] = self.logprobs[name] = [*self.logprobs.get(name, ()), *new]
            meta["output_token_logprobs_length"] = len(self.logprobs["output_token_logprobs"])
        return {"text": self.text, "output_ids": list(self.ids), "meta_info": meta}


def _replies(
    requests: Sequence[_Request], results: Sequence[Generated], elapsed: float
) -> list[dict[str, Any]]:
    """Return every sample of every prompt."""
    return [
        _reply(request, result, index, elapsed)
        for request, result in zip(requests, results, strict=True)
        for index in range(len(result.outputs))
    ]


def _reply(request: _Request, result: Generated, index: int, elapsed: float) -> dict[str, Any]:
    """Return one finished sample."""
    output = result.outputs[index]
    meta: dict[str, Any] = {
        "id": request.id_of(index),
        "finish_reason": _finish_reason(output),
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "forced_tokens": output.forced_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "e2e_latency": elapsed,
    }
    if drafts := drafts_of([result.usage]):
        meta["drafts"] = drafts
    meta |= report_of(result)
    if request.job.params.logprobs:
        for side, tokens in (("input", result.prompt_logprobs), ("output", output.logprobs)):
            for name, rows in _logprobs(side, tokens, request).items():
                meta[name] = in_parts(rows)
        meta["output_token_logprobs_length"] = len(output.logprobs)
    return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta}


def _finish_reason(output: Output) -> Finish:
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.matched}
    return {"type": "abort", "message": "aborted by a client"}


def _logprobs(side: str, tokens: Sequence[TokenLogprob], request: _Request) -> dict[str, list[Any]]:
    """Return `{side}_token_logprobs` as [logprob, id, text], and requested
    `{side}_top_logprobs`."""
    columns: dict[str, list[Any]] = {
        f"{side}_token_logprobs": [
            [
                None if token.logprob is None else finite(token.logprob),
                token.token_id,
                token.text if request.texts else None,
            ]
            for token in tokens
        ]
    }
    if request.job.params.top_logprobs:
        columns[f"{side}_top_logprobs"] = [
            None
            if token.logprob is None
            else [[finite(lp), i, text if request.texts else None] for i, lp, text in token.top]
            for token in tokens
        ]
    return columns


def _params(fields: dict[str, Any], model: ModelInfo, param: str) -> SamplingParams:
    """Return a prompt's parameters; errors name the field below `param`, the path of its object."""
    try:
        return make_params(fields, model, _NAMES)
    except InvalidParameter as error:
        if (error.param or "").partition("[")[0] in SamplingParamsBody.__struct_fields__:
            raise InvalidParameter(f"{param}.{error.param}", f"{param}.{error}") from None
        raise


def _prompt_field(body: GenerateBody, index: int) -> str:
    """Return the field that holds a prompt."""
    name, value = ("input_ids", body.input_ids) if body.text is None else ("text", body.text)
    several = isinstance(value, list) and not isinstance(value[0], int)
    return f"{name}[{index}]" if several else name


def _per_prompt(value: T | list[T] | None, count: int, param: str, default: T) -> list[T]:
    """Return one entry per prompt of a field with one value for all or a list of them."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidParameter(
            param, f"{param} has {len(value)} entries for {count} prompt{'s' * (count != 1)}"
        )
    return value


def _named(
    body: GenerateBody, requests: Sequence[_Request], shots: generation.GenerationStream
) -> list[tuple[str, Callable[[], None]]]:
    """Return functions that end the prompts, by their own ids and by the client's common id."""
    named: list[tuple[str, Callable[[], None]]] = []
    for index, request in enumerate(requests):
        abort = partial(shots.abort, index)
        shared = {body.rid} if isinstance(body.rid, str) else set()
        named += [(rid, abort) for rid in shared | {request.rid} if rid]
    return named


def _is_batch(body: GenerateBody, requests: list[_Request]) -> bool:
    """Return whether the reply is a list: several prompts or samples, or a list of prompts."""
    if requests[0].job.params.n > 1 or isinstance(body.text, list):
        return True
    return body.input_ids is not None and isinstance(body.input_ids[0], list)
