"""How much of the time the GPU waits for the host while the engine decodes."""

from __future__ import annotations

from benchmarks.gpu.decode_step import PAUSE, WARM_UP, TimedSteps, fill
from benchmarks.gpu.engine import decode_rate, started
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.step_plans import decode_plans


def measure(setting: Setting, findings: Findings) -> None:
    """The engine decodes 64 rows of the 1B shape. Beside it the same steps, planned beforehand and
    launched so that the device always has one waiting (`decode_step` says how near their floor such
    steps are): for as long as the engine's take longer, the device is idle."""
    name, rows, prompt, new = ("smoke", 3, 16, 10) if setting.smoke else ("1B", 64, 128, 256)
    warm_up = setting.choose(WARM_UP, WARM_UP, 2)
    prompts = [[5 + (row + i) % 250 for i in range(prompt)] for row in range(rows)]
    with random_model(name, setting.device) as model:
        runner = model.runner(rows, prompt + new)
        fill(runner)
        before = prompt - warm_up
        plans = decode_plans(rows, before, warm_up + new, runner.block_size, runner.vocab_size)
        steps = TimedSteps(setting, runner, plans)
        steps.warm_up(warm_up, PAUSE if setting.on_gpu else 0.0)
        bare = steps.seconds_each(new - 1)
        steps.end()
    del runner, steps, model
    setting.release()
    for overlap in (None,) if setting.quick or setting.smoke else (None, False):
        with findings.attempt(overlap=overlap is None, rows=rows) as case:
            with started(name, setting.device, rows, overlap=overlap) as engine:
                params = {"temperature": 0.0}
                decode_rate(engine, prompts, new, params)  # graphs are captured
                rate = decode_rate(engine, prompts, new, params)
            case |= {"decode_tokens_per_second": rate, "step_us": rows / rate * 1e6}
            case |= {"bare_step_us": bare * 1e6, "idle_share": max(0.0, 1 - bare * rate / rows)}
