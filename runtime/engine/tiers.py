"""What is below an engine's KV pool: opened when it starts, filled when it ends."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rootlace.runtime.cache.tier import Label, Tier
from rootlace.runtime.cache.wear import HourlyBytes
from rootlace.runtime.config import CacheConfig, EngineConfig
from rootlace.runtime.contracts.block_store import StoreMemory
from rootlace.runtime.engine.client.engine_client import SPILL_SECONDS
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv.block_mover import BlockMover
from rootlace.runtime.model.kv.device_memory import made_up_plan
from rootlace.runtime.model.kv.identity import kv_identity, kv_spaces
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.scheduler.tiers.levels import HandedLevel, Level, Tiers
from rootlace.runtime.tiers.disk import DiskStore
from rootlace.runtime.tiers.folder import TierFolder, open_folder
from rootlace.runtime.tiers.host import HostStore
from rootlace.runtime.tiers.read_speed import block_seconds
from rootlace.runtime.tiers.shared_slots import HandedStore, SharedSlots
from rootlace.runtime.tiers.slot_file import SlotFile
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import SamplingParams

FIRST_TOKENS, MORE_TOKENS = 16, 128
"""Prompts that are computed to find out how long it takes; the longer one where the shorter one
takes less than `QUICK_SECONDS`."""
QUICK_SECONDS = 0.25
TIMED_BLOCKS = 16
GIGABYTE = 10**9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenTiers:
    """What is below the pool. `disk` and `folder`: None where there is none."""

    tiers: Tiers
    mover: BlockMover
    disk: DiskStore | None
    folder: TierFolder | None

    @property
    def handed_slots(self) -> int:
        """Of the memory that engines share."""
        return 0 if self.tiers.handed is None else self.tiers.handed.tier.num_slots

    def move(self, moves: np.ndarray) -> None:
        """See `Steps`."""
        self.mover.move(moves)

    def begin(self, scheduler: Scheduler, runner: ModelRunner, block_size: int) -> None:
        """Measure what computing a prompt takes, which reading is compared with. The pool is
        empty."""
        tokens, seconds = prefill_seconds(runner, block_size)
        scheduler.view.pace.begin(tokens, seconds)
        for level in self.tiers.readable:
            store = level.store
            log.info(
                "%s: %d of %d blocks from before; one is read in %.3g ms, its %d tokens are "
                "computed in %.3g ms",
                *(level.name, len(level.tier), store.num_slots),
                *(1e3 * level.block_seconds, block_size),
                1e3 * seconds * block_size / tokens,
            )

    def close(self, scheduler: Scheduler) -> None:
        """Write what is cached and not on the disk yet, and then what the next start is to know.
        What there is no time for is left out, and what has a time to live is forgotten."""
        if self.disk is None or self.folder is None:
            return
        end = time.monotonic() + SPILL_SECONDS
        scheduler.kv.retention.end()
        for moves in scheduler.kv.tiering.spill():
            self.mover.move(moves)
            self.mover.finish()
            if not self.disk.writer.wait(end - time.monotonic()):
                break
        scheduler.kv.tiering.poll()
        wanted, left = scheduler.kv.tiering.wanted_slots(), max(end - time.monotonic(), 1.0)
        if self.disk.close(wanted, left):
            self.folder.close()  # else it is this process's until it ends


def open_tiers(
    config: EngineConfig,
    runner: ModelRunner,
    engines: int = 1,
    memory: int = -1,
    memory_bytes: int = 0,
) -> OpenTiers | None:
    """What the configuration asks for (`CacheConfig.tiered`), a part of it for each of so many
    engines; None where the disk does not work, which is logged. `memory`: a file descriptor of what
    engines hand blocks over in, of so many bytes at most; -1: none. Raises `InvalidRequest` for a
    folder that cannot be one, for adapters that cannot be read, and for a memory without room."""
    cache = config.cache
    try:
        spaces = kv_spaces(config.executor)
    except OSError as error:
        raise InvalidRequest(f"the files of an adapter cannot be read: {error}") from error
    levels: list[Level] = []
    stores: list[StoreMemory] = []
    if cache.host_gb:
        host = _open_host(cache.host_gb / engines, runner)
        levels.append(host[0])
        stores.append(host[1])
    disk = folder = None
    try:
        if cache.disk:
            level, disk, folder = _open_disk(config, cache, runner, engines)
            levels.append(level)
            stores.append(disk)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidRequest(f"--cache-disk {cache.disk}: {error}") from error
    except OSError as error:
        log.warning("no blocks are kept on disk: %s", error)
    handed = None
    if memory >= 0:
        if config.executor.tensor_parallel > 1:
            raise InvalidRequest("--disaggregate hands over the blocks of a whole model")
        handed, shared = _open_handed(runner, memory, memory_bytes)
        stores.append(shared)
    if not stores:
        return None
    mover = BlockMover(runner.kv_cache, stores, runner.work)
    return OpenTiers(Tiers(tuple(levels), spaces, handed=handed), mover, disk, folder)


def _open_handed(runner: ModelRunner, memory: int, most: int) -> tuple[HandedLevel, HandedStore]:
    """Raises `InvalidRequest` where there is no room for a block."""
    size = BlockMover(runner.kv_cache, ()).block_bytes
    slots = most // size
    if not slots:
        raise InvalidRequest(f"--disaggregate-gb {most / GIGABYTE}: a block takes {size} bytes")
    store = HandedStore(SharedSlots(memory, size, slots))
    wear = HourlyBytes(None, time.monotonic)
    return HandedLevel("handed", Tier(slots), store, wear, size), store


def _open_host(gigabytes: float, runner: ModelRunner) -> tuple[Level, HostStore]:
    """Memory that the GPU copies from and to by itself. Raises `InvalidRequest`."""
    if runner.device.type != "cuda":
        raise InvalidRequest("--cache-host-gb is for a GPU: here the KV pool is in main memory")
    mover = BlockMover(runner.kv_cache, (), runner.work)
    size = mover.block_bytes
    slots = int(gigabytes * GIGABYTE) // size
    if not slots:
        raise InvalidRequest(f"--cache-host-gb {gigabytes}: a block takes {size} bytes")

    def pinned(count: int) -> np.ndarray:
        memory: np.ndarray = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    try:
        store = HostStore(slots, size, mover.load_seconds(pinned(size), TIMED_BLOCKS), pinned)
    except RuntimeError as error:
        raise InvalidRequest(f"--cache-host-gb {gigabytes}: {error}") from error
    wear = HourlyBytes(None, time.monotonic)
    return Level("host", Tier(slots), store, wear, size), store


def _open_disk(
    config: EngineConfig, cache: CacheConfig, runner: ModelRunner, engines: int
) -> tuple[Level, DiskStore, TierFolder]:
    """Raises OSError, and `InvalidRequest` where there is no room for a block."""
    identity = kv_identity(runner, config.executor, cache)
    most = int(cache.disk_gb * GIGABYTE / engines)
    try:
        root = Path(cache.disk).expanduser()
    except RuntimeError as error:  # nobody of this name is known
        raise InvalidRequest(f"--cache-disk {cache.disk}: {error}") from error
    folder = open_folder(root, identity, most, engines)
    try:
        size = BlockMover(runner.kv_cache, ()).block_bytes
        slots = SlotFile.slots_in(folder.most_bytes, size)
        if not slots:
            raise InvalidRequest(f"--cache-disk-gb {cache.disk_gb}: a block takes {size} bytes")
        file = SlotFile(folder.path, identity, size, slots)
        kept = file.kept()
        disk = DiskStore(file, block_seconds(file, folder.path, kept))
        tier = Tier(slots)
        found = ((one.slot, Label(one.key, one.owner), one.wanted) for one in kept)
        disk.erase(tier.restore(found))
        hourly = cache.disk_hourly_gb or cache.disk_gb
        wear = HourlyBytes(int(hourly * GIGABYTE / engines), time.monotonic)
        return Level("disk", tier, disk, wear, size), disk, folder
    except BaseException:
        folder.close()
        raise


def prefill_seconds(runner: ModelRunner, block_size: int) -> tuple[int, float]:
    """Tokens of a made-up prompt, and how long they took. Writes to the pool's first blocks."""
    most = min(runner.num_blocks * block_size, runner.context_length)
    order = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, seed=0)
    tokens, seconds = 0, 0.0
    for wanted in (FIRST_TOKENS, FIRST_TOKENS, MORE_TOKENS):  # the first is a warm-up
        if seconds > QUICK_SECONDS:
            break
        tokens = min(wanted, most)
        plan = made_up_plan(order, runner.vocab_size, [tokens], block_size, params)
        begun = time.perf_counter()
        runner.run(plan)
        seconds = time.perf_counter() - begun
    return tokens, seconds
