"""Large inputs neither block the event loop nor exceed bounds."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.server import generate, score, server_state
from rootlace.runtime.server.http import generation, logprobs
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Done,
    Failed,
    Generate,
    Generated,
    Open,
    SamplingParams,
    Select,
    Selected,
    Text,
    Tokens,
)
from tests.server.conftest import Client, served

CHOICES = tuple(f" {number}" for number in range(40))
MakeClient = Callable[..., Client]


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each piece take a whole turn."""
    monkeypatch.setattr(server_state, "TURN_SECONDS", 0.0)


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.usefixtures("short_turns")
async def test_others_have_their_turns_between_choices(client: MakeClient) -> None:
    c = client()
    turns, seen = Turns(), []

    def script(request: EngineRequest) -> list[int]:
        seen.append(turns.count)
        return []

    c.engine.script = script
    c.send(Open(1, 1), Append(2, 1, (Text("Is it"),)), Select(3, 1, CHOICES))
    assert isinstance(await c.result(3), Selected)
    turns.stop()
    assert len(seen) == len(set(seen)) == len(CHOICES)


@pytest.mark.usefixtures("short_turns")
async def test_choices_that_end_before_others_begin_do_not_end_all(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), Append(2, 1, (Text("Is it"),)), Select(3, 1, CHOICES))
    selected = await c.result(3)
    assert isinstance(selected, Selected)
    await c.settle()
    assert len(selected.scores) == len(c.engine.submitted) == len(CHOICES)
    assert not c.engine.aborted and not c.engine.running


@pytest.mark.usefixtures("short_turns")
async def test_a_choice_that_fails_ends_those_that_were_begun(client: MakeClient) -> None:
    c = client()

    def script(request: EngineRequest) -> list[int] | Exception:
        return Overloaded("full") if len(c.engine.submitted) == 5 else []

    c.engine.script = script
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, (Text("Is it"),)), Select(3, 1, CHOICES))
    while len(c.engine.submitted) < 8:
        await asyncio.sleep(0)
    failing = c.engine.submitted[4].rid
    c.engine.step(failing)
    failed = await c.result(3)
    assert isinstance(failed, Failed) and (failed.code, failed.message) == ("overloaded", "full")
    begun = {request.rid for request in c.engine.submitted}
    assert len(begun) < len(CHOICES) and set(c.engine.aborted) == begun - {failing}


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_who_goes_meanwhile_leaves_nothing_behind(client: MakeClient, end: str) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, (Text("Is it"),)), Select(3, 1, CHOICES))
    while len(c.engine.submitted) < 8:
        await asyncio.sleep(0)
    if end == "cancel":
        c.send(Cancel(4, 1))
        assert isinstance(await c.result(3), Failed)
        assert isinstance(await c.result(4), Done)
    else:
        c.session.close()
        await c.settle()
    assert 8 <= len(c.engine.submitted) < len(CHOICES) and not c.engine.running


@pytest.mark.parametrize(
    ("bound", "what"),
    [
        ("MAX_CHARACTERS", "characters"),
        ("MAX_SCORED", "tokens to score"),
        ("MAX_TOKENS", "tokens, each with the prompt"),
    ],
)
async def test_choices_have_a_size_together(
    client: MakeClient, monkeypatch: pytest.MonkeyPatch, bound: str, what: str
) -> None:
    c = client()
    prompt, choices = Tokens((5,) * 20), (" a", " b", " c")

    async def ask(op: int) -> Any:
        c.send(Open(op, op), Append(op + 1, op, (prompt,)), Select(op + 2, op, choices))
        return await c.result(op + 2)

    good = await ask(1)
    assert isinstance(good, Selected)
    size = {
        "MAX_CHARACTERS": sum(len(choice) + 1 for choice in choices),
        "MAX_SCORED": sum(map(len, good.token_logprobs)),
        "MAX_TOKENS": sum(len(request.token_ids) for request in c.engine.submitted),
    }[bound]
    monkeypatch.setattr(score, bound, size)
    assert isinstance(await ask(11), Selected)
    monkeypatch.setattr(score, bound, size - 1)
    failed = await ask(21)
    assert isinstance(failed, Failed) and failed.code == "invalid_request"
    assert f"the choices are {size} {what}" in failed.message
    assert len(c.engine.submitted) == 6


async def test_log_probabilities_of_a_prompt_have_a_bound(
    client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = client()
    monkeypatch.setattr(generate, "MAX_PROMPT_LOGPROBS", 24)
    params = SamplingParams(max_tokens=0, logprobs=True, top_logprobs=3, prompt_logprobs_from=2)
    for op, length, ended in ((1, 8, Generated), (11, 9, Failed)):
        c.send(Open(op, op), Append(op + 1, op, (Tokens((5,) * length),)))
        c.send(Generate(op + 2, op, params=params))
        assert isinstance(event := await c.result(op + 2), ended)
    assert isinstance(event, Failed) and "28 log-probabilities of the prompt" in event.message
    assert len(c.engine.submitted) == 1


ASKED: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": "Once upon a time there was a little girl",
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
        "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 6, "sampling_seed": 1},
    },
    "/v1/completions": {
        "prompt": "Once upon a time there was a little girl",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 6,
        "seed": 1,
    },
    "/select": {"text": "Once upon a time", "choices": [" there", " a", " in"]},
}


@pytest.mark.parametrize("path", ASKED)
async def test_what_is_large_is_done_elsewhere_and_is_the_same(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    ids = ("id", "created", "e2e_latency")

    def without_chance(reply: dict[str, Any]) -> dict[str, Any]:
        meta = reply.get("meta_info", {})
        return {k: v for k, v in {**reply, **meta}.items() if k not in (*ids, "meta_info")}

    threads: set[int] = set()
    text = stories.token_text

    def noted(token_id: int) -> str:
        threads.add(threading.get_ident())
        return text(token_id)

    monkeypatch.setattr(stories, "token_text", noted)
    async with served(stories) as http:
        replies = []
        for rows, part in ((10**6, 10**6), (0, 2)):
            threads.clear()
            monkeypatch.setattr(server_state, "INLINE_ROWS", rows)
            monkeypatch.setattr(logprobs, "PART_ROWS", part)
            async with http.post(path, json=ASKED[path]) as reply:
                assert reply.status == 200, await reply.text()
                replies.append(without_chance(await reply.json()))
            if rows:
                assert threads == {threading.get_ident()}
    if path == "/select":
        assert threading.get_ident() not in threads
    assert replies[0] == replies[1]
    if path == "/generate":
        assert len(replies[1]["input_token_logprobs"]) > 4


async def test_log_probabilities_of_all_prompts_have_a_bound(
    stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_PROMPT_LOGPROBS", 16)
    nothing = {"max_new_tokens": 0}
    body = {"return_logprob": True, "top_logprobs_num": 1, "sampling_params": nothing}
    async with served(stories) as http:
        for prompts, status in ((2, 200), (3, 400)):
            asked = {**body, "input_ids": [[5, 6, 7, 8]] * prompts}
            async with http.post("/generate", json=asked) as reply:
                said = await reply.text()
                assert reply.status == status, said
        assert "of all prompts" in said
