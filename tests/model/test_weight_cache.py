"""Packed weights that the next start maps: the same bytes, or none."""

import errno
import io
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from rootlace.kernels.native.library import Team
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32, Packed
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import ExecutorLost
from rootlace.runtime.model import weight_cache as cache_entry
from rootlace.runtime.model import weight_cache as cache_folder
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder.native_weights import PackedWeights
from rootlace.runtime.model.executor.cpu_setup import packed_weights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.weight_cache import (
    PART,
    DamagedEntry,
    Entry,
    WeightCache,
    _locked,
    cache_key,
    write_entry,
)
from tests.model.checkpoints import configs, save
from tests.model.gguf.converting import convert
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.model.quantised_checkpoints import WEIGHTS, edit, gptq, quantised
from tests.native import native_library
from tests.waiting import eventually

KEY = "0" * 32


class Starts:
    """Starts of one model, with or without a cache."""

    def __init__(self, path: Path, dtype: np.dtype[Any], quantize: Any = "none") -> None:
        self.library = native_library()
        self.team = Team(self.library, 1)
        self.config = ModelConfig.read(path)
        self.executor = ExecutorConfig("", quantize=quantize)
        self.dtype = dtype
        self.loads = 0

    def load(self, *given: Any) -> ModelWeights:
        self.loads += 1
        return load_weights(*given)

    def start(self, cache: WeightCache | None) -> PackedWeights:
        setup = ModelSetup(
            *(self.config, self.executor, CacheConfig(), self.dtype), weights_of=self.load
        )
        return packed_weights(self.library, self.team, setup, cache)

    def key(self) -> str:
        files = Checkpoint(self.config.path).files
        return cache_key(self.config, files, self.library, self.dtype, self.executor.quantize)


def bytes_of(packed: PackedWeights) -> dict[str, Any]:
    """All that the native kernels are given, by name."""
    found: dict[str, Any] = {}

    def part(one: Packed) -> list[Any]:
        tensors = (one.memory, one.bias, one.order)
        numbers = [None if each is None else (each.dtype, each.tolist()) for each in tensors]
        schemes = None if one.schemes is None else bytes(one.schemes)
        return [one.outputs, one.inputs, *numbers, schemes]

    found = {name: list(map(part, parts)) for name, parts in packed.linears.items()}
    return found | {
        name: (tensor.dtype, tensor.shape, tensor.tolist())
        for name, tensor in packed.tensors.items()
    }


def llama(folder: Path) -> Path:
    save(configs()["llama-tied"], folder, dtype=torch.bfloat16)
    return folder


def act_order(folder: Path) -> Path:
    quantised(configs()["qwen2"], folder, *gptq(4, 32, order=True))
    return folder / "quantised"


def gguf(folder: Path) -> Path:
    save(configs()["llama"], folder / "hf")
    return convert(folder / "hf", folder / "m.gguf", "Q4_0")


def experts(folder: Path) -> Path:
    save(configs()["gpt_oss"], folder)
    return folder


@pytest.mark.parametrize(
    ("write", "dtype", "quantize"),
    [
        (llama, BFLOAT16, "none"),
        (llama, BFLOAT16, "int4"),
        (act_order, BFLOAT16, "none"),
        (gguf, FLOAT32, "none"),
        (experts, FLOAT32, "none"),
    ],
)
def test_the_second_start_has_the_bytes_of_one_without_a_cache(
    tmp_path: Path, write: Callable[[Path], Path], dtype: np.dtype[Any], quantize: str
) -> None:
    starts = Starts(write(tmp_path / "model"), dtype, quantize)
    cache = WeightCache(tmp_path / "cache", least_bytes=0)
    expected = bytes_of(starts.start(None))
    assert bytes_of(starts.start(cache)) == expected
    eventually(lambda: bool(cache.files()))
    starts.loads = 0
    second = starts.start(cache)
    assert starts.loads == 0
    assert bytes_of(second) == expected
    assert second.mapped > 0


