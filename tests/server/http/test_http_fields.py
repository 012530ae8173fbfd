"""Fields that clients send to every server: served, accepted or refused, never ignored silently."""

import json
from typing import Any

import msgspec
import pytest

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.body import field_suggestion, nearest
from rootlace.wire.protocol import Text
from tests.server.http.conftest import Served

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "hi"}


async def _post(served: Served, body: dict[str, Any]) -> tuple[int, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with served.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def test_fields_that_are_served(served: Served) -> None:
    _, reply = await _post(served, {**CHAT, "request_id": "mine"})
    assert reply["id"] == "chatcmpl-mine"
    await _post(served, {**TEXT, "add_special_tokens": False})
    assert served.model.last_parts == (Text("hi", special=True),)  # no BOS


@pytest.mark.parametrize("nothing", [None, "", [], {}])
@pytest.mark.parametrize(
    "path, body",
    [
        (
            "/v1/chat/completions",
            {**CHAT, "stream_options": {}, "response_format": {"type": "text"}},
        ),
        ("/v1/completions", TEXT),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "text"}}}),
        ("/v1/messages", {**CHAT, "max_tokens": 3, "thinking": {"type": "disabled"}}),
        ("/api/chat", {**CHAT, "stream": False, "options": {"seed": 1}}),
        ("/generate", {"text": "hi", "sampling_params": [{"seed": 1}]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_an_unknown_field_without_a_value_asks_for_nothing(
    served: Served, path: str, body: dict[str, Any], nothing: Any
) -> None:
    def with_more(value: Any, more: Any) -> Any:
        if isinstance(value, list):
            return [with_more(one, more) for one in value]
        if isinstance(value, dict):
            return {"xyzzy": more} | {name: with_more(one, more) for name, one in value.items()}
        return value

    status = (await served.post(path, body)).status
    assert (await served.post(path, with_more(body, nothing))).status == status
    async with served.http.post(path, json=with_more(body, 0)) as reply:
        assert reply.status == 400 and "unknown field `xyzzy`" in await reply.text()


@pytest.mark.parametrize(
    "given, param, says",
    [
        ({"request_id": "x" * 129}, "request_id", "128"),
        ({"request_id": "x\ny"}, "request_id", "128"),
        ({"request_id": ""}, "request_id", "128"),
        ({"x" * 100: 3}, "x" * 61 + "...", "unknown field"),
        ({"max_new_tokens": 3}, "max_new_tokens", "Did you mean 'max_tokens'?"),
        ({"temprature": 3}, "temprature", "Did you mean 'temperature'?"),
        ({"stop_sequences": ["a"]}, "stop_sequences", "Did you mean 'stop'?"),
        ({"length_penalty": 2.0}, "length_penalty", "beam"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "shorten"),
        ({"echo": True}, "echo", "prompt"),
        ({"web_search_options": {}}, "web_search_options", "there is no web search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "echo and logprobs"),
        ({"best_of": 2}, "best_of", "equal to n"),
        ({"return_token_ids": True}, "return_token_ids", "/generate"),
        ({"bad_words": ["no"]}, "bad_words", "logit_bias"),
        ({"temprature": 0}, "temprature", "Did you mean 'temperature'?"),
        ({"do_sample": False}, "do_sample", "unknown field"),
        ({"return_hidden_states": True}, "return_hidden_states", "other endpoints"),
        ({"stop_reasons": False}, "stop_reasons", "unknown field"),
        ({"response_format": {"typ": "text"}}, "response_format.typ", "Did you mean 'type'?"),
    ],
)
async def test_refusals_say_what_to_do(
    served: Served, given: dict[str, Any], param: str, says: str
) -> None:
    status, reply = await _post(served, {**CHAT, **given})
    assert (status, reply["error"]["param"]) == (400, param)
    assert says in reply["error"]["message"]


@pytest.mark.parametrize(
    "path, field, meant",
    [
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "max_new_tokens", "max_output_tokens"),
        ("/v1/responses", "response_format", "text.format"),
        ("/v1/responses", "messages", "input"),
        ("/v1/completions", "max_completion_tokens", "max_tokens"),
        ("/v1/completions", "messages", "prompt"),
        ("/v1/chat/completions", "instructions", "messages"),
        ("/v1/chat/completions", "function", "tools"),
        ("/v1/chat/completions", "allowed_token_ids", None),
        ("/v1/messages", "output_format", "output_config.format"),
        ("/v1/messages", "enable_thinking", "thinking"),
        ("/generate", "max_tokens", "sampling_params.max_new_tokens"),
        ("/generate", "temperature", "sampling_params.temperature"),
        ("/generate", "response_format", "sampling_params.json_schema"),
    ],
)
async def test_a_field_of_another_interface(
    served: Served, path: str, field: str, meant: str | None
) -> None:
    async with served.http.post(path, json={field: 1}) as reply:
        message = (await reply.json())["error"]["message"]
    assert reply.status == 400 and f"unknown field `{field}`" in message
    _, asks, says = message.partition(". Did you mean ")
    assert says == (f"{meant!r}?" if meant else "") and bool(asks) == bool(meant)


@pytest.mark.parametrize(
    "path, field",
    [
        ("/v1/responses", "add_special_tokens"),  # not skip_special_tokens
        ("/v1/messages", "seed"),  # not speed
        ("/select", "echo"),  # not method
        ("/v1/responses", "dimensions"),  # not instructions
        ("/v1/embeddings", "truncate_prompt_tokens"),
    ],
)
async def test_a_field_that_others_have_is_no_misspelt_one(
    served: Served, path: str, field: str
) -> None:
    async with served.http.post(path, json={field: 1}) as reply:
        message = (await reply.json())["error"]["message"]
    assert reply.status == 400 and message.endswith("It is a field of other endpoints")


async def test_a_tool_in_another_interfaces_form(served: Served) -> None:
    flat = {"type": "function", "name": "f"}
    for path, tool, meant in (
        ("/v1/chat/completions", flat, "'function.name'"),
        ("/v1/responses", {"type": "function", "function": {}}, "'name'"),
    ):
        async with served.http.post(path, json={"tools": [tool]}) as reply:
            assert f"Did you mean {meant}?" in (await reply.json())["error"]["message"]


class _Leaf(msgspec.Struct):
    colour: int = 0


class _Root(msgspec.Struct):
    leaves: list[_Leaf] | dict[str, _Leaf] | None = None


def test_suggestions_look_where_the_field_stands() -> None:
    assert "'colour'" in field_suggestion(_Root, "leaves[3]", "color")
    assert "'colour'" in field_suggestion(_Root, "leaves[...]", "color")
    assert field_suggestion(_Root, "", "color") == ""
    assert "'leaves'" in field_suggestion(_Root, "", "leave")
    assert nearest("/v1/chat/completion", ["/v1/completions", "/v1/chat/completions"]) == [
        "/v1/chat/completions"
    ]


def test_a_long_name_is_compared_with_none() -> None:
    assert nearest("x" * 65, ["x" * 65]) == [] and nearest("x" * 63, ["x" * 64]) == ["x" * 64]


DEEP = json.loads("[" * 600 + "]" * 600)
EITHER = (200, 400)  # the depth limit depends on the releases of Python and msgspec


@pytest.mark.parametrize(
    "path, given, statuses",
    [
        (path, {"chat_template_kwargs": kwargs}, statuses)
        for path in ("/v1/chat/completions", "/tokenize")
        for kwargs, statuses in (({"self": 1}, (200,)), ({"x": DEEP}, EITHER))
    ]
    + [
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
                "tool_choice": "required",
            },
            statuses,
        )
        for schema, statuses in (
            ({"$defs": [1]}, (400,)),
            ({"$defs": "x"}, (400,)),
            ({"x": DEEP}, EITHER),
        )
    ],
)
async def test_values_that_a_template_could_stumble_over(
    served: Served, path: str, given: dict[str, Any], statuses: tuple[int, ...]
) -> None:
    chat: Any = ChatTemplate("{{ messages[0].content }}{{ tools }}", ["<|im_end|>"])
    served.model.chat = chat
    body = {"messages": CHAT["messages"], **given}
    async with served.http.post(path, json=body) as reply:
        assert reply.status in statuses, await reply.text()
