"""Pipeline of chat requests: turns a conversation into a generation and a parser of its answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from rootlace.runtime.server.http.chat_request import (
    ChatRequest,
    Pin,
    Tool,
    ToolChoice,
    Written,
    calls_among_text,
    calls_or_format,
    forced_call,
    pieces_of,
)
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import GenerateRequest, Prepared
from rootlace.runtime.server.http.request_fields import make_params
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.tokenizer import Joined, Tokenizer
from rootlace.runtime.server.tool_parsers.base import Format
from rootlace.runtime.server.tool_parsers.listing import RESULTS, ToolPrompt
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Part, Text, Tokens

log = logging.getLogger(__name__)

# Most characters tokenized at once: they take about a second of a thread. Models with a long
# context may get more, by this many characters per token of the context.
MAX_CHARACTERS = 2**20
_CHARACTERS_PER_TOKEN = 8
# Characters that show how a prompt ends.
_END_CHARACTERS = 64


class Chats:
    """Preparation of chat requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._prompts: dict[bool, ToolPrompt] = {}
        self._warned = False
        self._warned_unread = False

    @property
    def format(self) -> Format:
        """Format of calls and thoughts of the served model."""
        return self.tool_prompt().format

    def tool_prompt(self, with_tools: bool = False) -> ToolPrompt:
        """Return the tools' prompt for the template of conversations `with_tools` or without."""
        chat = self.model.chat
        named = with_tools and chat.tool_use is not None
        if named not in self._prompts:
            self._prompts[named] = ToolPrompt(chat.tool_use if named and chat.tool_use else chat)
        return self._prompts[named]

    async def prepare(self, request: ChatRequest) -> Prepared:
        """Prepare a request. Raises InvalidParameter for wrong or conflicting fields.

        A long conversation is written in a thread: templates are interpreted.
        """
        return await self.model.tokenize(_length(request), self._prepare, request)

    def _prepare(self, request: ChatRequest) -> Prepared:
        tools = offered_tools(request.choice, request.tools)
        form = self.tool_prompt(bool(tools)).format
        if tools:
            check_names(tools, form, self.model.tokenizer)
        fields = dict(request.fields)
        forced = request.choice.kind == "required"
        rule = request.constraint
        if forced and rule is not None and rule.is_format:
            rule = None  # a format describes a text, and there will be a call
        # A constraint applies to the whole answer, and rules out calls and thoughts.
        whole = rule is not None and rule.constraint.kind != "structural_tag"
        begins = request.add_generation_prompt and not request.continue_final
        # A format applies to text: calls may come in its place, where an answer begins.
        either = whole and rule is not None and rule.is_format and bool(tools) and begins
        whole = whole and not either
        # The tags around calls and thoughts are special tokens of some vocabularies.
        if tools and not whole:
            fields["skip_special_tokens"] = False
        elif form.always:
            fields.setdefault("skip_special_tokens", False)
        info = self.model.model_info
        params = make_params(fields, info, request.names, request.defaults)
        parts = self.render(request, tools)
        end = _end_of(parts)
        thoughts = form.thoughts(end) if begins and form.always else None
        lead, budget = "", request.thinking_budget
        if thoughts is not None and request.thinks is False:
            lead = self._unthought(request, tools, parts, form, end)
            if tools and rule is None and not (lead or forced or form.no_thoughts()):
                budget = 0  # thoughts begun all the same are ended at once
            else:
                thoughts = None
                if not (lead or tools or whole):
                    lead = form.answer_prefix(end)
        begun: tuple[Text, ...] = ()
        if forced:
            if rule is not None:
                raise InvalidParameter("tool_choice", "a forced call excludes other constraints")
            begun, rule = forced_call(request.choice, tools, form, request.options)
        elif either and rule is not None:
            rule = calls_or_format(rule, request.choice, tools, form)
        elif rule is None and tools:
            rule = calls_among_text(tools, form, request.options)
        prefix = "".join([text.text for text in begun]) if begun else ""
        before = end + lead if thoughts is None else ""
        answer = form.answer_prefix(before) if whole and begins else ""
        if thoughts is not None:
            # Behind its thoughts the model writes this text itself.
            thoughts = msgspec.structs.replace(thoughts, then=prefix or answer, budget=budget)
            prefix, begun = "", ()
        else:
            lead += answer
        parts = (*parts, *((Text(lead, special=True),) if lead else ()), *begun)
        pins = self._pins(request, tools, parts) if request.pinned else ()
        written = self._write(request, parts) if request.keep else None
        if written is not None:
            parts = (Tokens(tuple(written.ids)),)
        offered = {tool.name: tool.parameters for tool in tools} if not whole else {}
        # A constrained answer without thoughts cannot begin with any.
        reasoning = request.reasoning and form.always
        reasoning = reasoning and (thoughts is not None or not (whole or forced))
        parser = partial(form.parser, end + lead, offered, reasoning)
        return Prepared(
            job=GenerateRequest(
                parts,
                params,
                rule,
                request.namespace,
                request.cache_report,
                request.adapter,
                request.handling,
                pins,
                keep=written is not None,
                prediction=request.prediction,
                param=request.param,
                thoughts=thoughts,
            ),
            parser=parser if offered or form.always else None,
            prefix=prefix,
            several=request.choice.parallel is not False,
            written=written,
        )

    def _unthought(
        self,
        request: ChatRequest,
        tools: tuple[Tool, ...],
        parts: tuple[Part, ...],
        form: Format,
        end: str,
    ) -> str:
        """Return the text that keeps a model from thinking, behind a prompt that allows thoughts.
        The text ends thoughts that the prompt begins. Otherwise the text is empty thoughts, where
        the template ignores the request not to think."""
        if (left := form.leave_thoughts(end)) or not form.no_thoughts():
            return left
        flags = {name: True for name in ("thinking", "enable_thinking") if name in request.template}
        thinking = replace(request, template={**request.template, **flags})
        return form.no_thoughts() if self.render(thinking, tools) == parts else ""

    def _write(self, request: ChatRequest, parts: tuple[Part, ...]) -> Written | None:
        """Tokenize the prompt of a kept branch: earlier tokens, then those of new text. Returns
        None if the text is too long to be tokenized here."""
        pieces = pieces_of(parts)
        if sum(len(piece.text) for piece in pieces) > _max_characters(self.model):
            return None
        text, encode = Joined.of(pieces), self.model.tokenizer.encode_pieces
        rest = None if request.behind is None else request.behind.rest(text)
        if request.behind is None or rest is None:
            return Written(text, encode(pieces, begin=bool(pieces) and not pieces[0].special))
        before = request.behind.ids
        return Written(text, [*before, *encode(rest, before[-1])])

    def prepare_text(self, request: ChatRequest, parts: tuple[Part, ...]) -> Prepared:
        """Prepare `parts` that are no conversation: text follows them."""
        info = self.model.model_info
        params = make_params(request.fields, info, request.names, request.defaults)
        job = GenerateRequest(
            parts,
            params,
            request.constraint,
            request.namespace,
            request.cache_report,
            request.adapter,
            request.handling,
        )
        return Prepared(job, parser=None)

    def render(self, request: ChatRequest, tools: tuple[Tool, ...]) -> tuple[Part, ...]:
        """Write the conversation with the model's template. Raises InvalidRequest, which names its
        field, where the template refuses it."""
        prompt = self.tool_prompt(bool(tools))
        messages, left = request.messages, None
        try:
            if tools or any(one["role"] in RESULTS or "tool_calls" in one for one in messages):
                listed = [tool.for_template() for tool in tools]
                messages, left, missing = prompt.write(messages, listed)
                if missing:
                    which = "tool_use" if prompt is not self.tool_prompt() else ""
                    self._check_missing(missing, which)
            if tools and not prompt.reads:
                self._tell_unread(prompt)
            return prompt.template.render(
                messages,
                tools=left,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final,
                **({"continue_final": True} if request.continue_final else {}),
                **request.template,
            )
        except RecursionError:
            raise InvalidParameter("tools", "tools: they are nested too deeply") from None
        except InvalidRequest as error:
            error.param = error.param or request.param
            raise

    def _check_missing(self, missing: Sequence[str], named: str) -> None:
        """Log once that the server writes `missing` parts, which the template lacks, in its own
        words. Raises InvalidParameter if the server was started to refuse that."""
        which = f"the chat template {named}".rstrip() + f" of {self.model.model_info.name!r}"
        says = f"{which} has no place for {' and '.join(missing)}"
        if self.model.config.tools == "template-only":
            param = "tools" if "tools" in missing else "messages"
            raise InvalidParameter(
                param, f"{says} (the server was started with --tools template-only)"
            )
        if not self._warned:
            self._warned = True
            log.warning("%s: the server writes them in words of its own", says)

    def _tell_unread(self, prompt: ToolPrompt) -> None:
        """Log once that the model was trained to call in a form that is not parsed."""
        if not self._warned_unread:
            self._warned_unread = True
            log.warning(
                "the chat template of %r writes calls in a form that is not read: behind %r a call "
                "is held to JSON, and any other form stays text",
                self.model.model_info.name,
                prompt.format.trigger,
            )

    def _pins(
        self, request: ChatRequest, tools: tuple[Tool, ...], parts: tuple[Part, ...]
    ) -> tuple[Pin, ...]:
        """Return the pins by their ends, without empty ones. Of pins with the same end, the
        longest-lived stays."""
        caches = self.model.model_info.caching and request.handling.cache.share
        if not caches:
            return ()
        text, pins = Joined.of(pieces_of(parts)), []
        for pinned in request.pinned:
            other = replace(request, messages=pinned.messages, continue_final=False)
            end = text.common(Joined.of(pieces_of(self.render(other, tools))))
            pins.append(Pin(end, pinned.cache))
        pins.sort(key=lambda pin: (pin.end, pin.cache.ttl or 0.0))
        return tuple({pin.end: pin for pin in pins if pin.end}.values())

    async def encode(self, request: ChatRequest) -> list[int]:
        """Tokenize the conversation, with the text that forces a call. Raises InvalidParameter if
        it is too long to count."""
        parts = (await self.prepare(request)).job.parts
        pieces = pieces_of(parts)
        length = sum(len(piece.text) for piece in pieces)
        check_length(self.model, request.param, length)
        return await self.model.tokenize(
            length,
            self.model.tokenizer.encode_pieces,
            pieces,
            begin=bool(pieces) and not pieces[0].special,
        )

    async def fitting(self, request: ChatRequest) -> ChatRequest:
        """Drop the oldest turns of the request, as few as let prompt and answer fit. Leading system
        messages and the last turn stay. An answer without `max_tokens` gets an eighth of the
        context."""
        most = self.model.max_prompt
        reserve = min(request.fields.get("max_tokens") or most // 8, most // 2)
        turns = [at for at, one in enumerate(request.messages) if one["role"] == "user"]
        lead = (
            [one for one in request.messages[: turns[0]] if one["role"] == "system"]
            if turns
            else []
        )

        async def fits(dropped: int) -> bool:
            short = without(dropped)
            if _length(short) > _max_characters(self.model):
                return False
            return len(await self.encode(replace(short, keep=False, behind=None))) + reserve <= most

        def without(dropped: int) -> ChatRequest:
            if not dropped:
                return request
            return replace(request, messages=[*lead, *request.messages[turns[dropped] :]])

        few, many = 0, max(len(turns) - 1, 0)
        while few < many:
            middle = (few + many) // 2
            if await fits(middle):
                many = middle
            else:
                few = middle + 1
        return without(few)


def offered_tools(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools to list in the prompt. Raises InvalidParameter for a choice without tools,
    or of an unknown tool."""
    if choice.allowed is not None:
        for name in {*choice.allowed} - {tool.name for tool in tools}:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {name!r}")
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if choice.kind == "required" and not tools:
        raise InvalidParameter("tool_choice", "tool_choice needs tools")
    return () if choice.kind == "none" else tuple(tools)


def check_names(tools: Sequence[Tool], form: Format, tokenizer: Tokenizer) -> None:
    """Raise InvalidParameter for a name written in special tokens. A constraint would let the model
    write these tokens, which only templates may write."""

    def special(name: str) -> list[int]:
        ids = tokenizer.encode(form.begin(name), add_special_tokens=False)
        return [token for token in ids if tokenizer.is_special(token)]

    usual = special("a_name")
    for tool in tools:
        if special(tool.name) != usual:
            raise InvalidParameter("tools", f"the name {tool.name!r} is written in special tokens")


def check_length(model: ServedModel, field: str, length: int) -> None:
    """Raise InvalidParameter for a text that is too long to be tokenized at once."""
    limit = _max_characters(model)
    if length > limit:
        raise InvalidParameter(field, f"{length} characters, at most {limit} are tokenized")


def _max_characters(model: ServedModel) -> int:
    """Return the most characters tokenized at once."""
    return max(MAX_CHARACTERS, _CHARACTERS_PER_TOKEN * model.model_info.context_length)


def _length(request: ChatRequest) -> int:
    """Estimate the work on a conversation, in characters of a text that takes as long to tokenize.
    It counts the template, and tokenizing the prompt of a kept branch."""
    characters = 0
    for message in request.messages:
        characters += len(message.get("content") or "")
    return (characters if request.keep else characters // 64) + 16 * len(request.messages)


def _end_of(parts: tuple[Part, ...]) -> str:
    end = ""
    for part in reversed(parts):
        if len(end) >= _END_CHARACTERS or not isinstance(part, Text):
            break
        end = part.text + end
    return end[-_END_CHARACTERS:]
