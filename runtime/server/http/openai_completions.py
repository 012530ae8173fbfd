"""OpenAI's completions and chat completions."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec.structs import replace

from rootlace.runtime.server.http.body import Body, ignored, refused, with_fields
from rootlace.runtime.server.http.chat_pipeline import Chats, check_length
from rootlace.runtime.server.http.chat_request import (
    Budget,
    ChatRequest,
    Thinking,
    ToolChoice,
    budget_of,
    thinking_arguments,
)
from rootlace.runtime.server.http.constraints import openai_constraint, openai_options
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import (
    AnswerDelta,
    AnswerStream,
    FinalOutput,
    GenerateRequest,
    GenerationStream,
    Prepared,
    run,
)
from rootlace.runtime.server.http.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TextOffsets,
    chat_logprobs,
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
    one_line,
    sse,
    usage_of,
)
from rootlace.runtime.server.http.request_fields import (
    ContentPart,
    Messages,
    Prompt,
    SamplingBody,
    Tool,
    TopLogprobs,
    asked_top,
    check_samples,
    chosen_id,
    make_params,
    openai_fields,
    parse_prompts,
    placed,
    template_arguments,
    template_messages,
    text_of,
    tools_of,
    wants_usage,
    wants_usage_so_far,
    with_sampling,
)
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import call_for
from rootlace.runtime.server.tool_parsers.base import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Reasoning,
)
from rootlace.wire.protocol import Chunk, Generated, Output

# Completions --------------------------------------------------------------------------------------


DEFAULT_MAX_TOKENS = 16


@with_sampling("openai")
class CompletionBody(SamplingBody, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[str | None, refused("the model cannot infill")] = None


class CompletionChoice(msgspec.Struct):
    """Sample, complete; `matched_stop` is the stop string, pattern or token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    matched_stop: str | int | None


class CompletionReply(Envelope):
    """Reply to `POST /v1/completions`."""

    choices: list[CompletionChoice]
    usage: UsageReply


class _Request(msgspec.Struct, frozen=True):
    """Body, checked and parsed. `top` is None without logprobs."""

    model: str
    prompts: list[Prompt]
    jobs: list[GenerateRequest]
    echo: bool
    top: int | None
    usage_chunk: bool
    usage_so_far: bool
    id: str | None


