"""Responses kept for later requests: within bounds, separate for each key, and on a disk."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server import full_disk
from rootlace.runtime.server.full_disk import RETRY_SECONDS
from rootlace.runtime.server.http.response_store import ResponseDisk, ResponseStore
from rootlace.wire.errors import InvalidRequest
from tests.server.full_disk import FAILURE_NAMES, FAILURES, FullDisk
from tests.waiting import eventually


def test_the_store_is_bounded() -> None:
    def kept(store: ResponseStore) -> set[str]:
        return {str(i) for i in range(9) if _has(store, str(i))}

    store = ResponseStore(max_responses=3)
    for i in range(5):
        store.put({"id": str(i)}, (), [{"role": "user", "content": "x"}])
        store.get("0") if i < 3 else None
    assert kept(store) == {"0", "3", "4"}  # 0 was used after 1 and 2
    store = ResponseStore(max_bytes=1000)
    for i in range(5):
        store.put({"id": str(i)}, (), [{"role": "user", "content": "x" * 400}])
    assert kept(store) == {"3", "4"}
    store.delete("3")
    store.put({"id": "5"}, (), [{"role": "user", "content": "x" * 400}])
    assert kept(store) == {"4", "5"}


def test_the_store_counts_what_it_holds() -> None:
    """Messages stay with later responses after the responses that contained them are gone."""
    store = ResponseStore(max_bytes=2000)
    before: tuple[dict[str, Any], ...] = ()
    for i in range(40):
        store.put({"id": str(i)}, before, [{"role": "user", "content": "x" * 200}])
        if not len(store):
            break
        before = store.get(str(i)).messages
        store.delete(str(i - 1)) if i else None
        held = sum(len(m["content"]) for m in before)
        assert held <= store.nbytes <= 2000
    assert 4 < i < 10  # the conversation itself became too long
    assert (store.nbytes, store._of) == (0, {})
    one = [{"role": "user", "content": "x" * 1500}]
    store.put({"id": "a"}, (), one)
    store.put({"id": "b"}, (*one,), [])
    assert len(store) == 2  # shared messages count once


def test_no_key_pushes_out_anothers_responses() -> None:
    def message(size: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "x" * size}]

    store = ResponseStore(max_responses=4)
    store.put({"id": "a"}, (), message(1), owner="alice")
    for number in range(9):
        store.put({"id": str(number)}, (), message(1), owner="bob")
    assert _has(store, "a", "alice") and len(store) == 4
    assert [number for number in range(9) if _has(store, str(number), "bob")] == [6, 7, 8]
    store = ResponseStore(max_bytes=4000)
    store.put({"id": "a"}, (), message(1500), owner="alice")
    for number in range(30):
        store.put({"id": str(number)}, (), message(200), owner="bob")
    assert _has(store, "a", "alice") and _has(store, "29", "bob") and not _has(store, "0", "bob")
    store.put({"id": "b"}, (), message(3900), owner="carol")
    assert _has(store, "a", "alice") and not _has(store, "b", "carol")  # alone too large


_ACTIONS = st.lists(
    st.tuples(st.sampled_from("pfdr"), st.integers(0, 9), st.sampled_from(["", "bob"])), max_size=25
)


@settings(max_examples=15, deadline=None)
@given(_ACTIONS)
def test_a_disk_has_what_the_store_has(actions: list[tuple[str, int, str]]) -> None:
    """The disk has the store's responses after puts, reads, deletions and restarts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "responses.sqlite"
        disk = ResponseDisk(path)
        store = ResponseStore(max_responses=5, max_bytes=1500)
        store.open(disk)
        for number, (action, which, owner) in enumerate(actions):
            ids = sorted(store._of[owner].stored) if owner in store._of else []
            one = ids[which % len(ids)] if ids else None
            if action == "r":
                before = _all(store)
                disk.close()
                disk = ResponseDisk(path)
                store = ResponseStore(max_responses=5, max_bytes=1500)
                store.open(disk)
                assert _all(store) == before
            elif action == "d" and one is not None:
                store.delete(one, owner)
            elif action in "pf":
                known = store.get(one, owner=owner).messages if action == "f" and one else ()
                new = [{"role": "user", "content": "x" * (20 * which + number)}]
                store.put({"id": f"{number:03}"}, known, new, owner=owner, salt=str(which))
        disk.close()
        messages, responses = ResponseDisk(path).read()
        assert set(messages) == {number for one in responses for number in one.numbers}


