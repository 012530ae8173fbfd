"""Engine whose pool is too small, with a disk below it: the tokens are those of a run without a
disk."""

import dataclasses
import errno
import importlib.metadata
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import msgspec
import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.engine import offload
from rootlace.runtime.engine.core import Steps
from rootlace.runtime.engine.offload import open_tiers
from rootlace.runtime.model.executor import runner as module
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import MainMemory
from rootlace.runtime.offload.disk_store import BLOCKS, HEADER_BYTES, RECORD
from rootlace.runtime.offload.slot_store import HostStore
from rootlace.runtime.processes import new_memory
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import Cache, Handling
from tests.engine.harness import Outcome, greedy
from tests.tiny_model import make_tiny_model
from tests.waiting import eventually

Kernels = Literal["native", "reference"]
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(40)] for seed in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def without(model: Path) -> list[list[int]]:
    """The tokens of each prompt, nothing being cached."""
    engine = Engine(config(model, None, enabled=False))
    return [engine.ask(prompt).token_ids for prompt in PROMPTS]


def config(
    model: Path, disk: Path | None, kernels: Kernels = "reference", **cache: object
) -> EngineConfig:
    """Return a configuration whose pool holds little more than one of the prompts."""
    given: dict[str, object] = {"block_size": 16, "num_blocks": 4, "disk": str(disk or "")}
    given["disk_gb"] = 0.001
    return EngineConfig(
        executor=ExecutorConfig(
            model=str(model), dtype="float32", device="cpu", threads=1, kernels=kernels
        ),
        cache=CacheConfig(**{**given, **cache}),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(check_invariants=True),
    )


HOST_GB = 12.6e-6
"""Three blocks of 4,096 bytes and their records."""


class Engine:
    """Engine as in `engine.__main__`. Reading always pays, since the model is too small."""

    runners: ClassVar[dict[tuple[object, ...], ModelRunner]] = {}
    """Runners by model: contents of another engine's pool must not matter."""

    def __init__(self, config: EngineConfig, memory: int = -1, eager: bool = True) -> None:
        """`memory`: a descriptor of host memory; the engine has its own of the same. `eager`:
        whether all blocks are copied there, as on a CPU."""
        cache = config.cache
        known = config.executor, cache.block_size, cache.num_blocks
        if known not in self.runners:
            self.runners[known] = ModelRunner.load(config.executor, cache, 512, 16)
        self.runner = self.runners[known]
        memory = os.dup(memory) if memory >= 0 else memory
        self.below = open_tiers(config, self.runner, memory=memory)
        if not eager and self.below is not None:
            tiers = self.below.tiers
            levels = tuple(msgspec.structs.replace(one, eager=False) for one in tiers.levels)
            tiers = msgspec.structs.replace(tiers, levels=levels)
            self.below = msgspec.structs.replace(self.below, tiers=tiers)
        self.scheduler = Scheduler(
            config.scheduler,
            dataclasses.replace(config.cache, num_blocks=self.runner.num_blocks),
            self.runner.context_length,
            vocab_size=self.runner.vocab_size,
            tiers=self.below and self.below.tiers,
        )
        if self.below is not None:
            self.below.begin(self.scheduler, self.runner, config.cache.block_size)
            self.scheduler.pace.begin(1, 1e9)
        self.outcomes: dict[int, Outcome] = {}
        move = self.below and self.below.mover.move
        self.steps = Steps(self.scheduler, self.runner, False, self.take, move=move)

    @property
    def tiering(self):
        return self.scheduler.kv.tiering

    def take(self, updates) -> None:
        for update in updates:
            self.outcomes[update.rid].add(update)

    def ask(
        self, prompt: list[int], namespace: str = "", ttl: float | None = None, tokens: int = 4
    ) -> Outcome:
        rid = len(self.outcomes)
        self.outcomes[rid] = Outcome()
        ids, handling = np.array(prompt, np.int32), Handling(cache=Cache(ttl=ttl))
        self.scheduler.add(
            EngineRequest(rid, ids, greedy(tokens), namespace=namespace, handling=handling)
        )

        def turn() -> bool:
            for _ in range(20):
                self.take(self.steps.step())
            return self.outcomes[rid].finish is not None

        eventually(turn)
        if self.below is not None and self.below.disk is not None:
            # So that it does not depend on the disk what is there.
            assert self.below.disk.wait(60)
            self.tiering.poll()
        return self.outcomes[rid]

    def close(self) -> None:
        assert self.below is not None
        self.below.close(self.scheduler)


