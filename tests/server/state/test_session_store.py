"""The store of sessions against a plain model, a kill, a damaged file, a full disk."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server import session_store
from rootlace.runtime.server.full_disk import RETRY_SECONDS
from rootlace.runtime.server.session_store import (
    RECLAIM_SECONDS,
    Quoted,
    SavedBranch,
    SavedSession,
    Sent,
    SessionStore,
    Told,
)
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Done, encode
from tests.server.full_disk import FAILURE_NAMES, FAILURES, FullDisk

View = dict[str, Any]
Change = tuple[Any, ...]
"""The name of a change, and what it takes."""


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def replayed(changes: list[Change]) -> View:
    """Apply a session's changes to the plain model."""
    view: View = {"branches": {}, "answers": {}, "told": {}, "quoted": set()}
    sent: list[int] = []
    heard = 0
    for change in changes:
        match change:
            case "open", op, parent:
                branch = {"ids": [], "pending": (), "begin": None, "gained": [], "broken": None}
                if parent is not None:
                    above = view["branches"][parent]
                    branch |= {"ids": list(above["ids"]), "begin": above["begin"]}
                    branch["pending"] = above["pending"]
                    view["answers"][op] = encode([Done(op)])
                view["branches"][op] = branch
            case "grow", number, new, gained, pending, begin:
                branch = view["branches"][number]
                branch["ids"] += array("i", new).tolist()
                branch["pending"], branch["begin"] = pending, begin
                branch["gained"] += gained
            case "break", number, why:
                view["branches"][number]["broken"] = why
            case "finish", number, op, closed:
                view["answers"][op] = encode([Done(op)])
                view["told"].pop(op, None)
                view["quoted"] -= {(op, at) for at in range(9)}
                if closed:
                    del view["branches"][number]
            case "told", op, update:
                view["told"].setdefault(op, []).append(update)
            case "quoted", op, at:
                view["quoted"].add((op, at))
            case "send", op:
                sent.append(op)
            case "hear", count:
                heard = count
    for op in sent[:heard]:
        view["answers"].pop(op, None)
    return {**view, "sent": sent[heard:], "heard": heard}


def held(store: SessionStore, key: str) -> View | None:
    """Return the session in the store in the plain model's form."""
    session = store.find(key)
    if session is None:
        return None
    branches = {}
    for number, branch in session.branches.items():
        segments = [session.segments[place] for place in branch.segments]
        branches[number] = {
            "ids": array("i", b"".join(one.ids for one in segments)).tolist(),
            "pending": branch.pending,
            "begin": branch.begin,
            "gained": [x for one in segments if one.branch == number for x in one.gained],
            "broken": branch.broken,
        }
    assert session.segments.keys() == session.holders.keys(), "a segment that no branch has"
    return {
        "branches": branches,
        "answers": {op: answer.event for op, answer in session.answers.items()},
        "told": {op: [one.update for one in told] for op, told in session.told.items()},
        "quoted": {(op, at) for op, quotes in session.quoted.items() for at in quotes},
        "sent": [one.op for one in session.sent],
        "heard": session.client.heard,
    }


def apply(session: SavedSession, change: Change) -> None:
    match change:
        case "open", op, parent:
            session.open(SavedBranch(op, op, "p", "ns", "", False), parent)
        case "grow", number, new, gained, pending, begin:
            session.grow(number, new, gained, pending, begin, 0)
        case "break", number, why:
            session.break_branch(number, why)
        case "finish", number, op, closed:
            session.finish(number, op, encode([Done(op)]), closed)
        case "told", op, update:
            session.add(Told(op, 0, update))
        case "quoted", op, at:
            session.add(Quoted(op, at, (Piece("q"),)))
        case "send", op:
            session.add(Sent(op))
        case "hear", count:
            session.hear(count)


