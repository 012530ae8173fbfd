"""The journal against a plain model, cut and damaged at every place, and on a full disk."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import stat
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server import session_store
from rootlace.runtime.server.records import (
    Emitted,
    Ended,
    Finished,
    Grown,
    Heard,
    Opened,
    Quoted,
    Record,
    Told,
)
from rootlace.runtime.server.session_store import RECLAIM_SECONDS, Journal
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Done, encode
from tests.waiting import eventually

View = dict[str, Any]


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def replayed(records: list[Record]) -> View:
    """What a list of records of one session amounts to."""
    view: View = {"branches": {}, "answers": {}, "told": {}, "quoted": set()}
    sent, heard = [], 0
    for one in records:
        if isinstance(one, Opened):
            branch = {"ids": [], "pending": (), "begin": None, "gained": [], "broken": None}
            if one.parent is not None:
                above = view["branches"][one.parent]
                branch |= {"ids": list(above["ids"]), "begin": above["begin"]}
                branch["pending"] = above["pending"]
                view["answers"][one.op] = encode([Done(one.op)])
            view["branches"][one.branch] = branch
        elif isinstance(one, Grown):
            branch = view["branches"][one.branch]
            branch["ids"] += array("i", one.ids).tolist()
            branch["pending"], branch["begin"] = one.pending, one.begin
            branch["gained"] += one.gained
        elif isinstance(one, Finished):
            view["branches"][one.branch]["broken"] = one.broken
            view["answers"][one.op] = one.event
            view["told"].pop(one.op, None)
            view["quoted"] -= {(one.op, at) for at in range(9)}
            if one.closed:
                del view["branches"][one.branch]
        elif isinstance(one, Told):
            view["told"].setdefault(one.op, []).append(one.update)
        elif isinstance(one, Quoted):
            view["quoted"].add((one.op, one.at))
        elif isinstance(one, Emitted):
            sent.append(one.op)
        elif isinstance(one, Heard):
            heard = one.count
    for op in sent[:heard]:
        view["answers"].pop(op, None)
    return {**view, "sent": sent[heard:], "heard": heard}


def held(journal: Journal, key: str) -> View | None:
    """The same, as the journal has it."""
    session = journal.find(key)
    if session is None:
        return None
    branches = {
        number: {
            "ids": array("i", b"".join(branch.ids)).tolist(),
            "pending": branch.pending,
            "begin": branch.begin,
            "gained": branch.gained,
            "broken": branch.broken,
        }
        for number, branch in session.branches.items()
    }
    return {
        "branches": branches,
        "answers": session.answers,
        "told": {op: [one.update for one in told] for op, told in session.told.items()},
        "quoted": {(op, at) for op, quotes in session.quoted.items() for at in quotes},
        "sent": list(session.sent),
        "heard": session.heard,
    }


def random_record(rng: random.Random, number: int, before: list[Record]) -> Record:
    """One that may come behind these."""
    view, op = replayed(before), len(before) + 1
    live = sorted(view["branches"])
    kind = rng.choice(["open", "grow", "grow", "finish", "told", "quoted", "emit", "hear"])
    if kind == "open" or (not live and kind in ("grow", "finish")):
        return Opened(number, op, op, "p", "ns", "", False, rng.choice([None, *live]))
    if kind == "grow":
        gained = (Piece("x", True), ids(3)) if rng.random() < 0.5 else ()
        new = ids(*(rng.randrange(100) for _ in range(rng.randrange(4))))
        pending = (Piece("é" * rng.randrange(3)),)
        return Grown(number, rng.choice(live), new, pending, rng.choice([None, True]), gained)
    under_way = rng.choice([*view["told"], *(op for op, _ in view["quoted"]), op])
    if kind == "finish":
        broken = ("cancelled", "why") if rng.random() < 0.3 else None
        event = encode([Done(under_way)])
        closed = rng.random() < 0.3
        return Finished(number, rng.choice(live), under_way, event, broken, closed)
    if kind == "told":
        return Told(number, under_way, 0, b"update %d" % op)
    if kind == "quoted":
        return Quoted(number, op, rng.randrange(2), (Piece("q"),))
    if kind == "emit":
        return Emitted(number, rng.choice([*view["answers"], op]))
    return Heard(number, view["heard"] + rng.randrange(len(view["sent"]) + 1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), small=st.booleans())
def test_what_is_read_is_what_a_plain_model_has(
    seed: int, small: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several clients, servers that end and begin again, logs that are shortened all the time."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("state")
    model: dict[str, list[Record]] = {}
    for _ in range(3):
        journal = Journal(folder, min_log_bytes=200 if small else 10**9)
        for key in model:
            assert held(journal, key) == replayed(model[key])
        for _ in range(rng.randrange(40)):
            if not model or rng.random() < 0.1:
                key = f"client {rng.randrange(10**6)}"
                journal.begin(key, "owner")
                model[key] = []
            key = rng.choice(sorted(model))
            session = journal.find(key)
            assert session is not None
            if rng.random() < 0.03:
                journal.end(session)
                del model[key]
                assert held(journal, key) is None
                continue
            record = random_record(rng, session.begun.session, model[key])
            model[key].append(record)
            journal.add(record)
            if rng.random() < 0.5:
                journal.flush()
        journal.close()
        assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in folder.glob("programs-*"))


def filled(folder: Path, batches: int = 4) -> tuple[list[Record], list[int]]:
    """A journal that was never shortened: its records, and how long its log was behind each."""
    journal = Journal(folder)
    session = journal.begin("key", "")
    journal.flush()
    (log,) = folder.glob("*.log")
    records, sizes = [], [log.stat().st_size]
    for _ in range(batches):
        records.append(random_record(random.Random(len(records)), session.begun.session, records))
        journal.add(records[-1])
        journal.flush()
        sizes.append(log.stat().st_size)
    # As a killed server leaves it: nothing is closed.
    return records, sizes


def test_a_log_that_is_cut_anywhere_is_read_up_to_its_last_whole_batch(tmp_path: Path) -> None:
    records, sizes = filled(tmp_path / "state")
    for cut in range(sizes[-1] + 1):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "state", copy)
        (log,) = copy.glob("*.log")
        os.truncate(log, cut)
        journal = Journal(copy)
        whole = sum(size <= cut for size in sizes) - 1
        assert held(journal, "key") == (None if whole < 0 else replayed(records[:whole])), cut
        journal.close()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_as_far_as_they_can_be_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "state"
    records, _ = filled(folder)
    if data.draw(st.booleans()):
        Journal(shutil.copytree(folder, folder.with_name("again"))).close()
        folder = folder.with_name("again")
    path = data.draw(st.sampled_from(sorted(folder.glob("programs-*"))))
    content = bytearray(path.read_bytes())
    for at, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content)), st.binary(max_size=9)), min_size=1)
    ):
        content[at : at + data.draw(st.integers(0, 9))] = byte
    path.write_bytes(content)
    try:
        journal = Journal(folder)
    except InvalidRequest as error:
        assert "version" in str(error)
        return
    found = held(journal, "key")
    assert found is None or found in [replayed(records[:n]) for n in range(len(records) + 1)]
    journal.close()


def test_a_full_disk_is_told_once_and_what_happened_meanwhile_is_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    journal = Journal(tmp_path, clock=lambda: now[0])
    session = journal.begin("key", "")
    journal.flush()
    records: list[Record] = []

    def happen() -> None:
        records.append(random_record(random.Random(len(records)), session.begun.session, records))
        journal.add(records[-1])
        journal.flush()

    real, room = os.write, [60]

    def write(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = real(descriptor, bytes(content)[: room[0]])
        room[0] -= part
        return part

    monkeypatch.setattr(session_store.os, "write", write)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            happen()
            now[0] += 2
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text
    monkeypatch.setattr(session_store.os, "write", real)
    now[0] += 10

    def kept() -> bool:
        happen()
        return "kept again" in caplog.text

    eventually(kept)
    happen()
    journal.close()
    again = Journal(tmp_path)
    assert held(again, "key") == replayed(records)
    again.close()


def test_a_log_that_lacks_what_was_before_it_counts_only_with_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a full disk the base is written by a thread, and the server may die meanwhile."""
    now, here, room = [100.0], threading.get_ident(), threading.Event()
    journal = Journal(tmp_path / "state", clock=lambda: now[0])
    session = journal.begin("key", "")
    journal.flush()
    records: list[Record] = []

    def happen() -> None:
        records.append(Grown(session.begun.session, 1, ids(len(records))))
        journal.add(records[-1])
        journal.flush()

    records.append(Opened(session.begun.session, 1, 1))
    journal.add(records[-1])
    happen()
    real, full = os.write, [True]

    def write(descriptor: int, content: bytes) -> int:
        if threading.get_ident() != here:
            room.wait(60)
        elif full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(session_store.os, "write", write)
    happen()
    full[0] = False
    now[0] += 10
    for _ in range(3):
        happen()  # the loop does not wait for the base
    died = Journal(shutil.copytree(tmp_path / "state", tmp_path / "died"))
    room.set()
    assert held(died, "key") == replayed(records[:2])

    def kept() -> bool:
        journal.forget_old()
        return "kept again" in caplog.text

    eventually(kept)
    died = Journal(shutil.copytree(tmp_path / "state", tmp_path / "died later"))
    assert held(died, "key") == replayed(records)
    journal.close()


