"""Files of blocks: what is written is read, and nothing else ever is."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from rootlace.runtime.contracts.block_store import Done
from rootlace.runtime.offload import disk_store
from rootlace.runtime.offload.disk_store import (
    ASSUMED_RATE,
    BLOCKS,
    HEADER_BYTES,
    INDEX,
    PREFIX,
    PROBE,
    RECORD,
    SlotFile,
    block_seconds,
    open_folder,
)
from rootlace.runtime.offload.slot_store import STALL_SECONDS, SlotStore
from tests.waiting import eventually

ME, OTHER = bytes(32), bytes([1] * 32)
OWNER = b"o" * 16
SIZE = 1000


def block_of(key: bytes) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, SIZE, np.uint8)


def opened(folder: Path, slots: int = 8, identity: bytes = ME) -> SlotStore:
    return SlotStore(SlotFile(folder, identity, SIZE, slots), 0.0, buffer_bytes=4 * SIZE)


def key_of(number: int) -> bytes:
    return bytes([number] * 16)


def save(store: SlotStore, slot: int, key: bytes) -> None:
    store.reserve(slot, key)
    store.buffer(slot)[:] = block_of(key)
    store.filled(slot)
    assert store.wait(60)
    assert store.poll() == [Done(slot, read=False, ok=True)]
    store.publish(slot, key, OWNER)
    assert store.wait(60)


def read(store: SlotStore, slot: int, key: bytes) -> np.ndarray | None:
    store.fetch(slot, key)
    done: list[Done] = []
    eventually(lambda: bool(done) or bool(done.extend(store.poll())))
    assert [(one.slot, one.read) for one in done] == [(slot, True)]
    if not done[0].ok:
        return None
    found = store.fetched(slot).copy()
    store.loaded(slot)
    return found


def test_what_is_written_is_found_in_its_order(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot in (5, 0, 3):
        save(store, slot, key_of(slot))
    store.erase([0])
    for slot in (5, 3, 5, 3, 5, 3):  # more than there are buffers
        found = read(store, slot, key_of(slot))
        assert found is not None and np.array_equal(found, block_of(key_of(slot)))
    store.close({3: True, 5: False})
    again = opened(tmp_path)
    assert [(one.slot, one.key, one.owner, one.wanted) for one in again._file.stored_blocks()] == [
        (3, key_of(3), OWNER, True),
        (5, key_of(5), OWNER, False),
    ]
    assert np.array_equal(read(again, 3, key_of(3)), block_of(key_of(3)))  # type: ignore[arg-type]
    again.close()


def test_an_order_that_cannot_be_written_is_only_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks stay, and the engine ends in peace."""
    store = opened(tmp_path)
    for slot in (0, 1):
        save(store, slot, key_of(slot))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    before = psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(disk_store, "_write", full)
        assert store.close({1: True, 0: True})
    assert "no space is left" in caplog.text
    assert psutil.Process().num_fds() == before - 2
    again = opened(tmp_path)
    assert {one.slot for one in again._file.stored_blocks()} == {0, 1}
    again.close()


