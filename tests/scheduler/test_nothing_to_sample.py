"""A row without any token to sample ends alone, with an error; nothing is appended."""

import msgspec
import numpy as np

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import SamplingParams
from tests.simulated_executor import SimulatedExecutor


def test_minus_one_ends_the_request_alone() -> None:
    executor = SimulatedExecutor(num_blocks=32, block_size=4)
    scheduler = Scheduler(
        SchedulerConfig(check_invariants=True), CacheConfig(block_size=4, num_blocks=32), 64
    )
    for rid in (0, 1):
        params = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
        scheduler.add(EngineRequest(rid, np.arange(1, 6 + rid, dtype=np.int32), params))
    ends: dict[int, str | None] = {}
    first = True
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        result = executor.run(plan)
        if first:
            nothing = [s.prompt_len == 5 for s in plan.samples]
            result = msgspec.structs.replace(
                result, token_ids=np.where(nothing, -1, result.token_ids).astype(np.int32)
            )
        first = False
        for update in scheduler.commit(plan, result):
            assert -1 not in update.token_ids
            if update.finish:
                ends[update.rid] = update.finish
                assert ("no token can follow" in update.error) == (update.rid == 0)
    assert ends == {0: "error", 1: "length"}
