"""Reports on the cache: with a generation, for a branch as it is, over HTTP, in words."""

import json
from typing import Any

import msgspec
import pytest

from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import (
    Append,
    CacheReport,
    Explain,
    Explained,
    Generate,
    Generated,
    Open,
    SamplingParams,
    describe,
)
from tests.server.conftest import make_model
from tests.server.http.conftest import *  # noqa: F403 (fixtures)
from tests.server.http.conftest import Serve
from tests.server.operations import MakeClient, failed, prompt_of, text

TWO = SamplingParams(max_tokens=2, n=2)


async def test_a_generation_says_why_so_much_was_cached(client: MakeClient) -> None:
    c = client()
    c.send(
        Open(1, 1),
        Append(2, 1, text("Once upon a time there was")),
        Generate(3, 1, params=TWO, cache_report=True),
        Generate(4, 1, params=TWO),
    )
    generated, silent = await c.result(3), await c.result(4)
    assert isinstance(generated, Generated) and isinstance(silent, Generated)
    assert silent.facts.report is None
    assert [r.report for r in c.engine.submitted] == ["own", "", "", ""]
    report, prompt = generated.facts.report, c.engine.submitted[0].token_ids.tolist()
    assert report is not None and report.reason == "differs"
    decode = c.model.tokenizer.decode
    at = report.matched
    assert report.before == decode(prompt[:at], skip_special_tokens=False)
    assert report.goes_on == decode(prompt[at:])
    assert report.cached_instead == decode([1], skip_special_tokens=False)


async def test_a_branch_is_explained_as_it_stands(client: MakeClient) -> None:
    """Pending text counts, and stays pending."""
    c = client()
    c.send(
        Open(1, 1, namespace="tenant"),
        Append(2, 1, text("Once upon a ti")),
        Explain(3, 1),
        Append(4, 1, text("me")),
        Generate(5, 1),
    )
    explained = await c.result(3)
    assert isinstance(explained, Explained)
    ids, namespace, scope = c.engine.explained[0]
    assert ids == c.model.tokenizer.encode("Once upon a ti") and namespace == "tenant"
    assert scope == "own"
    await c.result(5)
    assert prompt_of(c) == c.model.tokenizer.encode("Once upon a time")


async def test_a_server_may_keep_its_cache_to_itself(client: MakeClient) -> None:
    c = client(cache_reports="off")
    c.send(Open(1, 1), Append(2, 1, text("Once")), Generate(3, 1, cache_report=True))
    await c.result(3)
    assert failed(c, 3)[0] == "invalid_request" and not c.engine.submitted
    c.send(Open(4, 2), Append(5, 2, text("Once")), Generate(6, 2))
    assert isinstance(await c.result(6), Generated)


