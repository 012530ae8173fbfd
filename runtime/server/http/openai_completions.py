"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

from rootlace.runtime.server.http import generation
from rootlace.runtime.server.http.body import refused
from rootlace.runtime.server.http.constraints import openai_constraint
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.logprobs import (
    CompletionLogprobs,
    TextOffsets,
    completion_logprobs,
    rows_of,
    text_length,
)
from rootlace.runtime.server.http.replies import (
    DirectEvents,
    Envelope,
    Stream,
    UsageReply,
    envelope,
    sse,
    usage_of,
)
from rootlace.runtime.server.http.request_fields import (
    Prompt,
    SamplingBody,
    adapter_of,
    check_samples,
    chosen_id,
    handling_of,
    make_params,
    openai_fields,
    parse_prompts,
    wants_usage,
    with_sampling,
)
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import call_for
from rootlace.wire.protocol import Chunk, Generated, Output

DEFAULT_MAX_TOKENS = 16


@with_sampling("openai")
class CompletionBody(SamplingBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[str | None, refused("the model cannot infill")] = None


class CompletionChoice(TypedDict):
    """One sample, complete; `matched_stop` is the stop string, pattern or token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    matched_stop: str | int | None


class CompletionReply(Envelope):
    """The reply to `POST /v1/completions`."""

    choices: list[CompletionChoice]
    usage: UsageReply


@dataclass(frozen=True)
class _Request:
    """A body, checked and understood. `top` is None without logprobs."""

    model: str
    prompts: list[Prompt]
    jobs: list[generation.GenerateRequest]
    echo: bool
    top: int | None
    usage_chunk: bool
    id: str | None


class Completions:
    """The endpoint's handler."""

    def __init__(self, gateway: ServedModel) -> None:
        self._gateway = gateway

    async def handle(self, body: CompletionBody) -> CompletionReply | Stream:
        asked = self._parse(body)
        if body.stream:
            direct = DirectEvents()
            return Stream(self._stream(asked, direct), direct=direct)
        results = await generation.run(self._gateway, asked.jobs)
        choices = await call_for(rows_of(results), self._choices, asked, results)
        head = envelope("cmpl", "text_completion", asked.model, asked.id)
        return {**head, "choices": choices, "usage": usage_of(results)}

    def jobs(self, body: CompletionBody) -> list[generation.GenerateRequest]:
        """What is run for a body."""
        return self._parse(body).jobs

    def _parse(self, body: CompletionBody) -> _Request:
        model = check_name(self._gateway.model_info, body.model)
        fields = openai_fields(body)
        fields["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.logprobs is not None:
            if body.logprobs < 0:
                raise InvalidParameter("logprobs", "logprobs must not be negative")
            fields["logprobs"] = True
            fields["top_logprobs"] = body.logprobs
            if body.echo:
                fields["prompt_logprobs_from"] = 0
        info = self._gateway.model_info
        prompts = parse_prompts(body.prompt, "prompt", info.vocab_size)
        params = make_params(fields, info, {"top_logprobs": "logprobs"})
        check_samples(len(prompts) * params.n, "n")
        alone = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        job = generation.GenerateRequest(
            (),
            params,
            openai_constraint(body),
            body.cache_salt or "",
            bool(body.return_cache_report),
            handling=handling_of(body),
            adapter=adapter_of(self._gateway, model, body.adapter),
            param="prompt",
        )
        jobs = [
            replace(
                job,
                parts=prompt.parts(begin=body.add_special_tokens is not False),
                param="prompt" if alone else f"prompt[{index}]",
            )
            for index, prompt in enumerate(prompts)
        ]
        usage_chunk, chosen = wants_usage(body), chosen_id(body.request_id)
        return _Request(model, prompts, jobs, bool(body.echo), body.logprobs, usage_chunk, chosen)

    def _choices(self, asked: _Request, results: list[Generated]) -> list[CompletionChoice]:
        return [
            self._choice(asked, prompt, result, index)
            for prompt, result in enumerate(results)
            for index in range(len(result.outputs))
        ]

    def _choice(
        self, asked: _Request, prompt: int, result: Generated, index: int
    ) -> CompletionChoice:
        """One sample of one prompt, complete."""
        output = result.outputs[index]
        echo = self._echo(asked.prompts[prompt]) if asked.echo else ""
        logprobs = None
        if asked.top is not None:
            tokens = (*result.prompt_logprobs, *output.logprobs) if asked.echo else output.logprobs
            # Counted from the prompt's end, so that a BOS, which the echo leaves out, counts as 0.
            tokenizer = self._gateway.tokenizer
            shown = text_length(tokenizer, result.prompt_logprobs) if asked.echo else 0
            offsets = TextOffsets(tokenizer, len(echo) - shown)
            logprobs = completion_logprobs(tokens, asked.top, offsets)
        return {
            "index": prompt * len(result.outputs) + index,
            "text": echo + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "matched_stop": output.matched,
        }

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._gateway.tokenizer.decode(prompt.ids or (), skip_special_tokens=False)

    async def _stream(self, asked: _Request, direct: DirectEvents) -> AsyncGenerator[object, None]:
        head: dict[str, Any] = {**envelope("cmpl", "text_completion", asked.model, asked.id)}
        if asked.usage_chunk:
            head["usage"] = None
        # The prompt's logprobs come first in the text but are known only at the end.
        whole = asked.echo and asked.top is not None
        n = asked.jobs[0].params.n
        offsets: dict[int, TextOffsets] = {}
        results = []

        def written(prompt: int, chunk: Chunk) -> dict[str, Any]:
            choice = prompt * n + chunk.index
            text = chunk.text
            if choice not in offsets:
                echo = self._echo(asked.prompts[prompt]) if asked.echo else ""
                text = echo + text
                offsets[choice] = TextOffsets(self._gateway.tokenizer, len(echo))
            logprobs = None
            if asked.top is not None:
                logprobs = completion_logprobs(chunk.logprobs, asked.top, offsets[choice])
            return {**head, "choices": [_piece(choice, text, logprobs)]}

        with generation.GenerationStream(self._gateway, asked.jobs, stream=not whole) as shots:
            shots.divert(
                direct, lambda chunks: b"".join([sse(written(0, chunk)) for chunk in chunks])
            )
            async for prompt, event in shots:
                if isinstance(event, Chunk):
                    yield written(prompt, event)
                    continue
                results.append(event)
                for index, output in enumerate(event.outputs):
                    choice = prompt * n + index
                    if whole:
                        made = call_for(rows_of([event]), self._choice, asked, prompt, event, index)
                        yield {**head, "choices": [await made]}
                        continue
                    text = ""
                    if asked.echo and choice not in offsets:  # nothing was generated
                        text = self._echo(asked.prompts[prompt])
                    yield {**head, "choices": [{**_piece(choice, text, None), **_finish(output)}]}
        if asked.usage_chunk:
            yield {**head, "choices": [], "usage": usage_of(results)}


def _piece(choice: int, text: str, logprobs: CompletionLogprobs | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}


def _finish(output: Output) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "matched_stop": output.matched}