def random_change(rng: random.Random, before: list[Change]) -> Change:
    """Draw a change that may follow these."""
    view, op = replayed(before), len(before) + 1
    live = sorted(view["branches"])
    kinds = ["open", "grow", "grow", "finish", "break", "told", "quoted", "send", "hear"]
    kind = rng.choice(kinds)
    if kind == "open" or (not live and kind in ("grow", "finish", "break")):
        return "open", op, rng.choice([None, *live])
    if kind == "grow":
        gained = (Piece("x", True), ids(3)) if rng.random() < 0.5 else ()
        new = ids(*(rng.randrange(100) for _ in range(rng.choice([0, 1, 2, 3, 2000]))))
        pending = (Piece("é" * rng.randrange(3)),)
        return "grow", rng.choice(live), new, gained, pending, rng.choice([None, True])
    under_way = rng.choice([*view["told"], *(op for op, _ in view["quoted"]), op])
    if kind == "finish":
        return "finish", rng.choice(live), under_way, rng.random() < 0.3
    if kind == "break":
        return "break", rng.choice(live), ("cancelled", "why")
    if kind == "told":
        return "told", under_way, b"update %d" % op
    if kind == "quoted":
        return "quoted", op, rng.randrange(2)
    if kind == "send":
        return "send", rng.choice([*view["answers"], op])
    return "hear", view["heard"] + rng.randrange(len(view["sent"]) + 1)