def test_a_served_gguf_file_may_be_written_over(tmp_path: Path) -> None:
    """The packed file has all weights and tables that steps read."""
    starts = Starts(gguf(tmp_path / "model"), FLOAT32)
    cache = WeightCache(tmp_path / "cache", least_bytes=0)
    before = starts.start(cache).embedding_blocks
    assert before is not None
    eventually(lambda: bool(cache.files()))
    after = starts.start(cache).embedding_blocks
    assert after is not None and after.type == before.type
    expected = after.data.tolist()
    assert expected == before.data.tolist()
    file = starts.config.path
    file.write_bytes(bytes(file.stat().st_size))
    assert after.data.tolist() == expected
    (kept,) = cache.files()
    found = Entry.read(kept.path)
    found.verify()
    assert "embedding.blocks" in found.table.tensors


def kept(tmp_path: Path) -> tuple[Starts, WeightCache, Path]:
    """Return a cache with one file."""
    starts = Starts(llama(tmp_path / "model"), BFLOAT16)
    cache = WeightCache(tmp_path / "cache", most_bytes=1 << 30, least_bytes=0)
    cache.keep(KEY, starts.start(None), "m", None).join()
    return starts, cache, cache.files()[0].path


def test_what_the_key_depends_on(tmp_path: Path) -> None:
    starts = Starts(llama(tmp_path), BFLOAT16)
    key, weights = starts.key(), tmp_path / WEIGHTS
    assert starts.key() == key
    found = {
        key,
        Starts(tmp_path, FLOAT32).key(),
        Starts(tmp_path, BFLOAT16, "int8").key(),
    }
    assert len(found) == 3
    about = weights.stat()
    weights.chmod(about.st_mode)  # nothing but st_ctime, which an edit in place cannot hide
    found.add(starts.key())
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    found.add(starts.key())
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    found.add(starts.key())
    edit(tmp_path, rms_norm_eps=1e-3)
    found.add(starts.key())
    assert len(found) == 7


def test_each_set_of_longropes_factors_is_kept(tmp_path: Path) -> None:
    """Angles are kept beside the weights: those of a context, short or long."""
    save(configs()["phi3-partial"], tmp_path / "model")
    starts = Starts(tmp_path / "model", FLOAT32)
    cache = WeightCache(tmp_path / "cache", most_bytes=1 << 30, least_bytes=0)
    for context, loads in ((None, 1), (100, 1), (200, 2), (256, 2), (128, 2)):
        starts.executor = ExecutorConfig("", context_length=context)
        angles = starts.start(cache).tensors["frequencies"].tolist()
        expected = starts.start(None).tensors["frequencies"].tolist()
        starts.loads -= 1
        assert (angles, starts.loads) == (expected, loads)
        eventually(lambda count=loads: len(cache.files()) == count)