def test_fewer_slots_keep_what_fits(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot in range(8):
        save(store, slot, key_of(slot))
    store.close()
    again = opened(tmp_path, slots=3)
    assert {one.slot for one in again._file.stored_blocks()} == {0, 1, 2}
    assert (tmp_path / BLOCKS).stat().st_size == 3 * SIZE
    again.close()


def test_the_bytes_of_another_model_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    save(store, 1, key_of(1))
    store.close()
    other = opened(tmp_path, identity=OTHER)
    assert other._file.stored_blocks() == [] and "something else" in caplog.text
    other.close()
    again = opened(tmp_path)
    assert again._file.stored_blocks() == []
    again.close()


@pytest.mark.parametrize("seed", range(9))
def test_damage_is_never_read(seed: int, tmp_path: Path) -> None:
    """Whatever happens to the files, a block is as it was written, or not there."""
    order = random.Random(seed)
    store = opened(tmp_path)
    for slot in range(8):
        save(store, slot, key_of(slot))
    store.close()
    for _ in range(order.randint(1, 3)):
        path = tmp_path / order.choice([INDEX, INDEX, BLOCKS])
        data = bytearray(path.read_bytes())
        if not data:
            continue
        if order.random() < 0.3:
            data = data[: order.randrange(len(data))]
        else:
            at = order.randrange(len(data))
            data[at : at + order.choice([1, 64])] = order.randbytes(order.choice([1, 64]))
        path.write_bytes(data)
    again = opened(tmp_path)
    damaged = 0
    for one in again._file.stored_blocks():
        found = read(again, one.slot, one.key)
        damaged += found is None
        assert found is None or np.array_equal(found, block_of(one.key))
    assert damaged == int(again.stats()["damaged_blocks"])
    again.close()


def test_a_block_in_the_place_of_another_is_damaged(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot in (0, 1):
        save(store, slot, key_of(slot))
    store.close()
    with (tmp_path / BLOCKS).open("r+b") as file:
        first = file.read(SIZE)
        file.seek(SIZE)
        file.write(first)
    again = opened(tmp_path)
    assert read(again, 0, key_of(0)) is not None and read(again, 1, key_of(1)) is None
    again.close()


KILLED = """
import sys
from pathlib import Path
from tests.offload.test_disk import *
store = opened(Path(sys.argv[1]), slots=20)
number = 0
while True:
    save(store, number % 20, key_of(number % 250))
    number += 1
    print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=root, text=True
    )
    assert child.stdout is not None
    told = 0
    while told < 57:  # amid the third time round
        told = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    told = int((["0", *child.stdout.read().split()])[-1]) or told
    child.wait()
    again = opened(tmp_path, slots=20)
    kept = again._file.stored_blocks()
    for one in kept:
        found = read(again, one.slot, one.key)
        assert found is not None and np.array_equal(found, block_of(one.key))
    # All but the one that was being written.
    assert len(kept) >= 19
    assert {one.key for one in kept} >= {key_of(n % 250) for n in range(told - 19, told)}
    again.close()


class Disk:
    """The file system of a test: so many bytes are free, and writing takes them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, free: int, total: int, number: int = errno.ENOSPC
    ) -> None:
        """`number`: the error where there is no room."""
        self.free, self.total, self._number = free, total, number
        self._write = os.pwrite
        monkeypatch.setattr("os.pwrite", self.pwrite)
        monkeypatch.setattr("shutil.disk_usage", lambda path: self)

    def pwrite(self, file: int, data: memoryview, at: int) -> int:
        new = max(at + len(data) - os.fstat(file).st_size, 0)
        if new > self.free:
            raise OSError(self._number, "No space left on device")
        self.free -= new
        return self._write(file, data, at)


def try_to_save(store: SlotStore, slot: int) -> bool:
    store.reserve(slot, key_of(slot))
    store.buffer(slot)[:] = block_of(key_of(slot))
    store.filled(slot)
    assert store.wait(60)
    (done,) = store.poll()
    if done.ok:
        store.publish(slot, key_of(slot), OWNER)
        assert store.wait(60)
    return done.ok


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("reserved", [True, False])
def test_a_full_disk_is_read_and_written_to_again_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reserved: bool,
    number: int,
) -> None:
    """`reserved`: what is kept free is met first; otherwise the system itself has no more room."""
    now = [0.0]
    total = 20 * SIZE if reserved else 0
    disk = Disk(monkeypatch, 5 * SIZE, total, number)
    reserve = total // 20
    file = SlotFile(tmp_path, ME, SIZE, 8)
    assert "has room for 0.0 of 0.0 GB" in caplog.text
    store = SlotStore(file, 0.0, buffer_bytes=4 * SIZE, clock=lambda: now[0])
    saved = 0
    while try_to_save(store, saved):
        saved += 1
    assert saved >= 3 and disk.free >= reserve
    assert store.working and store.writable_slots == 0 and store.stats()["full"] == 1
    found = read(store, 0, key_of(0))
    assert found is not None and np.array_equal(found, block_of(key_of(0)))
    # What is on its way meanwhile is dropped without a look at the disk.
    assert not try_to_save(store, saved)
    pauses = []
    for _ in range(9):
        begun = now[0]
        while not store.writable_slots:
            now[0] += 1.0
        pauses.append(now[0] - begun)
        assert not try_to_save(store, saved)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    assert caplog.text.count("no more blocks are kept there for now") == 1
    disk.free += 4 * SIZE
    now[0] += 64.0
    assert store.writable_slots and try_to_save(store, saved) and store.stats()["full"] == 0
    assert "there is room again" in caplog.text
    store.erase([0])
    assert store.wait(60) and store.working
    assert store.close(dict.fromkeys(range(saved + 1), True))
    again = opened(tmp_path)
    assert sorted(one.slot for one in again._file.stored_blocks()) == list(range(1, saved + 1))
    assert again.close()


