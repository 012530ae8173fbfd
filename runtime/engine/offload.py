"""Offload levels of the engine: opened at its start, filled at its end."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rootlace.runtime.cache.tier import HourlyBytes, Label, Tier
from rootlace.runtime.config import CacheConfig, EngineConfig
from rootlace.runtime.contracts.block_store import BlockLost, StoreMemory, Transfer, TransferConfig
from rootlace.runtime.contracts.messages import kv_space
from rootlace.runtime.engine.client.engine_client import SPILL_SECONDS
from rootlace.runtime.model.executor.runner import (
    BlockMover,
    ModelRunner,
    adapter_contents,
    kv_identity,
)
from rootlace.runtime.model.kv_pool import made_up_plan, main_memory
from rootlace.runtime.offload.disk_store import SlotFile, TierFolder, block_seconds, open_folder
from rootlace.runtime.offload.slot_store import HandedBlocks, HandedStore, HostStore, SlotStore
from rootlace.runtime.processes import new_memory
from rootlace.runtime.scheduler.offload.levels import HandedLevel, Level, Tiers
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.transfer import Nixl, SharedMemory, Tcp
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import SamplingParams

FIRST_TOKENS, MORE_TOKENS = 16, 128
"""Lengths of prompts computed to measure prefill.

The longer one is used if the shorter one takes less than `QUICK_SECONDS`.
"""
QUICK_SECONDS = 0.25
TIMED_BLOCKS = 16
GIGABYTE = 10**9
DISK_BUFFER_BYTES = 256 << 20
"""Bytes for blocks on their way to the disk, and as many for blocks on their way back."""

log = logging.getLogger(__name__)


class OpenTiers(msgspec.Struct, frozen=True):
    """Open offload levels of an engine. `disk`, `folder` and `transfer`: None if absent.

    `adapters`: digests of adapter contents, by name.
    """

    tiers: Tiers
    mover: BlockMover
    disk: SlotStore | None
    folder: TierFolder | None
    adapters: dict[str, bytes]
    transfer: Transfer | None = None

    @property
    def handed_slots(self) -> int:
        """Count of slots for blocks given to other engines."""
        return 0 if self.tiers.handed is None else self.tiers.handed.tier.num_slots

    @property
    def handed_at(self) -> bytes:
        """Return the address that other engines need to take blocks."""
        return b"" if self.transfer is None else self.transfer.address

    def begin(self, scheduler: Scheduler, runner: ModelRunner, block_size: int) -> None:
        """Measure prefill, which reads are compared with; the pool is empty."""
        if not self.tiers.readable:
            return
        tokens, seconds = prefill_seconds(runner, block_size)
        scheduler.pace.begin(tokens, seconds)
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
        """Save cached blocks to disk, and then the order of eviction for the next start.

        Blocks without time left are skipped, and blocks with a time to live are forgotten.
        """
        if self.transfer is not None:
            self.transfer.close()
        if self.disk is None or self.folder is None:
            return
        end = time.monotonic() + SPILL_SECONDS
        scheduler.kv.retention.end()
        for moves in scheduler.kv.tiering.spill():
            self.mover.move(moves)
            self.mover.finish()
            if not self.disk.wait(end - time.monotonic()):
                break
        scheduler.kv.tiering.poll()
        wanted, left = scheduler.kv.tiering.wanted_slots(), max(end - time.monotonic(), 1.0)
        if self.disk.close(wanted, left):
            self.folder.close()  # the lock would last as long as the process


def open_tiers(
    config: EngineConfig,
    runner: ModelRunner,
    engines: int = 1,
    transfer: TransferConfig | None = None,
    memory: int = -1,
) -> OpenTiers | None:
    """Open the configured levels (`CacheConfig.tiered`), shared among `engines` engines.

    Returns None without any level. A disk that fails is logged and counted (`Tiers.failed`).
    `transfer`: block transfer between engines, if any. `memory`: the descriptor of host memory;
    negative: of this process alone. Raises `InvalidRequest` for an unusable folder, unreadable
    adapters, and an impossible transfer.
    """
    cache = config.cache
    try:
        contents = adapter_contents(config.executor)
    except OSError as error:
        raise InvalidRequest(f"the files of an adapter cannot be read: {error}") from error
    levels: list[Level] = []
    stores: list[StoreMemory] = []
    if cache.host_gb:
        host = _open_host(config, runner, engines, memory)
        levels.append(host[0])
        stores.append(host[1])
    disk = folder = None
    failed: tuple[str, ...] = ()
    try:
        if cache.disk:
            level, disk, folder = _open_disk(config, cache, runner, engines)
            levels.append(level)
            stores.append(disk)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidRequest(f"--cache-disk {cache.disk}: {error}") from error
    except OSError as error:
        log.warning("no blocks are kept on disk: %s", error)
        failed = ("disk",)
    handed = way = None
    if transfer is not None:
        if config.executor.tensor_parallel > 1:
            raise InvalidRequest("--disaggregate hands over the blocks of a whole model")
        handed, store, way = _open_handed(runner, transfer)
        stores.append(store)
    if not (stores or failed):
        return None
    mover = BlockMover(runner.pool, stores, runner.work, runner.draft)
    tiers = Tiers(tuple(levels), partial(kv_space, contents=contents), handed=handed, failed=failed)
    return OpenTiers(tiers, mover, disk, folder, contents, way)


def _open_handed(
    runner: ModelRunner, config: TransferConfig
) -> tuple[HandedLevel, HandedStore, Transfer]:
    """Open the level of transferred blocks. Raises `InvalidRequest` if no block fits, or for an
    unknown kind of transfer."""
    size = BlockMover(runner.pool, ()).block_bytes
    slots = config.bytes // size
    if not slots:
        gigabytes = config.bytes / GIGABYTE
        raise InvalidRequest(f"--disaggregate-gb {gigabytes}: a block takes {size} bytes")
    try:
        transfer = _open_transfer(config, size, slots)
        store = HandedStore(HandedBlocks(transfer, size, slots))
    except (BlockLost, OSError) as error:
        raise InvalidRequest(f"--disaggregate-by {config.by}: {error}") from error
    return HandedLevel("handed", Tier(slots), store), store, transfer


def _open_transfer(config: TransferConfig, block_bytes: int, slots: int) -> Transfer:
    """Open a block transfer. Raises `InvalidRequest`, or OSError."""
    if config.by == "tcp":
        return Tcp(config.host, block_bytes, slots)
    if config.by == "nixl":
        return Nixl(block_bytes, slots)
    return SharedMemory(config.memory, block_bytes)


def _open_host(
    config: EngineConfig, runner: ModelRunner, engines: int, memory: int
) -> tuple[Level, HostStore]:
    """Open the host memory of a descriptor (negative: of this process alone). A GPU copies from and
    to this memory by itself. Raises `InvalidRequest`."""
    gigabytes = config.cache.host_gb or 0.0
    mover = BlockMover(runner.pool, (), runner.work)
    size = mover.block_bytes
    slots = SlotFile.slots_in(int(gigabytes * GIGABYTE / engines), size)
    if not slots:
        raise InvalidRequest(f"--cache-host-gb {gigabytes}: a block takes {size} bytes")
    wanted, there = engines * slots * size, main_memory().total
    if wanted > there:  # the kernel would kill one engine after another without freeing memory
        raise InvalidRequest(
            f"--cache-host-gb {gigabytes}: this machine grants {there / GIGABYTE:.1f} GB of memory"
        )
    identity = kv_identity(runner, config.executor, config.cache)
    try:
        store = HostStore(new_memory() if memory < 0 else memory, identity, slots, size)
        if runner.device != "cpu":
            _pin(store.bytes)
        block = np.empty(size, np.uint8) if runner.device == "cpu" else store.buffer(slots - 1)
        store.block_seconds = mover.load_seconds(block, TIMED_BLOCKS)
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(f"--cache-host-gb {gigabytes}: {error}") from error
    tier = Tier(slots)
    store.erase(
        tier.restore((one.slot, Label(one.key, one.owner), False) for one in store.stored_blocks())
    )
    held = memory >= 0  # by the server, which outlives this engine
    return Level("host", tier, store, outlives=held, eager=held and runner.device == "cpu"), store


def _pin(memory: np.ndarray) -> None:
    """Let a GPU read and write `memory` (uint8) by itself. Raises RuntimeError."""
    import torch  # only here: other engines need no torch for their blocks

    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def _open_disk(
    config: EngineConfig, cache: CacheConfig, runner: ModelRunner, engines: int
) -> tuple[Level, SlotStore, TierFolder]:
    """Open the disk level. Raises OSError, and `InvalidRequest` if no block fits."""
    identity = kv_identity(runner, config.executor, cache)
    max_bytes = int(cache.disk_gb * GIGABYTE / engines)
    try:
        root = Path(cache.disk).expanduser()
    except RuntimeError as error:  # the user id has no name
        raise InvalidRequest(f"--cache-disk {cache.disk}: {error}") from error
    folder = open_folder(root, identity, max_bytes, engines)
    try:
        size = BlockMover(runner.pool, ()).block_bytes
        slots = SlotFile.slots_in(folder.most_bytes, size)
        if not slots:
            raise InvalidRequest(f"--cache-disk-gb {cache.disk_gb}: a block takes {size} bytes")
        file = SlotFile(folder.path, identity, size, slots)
        stored = file.stored_blocks()
        disk = SlotStore(file, block_seconds(file, folder.path, stored), DISK_BUFFER_BYTES)
        tier = Tier(slots)
        stored_blocks = ((one.slot, Label(one.key, one.owner), one.wanted) for one in stored)
        disk.erase(tier.restore(stored_blocks))
        hourly = cache.disk_hourly_gb or cache.disk_gb
        wear = HourlyBytes(int(hourly * GIGABYTE / engines), time.monotonic)
        return Level("disk", tier, disk, wear, size, outlives=True), disk, folder
    except BaseException:
        folder.close()
        raise


def prefill_seconds(runner: ModelRunner, block_size: int) -> tuple[int, float]:
    """Measure prefill: prompt tokens, and seconds. Writes to the first blocks of the pool."""
    longest = min(runner.num_blocks * block_size, runner.context_length)
    order = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, seed=0)
    tokens, seconds = 0, 0.0
    for wanted in (FIRST_TOKENS, FIRST_TOKENS, MORE_TOKENS):  # the first is a warm-up
        if seconds > QUICK_SECONDS:
            break
        tokens = min(wanted, longest)
        plan = made_up_plan(order, runner.vocab_size, [tokens], block_size, params)
        begun = time.perf_counter()
        runner.run(plan)
        seconds = time.perf_counter() - begun
    return tokens, seconds