@pytest.mark.parametrize("count", [1, 2])
def test_torch_packs_with_the_threads_that_are_asked_for(count: int, tmp_path: Path) -> None:
    starts, before, found = Starts(llama(tmp_path), BFLOAT16), torch.get_num_threads(), []

    def load(*given: Any) -> ModelWeights:
        found.append(torch.get_num_threads())
        return load_weights(*given)

    executor = ExecutorConfig("", threads=count)
    setup = ModelSetup(starts.config, executor, CacheConfig(), BFLOAT16, weights_of=load)
    try:
        torch.set_num_threads(3 - count)
        packed_weights(starts.library, starts.team, setup, None)
    finally:
        torch.set_num_threads(before)
    assert found == [count]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-60] + bytes([data[-60] ^ 1]) + data[-59:],
    ],
    ids=["shorter", "longer", "half", "empty", "zeros", "an array", "the table"],
)
def test_a_damaged_file_is_made_again(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _, cache, path = kept(tmp_path)
    assert cache.find(KEY) is not None
    data = path.read_bytes()
    path.unlink()  # what is mapped may be deleted, but not be written to
    path.write_bytes(damage(data))
    assert cache.find(KEY) is None
    assert "packed weights are made again" in caplog.text
    assert not path.exists()


def flip(path: Path, place: int) -> None:
    """Change a byte in a new file of that name: the old one may be mapped."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_every_array_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and last byte of each array are damaged, outside of the samples at mapping."""
    monkeypatch.setattr(cache_entry, "samples", lambda *_: ())
    starts = Starts(act_order(tmp_path / "model"), FLOAT32)
    cache = WeightCache(tmp_path / "cache", most_bytes=1 << 30, least_bytes=0)
    cache.keep(KEY, starts.start(None), "m", None).join()
    path = cache.files()[0].path
    entry = Entry.read(path)
    entry.verify()
    assert not entry.damage.is_set()
    linears = [part for parts in entry.table.linears.values() for part in parts][:7]
    assert any(one.bias for one in linears)
    assert any(one.order for one in linears)
    arrays = [array for one in linears for array in (one.memory, one.bias, one.order) if array]
    for array in (*arrays, *entry.table.tensors.values()):
        for place in (array.begin, array.begin + array.size - 1):
            flip(path, place)
            damaged = Entry.read(path)
            with pytest.raises(DamagedEntry, match=f"{array.begin} to {array.begin + array.size} "):
                damaged.verify()
            assert damaged.damage.is_set()
            flip(path, place)


def test_damage_ends_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is deleted, and the process that mapped it uses no further step's result."""
    native_library()
    monkeypatch.setattr(cache_entry, "samples", lambda *_: ())
    cache = WeightCache(tmp_path / "cache", least_bytes=0)
    monkeypatch.setattr(WeightCache, "chosen", lambda *_: cache)
    executor = ExecutorConfig(model=str(llama(tmp_path / "model")), kernels="native", threads=1)
    whole = ModelRunner.load(executor, CacheConfig(16, 16), 64, 4)
    eventually(lambda: bool(cache.files()))
    path = cache.files()[0].path
    flip(path, Entry.read(path).table.tensors["final_norm"].begin)
    damaged = ModelRunner.load(executor, CacheConfig(16, 16), 64, 4)
    eventually(lambda: "packed weights are damaged" in caplog.text and not path.exists())
    assert str(path) in caplog.text
    plan = make_plan([Work(Row(Blocks(16, 16), list(range(3, 11))))])
    assert len(whole.run(plan).token_ids) == 1
    with pytest.raises(ExecutorLost):
        damaged.run(plan)


def test_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is not mapped, and the log explains in one line why every start packs."""
    starts, cache, path = kept(tmp_path)
    if os.getuid() == 0:
        os.chown(path, 1, 1)
    else:
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert cache.find(KEY) is None
    cache.keep(KEY, starts.start(None), "m", None).join()
    assert len(caplog.records) == 1
    assert f"{path} is another user's" in caplog.text


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    starts, cache, path = kept(tmp_path)
    size = path.stat().st_size
    packed = starts.start(None)
    cache = replace(cache, most_bytes=3 * size + size // 2)
    for place, key in enumerate(("1", "2")):
        cache.keep(key, packed, "m", None).join()
        os.utime(cache.folder / f"{key}.packed", (place + 1, place + 1))
    os.utime(path, (0, 0))
    assert cache.find(KEY) is not None  # which uses it
    cache.keep("3", packed, "m", None).join()
    assert {one.path.stem for one in cache.files()} == {"2", "3", KEY}
    replace(cache, most_bytes=size // 2).keep("4", packed, "m", None).join()
    assert len(cache.files()) == 3
    assert cache.clear() == 3 * size
    assert not cache.files()


def test_two_starts_at_once(tmp_path: Path) -> None:
    """The second one leaves the file to the first; what a process left that is gone is deleted,
    also by a start that writes nothing."""
    starts, cache, path = kept(tmp_path)
    path.unlink()
    part, left = cache.folder / f"{KEY}{PART}", cache.folder / f"other{PART}"
    left.write_bytes(b"half")
    packed = starts.start(None)
    with _locked(part) as first:
        assert first is not None
        first.write(b"half")
        cache.keep(KEY, packed, "m", None).join()
        assert part.read_bytes() == b"half"
        assert not cache.files()
        assert cache.find(KEY) is None
        assert part.exists()
        assert not left.exists()
    cache.keep(KEY, packed, "m", None).join()
    assert [one.path for one in cache.files()] == [path]
    assert not part.exists()


def test_files_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder has downloads, for example, or other users can write to it."""
    starts, cache, path = kept(tmp_path)
    path.unlink()
    download, led_to = cache.folder / "film.part", tmp_path / "precious"
    for file in (download, led_to):
        file.write_text("mine")
    packed = starts.start(None)
    link = cache.folder / f"{KEY}{PART}"
    link.symlink_to(led_to)
    cache.keep(KEY, packed, "m", None).join()
    assert "packed weights are not kept" in caplog.text
    cache.keep("1", packed, "m", None).join()
    assert [one.path.stem for one in cache.files()] == ["1"]
    assert (download.read_text(), led_to.read_text()) == ("mine", "mine")


def test_no_room_on_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, cache, path = kept(tmp_path)
    path.unlink()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_folder, "write_entry", full)
    cache.keep(KEY, starts.start(None), "m", None).join()
    assert [record.getMessage() for record in caplog.records] == [
        f"packed weights are not kept for the next start: [Errno 28] {os.strerror(errno.ENOSPC)}"
    ]
    assert not list(cache.folder.iterdir())