class _UsageSoFar:
    """Usage in each chunk of a stream: of its prompt, and of its choice so far."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._choices: Counter[int] = Counter()

    def add(
        self, choice: int, tokens: int, prompt_tokens: int | None, prompt: int = 0
    ) -> dict[str, int]:
        """Return the usage after `tokens` more of `choice`; the first chunk has `prompt_tokens`."""
        if prompt_tokens is not None:
            self._prompts[prompt] = prompt_tokens
        self._choices[choice] += tokens
        counted, completion = self._prompts.get(prompt, 0), self._choices[choice]
        return {
            "prompt_tokens": counted,
            "completion_tokens": completion,
            "total_tokens": counted + completion,
        }

    def end(
        self, choice: int, output: Output, prompt_tokens: int, prompt: int = 0
    ) -> dict[str, int]:
        """Return the usage of a whole choice."""
        left = len(output.token_ids) - self._choices[choice]
        return self.add(choice, left, prompt_tokens, prompt)


class Completions:
    """Handler of completions."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def handle(self, body: CompletionBody) -> CompletionReply | Stream:
        parsed = self._parse(body)
        if body.stream:
            direct = DirectEvents(self._served.deliveries)
            return Stream(self._stream(parsed, direct), direct=direct)
        results = await run(self._served, parsed.jobs)
        choices = await call_for(rows_of(results), self._choices, parsed, results)
        head = envelope("cmpl", "text_completion", parsed.model, parsed.id)
        return {**head, "choices": choices, "usage": usage_of(results)}

    def jobs(self, body: CompletionBody) -> list[GenerateRequest]:
        """Return the generations of a body."""
        return self._parse(body).jobs

    def _parse(self, body: CompletionBody) -> _Request:
        model = check_name(self._served.model_info, body.model)
        fields = openai_fields(body)
        fields["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.logprobs is not None:
            fields["logprobs"] = True
            fields["top_logprobs"] = body.logprobs
            if body.echo:
                fields["prompt_logprobs_from"] = 0
        info = self._served.model_info
        prompts = parse_prompts(body.prompt, "prompt", info.vocab_size)
        params = make_params(fields, info, {"top_logprobs": "logprobs"})
        check_samples(len(prompts) * params.n, "n")
        alone = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        place = placed(self._served, body, model)
        job = GenerateRequest((), params, openai_constraint(body), param="prompt", **place)
        jobs = [
            replace(
                job,
                parts=prompt.parts(begin=body.add_special_tokens is not False),
                param="prompt" if alone else f"prompt[{index}]",
            )
            for index, prompt in enumerate(prompts)
        ]
        return _Request(
            model,
            prompts,
            jobs,
            echo=bool(body.echo),
            top=body.logprobs,
            usage_chunk=wants_usage(body),
            usage_so_far=wants_usage_so_far(body),
            id=chosen_id(body.request_id),
        )

    def _choices(self, parsed: _Request, results: list[Generated]) -> list[CompletionChoice]:
        return [
            self._choice(parsed, prompt, result, index)
            for prompt, result in enumerate(results)
            for index in range(len(result.outputs))
        ]

    def _choice(
        self, parsed: _Request, prompt: int, result: Generated, index: int
    ) -> CompletionChoice:
        """Return one sample of one prompt, complete."""
        output = result.outputs[index]
        echo = self._echo(parsed.prompts[prompt]) if parsed.echo else ""
        logprobs = None
        if parsed.top is not None:
            tokens = (*result.prompt_logprobs, *output.logprobs) if parsed.echo else output.logprobs
            # Counted from the prompt's end, so that a BOS, which the echo leaves out, counts as 0.
            tokenizer = self._served.tokenizer
            shown = text_length(tokenizer, result.prompt_logprobs) if parsed.echo else 0
            offsets = TextOffsets(tokenizer, len(echo) - shown)
            logprobs = completion_logprobs(tokens, parsed.top, offsets)
        choice, text = prompt * len(result.outputs) + index, echo + output.text
        return CompletionChoice(choice, text, logprobs, output.finish_reason, output.matched)

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._served.tokenizer.decode(prompt.ids or (), skip_special_tokens=False)

    async def _stream(self, parsed: _Request, direct: DirectEvents) -> AsyncGenerator[object, None]:
        head: dict[str, Any] = {**envelope("cmpl", "text_completion", parsed.model, parsed.id)}
        if parsed.usage_chunk:
            head["usage"] = None
        # The prompt's logprobs come first in the text but are known only at the end.
        whole = parsed.echo and parsed.top is not None
        n = parsed.jobs[0].params.n
        offsets: dict[int, TextOffsets] = {}
        so_far = _UsageSoFar() if parsed.usage_so_far else None
        results = []

        def written(prompt: int, chunk: Chunk) -> dict[str, Any]:
            choice = prompt * n + chunk.index
            text = chunk.text
            if choice not in offsets:
                echo = self._echo(parsed.prompts[prompt]) if parsed.echo else ""
                text = echo + text
                offsets[choice] = TextOffsets(self._served.tokenizer, len(echo))
            logprobs = None
            if parsed.top is not None:
                logprobs = completion_logprobs(chunk.logprobs, parsed.top, offsets[choice])
            if so_far is not None:
                tokens = len(chunk.token_ids)
                head["usage"] = so_far.add(choice, tokens, chunk.prompt_tokens, prompt)
            return {**head, "choices": [_piece(choice, text, logprobs)]}

        with GenerationStream(self._served, parsed.jobs, stream=not whole) as shots:
            shots.divert(direct, lambda chunk: sse(written(0, chunk)))
            async for prompt, event in shots:
                if isinstance(event, Chunk):
                    yield written(prompt, event)
                    continue
                results.append(event)
                for index, output in enumerate(event.outputs):
                    choice = prompt * n + index
                    if so_far is not None:
                        prompt_tokens = event.usage.prompt_tokens
                        head["usage"] = so_far.end(choice, output, prompt_tokens, prompt)
                    if whole:
                        row = call_for(rows_of([event]), self._choice, parsed, prompt, event, index)
                        yield {**head, "choices": [await row]}
                        continue
                    text = ""
                    if parsed.echo and choice not in offsets:  # nothing was generated
                        text = self._echo(parsed.prompts[prompt])
                    yield {**head, "choices": [{**_piece(choice, text, None), **_finish(output)}]}
        if parsed.usage_chunk:
            yield {**head, "choices": [], "usage": usage_of(results)}


def _piece(choice: int, text: str, logprobs: CompletionLogprobs | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}


def _finish(output: Output) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "matched_stop": output.matched}


