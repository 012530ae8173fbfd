"""OpenAI's text completions, through the real `openai` client."""

from types import SimpleNamespace
from typing import Any

import pytest

from rootlace.runtime.server.http.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from rootlace.wire.protocol import Text, TokenLogprob, Tokens
from tests.server.http.conftest import Served


async def test_completion(served: Served) -> None:
    reply = await served.openai().completions.create(model="fake", prompt="say", seed=3)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("hello", "stop", 0)
    assert reply.object == "text_completion"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 5)
    assert reply.usage.total_tokens == 9
    assert reply.usage.prompt_tokens_details.cached_tokens == 2  # type: ignore[union-attr]
    params = served.model.last_generate.params
    assert (params.max_tokens, params.temperature, params.seed) == (16, 1.0, 3)
    # BOS first, then the text with its special tokens recognised.
    assert served.model.last_parts == (Text(""), Text("say", special=True))
    assert served.model.sessions[-1].closed


async def test_completion_of_several_prompts_and_samples(served: Served) -> None:
    reply = await served.openai().completions.create(model="fake", prompt=["ab", "abcd"], n=2)
    assert [(c.index, c.text) for c in reply.choices] == [
        (0, "hello"),
        (1, "ello"),
        (2, "hello"),
        (3, "ello"),
    ]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3 + 5, 18)


@pytest.mark.parametrize(
    "prompt, parts", [([104, 105], [(104, 105)]), ([[104], [105, 106]], [(104,), (105, 106)])]
)
async def test_completion_of_token_ids(
    served: Served, prompt: Any, parts: list[tuple[int, ...]]
) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt=prompt, echo=True, max_tokens=1
    )
    appended = [op.parts for op in served.model.sessions[-1].ops if hasattr(op, "parts")]
    assert appended == [(Tokens(ids),) for ids in parts]
    assert [c.text for c in reply.choices] == [bytes(ids).decode() + "h" for ids in parts]


async def test_completion_logprobs_with_echo(served: Served) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt="ab", echo=True, logprobs=2, max_tokens=2
    )
    choice = reply.choices[0]
    assert choice.text == "abhe"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", "a", "b", "h", "e"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    # Echoed text does not contain BOS, which takes no place.
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[3] == {"h": -0.5, "i": -1.5}


async def test_completion_scores_a_prompt_only(served: Served) -> None:
    reply = await served.openai().completions.create(
        model="fake", prompt="ab", echo=True, logprobs=0, max_tokens=0
    )
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == 3
    assert choice.logprobs.top_logprobs is None


def test_the_value_under_a_token_is_its_own() -> None:
    """A token keeps its own value: part of a character, and the less likely of two tokens "a"."""
    tokenizer: Any = SimpleNamespace(
        token_bytes={1: b"\xf0\x9f", 2: b" \xf0", 3: "\ufffd".encode()}
    )
    part = TokenLogprob(
        1, "\ufffd", -3.0, ((2, -0.5, " \ufffd"), (3, -1.0, "\ufffd"), (4, -2.0, "a"))
    )
    twice = TokenLogprob(4, "a", -4.0, ((5, -0.25, "a"), (6, -1.0, "b"), (7, -2.0, "b")))
    found = completion_logprobs([part, twice], 3, TextOffsets(tokenizer, 0))
    assert found["tokens"] == ["bytes:\\xf0\\x9f", "a"]
    assert found["top_logprobs"] == [
        {"bytes: \\xf0": -0.5, "\ufffd": -1.0, "a": -2.0, "bytes:\\xf0\\x9f": -3.0},
        {"a": -4.0, "b": -1.0},
    ]
    (entry, _) = chat_logprobs(tokenizer, [part, twice], 2)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xf0\\x9f", [0xF0, 0x9F])
    assert [(one["token"], one["bytes"]) for one in entry["top_logprobs"]] == [
        (" \\xf0", [0x20, 0xF0]),
        ("\ufffd", [0xEF, 0xBF, 0xBD]),
    ]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_streamed_completion_equals_the_whole_one(
    served: Served, logprobs: int | None
) -> None:
    given: dict[str, Any] = {"model": "fake", "prompt": ["a", "b"], "n": 2, "echo": True}
    given["logprobs"] = logprobs
    whole = await served.openai().completions.create(**given)
    stream = await served.openai().completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    texts, tokens, offsets, finish = [""] * 4, [[], [], [], []], [[], [], [], []], [""] * 4  # type: ignore[var-annotated]
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
        finish[choice.index] = choice.finish_reason or finish[choice.index]
        assert chunk.usage is None
    assert texts == [c.text for c in whole.choices]
    assert finish == [c.finish_reason for c in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    if logprobs is not None:
        assert tokens == [c.logprobs.tokens for c in whole.choices]
        assert offsets == [c.logprobs.text_offset for c in whole.choices]