async def ask(served: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with served.http.post(path, json=body) as reply:
        return reply.status, json.loads(await reply.read())


async def test_over_http(serve: Serve, stories: Tokenizer) -> None:
    model, engine = make_model(stories, eos=(2,))
    served = await serve(model)  # type: ignore[arg-type]
    prompt = {"prompt": "Once upon a time there was", "max_tokens": 1}
    status, reply = await ask(served, "/v1/completions", {**prompt, "return_cache_report": True})
    assert status == 200, reply
    (report,) = reply["usage"]["cache_reports"]
    assert report["reason"] == "differs" and report["says"].endswith("the cache has '<s>'.")
    _, reply = await ask(served, "/v1/completions", prompt)
    assert "cache_reports" not in reply["usage"]
    body = {"text": "Once upon", "return_cache_report": True}
    _, reply = await ask(served, "/generate", body)
    assert reply["meta_info"]["cache_report"]["reason"] == "differs"

    async with served.http.post(
        "/v1/completions", json={**prompt, "stream": True, "return_cache_report": True}
    ) as stream:
        lines = [line for line in (await stream.text()).splitlines() if line.startswith("data: {")]
    assert [bool(json.loads(line[6:]).get("usage")) for line in lines][-1]
    assert json.loads(lines[-1][6:])["usage"]["cache_reports"] == [report]

    status, explained = await ask(
        served, "/cache/explain", {"prompt": prompt["prompt"], "cache_salt": "s"}
    )
    assert status == 200 and explained == report
    assert engine.explained[-1][1] == "s"
    page = (await served.get("/cache/tree?namespace=s&limit=5")).json()
    assert page["nodes"][0]["head_text"] == "<s> Once upon a time there was"
    assert page["nodes"][0]["namespace"] == "s"


async def test_prompts_that_could_share_more(serve: Serve, stories: Tokenizer) -> None:
    model, _ = make_model(stories)
    served = await serve(model)  # type: ignore[arg-type]
    tale = " ".join(f"The {n} cats met {n + 3} dogs and {n * n} birds." for n in range(30))
    said = ""
    for name in ("Lily", "Tom"):
        body = {"prompt": f"{name} asked. {tale}", "max_tokens": 1, "return_cache_report": True}
        _, reply = await ask(served, "/v1/completions", body)
        said = reply["usage"]["cache_reports"][0]["advice"]
    (finding,) = (await served.get("/cache/lint")).json()["findings"]
    assert finding["says"] == said and finding["ours"].strip() == "Tom"
    assert (await served.get("/cache/lint?namespace=s")).json() == {"findings": []}


async def test_what_is_explained_is_what_would_be_sent(serve: Serve, stories: Tokenizer) -> None:
    """The report covers a completion's whole prompt: template, tools and forced calls included."""
    model, engine = make_model(stories)
    model.chat = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ think }}"
        "{% if tools %}{{ tools | length }}{% endif %}"
    )
    served = await serve(model)  # type: ignore[arg-type]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "Once upon a time"}]
    for path, body in [
        ("/v1/completions", {"prompt": "Once upon", "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": messages}),
        (
            "/v1/chat/completions",
            {
                "messages": messages,
                "tools": [tool],
                "tool_choice": "required",
                "chat_template_kwargs": {"think": "hard"},
            },
        ),
    ]:
        salted = {**body, "max_tokens": 1, "cache_salt": "s"}
        status, reply = await ask(served, path, salted)
        assert status == 200, reply
        status, reply = await ask(served, "/cache/explain", salted)
        assert status == 200, reply
        sent = engine.submitted[-1]
        assert engine.explained[-1][:2] == (sent.token_ids.tolist(), sent.namespace)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt"),
        ({"input": "a"}, "input"),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, "system"),
    ],
)
async def test_wrong_prompts_to_explain(
    serve: Serve, stories: Tokenizer, body: Any, param: str
) -> None:
    model, _ = make_model(stories)
    status, reply = await ask(await serve(model), "/cache/explain", body)  # type: ignore[arg-type]
    assert status == 400 and reply["error"]["param"] == param


def test_reports_in_words() -> None:
    assert describe(CacheReport(99, 99, "whole")) == "99 of 99 tokens were cached."
    assert describe(CacheReport(0, 9, "new")) == "None of the 9 tokens were cached."
    assert "12 more had been until 3.5 s ago" in describe(
        CacheReport(5, 99, "evicted", lost=12, lost_seconds=3.5)
    )
    assert "for another request" in describe(CacheReport(5, 99, "evicted", lost=1))
    assert "for the program p." in describe(CacheReport(5, 99, "evicted", lost=1, lost_to="p"))
    assert "flushed" in describe(CacheReport(5, 99, "flushed", lost=1))
    assert describe(CacheReport(5, 99, "new", saved_seconds=0.25)) == (
        "5 of 99 tokens were cached, which saved about 0.25 s; the 94 behind them are new."
    )
    differs = CacheReport(
        5, 9, "differs", before="at ", goes_on="10:31", cached_instead="10:30", continuations=3
    )
    assert describe(differs) == (
        "5 of 9 tokens were cached. Behind 'at ' the prompt goes on with '10:31', where the cache "
        "has '10:30' (and 2 other continuations)."
    )
    first = CacheReport(0, 9, "differs", goes_on="Hi", cached_instead="No", continuations=1)
    assert describe(first) == (
        "0 of 9 tokens were cached. The prompt begins with 'Hi', where the cache has 'No'."
    )
    for other in ("10:31", "10:31 in the", "10"):  # excerpts of so many tokens each
        same = msgspec.structs.replace(differs, cached_instead=other)
        assert describe(same) == (
            "5 of 9 tokens were cached. Behind 'at ' the prompt goes on with '10:31', which the "
            "cache has in other tokens (and 2 other continuations): there it was generated or cut "
            "apart elsewhere. Only equal tokens are shared."
        )
    cut = CacheReport(0, 9, "differs", goes_on="\ufffd", cached_instead="\ufffd", continuations=1)
    assert "where the cache has" in describe(cut)
    assert "own figures" in describe(CacheReport(0, 9, "scored"))
    assert "another namespace" in describe(CacheReport(0, 9, "namespace", elsewhere=7))
    assert "switched off" in describe(CacheReport(0, 9, "disabled"))