class Filling(io.FileIO):
    """A file on a disk with room for so many bytes: what is left is written, then nothing."""

    def __init__(self, path: Path, free: int) -> None:
        super().__init__(path, "w+")
        self.free = free

    def write(self, data: Any) -> int:
        with memoryview(data) as whole:
            if not self.free and len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = super().write(whole[: self.free])
        self.free -= written
        return written


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Also in the midst of the table, at the end."""
    packed = tiny_weights()
    with Filling(tmp_path / "whole", 1 << 20) as file:
        write_entry(file, packed, "m", None)
        size = file.tell()
    assert Entry.read(tmp_path / "whole").table.remarks == packed.remarks
    for free in (0, 1, 64, size - 60, size - 1):
        with Filling(tmp_path / "part", free) as file, pytest.raises(OSError, match="No space"):
            write_entry(file, packed, "m", None)


def test_every_damaged_byte_of_a_table(tmp_path: Path) -> None:
    """The table belongs to an entry smaller than a sample."""
    path = tmp_path / "entry"
    with Filling(path, 1 << 20) as file:
        write_entry(file, tiny_weights(), "m", None)
    for place in range(Entry.read(path).table.arrays, path.stat().st_size):
        for mask in (0x01, 0x80):
            data = bytearray(path.read_bytes())
            data[place] ^= mask
            (tmp_path / "damaged").write_bytes(data)
            with pytest.raises(DamagedEntry):
                Entry.read(tmp_path / "damaged")
    (tmp_path / "empty").touch()
    with pytest.raises(DamagedEntry):
        Entry.read(tmp_path / "empty")


def tiny_weights() -> PackedWeights:
    return PackedWeights({}, {"norm": np.arange(20, dtype=np.float32)}, remarks=("remark",))


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    starts = Starts(llama(tmp_path / "model"), BFLOAT16)
    cache = WeightCache(tmp_path / "file" / "cache", least_bytes=0)
    assert bytes_of(starts.start(cache)) == bytes_of(starts.start(None))
    eventually(lambda: bool(caplog.records))
    assert len(caplog.records) == 1
    assert "packed weights are not kept for the next start" in caplog.text


def test_what_is_mapped_outlives_its_file(tmp_path: Path) -> None:
    starts, cache, path = kept(tmp_path)
    entry = Entry.read(path)
    cache.clear()
    assert bytes_of(entry.packed(None)) == bytes_of(starts.start(None))


def test_what_options_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert WeightCache.chosen("off") is None
    assert WeightCache.chosen("", 5) == WeightCache(tmp_path / "rootlace" / "weights", 5)
    assert WeightCache.chosen(str(tmp_path)) == WeightCache(tmp_path)


def test_reading_ahead_ends_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends on its own: an end inside torch's code would abort the process."""
    _, cache, path = kept(tmp_path)
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
    assert cache.find(KEY) is not None
    assert [thread.daemon for thread in threads] == [False]
    summed: list[int] = []
    monkeypatch.setattr(zlib, "crc32", lambda piece, crc: summed.append(len(piece)) or crc)
    with pytest.raises(DamagedEntry):
        Entry.read(path).verify()
    assert summed
    summed.clear()
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # which is not alive
    Entry.read(path).verify()
    assert not summed


def test_small_models_are_not_kept(tmp_path: Path) -> None:
    starts = Starts(llama(tmp_path / "model"), BFLOAT16)
    starts.start(WeightCache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