def test_a_base_that_fills_the_disk_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log that goes on meanwhile needs no base: what it has was told."""
    now, here, full = [100.0], threading.get_ident(), threading.Event()
    journal = Journal(tmp_path / "state", min_log_bytes=1, clock=lambda: now[0])
    session = journal.begin("key", "")
    records: list[Record] = [Opened(session.begun.session, 1, 1)]
    journal.add(records[0])
    real = os.write

    def write(descriptor: int, content: bytes) -> int:
        if threading.get_ident() != here:
            full.wait(60)
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(session_store.os, "write", write)
    while journal._base is None:
        records.append(Grown(session.begun.session, 1, ids(len(records))))
        journal.add(records[-1])
        journal.flush()
    records.append(Grown(session.begun.session, 1, ids(len(records))))
    journal.add(records[-1])
    journal.flush()
    full.set()
    journal.add(Grown(session.begun.session, 1, ids(0)))
    journal.flush()
    eventually(lambda: journal._base is None or journal._base.done())
    journal.forget_old()
    died = Journal(shutil.copytree(tmp_path / "state", tmp_path / "died"))
    assert held(died, "key") == replayed(records)
    journal.close()


def test_no_part_of_a_base_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs-00000007.new").write_bytes(b"of a server that was killed")
    now = [0.0]
    journal = Journal(tmp_path, clock=lambda: now[0])
    assert not list(tmp_path.glob("*.new"))

    real = os.write

    def write(descriptor: int, content: bytes) -> int:
        if bytes(content).startswith(b"rootlace"):  # of a header there is room
            return real(descriptor, content)
        raise OSError(errno.ENOSPC, "No space left on device")

    begun = journal.begin("key", "").begun
    with monkeypatch.context() as patch:
        patch.setattr(session_store.os, "write", write)
        for _ in range(5):
            journal.add(Emitted(begun.session, 1))
            journal.flush()
            now[0] += 10
            eventually(lambda: journal._base is None or journal._base.done())
        assert not list(tmp_path.glob("*.new"))
        assert len(list(tmp_path.glob("*.log"))) <= 2, "one for each time that it was tried"
    journal.close()


def test_a_folder_has_one_server_and_one_version(tmp_path: Path) -> None:
    first = Journal(tmp_path / "state")
    with pytest.raises(InvalidRequest, match="another server"):
        Journal(tmp_path / "state")
    first.close()
    (log,) = (tmp_path / "state").glob("*.log")
    log.write_bytes(log.read_bytes()[:-4] + b"\x63\0\0\0")
    with pytest.raises(InvalidRequest, match="version 99"):
        Journal(tmp_path / "state")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot keep state"):
        Journal(tmp_path / "file")


def test_who_does_not_come_back_is_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    journal = Journal(tmp_path, clock=lambda: now[0])
    gone, here = journal.begin("gone", ""), journal.begin("here", "")
    journal.detach(gone)
    now[0] = RECLAIM_SECONDS + 1
    journal.forget_old()
    assert journal.find("gone") is None
    assert journal.find("here") is here
    journal.add(Ended(here.begun.session))
    journal.close()
    assert Journal(tmp_path).find("here") is None


def test_a_key_whose_absent_clients_are_too_many_loses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.server.session_store.MAX_DETACHED", 8)
    now = [0.0]
    journal = Journal(tmp_path, clock=lambda: now[0])
    names = ["quiet 0", *(f"loud {n}" for n in range(12)), "quiet 1"]
    for name in names:
        now[0] += 1
        journal.detach(journal.begin(name, name.split()[0]))
    journal.forget_old()
    kept = [name for name in names if journal.find(name) is not None]
    assert kept == ["quiet 0", *(f"loud {n}" for n in range(6, 12)), "quiet 1"]
    journal.close()