# Chat completions ---------------------------------------------------------------------------------


_encode_text = msgspec.json.Encoder().encode
_ANY_TEXT = "\0text"
_ROLE = {"role": "assistant", "content": ""}
"""First delta of each answer."""


class Prediction(Body):
    """Text that the answer may resemble, such as text to edit."""

    type: Literal["content"]
    content: str | list[ContentPart]


@with_sampling("openai")
@with_fields(
    (refused("the answer is not appended to its prompt"), bool, "echo"),
    (refused("the chat template writes the special tokens"), bool, "add_special_tokens"),
    (refused("the only modality is 'text'", ["text"]), list[str], "modalities"),
    (refused("only text is produced"), dict[str, Any], "audio"),
    (refused("use tools"), list[Any], "functions"),
    (refused("use tool_choice"), str | dict[str, Any], "function_call"),
    (refused("there is no web search"), dict[str, Any], "web_search_options"),
    (ignored("thoughts are streamed as they are written"), bool, "stream_reasoning"),
    (ignored("ask for it in words"), str, "verbosity"),
    (ignored("nothing is moderated"), dict[str, Any], "moderation"),
)
class ChatBody(SamplingBody, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | _Allowed | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: Budget | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    prediction: Prediction | None = None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct, tag_field="type", tag="function"):
    function: _Named


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_Choice]