def test_a_store_that_begins_on_a_full_disk_is_used_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, disk = [0.0], Disk(monkeypatch, 0, 0)
    file = SlotFile(tmp_path, ME, SIZE, 8)
    assert block_seconds(file, tmp_path, file.stored_blocks()) > 0
    store = SlotStore(file, 0.0, buffer_bytes=4 * SIZE, clock=lambda: now[0])
    assert not try_to_save(store, 0)
    disk.free, now[0] = 100 * SIZE, 1.0
    assert try_to_save(store, 0) and store.close({0: True})
    again = opened(tmp_path)
    assert [one.key for one in again._file.stored_blocks()] == [key_of(0)] and again.close()


@pytest.mark.parametrize("saved", [0, 2])
def test_a_quota_that_is_used_up_has_an_assumed_rate(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room, so that it is found out by writing. Blocks that are there are read."""
    first = opened(tmp_path)
    for slot in range(saved):
        save(first, slot, key_of(slot))
    first.close()

    def used_up(file: int, data: memoryview) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    file = SlotFile(tmp_path, ME, SIZE, 8)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", used_up)
        found = block_seconds(file, tmp_path, file.stored_blocks())
    assert found == SIZE / ASSUMED_RATE if not saved else found > 0
    assert not (tmp_path / PROBE).exists()
    monkeypatch.setattr("os.write", lambda *_: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        block_seconds(file, tmp_path, file.stored_blocks())


class NoErasing:
    """A disk that has no room to erase, as one that copies what is written; blocks can be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.full = True
        self.tries = 0
        self._number = number
        self._write = os.pwrite
        monkeypatch.setattr("os.pwrite", self.pwrite)

    def pwrite(self, file: int, data: memoryview, at: int) -> int:
        if self.full and bytes(data) == bytes(RECORD.itemsize):
            self.tries += 1
            raise OSError(self._number, "No space left on device")
        return self._write(file, data, at)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("later", ["idle", "the slot is used again", "the end"])
def test_what_cannot_be_erased_on_a_full_disk_is_erased_later(
    later: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    file = SlotFile(tmp_path, ME, SIZE, 8)
    store = SlotStore(file, 0.0, buffer_bytes=4 * SIZE, clock=lambda: now[0])
    for slot in range(4):
        save(store, slot, key_of(slot))
    disk = NoErasing(monkeypatch, number)
    store.erase([0, 1])
    store.erase([2])
    assert store.wait(60) and disk.tries == 1, "the second one waits with the first"
    assert store.working and store.writable_slots == 0 and store.stats()["full"] == 1
    assert read(store, 3, key_of(3)) is not None
    assert not try_to_save(store, 0), "nothing is written into a slot that is not erased"
    disk.full = False
    left = {3: key_of(3)}
    if later == "idle":
        now[0] += 1.0
        eventually(lambda: store.stats()["full"] == 0)
    elif later == "the slot is used again":
        now[0] += 1.0
        save(store, 0, key_of(0))
        store.erase([])
        assert store.wait(60)
        left[0] = key_of(0)
    assert store.working and store.close()
    again = opened(tmp_path)
    assert {one.slot: one.key for one in again._file.stored_blocks()} == left
    again.close()
    assert "could not be erased" not in caplog.text


def test_what_could_not_be_erased_to_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    for slot in range(3):
        save(store, slot, key_of(slot))
    NoErasing(monkeypatch, errno.ENOSPC)
    store.erase([0, 1])
    assert store.wait(60) and store.working and store.close()
    assert "2 blocks could not be erased" in caplog.text


def test_a_disk_that_fails_switches_the_store_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    save(store, 0, key_of(0))

    def broken(file: int, data: memoryview, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.pwrite", broken)
    assert not try_to_save(store, 1)
    assert not store.working and store.writable_slots == 0 and store.stats()["working"] == 0
    assert "Input/output error" in caplog.text
    assert read(store, 0, key_of(0)) is None  # nothing is read any more, either
    store.close({0: True})


def test_what_is_written_is_read_while_the_index_waits_for_other_writes(tmp_path: Path) -> None:
    store, free = opened(tmp_path), threading.Event()
    store.reserve(0, key_of(0))
    store.buffer(0)[:] = block_of(key_of(0))
    store.filled(0)
    assert store.wait(60) and store.poll()
    store.ask(lambda: free.wait() and None)
    store.publish(0, key_of(0), OWNER)
    found = read(store, 0, key_of(0))
    assert found is not None and np.array_equal(found, block_of(key_of(0)))
    assert not store.close(seconds=0.0)  # something may still be written to its folder
    free.set()
    assert store.wait(60)
    again = opened(tmp_path)
    assert [one.key for one in again._file.stored_blocks()] == [key_of(0)]
    assert again.close()


def test_nobody_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, free, begun = [0.0], threading.Event(), threading.Event()
    file = SlotFile(tmp_path, ME, SIZE, 8)
    store = SlotStore(file, 0.0, buffer_bytes=4 * SIZE, clock=lambda: now[0])
    for slot in range(3):
        save(store, slot, key_of(slot))

    def hang(slot: int, key: bytes, into: np.ndarray, crc: int | None) -> None:
        begun.set()
        free.wait()

    monkeypatch.setattr(file, "read", hang)
    for slot in range(3):
        store.fetch(slot, key_of(slot))
    assert begun.wait(60)
    now[0] = 3600.0  # a pause of this process is not one of the disk
    for _ in range(int(STALL_SECONDS)):
        assert store.poll() == [] and store.working
        now[0] += 1.0
    assert store.poll() == [Done(slot, read=True, ok=False) for slot in range(3)]
    assert not store.working and "not read within" in caplog.text
    free.set()
    assert store.close() and store.poll() == []


def test_more_is_never_reserved_than_there_is_room_for(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.writable_slots == 4
    for slot in range(4):
        store.reserve(slot, key_of(slot))
    assert store.writable_slots == 0
    store.cancel(0)
    store.buffer(1)
    store.cancel(1)
    assert store.writable_slots == 2
    store.close()


# ---------------------------------------------------------------- folders


def test_each_engine_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = open_folder(tmp_path, ME, 1000), open_folder(tmp_path, ME, 1000)
    assert first.path != second.path and first.most_bytes == 1000
    first.close()
    again = open_folder(tmp_path, ME, 1000)
    assert again.path == first.path  # it finds what the first one left
    assert open_folder(tmp_path, OTHER, 1000).path not in (first.path, second.path)


def test_others_take_half_at_most_and_go_by_age(tmp_path: Path) -> None:
    sizes = {}
    for number in range(4):
        one = open_folder(tmp_path, bytes([number + 2] * 32), 1 << 30)
        (one.path / BLOCKS).write_bytes(bytes(40_960))
        sizes[one.path] = 40_960
        if number != 1:  # one that runs
            one.close()
        os.utime(one.path, (number, number))
    paths = list(sizes)
    mine = open_folder(tmp_path, ME, 200_000)
    # Of the three that nobody has, two fit into half of it.
    assert [path.exists() for path in paths] == [False, True, True, True]
    assert 200_000 - 2 * 50_000 <= mine.most_bytes <= 200_000 - 2 * 40_960


def test_a_start_of_several_engines_finds_what_each_had(tmp_path: Path) -> None:
    engines = [open_folder(tmp_path, ME, 100_000, engines=3) for _ in range(4)]
    for one in engines:
        (one.path / BLOCKS).write_bytes(bytes(81_920))
        one.close()
    # They start one after the other, and what the later ones left is theirs.
    again = [open_folder(tmp_path, ME, 100_000, engines=3) for _ in range(3)]
    assert [one.path for one in again] == [one.path for one in engines[:3]]
    assert all((one.path / BLOCKS).stat().st_size == 81_920 for one in again)
    assert all(one.most_bytes == 100_000 for one in again)
    assert not engines[3].path.exists()  # there were four once


def test_what_it_did_not_make_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [tmp_path / "kv-backup", tmp_path / f"{PREFIX}{OTHER.hex()[:32]}-1.old"]
    for path in theirs:
        path.mkdir()
        (path / "data").write_bytes(bytes(40_960))
    closed = open_folder(tmp_path, OTHER, 1 << 30)
    closed.close()
    lstat = Path.lstat

    def of_somebody_else(path: Path) -> os.stat_result:
        about = lstat(path)
        if path != closed.path:
            return about
        return os.stat_result([*about[:4], about.st_uid + 1, *about[5:]])

    monkeypatch.setattr(Path, "lstat", of_somebody_else)
    mine = open_folder(tmp_path, ME, 1000)
    assert mine.most_bytes == 1000 and closed.path.exists()
    for path in theirs:
        assert [file.name for file in path.iterdir()] == ["data"]
    mine.path.chmod(0o755)
    mine.close()
    assert open_folder(tmp_path, ME, 1000).path.stat().st_mode & 0o777 == 0o700


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        open_folder(tmp_path / "file", ME, 1000)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / f"{PREFIX}{ME.hex()[:32]}-0").symlink_to(target)
    with pytest.raises(PermissionError):
        open_folder(tmp_path, ME, 1000)


def test_reading_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, slots=40)
    assert block_seconds(store._file, tmp_path, store._file.stored_blocks()) > 0
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, BLOCKS}
    for slot in range(33):
        save(store, slot, key_of(slot))
    size = (tmp_path / BLOCKS).stat().st_size
    assert block_seconds(store._file, tmp_path, store._file.stored_blocks()) > 0
    assert (tmp_path / BLOCKS).stat().st_size == size == 33 * SIZE
    assert (tmp_path / INDEX).stat().st_size == HEADER_BYTES + 33 * RECORD.itemsize
    store.close()


def test_a_pause_during_a_read_says_little_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads = [0.0], SlotFile.read
    file = SlotFile(tmp_path, ME, SIZE, 8)
    store = SlotStore(file, 1e-3, buffer_bytes=4 * SIZE, clock=lambda: now[0])
    save(store, 0, key_of(0))

    def paused(slot: int, key: bytes, into: np.ndarray, crc: int | None) -> None:
        now[0] += took
        reads(file, slot, key, into, crc)

    monkeypatch.setattr(file, "read", paused)
    took = 60.0
    assert read(store, 0, key_of(0)) is not None
    assert store.block_seconds < 2e-3 and store.working
    took = 0.1  # a disk that has become so slow
    for _ in range(100):
        assert read(store, 0, key_of(0)) is not None
    assert store.block_seconds > 0.09
    assert store.close()
