"""Files and batches on a full or broken disk, and the permissions of their files."""

import asyncio
import errno
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from rootlace.runtime.server.http import batch_runner, batch_store, openai_batches
from rootlace.runtime.server.http.batch_store import Bounds, FileStore
from tests.server.http.conftest import Serve, stop
from tests.server.http.fake_model import FakeModel
from tests.server.http.test_http_batches import answers, row, start, until
from tests.waiting import until as until_true


class Disk:
    """Opens files with room for some bytes; writing more raises this error."""

    def __init__(self, room: int, number: int = errno.ENOSPC) -> None:
        self.room = room
        self.number = number
        self.refused = asyncio.Event()

    def open(self, path: Path, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        raw = _File(self, path, mode, opener)
        return io.BufferedWriter(raw) if buffering else raw


class _File(io.FileIO):
    def __init__(self, disk: Disk, path: Path, mode: str, opener: Any) -> None:
        super().__init__(path, mode, opener=opener)
        self._disk = disk
        self._path = path

    def write(self, data: Any) -> int:  # type: ignore[override]
        disk, data = self._disk, bytes(data)
        if data and not disk.room:
            disk.refused.set()
            raise OSError(disk.number, os.strerror(disk.number), str(self._path))
        written = super().write(data[: disk.room])
        disk.room -= written
        return written


def use(disk: Disk, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    monkeypatch.setattr(batch_runner, "ROOM_SECONDS", 0.01)
    for module in modules:
        monkeypatch.setattr(module, "open", disk.open, raising=False)


async def test_a_full_disk_costs_no_answer(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(files=str(tmp_path))
    served = await serve(model)
    disk = Disk(1000)
    use(disk, monkeypatch, batch_runner)
    batch = await start(served, [row(name) for name in "abcdef"])
    await disk.refused.wait()
    waiting = await until(served, batch.id, "in_progress")
    written = (tmp_path / "files" / f"file-{batch.id.removeprefix('batch_')}-output").read_bytes()
    assert written.endswith(b"}\n") and 0 < len(written) < 1000
    assert waiting.request_counts.completed == written.count(b"\n") < 6
    disk.room = 10**6
    batch = await until(served, batch.id, "completed")
    assert sorted(await answers(served, batch.output_file_id)) == list("abcdef")
    assert len(model.sessions) == 6  # each row was computed once


@pytest.mark.parametrize("end", ["completed", "expired"])
async def test_a_full_share_of_files_costs_no_answer(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    """The client may delete files until the batch expires."""
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(batch_runner, "time", clock)
    monkeypatch.setattr(batch_runner, "ROOM_SECONDS", 0.01)
    monkeypatch.setattr(batch_runner, "Bounds", lambda: Bounds(total_bytes=6000))
    model = FakeModel(files=str(tmp_path))
    served = await serve(model)
    client = served.openai()
    ballast = await client.files.create(file=b"{}" * 2500, purpose="batch")
    batch = await start(served, [row(name) for name in "abcdef"])
    await until_true(lambda: "batches wait: files of 0 MiB are kept at most" in caplog.text)
    waiting = await until(served, batch.id, "in_progress")
    assert waiting.request_counts.completed < 6
    if end == "expired":
        clock.time = lambda: time.time() + 25 * 3600
        batch = await until(served, batch.id, end)
        assert batch.request_counts.completed == waiting.request_counts.completed
        return
    await client.files.delete(ballast.id)
    batch = await until(served, batch.id, end)
    assert sorted(await answers(served, batch.output_file_id)) == list("abcdef")
    assert len(model.sessions) == 6  # each row was computed once


@pytest.mark.parametrize("times", [1, 100])
async def test_a_batch_that_cannot_end_takes_no_room(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A batch's results are kept if a second attempt to write succeeds, and lost otherwise."""
    left, add = times, FileStore.add

    def broken(store: FileStore, content: Path, name: str, *more: str) -> Any:
        nonlocal left
        left -= "output" in name
        if "output" in name and left >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return add(store, content, name, *more)

    monkeypatch.setattr(FileStore, "add", broken)
    monkeypatch.setattr(batch_runner, "Bounds", lambda: Bounds(total_bytes=6000))
    served = await serve(FakeModel(files=str(tmp_path)))
    batch = await until(served, (await start(served, [row("a")])).id, "failed")
    if times == 1:
        assert list(await answers(served, batch.output_file_id)) == ["a"]
    else:
        assert batch.output_file_id is None
    client = served.openai()
    for file in (await client.files.list()).data:
        await client.files.delete(file.id)
    assert not list((tmp_path / "files").iterdir())
    await client.files.create(file=b"{}" * 3000, purpose="batch")


class FlakyDisk(Disk):
    """Refuses every other line: short lines find room where long ones do not."""

    def __init__(self) -> None:
        super().__init__(0)
        self._times = 0

    @property
    def room(self) -> int:
        self._times += 1
        return 10**6 * ((self._times // 4) % 2)

    @room.setter
    def room(self, left: int) -> None:
        pass


async def test_a_disk_that_is_nearly_full_is_told_once(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[str]:
        found = [record for record in caplog.records if record.name == batch_runner.__name__]
        return [record.getMessage().partition(":")[0] for record in found]

    served = await serve(FakeModel(files=str(tmp_path)))
    disk = FlakyDisk()
    use(disk, monkeypatch, batch_runner)
    batch = await start(served, [row(str(number)) for number in range(10)])
    await until(served, batch.id, "completed")
    assert disk.refused.is_set() and told() == ["batches wait"]
    monkeypatch.setattr(batch_runner, "SETTLED_SECONDS", 0.0)
    use(Disk(10**6), monkeypatch, batch_runner)
    batch = await start(served, [row(name) for name in "ab"])
    await until(served, batch.id, "completed")
    assert told() == ["batches wait", "batches go on"]


async def test_an_end_that_cannot_be_written_waits(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(FakeModel(files=str(tmp_path)))
    batch = await start(served, [row("a")])
    disk = Disk(0)
    use(disk, monkeypatch, batch_store, openai_batches)
    await disk.refused.wait()
    assert (await until(served, batch.id, "in_progress")).output_file_id is None
    client = served.openai()
    for ask in (
        client.files.create(file=b"{}", purpose="batch"),
        client.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        ),
    ):
        with pytest.raises(openai.APIStatusError, match="the server's disk is full") as refusal:
            await ask
        assert (refusal.value.status_code, refusal.value.code) == (507, "disk_full")
        assert str(tmp_path) not in str(refusal.value.body)
    disk.room = 10**6
    batch = await until(served, batch.id, "completed")
    assert list(await answers(served, batch.output_file_id)) == ["a"]
    assert len((await client.files.list()).data) == 2
    assert not [
        path for path in tmp_path.rglob("*") if path.match("*.new") or "upload" in str(path)
    ]


async def test_a_broken_disk_fails_a_batch_and_names_no_path(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(FakeModel(files=str(tmp_path)))
    use(Disk(1000, errno.EIO), monkeypatch, batch_runner)
    batch = await start(served, [row(name) for name in "abcdef"])
    batch = await until(served, batch.id, "failed")
    (fault,) = batch.errors.data
    assert fault.code == "storage_error" and str(tmp_path) not in fault.message
    good = await answers(served, batch.output_file_id)  # the answers that were written
    assert 0 < len(good) == batch.request_counts.completed < 6


async def test_nobody_else_reads_them_and_nothing_is_left_behind(
    serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    served = await serve(FakeModel(files=str(folder)))
    await until(served, (await start(served, [row("a")])).id, "completed")
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o600}
    (folder / "files").chmod(0o755)  # as an earlier version made the folder
    await stop(served)
    kept = set(folder.rglob("*"))
    hexes = "0" * 32
    for name in (f"file-{hexes}-output", f"upload-{hexes}", f"file-{hexes}.new"):
        (folder / "files" / name).touch()
    (folder / "batches" / f"batch_{hexes}.new").touch()
    for name in ("thesis", "file-of-mine", "a.new"):  # files of other programs
        (folder / "files" / name).touch()
        kept.add(folder / "files" / name)
    await serve(FakeModel(files=str(folder)))
    assert set(folder.rglob("*")) == kept
    folders = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700} and len(folders) == 3