def rows_of(folder: Path) -> int:
    with sqlite3.connect(folder / "programs.sqlite") as file:
        (count,) = file.execute("select count(*) from rows").fetchone()
    return count


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_read_is_what_a_plain_model_has(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several clients, and servers that end and start again; the file has no superfluous row."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("state")
    model: dict[str, list[Change]] = {}
    for _ in range(3):
        store = SessionStore(folder)
        for key in model:
            assert held(store, key) == replayed(model[key])
        for _ in range(rng.randrange(40)):
            if not model or rng.random() < 0.1:
                key = f"client {rng.randrange(10**6)}"
                store.begin(key, "owner")
                model[key] = []
            key = rng.choice(sorted(model))
            session = store.find(key)
            assert session is not None
            if rng.random() < 0.03:
                store.end(session)
                del model[key]
                assert held(store, key) is None
                continue
            change = random_change(rng, model[key])
            model[key].append(change)
            apply(session, change)
            assert held(store, key) == replayed(model[key])
            if rng.random() < 0.5:
                store.flush()
                files = list(folder.glob("programs*"))
                assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
        sessions = [store.find(key) for key in model]
        store.close()
        assert rows_of(folder) == sum(len(one.sizes) for one in sessions if one is not None)


CHANGES: list[Change] = []
for _ in range(12):
    CHANGES.append(random_change(random.Random(len(CHANGES)), CHANGES))


def filled(store: SessionStore) -> None:
    """Commit each change separately."""
    session = store.begin("key", "")
    store.flush()
    for change in CHANGES:
        apply(session, change)
        store.flush()


def test_a_killed_process_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """SIGKILL with changes behind the last commit, which are lost as a whole."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tests.server.state import test_session_store as test\n"
        "store = test.SessionStore(Path(sys.argv[1])); test.filled(store)\n"
        "test.apply(store.find('key'), ('open', 999, None)); os.kill(os.getpid(), 9)\n"
    )
    folder = tmp_path / "state"
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (folder / "programs.sqlite-wal").stat().st_size, "nothing was moved into the file"
    store = SessionStore(folder)
    assert held(store, "key") == replayed(CHANGES)
    store.close()


def test_a_write_that_is_torn_anywhere_leaves_the_commits_before_it(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "state")
    filled(store)
    wal = tmp_path / "state" / "programs.sqlite-wal"
    frame, size = 24 + 4096, wal.stat().st_size
    found = []
    for cut in sorted({0, 31, *range(32, size, frame), *range(32 + 100, size, frame), size}):
        copy = shutil.copytree(tmp_path / "state", tmp_path / f"cut-{cut}")
        os.truncate(copy / wal.name, cut)
        try:
            died = SessionStore(copy)
        except InvalidRequest as error:  # of the first transaction, which made the file
            assert "programs.sqlite" in str(error) and cut < 32 + 3 * frame
            continue
        saved = [held(died, "key") == replayed(CHANGES[:n]) for n in range(len(CHANGES) + 1)]
        found.append(saved.index(True) if any(saved) else held(died, "key"))
        died.close()
    store.close()
    known = [n for n in found if n is not None]
    assert known == sorted(known) and set(known) >= {0, len(CHANGES)}
    assert found == [None] * (len(found) - len(known)) + known
    assert all(isinstance(n, int) for n in known)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_was_not_damaged_where_it_counts(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    store = SessionStore(folder)
    filled(store)
    store.close()
    path = folder / "programs.sqlite"
    content = bytearray(path.read_bytes())
    for at, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content)), st.binary(max_size=9)), min_size=1)
    ):
        content[at : at + data.draw(st.integers(0, 9))] = byte
    path.write_bytes(content)
    try:
        store = SessionStore(folder)
    except InvalidRequest as error:
        assert str(path) in str(error)
        return
    assert held(store, "key") == replayed(CHANGES) or not content
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "row = cast(replace(row, x'6e73', x'6e74') as blob)",  # a namespace
        "checksum = checksum + 1",
        "place = place + 90",
    ],
)
def test_a_row_that_was_changed_is_refused(tmp_path: Path, change: str) -> None:
    """SQLite has no checksum of a row."""
    store = SessionStore(tmp_path)
    filled(store)
    store.close()
    with sqlite3.connect(tmp_path / "programs.sqlite") as file:
        changed = file.execute(f"update rows set {change}").rowcount
    assert changed
    file.close()
    with pytest.raises(InvalidRequest, match=r"programs\.sqlite is damaged.*move it away"):
        SessionStore(tmp_path)


def test_a_full_disk_is_told_once_and_what_happened_meanwhile_is_kept_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite itself reports that the disk is full: the file may not have more pages."""
    now = [100.0]
    store = SessionStore(tmp_path / "state", clock=lambda: now[0])
    session = store.begin("key", "")
    store.flush()
    changes: list[Change] = []

    def happen(change: Change) -> None:
        changes.append(change)
        apply(session, change)
        store.flush()

    happen(("open", 1, None))
    assert store._file is not None
    (pages,) = store._file.execute("pragma page_count").fetchone()
    store._file.execute(f"pragma max_page_count = {pages}").fetchone()
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            happen(("grow", 1, ids(*range(2000)), (), (), None))
            happen(("told", 100 + number, b"update"))
            now[0] += 2
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "programs.sqlite" in caplog.text and "disk is full" in caplog.text
    died = SessionStore(shutil.copytree(tmp_path / "state", tmp_path / "died"))
    before = held(died, "key")
    assert before == replayed(changes[:1]), "a part of a transaction"
    died.close()
    store._file.execute("pragma max_page_count = 1000000").fetchone()
    happen(("told", 7, b"not tried again yet"))
    assert "kept again" not in caplog.text or now[0] >= 2
    now[0] += RETRY_SECONDS
    store.forget_old()
    assert "kept again" in caplog.text
    died = SessionStore(shutil.copytree(tmp_path / "state", tmp_path / "died later"))
    assert held(died, "key") == replayed(changes)
    died.close()
    store.close()


@pytest.mark.parametrize(("fails", "number"), FAILURES, ids=FAILURE_NAMES)
def test_a_store_starts_on_a_full_disk_and_keeps_everything_later(
    fails: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, now, folder = bool(fails), [100.0], tmp_path / "state"
    if old:
        store = SessionStore(folder)
        store.begin("before", "")
        store.close()
    disk = FullDisk(monkeypatch, folder, fails, number)
    disk.full = True
    store = SessionStore(folder, clock=lambda: now[0])
    assert (store.find("before") is not None) is old
    with pytest.raises(InvalidRequest, match="used by another server"):
        SessionStore(folder)
    store.begin("key", "")
    for _ in range(3):
        store.flush()
        now[0] += RETRY_SECONDS
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    disk.full = False
    store.flush()
    assert "programs are kept again" in caplog.text
    store.close()
    after = SessionStore(folder)
    assert after.find("key") is not None and (after.find("before") is not None) is old
    after.close()


def test_what_fails_where_there_is_room_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(self: SessionStore, file: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_IOERR, "SQLITE_IOERR"
        raise error

    monkeypatch.setattr(SessionStore, "_open", opened)
    with pytest.raises(InvalidRequest, match="cannot keep state: disk I/O error"):
        SessionStore(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size >= 1 << 20]


def test_the_log_is_synced_a_second_later_and_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The delay bounds the loss in a power cut; the log's size is bounded, too."""
    later: list[tuple[float, Any]] = []
    store = SessionStore(tmp_path, lambda seconds, call: later.append((seconds, call)))
    session = store.begin("key", "")
    sizes = []
    for op in range(1, 60):
        session.add(Told(op, 0, b"x" * 3000))
        store.flush()
        if op % 10 == 0:
            ((seconds, sync),) = later
            assert seconds == session_store.SYNC_SECONDS
            later.clear()
            sync()
            store._thread.submit(lambda: None).result()
            sizes.append((tmp_path / "programs.sqlite-wal").stat().st_size)
    assert sizes[-1] == sizes[1], "the log begins anew when the file has all of it"
    shutil.copyfile(tmp_path / "programs.sqlite", tmp_path / "synced")
    with sqlite3.connect(tmp_path / "synced") as file:
        assert file.execute("select count(*) from rows").fetchone() == (51,)
    file.close()
    store.close()


def test_what_was_forgotten_takes_no_room_after_the_next_start(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    session = store.begin("key", "")
    session.add(Told(1, 0, bytes(1 << 20)))
    store.flush()
    store.end(session)
    store.close()
    path = tmp_path / "programs.sqlite"
    assert path.stat().st_size > 1 << 20
    SessionStore(tmp_path).close()
    assert path.stat().st_size < 1 << 16


def test_a_folder_has_one_server_and_one_version(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    first = SessionStore(folder)
    with pytest.raises(InvalidRequest, match="another server"):
        SessionStore(folder)
    first.close()
    with sqlite3.connect(folder / "programs.sqlite") as file:
        file.execute("pragma user_version = 99")
    file.close()
    for _ in range(2):  # a refused store holds no lock
        with pytest.raises(InvalidRequest, match=r"programs\.sqlite has version 99"):
            SessionStore(folder)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot keep state"):
        SessionStore(tmp_path / "file")


def test_files_of_others_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "programs.sqlite"
    with sqlite3.connect(path) as file:
        file.execute("create table theirs (a)")
    file.close()
    for content in (path.read_bytes(), b"a letter to my aunt" * 300):
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match=r"programs\.sqlite is damaged, or not a file of"):
            SessionStore(tmp_path)
        assert path.read_bytes() == content


def test_who_does_not_come_back_is_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    store = SessionStore(tmp_path, clock=lambda: now[0])
    gone, here = store.begin("gone", ""), store.begin("here", "")
    store.detach(gone)
    now[0] = RECLAIM_SECONDS + 1
    store.forget_old()
    assert store.find("gone") is None
    assert store.find("here") is here
    store.end(here)
    store.close()
    assert SessionStore(tmp_path).find("here") is None


def test_a_key_whose_absent_clients_are_too_many_loses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.server.session_store.MAX_DETACHED", 8)
    now = [0.0]
    store = SessionStore(tmp_path, clock=lambda: now[0])
    names = ["quiet 0", *(f"loud {n}" for n in range(12)), "quiet 1"]
    for name in names:
        now[0] += 1
        store.detach(store.begin(name, name.split()[0]))
    store.forget_old()
    saved = [name for name in names if store.find(name) is not None]
    assert saved == ["quiet 0", *(f"loud {n}" for n in range(6, 12)), "quiet 1"]
    store.close()
