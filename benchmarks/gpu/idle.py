"""How much of the time the GPU waits for the host while the engine decodes."""

from __future__ import annotations

from benchmarks.gpu.decode_step import TimedSteps, fill
from benchmarks.gpu.engine import InProcessEngine, grammar_compiler, greedy
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Report, Setting
from benchmarks.step_plans import decode_plans


def measure(setting: Setting, report: Report) -> None:
    """The engine decodes 64 rows of the 1B shape. Beside it the same steps, planned beforehand and
    launched so that the device always has one waiting (`decode_step` says how near their floor such
    steps are): for as long as the engine's take longer, the device is idle."""
    name, rows, prompt, new = ("smoke", 3, 16, 10) if setting.smoke else ("1B", 64, 128, 256)
    with random_model(name, setting.device) as model:
        runner = model.runner_for(rows, prompt + new)
        compiler = grammar_compiler(model.config.spec.vocab_size)
        prompts = [[2 + (row + i) % 250 for i in range(prompt)] for row in range(rows)]
        modes = (None,) if setting.quick else (None, False)
        for overlap in modes:
            with report.attempt(overlap=overlap is None, rows=rows) as case:
                with InProcessEngine(runner, compiler, rows, overlap) as engine:
                    engine.serve(prompts, greedy(new))  # graphs are captured
                    served = engine.serve(prompts, greedy(new))
                step = rows / served.decode_tokens_per_second
                fill(runner)
                plans = decode_plans(rows, prompt, new, runner.block_size, runner.vocab_size)
                steps = TimedSteps(setting, runner, plans)
                bare = steps.seconds_each(new - 1)
                steps.end()
                case |= {"tokens_per_second": served.tokens_per_second, "step_us": step * 1e6}
                case |= {"bare_step_us": bare * 1e6, "idle_share": max(0.0, 1 - bare / step)}
