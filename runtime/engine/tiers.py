"""What is below an engine's KV pool: opened when it starts, filled when it ends."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rootlace.runtime.cache.tier import Label, Tier
from rootlace.runtime.cache.wear import HourlyBytes
from rootlace.runtime.config import CacheConfig, EngineConfig
from rootlace.runtime.engine.client.engine_client import SPILL_SECONDS
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv.block_mover import BlockMover
from rootlace.runtime.model.kv.device_memory import made_up_plan
from rootlace.runtime.model.kv.identity import kv_identity, kv_spaces
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.scheduler.tiers.levels import Level, Tiers
from rootlace.runtime.tiers.disk import DiskStore
from rootlace.runtime.tiers.folder import TierFolder, open_folder
from rootlace.runtime.tiers.read_speed import block_seconds
from rootlace.runtime.tiers.slot_file import SlotFile
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import SamplingParams

FIRST_TOKENS, MORE_TOKENS = 16, 128
"""Prompts that are computed to find out how long it takes; the longer one where the shorter one
takes less than `QUICK_SECONDS`."""
QUICK_SECONDS = 0.25
GIGABYTE = 10**9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenTiers:
    """A disk below the pool."""

    tiers: Tiers
    mover: BlockMover
    disk: DiskStore
    folder: TierFolder

    def move(self, moves: np.ndarray) -> None:
        """See `Steps`."""
        self.mover.move(moves)

    def begin(self, scheduler: Scheduler, runner: ModelRunner, block_size: int) -> None:
        """Measure what computing a prompt takes, which reading is compared with. The pool is
        empty."""
        tokens, seconds = prefill_seconds(runner, block_size)
        scheduler.view.pace.begin(tokens, seconds)
        most = self.disk.seconds(1) - self.disk.seconds(0)
        log.info(
            "%s: %d blocks from before; a block of %d tokens is read in %.3g ms and computed in "
            "%.3g ms",
            *(self.folder.path, len(self.tiers.levels[0].tier), block_size),
            *(1e3 * most, 1e3 * seconds * block_size / tokens),
        )

    def close(self, scheduler: Scheduler) -> None:
        """Write what is cached and not on the disk yet, and then what the next start is to know.
        What there is no time for is left out."""
        end = time.monotonic() + SPILL_SECONDS
        for moves in scheduler.kv.tiering.spill():
            self.mover.move(moves)
            if not self.disk.wait(end - time.monotonic()):
                break
        scheduler.kv.tiering.poll()
        self.disk.close(scheduler.kv.tiering.wanted_slots(), max(end - time.monotonic(), 1.0))
        self.folder.close()


def open_tiers(config: EngineConfig, runner: ModelRunner, engines: int = 1) -> OpenTiers | None:
    """What the configuration asks for, a part of it for each of so many engines; None where that is
    nothing, or the disk does not work, which is logged. Raises `InvalidRequest` for a folder that
    cannot be one."""
    cache = config.cache
    if not cache.disk or not cache.enabled:
        return None
    try:
        return _open(config, cache, runner, engines)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidRequest(f"--cache-disk {cache.disk}: {error}") from error
    except OSError as error:
        log.warning("no blocks are kept on disk: %s", error)
        return None


def _open(config: EngineConfig, cache: CacheConfig, runner: ModelRunner, engines: int) -> OpenTiers:
    identity = kv_identity(runner, config.executor, cache)
    spaces = kv_spaces(config.executor)
    most = int(cache.disk_gb * GIGABYTE / engines)
    folder = open_folder(Path(cache.disk).expanduser(), identity, most)
    size = BlockMover(runner.kv_cache, ()).block_bytes
    slots = SlotFile.slots_in(folder.most_bytes, size)
    if not slots:
        raise InvalidRequest(f"--cache-disk-gb {cache.disk_gb}: a block takes {size} bytes")
    file = SlotFile(folder.path, identity, size, slots)
    disk = DiskStore(file, block_seconds(file, folder.path))
    tier = Tier(slots)
    kept = ((one.slot, Label(one.key, one.owner, one.digest), one.wanted) for one in disk.kept())
    disk.erase(tier.restore(kept))
    hourly = cache.disk_hourly_gb or cache.disk_gb
    wear = HourlyBytes(int(hourly * GIGABYTE / engines), time.monotonic)
    levels = (Level("disk", tier, disk, wear, size),)
    return OpenTiers(
        Tiers(levels, spaces), BlockMover(runner.kv_cache, [disk], runner.work), disk, folder
    )


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
