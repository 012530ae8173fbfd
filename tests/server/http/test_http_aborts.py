"""Requests ended by their id, and choices."""

import asyncio
import json
from typing import Any

from rootlace.wire.protocol import Open, Select
from tests.server.http.conftest import Served
from tests.server.http.fake_model import PAUSE


async def post(served: Served, path: str, status: int = 200, **body: Any) -> Any:
    async with served.http.post(path, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def test_abort(served: Served) -> None:
    served.model.script = lambda prompt, index: f"ab{PAUSE}" if "wait" in prompt else "ok"
    whole = asyncio.create_task(post(served, "/generate", text=["wait", "go"], rid=["r", "s"]))
    stream = {"text": "wait", "rid": "t", "stream": True}
    async with served.http.post("/generate", json=stream) as reply:
        event: dict[str, Any] = {}
        while event.get("text") != "ab":
            event = json.loads((await reply.content.readline()).removeprefix(b"data: ") or "{}")
            await reply.content.readline()
        assert (await post(served, "/abort_request", rid="t"))["aborted"] == 1
        *_, last, done, _ = (await reply.text()).split("\n\n")
        last_event = json.loads(last.removeprefix("data: "))
        assert done == "data: [DONE]"
    # Text that was streamed before the abort stays.
    assert last_event["text"] == "ab" and last_event["output_ids"] == list(b"ab")
    meta = last_event["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 2, 2)
    assert sum(session.closed for session in served.model.sessions) == 1
    # Aborting one prompt of several, twice, leaves the others running.
    for _ in range(2):
        await post(served, "/abort", rid="r")
    aborted, other = await whole
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert (aborted["text"], aborted["output_ids"]) == ("ab", list(b"ab"))
    assert (other["text"], other["meta_info"]["finish_reason"]["type"]) == ("ok", "stop")
    assert (await post(served, "/abort", rid="r"))["aborted"] == 0
    await post(served, "/abort", status=400)


async def test_select(served: Served) -> None:
    given = {"choices": ["a", "b"], "temperature": 0.5, "method": "greedy_token_selection"}
    reply = await post(served, "/select", text="abb", cache_salt="t", **given)
    assert (reply["choice"], reply["index"], reply["scores"]) == ("b", 1, [-8.0, -7.0])
    assert reply["meta_info"] == {"prompt_tokens": 4, "cached_tokens": 0}
    (opened, _, op) = served.model.sessions[-1].ops
    assert isinstance(opened, Open) and opened.namespace == "t"
    assert isinstance(op, Select)
    assert (op.method, op.temperature) == ("greedy_token_selection", 0.5)
    await post(served, "/select", status=400, text="a", choices=[])
    await post(served, "/select", status=400, text="a", input_ids=[1], choices=["a"])