def test_tokens_are_the_same_and_the_next_start_is_warm(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(config(model, tmp_path, "native"))
    for _ in range(3):
        found = [engine.ask(prompt) for prompt in PROMPTS]
        assert [one.token_ids for one in found] == without
    assert [one.cached_tokens for one in found] == [32] * len(PROMPTS)
    engine.close()
    again = Engine(config(model, tmp_path, "native"))
    found = [again.ask(prompt) for prompt in PROMPTS]
    assert [one.token_ids for one in found] == without
    assert [one.cached_tokens for one in found] == [32] * len(PROMPTS)
    again.close()


def test_main_memory_lies_between_the_pool_and_the_disk(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(config(model, tmp_path, host_gb=HOST_GB), eager=False)
    assert engine.below is not None and engine.below.disk is not None
    for _ in range(3):
        found = [engine.ask(prompt) for prompt in PROMPTS]
        assert [one.token_ids for one in found] == without
    assert [one.cached_tokens for one in found] == [32] * len(PROMPTS)
    stats = engine.scheduler.stats()
    assert stats["host_blocks"] == 3 and stats["disk_blocks"] > 0
    assert stats["host_read_bytes"] > 0 and stats["disk_read_bytes"] > 0
    engine.close()
    again = Engine(config(model, tmp_path))  # what was in memory was written, too
    assert [again.ask(prompt).cached_tokens for prompt in PROMPTS] == [32] * len(PROMPTS)
    again.close()


@pytest.fixture
def memory() -> Iterator[int]:
    memory = new_memory()
    yield memory
    os.close(memory)


@pytest.mark.parametrize("eager", [True, False])
def test_host_memory_gives_the_next_engine_what_a_killed_one_had(
    eager: bool, model: Path, without: list[list[int]], memory: int
) -> None:
    many = config(model, None, host_gb=1e-4)
    engine = Engine(many, memory, eager)
    for prompt in PROMPTS:
        engine.ask(prompt)
    assert engine.scheduler.stats()["host_blocks"] == (8 if eager else 5)  # or evicted ones alone
    engine = Engine(many, memory, eager)
    found = [engine.ask(prompt) for prompt in PROMPTS]
    assert [one.token_ids for one in found] == without
    assert [one.cached_tokens for one in found] == ([32] * 4 if eager else [32, 32, 0, 0])
    assert engine.ask(PROMPTS[0], "another").cached_tokens == 0
    engine.scheduler.cache.flush()
    engine = Engine(many, memory, eager)
    assert [engine.ask(prompt).cached_tokens for prompt in PROMPTS] == [0] * 4


def test_host_memory_keeps_what_requests_share_before_it_is_evicted(
    model: Path, memory: int
) -> None:
    roomy = config(model, None, host_gb=1e-4, num_blocks=64)
    engine = Engine(roomy, memory, eager=False)
    engine.ask(PROMPTS[0])
    assert engine.scheduler.stats()["host_blocks"] == 0
    engine.ask(PROMPTS[0][:36] + PROMPTS[1])
    assert engine.scheduler.stats()["host_blocks"] == 2
    again = Engine(roomy, memory)
    assert [again.ask(prompt).cached_tokens for prompt in PROMPTS[:2]] == [32, 0]


def test_host_memory_has_outputs_as_they_grow_and_nothing_that_expires(
    model: Path, memory: int
) -> None:
    roomy = config(model, None, host_gb=1e-4, num_blocks=64)
    engine = Engine(roomy, memory)
    reply = engine.ask(PROMPTS[0], tokens=30).token_ids  # 70 tokens, of which the last is unread
    assert engine.scheduler.stats()["host_blocks"] == 4
    engine.ask(PROMPTS[1], ttl=1e6)
    assert engine.scheduler.stats()["host_blocks"] == 4
    again = Engine(roomy, memory)
    assert again.ask(PROMPTS[1]).cached_tokens == 0
    assert again.ask([*PROMPTS[0], *reply, 1]).cached_tokens == 64


@pytest.mark.parametrize("seconds", [(1e6, None), (None, 1e6)])
def test_host_memory_loses_what_a_request_with_a_time_to_live_shares(
    seconds: tuple[float | None, ...], model: Path, memory: int
) -> None:
    roomy = config(model, None, host_gb=1e-4, num_blocks=64)
    engine = Engine(roomy, memory)
    for rid, ttl in enumerate(seconds):  # both run at once
        engine.outcomes[rid] = Outcome()
        ids, handling = np.array(PROMPTS[0], np.int32), Handling(cache=Cache(ttl=ttl))
        engine.scheduler.add(EngineRequest(rid, ids, greedy(30), handling=handling))
        for _ in range(3):
            engine.take(engine.steps.step())
    while not all(one.finish for one in engine.outcomes.values()):
        engine.take(engine.steps.step())
    # Of 64 tokens, the request with a time to live computed all, or what is behind the prompt.
    kept = 0 if seconds[0] else 2
    assert engine.scheduler.stats()["host_blocks"] == kept
    reply = engine.outcomes[0].token_ids
    again = Engine(roomy, memory)
    assert again.ask([*PROMPTS[0], *reply, 1]).cached_tokens == 16 * kept


def test_host_memory_that_something_else_wrote_is_empty(model: Path, memory: int) -> None:
    engine = Engine(config(model, None, host_gb=HOST_GB), memory)
    for prompt in PROMPTS:
        engine.ask(prompt)
    assert engine.scheduler.stats()["host_blocks"] == 3
    for other in (
        config(model, None, host_gb=HOST_GB, block_size=8),
        config(model, None, host_gb=2 * HOST_GB, block_size=8),
    ):
        assert Engine(other, memory).scheduler.stats()["host_blocks"] == 0


def test_a_record_that_was_not_finished_names_no_block(memory: int) -> None:
    store = HostStore(os.dup(memory), b"i" * 32, 4, 64)
    for slot in range(3):
        store.buffer(slot)[:] = slot
        store.publish(slot, bytes([slot]) * 16, b"o" * 16)
    store.erase([0])
    store.bytes[HEADER_BYTES + RECORD.itemsize] ^= 1  # the key of slot 1
    again = HostStore(os.dup(memory), b"i" * 32, 4, 64)
    (found,) = again.stored_blocks()
    assert (found.slot, found.key, found.owner) == (2, b"\2" * 16, b"o" * 16)
    assert again.fetched(2).tolist() == [2] * 64
    assert HostStore(os.dup(memory), b"j" * 32, 4, 64).stored_blocks() == []


def test_nobody_finds_what_another_namespace_left(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(config(model, tmp_path))
    for prompt in PROMPTS[:3]:
        engine.ask(prompt, "one")
    assert engine.ask(PROMPTS[0], "one").cached_tokens == 32
    for namespace in ("two", "", "one/", "on"):
        found = engine.ask(PROMPTS[0], namespace)
        assert (found.cached_tokens, found.token_ids) == (0, without[0])
    engine.close()
    again = Engine(config(model, tmp_path))
    again.scheduler.cache.forget_namespace("two")
    assert again.ask(PROMPTS[0], "two").cached_tokens == 0
    assert again.ask(PROMPTS[1], "one").cached_tokens == 32
    again.scheduler.cache.flush()
    assert again.ask(PROMPTS[2], "one").cached_tokens == 0
    again.close()


@pytest.mark.parametrize("killed", [False, True])
def test_no_start_finds_what_had_a_time_to_live(killed: bool, model: Path, tmp_path: Path) -> None:
    engine = Engine(config(model, tmp_path))
    for prompt, ttl in zip(PROMPTS, [1e6, None, None, 1e6], strict=True):
        engine.ask(prompt, ttl=ttl)  # of the first one, nothing is in the pool at the end
    assert engine.scheduler.stats()["disk_blocks"] > 0
    if killed:
        assert engine.below is not None and engine.below.folder is not None
        engine.below.folder.close()
    else:
        engine.close()
    again = Engine(config(model, tmp_path))
    found = [again.ask(prompt).cached_tokens for prompt in PROMPTS]
    assert found == [0, 32, 0 if killed else 32, 0]
    again.close()


def test_damaged_blocks_are_computed_again(
    model: Path, without: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(config(model, tmp_path))
    for prompt in PROMPTS:
        engine.ask(prompt)
    engine.close()
    (blocks,) = tmp_path.glob(f"*/{BLOCKS}")
    data = bytearray(blocks.read_bytes())
    for at in range(0, len(data), 5000):  # some of the blocks
        data[at] ^= 1
    blocks.write_bytes(data)
    again = Engine(config(model, tmp_path))
    found = [again.ask(prompt) for prompt in PROMPTS]
    assert [one.token_ids for one in found] == without
    assert again.scheduler.stats()["disk_damaged_blocks"] > 0
    assert "a damaged block is ignored" in caplog.text
    again.close()


@pytest.mark.parametrize("change", ["weights", "block size", "type of the cache"])
def test_another_model_begins_cold(change: str, model: Path, tmp_path: Path) -> None:
    engine = Engine(config(model, tmp_path / "cache"))
    engine.ask(PROMPTS[0])
    engine.close()
    other = config(model, tmp_path / "cache")
    if change == "weights":
        path = make_tiny_model(tmp_path / "other", seed=1)
        other = config(path, tmp_path / "cache")
    elif change == "block size":
        other = config(model, tmp_path / "cache", block_size=8, num_blocks=8)
    else:
        executor = dataclasses.replace(other.executor, kv_dtype="int8")
        other = dataclasses.replace(other, executor=executor)
    again = Engine(other)
    assert again.ask(PROMPTS[0]).cached_tokens == 0
    again.close()
    same = Engine(config(model, tmp_path / "cache"))
    assert same.ask(PROMPTS[0]).cached_tokens == 32
    same.close()


def test_the_folder_never_takes_more_than_it_may(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    quota = 0.00003
    for _ in range(2):
        engine = Engine(config(model, tmp_path, disk_gb=quota, disk_hourly_gb=1.0))
        for _ in range(2):
            assert [engine.ask(prompt).token_ids for prompt in PROMPTS] == without
        engine.close()
        files = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
        assert 0.5 * quota * 1e9 < sum(files) <= quota * 1e9


def test_no_more_is_written_in_an_hour_than_may_be(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(config(model, tmp_path, disk_hourly_gb=0.00002))
    for _ in range(2):
        assert [engine.ask(prompt).token_ids for prompt in PROMPTS] == without
    written = engine.scheduler.stats()["disk_written_bytes"]
    engine.close()
    assert 0 < written <= 20_000


def test_a_small_model_computes_faster_than_it_reads(
    model: Path, without: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(config(model, tmp_path))
    engine.below.disk.block_seconds = 1e12
    for _ in range(2):
        assert [engine.ask(prompt).token_ids for prompt in PROMPTS[:1]] == without[:1]
    engine.close()
    assert not next(tmp_path.glob(f"*/{BLOCKS}")).stat().st_size


def test_adapters_that_cannot_be_read_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(executor: ExecutorConfig) -> None:
        raise PermissionError(13, "Permission denied", "adapter_model.safetensors")

    monkeypatch.setattr("rootlace.runtime.engine.offload.adapter_contents", unreadable)
    with pytest.raises(InvalidRequest, match=r"of an adapter .*adapter_model\.safetensors"):
        Engine(config(model, tmp_path))


def test_what_cannot_be_a_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"--cache-disk .*file"):
        Engine(config(model, tmp_path / "file"))
    with pytest.raises(InvalidRequest, match="--cache-disk ~nobody-of-this-name/cache: "):
        Engine(config(model, Path("~nobody-of-this-name/cache")))
    with pytest.raises(InvalidRequest, match="--cache-host-gb 1e-06: a block takes 4096 bytes"):
        Engine(config(model, None, host_gb=1e-6))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="a block takes 4096 bytes"):
            Engine(config(model, tmp_path, disk_gb=1e-6))
    assert len(list(tmp_path.glob("kv-*"))) == 1  # nobody holds it


def test_more_host_memory_than_the_machine_grants_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (config(model, None, host_gb=gigabytes) for gigabytes in (3e-5, 1e-4))
    monkeypatch.setattr(offload, "main_memory", lambda: MainMemory(50_000, 0))
    assert Engine(few).below is not None
    with pytest.raises(InvalidRequest, match=r"--cache-host-gb 0.0001: this machine grants 0.0 GB"):
        Engine(many)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_opened_is_counted_as_one_that_failed(
    number: int,
    model: Path,
    without: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rootlace.runtime.engine.offload.open_folder", fails)
    engine = Engine(config(model, tmp_path))
    assert os.strerror(number) in caplog.text
    for _ in range(2):
        assert [engine.ask(prompt).token_ids for prompt in PROMPTS] == without
    stats = engine.scheduler.stats()
    assert (stats["disk_failed"], stats["disk_working"]) == (1, 0)
    engine.scheduler.cache.flush()
    engine.close()
    none_asked_for = Engine(config(model, None)).scheduler.stats()
    assert not any(name.startswith("disk_") for name in none_asked_for)


def test_the_version_of_transformers_counts_where_it_computes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(model, None)
    runner = ModelRunner.load(given.executor, given.cache, 512, 16)
    own, found = runner.config, []
    for modules in (None, SimpleNamespace(architecture="")):
        runner.config = msgspec.structs.replace(
            own, spec=msgspec.structs.replace(own.spec, transformers=modules)
        )
        for version in ("1", "2"):
            monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
            found.append(module.kv_identity(runner, given.executor, given.cache))
    assert found[0] == found[1] and len(set(found)) == 3
