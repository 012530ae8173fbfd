"""Keys and namespaces over the real gateway: what a key may see, do and use."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.contracts.messages import GetPins, TreeNode, TreePage
from rootlace.runtime.server.auth import KeyEntry, new_key, write_keys
from rootlace.runtime.server.http.admin import OwnNumbers
from rootlace.wire.protocol import CacheReport
from rootlace.wire.sampling import PLAIN, Cache, Handling
from tests.scheduler.world import World
from tests.server import fake_engine
from tests.server.http.conftest import Serve, Served
from tests.server.http.real.served import engine_of, serve_real
from tests.waiting import until

Keyed = Callable[..., Awaitable[Served]]


@pytest.fixture
def keyed(folder: str, serve: Serve, reference: FastTokenizer, tmp_path: Path) -> Keyed:
    """Start a server that admits clients with one of the keys of these entries."""

    async def start(*entries: KeyEntry, **options: str) -> Served:
        path = str(tmp_path / "keys.json")
        write_keys(path, entries)
        return await serve_real(folder, serve, reference, keys_file=path, **options)

    return start


async def test_tenants_are_separate(real: Served) -> None:
    for path, body in (
        ("/generate", {"text": "x", "extra_key": "t"}),
        ("/v1/completions", {"prompt": "x", "cache_salt": "t"}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        assert (await real.post(path, body)).status == 200
    assert [submit.namespace for submit in engine_of(real).submitted] == ["t", "t", ""]


async def test_to_explain_the_cache_is_no_request_of_a_quota(keyed: Keyed) -> None:
    key, entry = new_key("a", requests_per_minute=1)
    served = await keyed(entry)
    headers = {"Authorization": f"Bearer {key}"}
    found = []
    for where in ("/cache/explain", "/cache/explain", "/select", "/select"):
        body = {"prompt": "a"} if "explain" in where else {"text": "a", "choices": ["b"]}
        found.append((await served.post(where, body, headers=headers)).status)
    assert found == [200, 200, 200, 429]


async def test_who_opens_many_sessions_closes_nobody_elses(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.server.http.sglang_sessions.MAX_SESSIONS", 4)
    made = [new_key(name) for name in "ab"]
    served = await keyed(*(entry for _, entry in made))
    engine = engine_of(served)

    async def ask(key: str, where: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with served.http.post(where, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    a, b = (key for key, _ in made)
    _, mine = await ask(b, "/open_session", capacity_of_str_len=1)
    _, busy = await ask(a, "/open_session", capacity_of_str_len=1)
    engine.paused = True
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    running = [
        asyncio.create_task(ask(key, "/generate", **body, session_params={"id": one}))
        for key, one in ((a, busy), (b, mine))
    ]
    await until(lambda: len(engine.running) == 2)
    opened = [(await ask(a, "/open_session", capacity_of_str_len=1))[1] for _ in range(6)]
    engine.pause(False)
    for status, said in await asyncio.gather(*running):
        assert (status, said["meta_info"]["finish_reason"]["type"]) == (200, "length")
    found = [
        (await ask(key, "/generate", **body, session_params={"id": one}))[0]
        for key, one in ((b, mine), (a, busy), *((a, one) for one in opened))
    ]
    assert found == [200, 200, *(400,) * 4, 200, 200]


async def test_each_key_has_a_namespace_and_pays_for_its_tokens(
    keyed: Keyed, reference: FastTokenizer
) -> None:
    made = [new_key(name) for name in "ab"]
    made.append(new_key("c", namespace="shared", tokens_per_minute=1))
    made[1] = new_key("b", max_priority=3, max_pins=2)
    served = await keyed(*(entry for _, entry in made), api_key="operator")
    engine = engine_of(served)

    async def ask(key: str, method: str, where: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"x-api-key": key}
        async with served.http.request(method, where, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None) if reply.status < 500 else ""

    a, b, c = (key for key, _ in made)
    used = []
    for key in (a, b, c, "operator"):
        for salt in ("", "@a/"):
            body = {"prompt": "hi", "max_tokens": 3, "cache_salt": salt}
            status, _ = await ask(key, "POST", "/v1/completions", body)
            # The first request spends the only token of key c.
            assert status == (429 if (key, salt) == (c, "@a/") else 200)
        used += [request.namespace for request in engine.submitted[len(used) :]]
    assert used == ["@a/", "@a/@a/", "@b/", "@b/@a/", "", "", "@a/"]
    # Each key takes turns in the queue.
    assert [request.max_pins for request in engine.submitted[1:3]] == [None, 2]
    turns = [request.client for request in engine.submitted]
    assert turns == [*("key a",) * 2, *("key b",) * 2, "key c", *("127.0.0.1",) * 2]
    for kind, asked in (("completions", {"prompt": "hi"}), ("embeddings", {"input": "hi"})):
        for priority, expected in ((3, 200), (4, 400)):
            body = {**asked, "priority": priority}
            status, reply = await ask(b, "POST", f"/v1/{kind}", body)
            assert status == expected
        assert "3 at most (max_priority)" in reply["error"]["message"]
    status, _ = await ask(a, "POST", "/cache/explain", {"prompt": "hi"})
    assert status == 200 and [(one[1], one[2]) for one in engine.explained] == [("@a/", "own")]
    await ask(b, "POST", "/v1/embeddings", {"input": "hi", "cache_salt": "s"})
    assert engine.submitted[-1].namespace == "@b/s"
    for method, path in (("POST", "/flush_cache"), ("GET", "/metrics")):
        assert (await ask(a, method, path))[0] == 403
    assert not engine.flushes
    text = (await served.get("/metrics", headers={"x-api-key": "operator"})).text
    prompt = len(reference.encode("hi").ids)
    assert f'rootlace_key_usage_total{{key="a",kind="prompt_tokens"}} {2 * prompt}.0' in text
    assert 'rootlace_key_usage_total{key="a",kind="completion_tokens"} 6.0' in text
    assert 'rootlace_key_usage_total{key="c",kind="refused"} 1.0' in text


async def test_marks_of_the_cache_do_not_count_the_prompt_again(keyed: Keyed) -> None:
    key, entry = new_key("a")
    served = await keyed(entry, api_key="operator")
    mark = {"cache_control": {"type": "ephemeral"}}
    text = [{"type": "text", "text": text, **mark} for text in ("one and", " two and")]
    body = {
        "model": "tiny",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": [*text, {"type": "text", "text": " three"}]}],
    }
    headers = {"x-api-key": key}
    assert (await served.post("/v1/messages", body, headers=headers)).status == 200
    asked = [len(request.token_ids) for request in engine_of(served).submitted]
    assert len(asked) == 3
    counted = (await served.get("/metrics", headers={"x-api-key": "operator"})).text
    assert f'rootlace_key_usage_total{{key="a",kind="prompt_tokens"}} {asked[-1]}.0' in counted


async def test_a_key_sees_its_own_part_of_the_tree(keyed: Keyed) -> None:
    key, entry = new_key("a")
    served = await keyed(entry, cache_reports="all")
    asked: list[str | None] = []

    async def ask(kind: type, namespace: str | None, under: int, limit: int) -> TreePage:
        asked.append(namespace)
        return TreePage((TreeNode(1, 0, namespace or "", "", 0, 1, (5,)),))

    engine_of(served).ask = ask  # type: ignore[method-assign]
    for query, shown in (("", ""), ("?namespace=s", "s"), ("?namespace=@b/", "@b/")):
        headers = {"Authorization": f"Bearer {key}"}
        (node,) = (await served.get(f"/cache/tree{query}", headers=headers)).json()["nodes"]
        assert asked[-1] == f"@a/{shown}" and node["namespace"] == shown


PROMPT = list(range(10, 40))
OTHERS: dict[str, list[list[int]]] = {
    "nothing": [],
    "a new prompt": [[50, 51, 52]],
    "a repeat": [PROMPT, PROMPT],
    "a shared beginning": [PROMPT, [*PROMPT[:10], 1, 2, 3], [*PROMPT[:20], 4]],
}


async def test_what_a_key_sees_of_the_tree_does_not_tell_what_others_do(keyed: Keyed) -> None:
    """Node ids and request ids of the engine would reveal how much all keys do together."""
    key, entry = new_key("b")
    headers = {"Authorization": f"Bearer {key}"}

    async def seen(others: list[list[int]]) -> list[Any]:
        """Return the reports that `b` gets after each of its requests, between requests of `a`."""
        served = await keyed(entry)
        world = World()

        async def ask(kind: type, *fields: Any) -> Any:
            view = world.scheduler.view
            return view.pins() if kind is GetPins else view.tree_page(*fields)

        async def look(where: str) -> Any:
            async with served.http.get(where, headers=headers) as reply:
                assert reply.status == 200
                found = await reply.json()
            for one in (*found.get("nodes", ()), *found.get("pins", ())):
                one.pop("idle_seconds", None)
                one.pop("seconds_left", None)
            return found

        engine_of(served).ask = ask  # type: ignore[method-assign]
        found = []
        for prompt, handling, lasts in (
            (PROMPT, PLAIN, False),
            ([*PROMPT[:10], 1, 2, 3], Handling(cache=Cache(pin=True)), False),
            ([*PROMPT, 60], PLAIN, True),
            ([*PROMPT, 60], PLAIN, True),
        ):
            for namespace, prompts in (("@a/", others), ("@b/", [prompt])):
                for one in prompts:
                    # The gateway numbers all objects that open sequences.
                    rid = world.submit(
                        one,
                        50 * lasts,
                        namespace=namespace,
                        program=f"{len(world.jobs)}:agent",
                        handling=handling if namespace == "@b/" else PLAIN,
                    )
                    while not lasts and world.jobs[rid].finish is None:
                        world.step()
            world.step()
            found += [await look("/cache/tree"), await look("/cache/pins")]
            tree = found[-2]["nodes"]
            assert tree[0]["parent"] == 0
            below = [await look(f"/cache/tree?under={node['id']}") for node in tree]
            for node, page in zip(tree, below, strict=True):
                children = [one for one in page["nodes"] if one["parent"] == node["id"]]
                assert children == [one for one in tree if one["parent"] == node["id"]]
                assert all(one["start"] >= node["end"] for one in page["nodes"])
            assert not (await look("/cache/tree?under=99"))["nodes"]
        (pin,) = found[-1]["pins"]
        assert [one["end"] for one in tree if one["id"] == pin["node"]] == [13]
        assert max(len(node.get("requests", ())) for node in tree) == 2
        assert {name for node in tree for name in node.get("programs", ())} == {"agent"}
        return found

    alone = await seen(OTHERS["nothing"])
    for what, others in OTHERS.items():
        assert await seen(others) == alone, what


async def test_a_report_tells_a_key_the_name_alone_of_its_program(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evicted(prompt: np.ndarray) -> CacheReport:
        return CacheReport(1, len(prompt) - 1, "evicted", lost=1, lost_to="12:an:agent")

    monkeypatch.setattr(fake_engine, "made_up_report", evicted)
    key, entry = new_key("a")
    served = await keyed(entry, api_key="operator")
    for sent, name in ((key, "an:agent"), ("operator", "12:an:agent")):
        headers = {"Authorization": f"Bearer {sent}"}
        body: dict[str, Any] = {"prompt": "one two three"}
        report = (await served.post("/cache/explain", body, headers=headers)).json()
        assert report["lost_to"] == name and f"the program {name}." in report["says"]
        body |= {"max_tokens": 1, "return_cache_report": True}
        async with served.http.post("/v1/completions", json=body, headers=headers) as reply:
            (report,) = (await reply.json())["usage"]["cache_reports"]
        assert report["lost_to"] == name


def test_numbers_of_its_own() -> None:
    numbers = OwnNumbers(limit=2)
    assert [numbers.of(one) for one in (70, 80, 70)] == [1, 2, 1]
    assert (numbers.id_of(2), numbers.id_of(3)) == (80, None)
    # The number that was used longest ago is forgotten.
    assert numbers.of(90) == 3
    assert (numbers.id_of(1), numbers.id_of(2), numbers.of(70)) == (None, 80, 4)
    assert (numbers.id_of(2), numbers.id_of(3)) == (80, None)


async def test_a_key_sees_its_own_counters_and_no_path(keyed: Keyed, folder: str) -> None:
    """Global counters would reveal the activity of other keys."""
    made = {name: new_key(name) for name in "ab"}
    served = await keyed(*(entry for _, entry in made.values()), api_key="operator")
    keys = {name: key for name, (key, _) in made.items()} | {"operator": "operator"}

    async def ask(name: str, where: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        method = "POST" if body else "GET"
        async with served.http.request(method, where, json=body or None, headers=headers) as reply:
            assert reply.status == 200
            return await reply.json()

    before = await ask("b", "/get_server_info")
    await ask("a", "/v1/completions", prompt="abc", max_tokens=2)
    assert await ask("b", "/get_server_info") == before
    assert before["status"] == {"branches": 0}
    await ask("b", "/v1/completions", prompt="abc", max_tokens=2)
    own = (await ask("b", "/get_server_info"))["status"]
    assert own["requests"] == 1 and own["completion_tokens"] == 2 and own["prompt_tokens"] > 0
    assert "sessions" in (await ask("operator", "/get_server_info"))["status"]
    for where in ("/get_server_info", "/get_model_info", "/v1/models"):
        assert folder not in str(await ask("b", where))
        assert folder in str(await ask("operator", where))
