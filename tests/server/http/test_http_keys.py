"""Several API keys: admission, quotas, and what a key may know of another."""

from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from rootlace.cli.app import app
from rootlace.runtime.server.auth import Account, Quota, new_key, read_keys, write_keys
from rootlace.wire.errors import InvalidRequest, QuotaExceeded
from tests.server.http.conftest import Serve
from tests.server.http.fake_model import FakeModel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(path: Path, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments, "--keys", str(path)])
    assert result.exit_code == code, result.output
    return result.output.strip()


async def test_keys_come_and_go_while_it_runs(serve: Serve, path: Path) -> None:
    first = run(path, "add", "first")
    served = await serve(FakeModel(keys_file=str(path), api_key="operator"))

    async def status(key: str, where: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return (await served.get(where, headers=headers)).status

    second = run(path, "add", "second", "--namespace", "shared", "--tokens-per-minute", "9")
    other = first.rpartition("-")[0] + "-" + second.rpartition("-")[2]
    for key, expected in (
        (first, 200),
        (second, 200),
        ("operator", 200),
        (other, 401),  # a key's id with another key's secret
        (first + "0", 401),
        (first.rpartition("-")[0], 401),
        ("", 401),
        ("rl--", 401),
    ):
        assert await status(key) == expected
    assert await status("", "/health") == 200
    assert "second  9 tokens/min  namespace shared" in run(path, "list")
    run(path, "remove", "first")
    assert [await status(key) for key in (first, second)] == [401, 200]
    path.write_text("{")  # an edit in progress: nothing changes until the file can be read
    assert [await status(key) for key in (first, second)] == [401, 200]
    assert "cannot be read" in run(path, "list", code=1)


def test_the_file_holds_no_key(path: Path) -> None:
    key = run(path, "add", "a")
    text = path.read_text()
    assert key.rpartition("-")[2] not in text and path.stat().st_mode & 0o077 == 0
    assert "already" in run(path, "add", "a", code=1)
    assert "no such key" in run(path, "add", "a/b", code=1)
    assert "no key named" in run(path, "remove", "b", code=1)
    (entry,) = read_keys(str(path))
    write_keys(str(path), [entry, entry])
    with pytest.raises(InvalidRequest, match="two keys named 'a'"):
        read_keys(str(path))


async def test_a_request_beyond_the_quota(serve: Serve, path: Path) -> None:
    poor, rich = run(path, "add", "poor", "--requests-per-minute", "2"), run(path, "add", "rich")
    served = await serve(FakeModel(keys_file=str(path)))
    client = served.openai(poor)
    for _ in range(2):
        await client.completions.create(model="fake", prompt=["one request", "of two prompts"])
    await client.models.list()  # listing models costs nothing
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="'poor' has used its 2 requests") as info:
            await client.completions.create(model="fake", prompt="x", stream=stream)
        assert info.value.code == "quota_exceeded"
        assert 0 < int(info.value.response.headers["Retry-After"]) <= 30
    await served.openai(rich).completions.create(model="fake", prompt="x")


async def test_a_response_is_its_keys_own(serve: Serve, path: Path) -> None:
    ours, theirs = (served_key for served_key in (run(path, "add", "a"), run(path, "add", "b")))
    served = await serve(FakeModel(keys_file=str(path)))
    client, other = served.openai(ours), served.openai(theirs)
    kept = await client.responses.create(model="fake", input="hi")
    calls: list[Any] = [
        lambda: other.responses.retrieve(kept.id),
        lambda: other.responses.delete(kept.id),
        lambda: other.responses.create(model="fake", input="x", previous_response_id=kept.id),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="not kept here"):
            await call()
    await client.responses.create(model="fake", input="x", previous_response_id=kept.id)


def test_a_quota_fills_evenly_and_pays_its_debts() -> None:
    now = 0.0
    quota = Quota(60, lambda: now)
    quota.take(60)
    assert quota.seconds_to_wait() == 1
    now = 1.0
    assert quota.seconds_to_wait() == 0
    quota.take(121)  # a request's cost is known when it is done
    assert quota.seconds_to_wait() == 121
    now = 1e6
    assert quota.seconds_to_wait() == 0
    quota.take(60)  # the quota saves at most a minute's tokens
    assert quota.seconds_to_wait() == 1


def test_namespaces_of_keys_never_meet() -> None:
    keys = [new_key(n, namespace=s)[1] for n, s in (("a", "own"), ("b", "own"), ("c", "shared"))]
    accounts = [Account(entry, lambda *_: None, lambda: None) for entry in keys]
    salts = ("", "s", "/", "@", "@a/", "@/", "@/@a/", "a/", "@b/s")
    made = {(a.name, salt): a.namespace(salt) for a in accounts for salt in salts}
    assert len({*made.values()}) == len(made)
    assert all(a.salt(made[a.name, salt]) == salt for a in accounts for salt in salts)


def test_a_changed_quota_begins_anew_and_others_go_on() -> None:
    entry = new_key("a", requests_per_minute=1, tokens_per_minute=5)[1]
    account = Account(entry, lambda *_: None, lambda: None, clock=lambda: 0.0)
    account.admit()
    account.used("completion", 9)
    account.change(new_key("a", requests_per_minute=7, tokens_per_minute=5)[1])
    with pytest.raises(QuotaExceeded, match="5 tokens per minute; try again in 60 s"):
        account.admit()