def _all(store: ResponseStore) -> dict[tuple[str, str], Any]:
    return {
        (owner, name): (dict(one.response), one.messages, one.salt, own.nbytes)
        for owner, own in store._of.items()
        for name, one in own.stored.items()
    }


@pytest.mark.parametrize(("fails", "number"), FAILURES, ids=FAILURE_NAMES)
def test_a_disk_starts_without_room_and_has_everything_later(
    fails: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def opened(now: Callable[[], float] = time.monotonic) -> tuple[ResponseDisk, ResponseStore]:
        disk, store = ResponseDisk(path, now), ResponseStore()
        store.open(disk)
        return disk, store

    now, path, old = [100.0], tmp_path / "state" / "responses.sqlite", bool(fails)
    if old:
        disk, store = opened()
        store.put({"id": "before"}, (), _message("first"))
        store.put({"id": "deleted"}, (), _message("second"))
        disk.close()
    room = FullDisk(monkeypatch, path.parent, fails, number)
    room.full = True
    disk, store = opened(lambda: now[0])
    assert _has(store, "before") is old
    if old:
        store.delete("deleted")
    for name in ("a", "b", "c"):
        before = store.get("a").messages if name == "c" else ()
        store.put({"id": name}, before, _message(name))
        asyncio.run(disk.flush())
        now[0] += RETRY_SECONDS
    store.delete("b")
    asyncio.run(disk.flush())
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "responses are not kept any more" in caplog.text
    room.full = False
    now[0] += RETRY_SECONDS
    store.put({"id": "d"}, (), _message("d"))
    asyncio.run(disk.flush())
    assert "responses are kept again" in caplog.text
    disk.close()
    disk, after = opened()
    assert _all(after) == _all(store)
    assert {"a", "c", "d"} <= after._of[""].stored.keys() and _has(after, "before") is old
    disk.close()


def test_a_disk_that_fills_up_later_has_everything_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite itself reports that the disk is full: the file may not have more pages."""
    path, store = tmp_path / "responses.sqlite", ResponseStore()
    disk = ResponseDisk(path)
    store.open(disk)
    assert disk._file is not None
    (pages,) = disk._file.execute("pragma page_count").fetchone()
    disk._file.execute(f"pragma max_page_count = {pages}").fetchone()
    for number in range(9):
        store.put({"id": str(number)}, (), _message("x" * 4000))
    asyncio.run(disk.flush())
    assert "disk is full" in caplog.text and len(caplog.records) == 1
    disk._file.execute("pragma max_page_count = 1000000").fetchone()
    disk.close()
    again, after = ResponseDisk(path), ResponseStore()
    after.open(again)
    assert _all(after) == _all(store) and len(after) == 9
    again.close()


def test_what_waits_for_room_is_written_without_another_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_disk, "RETRY_SECONDS", 0.02)
    path, store = tmp_path / "responses.sqlite", ResponseStore()
    disk = ResponseDisk(path)
    store.open(disk)
    store.put({"id": "deleted"}, (), _message("a"))
    asyncio.run(disk.flush())
    assert disk._file is not None
    disk._file.execute("pragma query_only = 1")
    store.put({"id": "kept"}, (), _message("b"))
    store.delete("deleted")
    asyncio.run(disk.flush())
    ids = "select id from responses"
    assert disk._file.execute(ids).fetchall() == [("deleted",)]
    disk._file.execute("pragma query_only = 0")
    with closing(sqlite3.connect(path)) as file:
        eventually(lambda: file.execute(ids).fetchall() == [("kept",)])
    disk.close()


def _message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(InvalidRequest, match=r"responses\.sqlite cannot keep responses"):
        ResponseDisk(path)


def _has(store: ResponseStore, response_id: str, owner: str = "") -> bool:
    try:
        return response_id in store._of[owner].stored
    except KeyError:
        return False