class _Allowed(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: _AllowedTools


class CalledFunction(TypedDict):
    """Function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallReply(TypedDict):
    """Call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """Answer, with thoughts and calls if there are any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """Sample, complete; `matched_stop` is the stop string, pattern or token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None


class ChatReply(Envelope):
    """Reply to `POST /v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: UsageReply


class _Chat(msgspec.Struct, frozen=True):
    """Body, checked and parsed. `top` is None without logprobs."""

    model: str
    prepared: Prepared
    top: int | None
    usage_chunk: bool
    usage_so_far: bool
    thoughts: bool
    id: str | None

    def usage(self, ended: FinalOutput) -> UsageReply:
        """Return OpenAI's usage of the whole answer."""
        usage = usage_of([ended.generated])
        details, counted = usage["completion_tokens_details"], ended.generated.usage
        usage["reasoning_tokens"] = details["reasoning_tokens"] = ended.reasoning_tokens
        if self.prepared.job.prediction:
            details["accepted_prediction_tokens"] = counted.accepted
            details["rejected_prediction_tokens"] = counted.rejected
        return usage


class ChatCompletions:
    """Handler of chat completions."""

    def __init__(self, served: ServedModel, chats: Chats) -> None:
        self._served = served
        self._chats = chats

    async def handle(self, body: ChatBody) -> ChatReply | Stream:
        request = await self._parse(body)
        if body.stream:
            direct = DirectEvents(self._served.deliveries)
            head = envelope("chatcmpl", "chat.completion.chunk", request.model, request.id)
            return Stream(self._stream(request, head, direct), direct=direct)
        ended, answers = await AnswerStream.whole(self._served, request.prepared)
        rows = rows_of([ended.generated])
        choices = await call_for(rows, self._choices, request, ended, answers)
        head = envelope("chatcmpl", "chat.completion", request.model, request.id)
        return {**head, "choices": choices, "usage": request.usage(ended)}

    async def jobs(self, body: ChatBody) -> list[GenerateRequest]:
        """Return the generation of a body."""
        return [(await self._parse(body)).prepared.job]

    async def _parse(self, body: ChatBody) -> _Chat:
        template, choice = _template(body), _tool_choice(body)
        top = asked_top(body.logprobs, body.top_logprobs)
        model = check_name(self._served.model_info, body.model)
        options = openai_options(body)
        constraint = openai_constraint(body, options)
        fields = openai_fields(body)
        limit = body.max_completion_tokens
        if (most := body.max_tokens if limit is None else limit) is not None:
            fields["max_tokens"] = most
        fields["logprobs"] = top is not None
        fields["top_logprobs"] = top
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", "continue_final_message excludes add_generation_prompt"
            )
        budget, predicted = body.thinking_budget, ""
        if body.thinking is not None:
            budget = budget_of(budget, body.thinking)
        if body.prediction is not None:
            predicted = text_of(body.prediction.content, "prediction.content")
            check_length(self._served, "prediction.content", len(predicted))
        request = ChatRequest(
            messages=template_messages(body.messages),
            fields=fields,
            names={} if limit is None else {"max_tokens": "max_completion_tokens"},
            tools=tools_of(body.tools),
            choice=choice,
            constraint=constraint,
            options=options,
            template=template,
            thinking_budget=budget,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            reasoning=body.separate_reasoning is not False,
            prediction=predicted,
            **placed(self._served, body, model),
        )
        usage_chunk, chosen = wants_usage(body), chosen_id(body.request_id)
        return _Chat(
            model=model,
            prepared=await self._chats.prepare(request),
            top=top,
            usage_chunk=usage_chunk,
            usage_so_far=wants_usage_so_far(body),
            thoughts=body.include_reasoning is not False,
            id=chosen,
        )

    def _choices(
        self, request: _Chat, ended: FinalOutput, answers: Sequence[Answer]
    ) -> list[ChatChoice]:
        """Return the samples, complete."""
        choices: list[ChatChoice] = []
        for index, answer in enumerate(answers):
            output = ended.generated.outputs[index]
            message = ChatMessage(content=answer.content)
            if answer.reasoning and request.thoughts:
                message.reasoning_content = answer.reasoning
            if answer.calls:
                message.content = answer.content or None
                message.tool_calls = [_call(call.name, call.arguments) for call in answer.calls]
            logprobs = None
            if request.top is not None:
                logprobs = chat_logprobs(self._served.tokenizer, output.logprobs, request.top)
            called = bool(answer.calls) and not ended.cut_calls[index]
            reason = _finish_reason(output, called)
            choices.append(ChatChoice(index, message, logprobs, reason, output.matched))
        return choices

    async def _stream(
        self, request: _Chat, fields: Envelope, direct: DirectEvents
    ) -> AsyncGenerator[bytes, None]:
        head: dict[str, Any] = {**fields}
        if request.usage_chunk:
            head["usage"] = None
        so_far = _UsageSoFar() if request.usage_so_far else None
        writers = [
            _Writer(self._served, request, head, index, so_far)
            for index in range(request.prepared.job.params.n)
        ]
        write = [writer.write for writer in writers]
        with AnswerStream(self._served, request.prepared, direct, write) as answers:
            async for event in answers.events():
                if not isinstance(event, FinalOutput):
                    yield writers[event.index].write(event)
                    continue
                data, outputs = b"", event.generated.outputs
                for writer, output, cut in zip(writers, outputs, event.cut_calls, strict=True):
                    data += writer.finish(output, cut, event.generated.usage.prompt_tokens)
                if request.usage_chunk:
                    data += sse({**head, "choices": [], "usage": request.usage(event)})
                direct.last = data


