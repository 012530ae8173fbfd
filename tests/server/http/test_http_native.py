"""sglang's native endpoint."""

import json
from typing import Any

import pytest

from rootlace.wire.protocol import Tokens
from tests.server.http.conftest import Served


async def _post(served: Served, **body: Any) -> Any:
    async with served.http.post("/generate", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def _events(served: Served, **body: Any) -> list[Any]:
    async with served.http.post("/generate", json={**body, "stream": True}) as reply:
        assert reply.content_type == "text/event-stream"
        lines = [line for line in (await reply.text()).split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_text(served: Served) -> None:
    reply = await _post(served, text="abc", sampling_params={"max_new_tokens": 3}, rid="r1")
    assert (reply["text"], reply["output_ids"]) == ("hel", list(b"hel"))
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "forced_tokens": 0,
        "cached_tokens": 2,
    }


async def test_defaults(served: Served) -> None:
    reply = await _post(served, text="abc")
    params = served.model.last_generate.params
    assert (params.temperature, params.max_tokens, params.logprobs) == (1.0, 128, False)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}
    assert reply["meta_info"]["id"]
    reply = await _post(served, text="abc", sampling_params={"stop": "l"})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "l"}


async def test_batches(served: Served) -> None:
    replies = await _post(
        served,
        input_ids=[[1, 2], [3]],
        rid=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
    )
    assert [(r["text"], r["meta_info"]["id"]) for r in replies] == [("h", "a"), ("he", "b")]
    appended = [op.parts for op in served.model.sessions[-1].ops if hasattr(op, "parts")]
    assert appended == [(Tokens((1, 2)),), (Tokens((3,)),)]
    # A list of one is still a list; n > 1 of one prompt makes one.
    assert len(await _post(served, text=["x"])) == 1
    several = await _post(served, text="x", sampling_params={"n": 2})
    assert [r["text"] for r in several] == ["hello", "ello"]
    assert isinstance(await _post(served, input_ids=[5, 6]), dict)


async def test_logprobs(served: Served) -> None:
    reply = await _post(
        served,
        input_ids=list(b"abc"),
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, 104, "h"], [-0.5, 101, "e"]]
    assert meta["output_top_logprobs"][1] == [[-0.5, 101, "e"], [-1.5, 102, "f"]]
    assert len(meta["input_top_logprobs"]) == 2

    meta = (await _post(served, text="ab", return_logprob=True))["meta_info"]
    assert meta["input_token_logprobs"] == []  # from -1 on: no tokens of the prompt
    assert meta["output_token_logprobs"][0] == [-0.5, 104, None]
    assert "output_top_logprobs" not in meta

    meta = (await _post(served, text="ab", return_logprob=True, logprob_start_len=0))["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 256, None]
    assert len(meta["input_token_logprobs"]) == 3


async def test_stream_is_cumulative(served: Served) -> None:
    events = await _events(served, input_ids=[1, 2], return_logprob=True, rid="r")
    assert [e["text"] for e in events] == ["h", "he", "hel", "hell", "hello", "hello"]
    assert [len(e["output_ids"]) for e in events] == [1, 2, 3, 4, 5, 5]
    assert [len(e["meta_info"]["output_token_logprobs"]) for e in events] == [1, 2, 3, 4, 5, 5]
    assert [e["meta_info"]["prompt_tokens"] for e in events] == [2] * 6
    assert [e["meta_info"]["cached_tokens"] for e in events] == [1] * 6
    assert all(e["meta_info"]["finish_reason"] is None for e in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert "index" not in events[0]


async def test_stream_of_a_batch(served: Served) -> None:
    events = await _events(served, text=["a", "b"], sampling_params={"n": 2})
    assert all(event["meta_info"]["prompt_tokens"] == 2 for event in events)
    last = {event["index"]: event for event in events}
    assert {i: e["text"] for i, e in last.items()} == {0: "hello", 1: "ello", 2: "hello", 3: "ello"}
    assert all(e["meta_info"]["finish_reason"] for e in last.values())


async def test_sglangs_client_protocol(served: Served) -> None:
    """Send the requests that sglang's frontend sends to generate and to select."""
    text = "Q: "
    data = {
        "text": text,
        "sampling_params": {
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "max_new_tokens": 4,
            "stop": [],
            "stop_token_ids": [],
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": False,
            "regex": None,
            "json_schema": None,
            "n": 1,
        },
    }
    assert (await _post(served, **data))["text"] == "hell"
    prefill = {"max_new_tokens": 0, "temperature": 0}
    prompt_len = (await _post(served, text=text, sampling_params=prefill))["meta_info"][
        "prompt_tokens"
    ]
    scored = await _post(
        served,
        text=[text + choice for choice in ("yes", "no")],
        sampling_params=prefill,
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=max(prompt_len - 2, 0),
    )
    tokens = [[t[2] for t in r["meta_info"]["input_token_logprobs"]] for r in scored]
    assert tokens == [[":", " ", "y", "e", "s"], [":", " ", "n", "o"]]


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 3}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids[0]"),
        ({"input_ids": [99999]}, "input_ids"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"temperature": -1}]},
            "sampling_params[1].temperature",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"stop": [""]}]},
            "sampling_params[1].stop",
        ),
        ({"text": ["a", "boom"]}, "text[1]"),
        ({"text": "boom"}, "text"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"n": "x"}]},
            "sampling_params[1].n",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"custom_params": {"x": 1}}]},
            "sampling_params[1].custom_params",
        ),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 500}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "nonsense": 1}, "nonsense"),
    ],
)
async def test_bad_bodies(served: Served, body: dict[str, Any], param: str) -> None:
    async with served.http.post("/generate", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param), error


async def test_where_logprobs_of_a_prompt_may_begin(served: Served) -> None:
    for start in (-2, [-2]):
        reply = await served.post(
            "/generate", {"text": "a", "return_logprob": True, "logprob_start_len": start}
        )
        assert reply.status == 400 and ">= -1" in reply.json()["error"]["message"]
    assert (await _post(served, text="ab", return_logprob=True, logprob_start_len=-1))["text"]
