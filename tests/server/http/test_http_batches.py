"""OpenAI's files and batches, by OpenAI's client, over a gateway of scripts."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rootlace.runtime.server.auth import new_key, write_keys
from rootlace.runtime.server.http import batch_store, openai_batches
from rootlace.runtime.server.http.batch_runner import ROWS_AT_ONCE
from rootlace.runtime.server.http.batch_store import Batch, Bounds, FileStore, Storage
from rootlace.wire.errors import InvalidRequest, Overloaded, PinRefused
from tests.server.http.conftest import Serve, Served, stop
from tests.server.http.fake_model import PAUSE, FakeModel
from tests.waiting import soon

CHAT = "/v1/chat/completions"


def row(name: str, says: str = "hi", url: str = CHAT, **more: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": says}], **more}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


async def start(served: Served, rows: list[Any], endpoint: str = CHAT, key: str = "") -> Any:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    client = served.openai(key)
    content = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"a": "b"},
    )


async def until(served: Served, id_: str, *statuses: str, key: str = "") -> Any:
    async def ended() -> Any:
        while True:
            batch = await served.openai(key).batches.retrieve(id_)
            if batch.status in statuses:
                return batch
            await asyncio.sleep(0.01)

    return await soon(ended())


async def answers(served: Served, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await served.openai().files.content(file_id)).text
    lines = [json.loads(line) for line in text.splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


async def test_rows_are_answered_as_requests_are(serve: Serve, tmp_path: Path) -> None:
    served = await serve(FakeModel(files=str(tmp_path)))
    wrong = [
        row("url", url="/v1/completions"),
        row("field", stpo=1),
        row("engine", says="boom"),
        row("stream", stream=True),
        "{",
    ]
    rows = [row("a", max_tokens=2), "", *wrong, row("b", n=2)]
    batch = await start(served, rows)
    assert batch.metadata == {"a": "b"}
    batch = await until(served, batch.id, "completed")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
    good = await answers(served, batch.output_file_id)
    choices = {name: reply["body"]["choices"] for name, reply in good.items()}
    contents = {n: [c["message"]["content"] for c in each] for n, each in choices.items()}
    assert contents == {"a": ["he"], "b": ["hello", "ello"]}
    bad = await answers(served, batch.error_file_id)
    assert {name: reply["status_code"] for name, reply in bad.items()} == {
        "url": 400, "field": 400, "engine": 400, "stream": 400, None: 400,
    }  # fmt: skip
    assert "stop" in bad["field"]["body"]["error"]["message"]
    # Files and batches are listed in pages, latest first.
    client = served.openai()
    files = [file.id async for file in client.files.list(limit=1)]
    assert files[-1] == batch.input_file_id and len(files) == 3
    with pytest.raises(openai.BadRequestError, match="completed"):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(files[0])).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(files[0])
    other = await start(
        served,
        [{**row("c", url="/v1/completions"), "body": {"prompt": "x", "max_tokens": 1}}],
        "/v1/completions",
    )
    assert [each.id async for each in client.batches.list(limit=1)] == [other.id, batch.id]
    other = await until(served, other.id, "completed")
    reply = (await answers(served, other.output_file_id))["c"]
    assert reply["body"]["choices"][0]["text"] == "h" and other.error_file_id is None


async def test_another_server_goes_on_where_the_first_one_ended(
    serve: Serve, tmp_path: Path
) -> None:
    model = FakeModel(files=str(tmp_path))
    waiting: list[str] = []
    all_wait = asyncio.Event()

    def script(prompt: str, index: int) -> str:
        if "wait" not in prompt:
            return "one"
        waiting.append(prompt)
        if len(waiting) == ROWS_AT_ONCE:
            all_wait.set()
        return PAUSE

    model.script = script
    served = await serve(model)
    names = [f"r{i}" for i in range(12)]
    batch = await start(
        served, [row(n, "wait" if i % 3 == 2 else "go") for i, n in enumerate(names)]
    )
    output = tmp_path / "files" / f"file-{batch.id.removeprefix('batch_')}-output"
    # All rows that run at once wait; the other rows were written before.
    await soon(all_wait.wait())
    done = output.read_bytes()
    assert done.count(b"\n") == 8
    with pytest.raises(openai.BadRequestError, match="reads this file"):
        await served.openai().files.delete(batch.input_file_id)
    with pytest.raises(InvalidRequest, match="another server"):
        Storage(tmp_path, Bounds())
    await stop(served)
    assert output.read_bytes() == done
    # The server was killed while it wrote the last line.
    output.write_bytes(done[:-5])

    later = FakeModel(files=str(tmp_path))
    later.script = lambda prompt, index: "two"
    served = await serve(later)
    batch = await until(served, batch.id, "completed")
    assert (batch.request_counts.total, batch.request_counts.completed) == (12, 12)
    good = await answers(served, batch.output_file_id)
    said = [good[name]["body"]["choices"][0]["message"]["content"] for name in names]
    assert said.count("one") == 7 and len(later.sessions) == said.count("two") == 5


async def test_ends(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootlace.runtime.server.http.batch_runner.RETRY_SECONDS", 0.01)
    model = FakeModel(files=str(tmp_path))
    model.script = lambda prompt, index: PAUSE if "wait" in prompt else "one"
    served = await serve(model)
    client = served.openai()
    batch = await start(served, [row("a"), row("b", "wait")])
    queued = await start(served, [row("c")])
    while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    assert (await client.batches.retrieve(queued.id)).status == "validating"
    model.fail = Overloaded("full")
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await until(served, batch.id, "cancelled")
    assert list(await answers(served, batch.output_file_id)) == ["a"]
    assert all(session.closed for session in model.sessions[:2])
    # A row waits while the server has no room for it.
    await until(served, queued.id, "in_progress")
    model.fail = None
    await until(served, queued.id, "completed")
    # A row that can never be served fails at once.
    model.fail = PinRefused("no room")
    refused = await until(served, (await start(served, [row("d")])).id, "completed")
    assert refused.request_counts.failed == 1
    model.fail = None
    empty = await until(served, (await start(served, [""])).id, "failed")
    assert "0 rows" in empty.errors.data[0].message
    twice = [row("a"), "", row("b"), row("a", "ho")]
    refused = await until(served, (await start(served, twice)).id, "failed")
    (error,) = refused.errors.data
    assert (error.line, error.param) == (4, "custom_id") and "line 1" in error.message
    assert refused.output_file_id is None


async def test_refusals(serve: Serve, tmp_path: Path) -> None:
    served = await serve(FakeModel())
    with pytest.raises(openai.BadRequestError, match="--files"):
        await served.openai().files.create(file=b"{}", purpose="batch")
    served = await serve(FakeModel(files=str(tmp_path)))
    client = served.openai()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=b"{}", purpose="assistants")
    given: dict[str, Any] = {"input_file_id": "../lock", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError, match="lock"):
        await client.batches.create(endpoint=CHAT, **given)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(endpoint="/v1/responses", **given)
    for path in ("/v1/files/..%2Flock/content", "/v1/batches/x"):
        assert (await served.get(path)).status == 404
    assert (await served.post("/v1/files", {})).status == 415
    assert list((tmp_path / "files").iterdir()) == []


def test_bounds(tmp_path: Path) -> None:
    files = FileStore(tmp_path, Bounds(total_bytes=10, files=2, seconds=-1))
    kept = []
    for name in "ab":
        content = files.new_upload("")
        content.write_bytes(b"1234")
        kept.append(files.add(content, name, "batch", "").id)
    with pytest.raises(Overloaded, match="2 files"):
        files.new_upload("")
    files.grow(tmp_path / "x", "", 2)
    with pytest.raises(Overloaded, match="MiB"):
        files.grow(tmp_path / "x", "", 3)
    with pytest.raises(Overloaded, match="MiB"):  # a file that is being written counts
        files.grow(tmp_path / "y", "", 1)
    files.drop(tmp_path / "x")
    files.grow(tmp_path / "y", "", 1)
    files.forget_old({kept[0]})
    files.grow(tmp_path / "y", "", 6)
    again = FileStore(tmp_path, Bounds())
    assert [file.id for file in again.records.all()] == kept[:1]


def test_a_key_leaves_files_and_room_to_others(tmp_path: Path) -> None:
    files = FileStore(tmp_path, Bounds(total_bytes=1600, files=16))

    def add(owner: str, size: int) -> str:
        content = files.new_upload(owner)
        files.grow(content, owner, size)
        content.write_bytes(b"x" * size)
        return files.add(content, "a", "batch", owner).id

    first, *_ = (add("greedy", 1) for _ in range(13))
    sending = files.new_upload("greedy")
    with pytest.raises(Overloaded, match="14 files, the last of 16 are for others"):
        files.new_upload("greedy")
    add("other", 1)
    files.grow(sending, "greedy", 1386)
    with pytest.raises(Overloaded, match="are for others"):
        files.grow(sending, "greedy", 1387)
    add("other", 199)
    with pytest.raises(Overloaded, match="kept at most"):
        files.new_upload("other")
    files.delete(first)
    content = files.new_upload("third")
    with pytest.raises(Overloaded, match="kept at most"):
        files.grow(content, "third", 3)
    files.grow(content, "third", 2)
    # Files that exist when a server starts count, too.
    again = FileStore(tmp_path, Bounds(total_bytes=300, files=16))
    again.grow(content, "third", 88)
    with pytest.raises(Overloaded, match="kept at most"):
        again.grow(content, "third", 89)


def test_batches_that_ended_are_forgotten_of_the_key_that_has_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 4)
    kept = Storage(tmp_path, Bounds())
    for at, owner in enumerate(("a", "b", "b", "a", "b", "b", "b", "c")):
        batch = Batch(f"batch_{at}", CHAT, "f", "24h", at, 0, status="failed", owner=owner)
        kept.batches.put(batch)
    kept.forget_old()
    assert [batch.id for batch in kept.batches.all()] == [f"batch_{at}" for at in (3, 5, 6, 7)]
    kept.close()


async def test_a_key_leaves_batches_to_others(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_batches, "MAX_UNFINISHED", 8)
    (a, first), (b, second) = new_key("a"), new_key("b")
    write_keys(str(tmp_path / "keys"), [first, second])
    model = FakeModel(files=str(tmp_path / "files"), keys_file=str(tmp_path / "keys"))
    model.script = lambda prompt, index: PAUSE
    served = await serve(model)
    mine = [await start(served, [row("1")], key=a) for _ in range(7)]
    with pytest.raises(openai.RateLimitError, match=r"7 batches of this API key.* for others"):
        await start(served, [row("1")], key=a)
    await start(served, [row("1")], key=b)
    with pytest.raises(openai.RateLimitError, match="8 batches are unfinished"):
        await start(served, [row("1")], key=b)
    for batch in mine:
        await served.openai(a).batches.cancel(batch.id)


async def test_a_file_that_never_comes_is_not_waited_for(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(FakeModel(files=str(tmp_path)))
    monkeypatch.setattr(openai_batches, "UPLOAD_SECONDS", 0.05)

    async def endless() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'
        await asyncio.Event().wait()

    form = {"Content-Type": "multipart/form-data; boundary=x"}
    async with served.http.post("/v1/files", data=endless(), headers=form) as reply:
        assert reply.status == 408
        assert "did not come within" in (await reply.json())["error"]["message"]
    assert not list((tmp_path / "files").iterdir())


async def test_each_key_has_its_own_batches(serve: Serve, tmp_path: Path) -> None:
    (a, first), (b, second) = new_key("a"), new_key("b", requests_per_minute=1, max_batches=1)
    write_keys(str(tmp_path / "keys"), [first, second])
    files = str(tmp_path / "files")
    model = FakeModel(files=files, keys_file=str(tmp_path / "keys"), api_key="operator")
    served = await serve(model)
    mine = await start(served, [row("1"), row("2")], key=a)
    done = await until(served, mine.id, "completed", key=a)
    assert done.request_counts.completed == 2
    assert [account and account.name for account in model.accounts] == ["a", "a"]
    seen: dict[str, list[int]] = {}
    for key in (a, b, "operator"):
        client = served.openai(key)
        seen[key] = [len((await kind.list()).data) for kind in (client.batches, client.files)]
    assert seen == {a: [1, 2], b: [0, 0], "operator": [1, 2]}
    stranger = served.openai(b)
    for ask in (
        stranger.batches.retrieve(mine.id),
        stranger.batches.cancel(mine.id),
        stranger.files.content(str(done.output_file_id)),
        stranger.files.delete(mine.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    with pytest.raises(openai.NotFoundError):
        await stranger.batches.create(
            input_file_id=mine.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    # A row beyond the quota waits.
    waiting = await start(served, [row("1"), row("2"), row("3")], key=b)
    with pytest.raises(openai.RateLimitError, match="may have 1 unfinished batches"):
        await start(served, [row("1")], key=b)
    while not (await served.openai(b).batches.retrieve(waiting.id)).request_counts.completed:
        await asyncio.sleep(0.01)
    # Meanwhile other clients' batches run.
    await until(served, (await start(served, [row("4")], key=a)).id, "completed", key=a)
    await served.openai(b).batches.cancel(waiting.id)
    ended = await until(served, waiting.id, "cancelled", key=b)
    assert ended.request_counts.completed == 1 and ended.request_counts.failed == 0