class _Writer:
    """Writer of one sample's deltas as OpenAI's streamed chunks, which begin with `head`."""

    def __init__(
        self,
        served: ServedModel,
        request: _Chat,
        head: dict[str, Any],
        index: int,
        so_far: _UsageSoFar | None,
    ) -> None:
        self._served = served
        self._request = request
        self._head = head
        self._index = index
        self._so_far = so_far
        self._calls = 0
        self._begun = False
        # Nearly all chunks differ only in their text.
        usual = self._event({"content": _ANY_TEXT})
        self._before, _, self._behind = usual.rpartition(msgspec.json.encode(_ANY_TEXT))

    def write(self, answer: AnswerDelta) -> bytes:
        """Return the events of new pieces of the answer."""
        top, so_far = self._request.top, self._so_far
        if so_far is not None:
            prompt_tokens = None if answer.begun is None else answer.begun.prompt_tokens
            self._head["usage"] = so_far.add(self._index, answer.tokens, prompt_tokens)
        begin = b"" if self._begun else self._event(_ROLE)
        self._begun = True
        if len(answer.deltas) == 1 and so_far is None and top is None:
            (delta,) = answer.deltas
            if isinstance(delta, Content):
                return begin + self._before + one_line(_encode_text(delta.text)) + self._behind
        written: list[dict[str, Any]] = []
        for delta in answer.deltas:
            match delta:
                case Content():
                    written.append({"content": delta.text})
                case Reasoning() if self._request.thoughts:
                    written.append({"reasoning_content": delta.text})
                case CallBegin():
                    self._calls += 1
                    call = {"index": self._calls - 1, **_call(delta.name, "")}
                    written.append({"tool_calls": [call]})
                case CallArguments():
                    call = {"index": self._calls - 1, "function": {"arguments": delta.text}}
                    written.append({"tool_calls": [call]})
        if top is not None and answer.logprobs:
            last = written.pop() if written else {}
            logprobs = chat_logprobs(self._served.tokenizer, answer.logprobs, top)
            begin += b"".join(map(self._event, written))
            return begin + self._event(last, logprobs=logprobs)
        return begin + b"".join(map(self._event, written))

    def finish(self, output: Output, cut: bool, prompt_tokens: int) -> bytes:
        """Return the last events."""
        if self._so_far is not None:
            self._head["usage"] = self._so_far.end(self._index, output, prompt_tokens)
        reason = _finish_reason(output, self._calls > 0 and not cut)
        last = self._event({}, finish_reason=reason, matched_stop=output.matched)
        return last if self._begun else self._event(_ROLE) + last

    def _event(self, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [{**choice, **more}]}
        return sse(chunk)


def _call(name: str, arguments: str) -> ToolCallReply:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_choice(body: ChatBody) -> ToolChoice:
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    if isinstance(choice, _Choice):
        return ToolChoice("required", choice.function.name)
    if isinstance(choice, _Allowed):
        allowed = choice.allowed_tools
        names = tuple(tool.function.name for tool in allowed.tools)
        return ToolChoice(allowed.mode, parallel=parallel, allowed=names)
    return ToolChoice(choice or "auto", parallel=parallel)


def _template(body: ChatBody) -> dict[str, Any]:
    """Return the template's arguments on whether and how hard the model is to think."""
    kwargs = body.chat_template_kwargs
    arguments = {} if kwargs is None else template_arguments(kwargs)
    if body.thinking is not None or body.reasoning_effort is not None:
        arguments |= thinking_arguments(body.thinking, body.reasoning_effort)
    if body.enable_thinking is not None:
        arguments["enable_thinking"] = body.enable_thinking
    return arguments


def _finish_reason(output: Output, called: bool) -> str:
    """Return OpenAI's reason: "tool_calls" for an answer that ended by itself with whole calls."""
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason
