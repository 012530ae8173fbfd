"""Tokens per second through the engine, beside others on the same weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.engine import InProcessEngine, grammar_compiler
from benchmarks.gpu.fast_loop import FastLoop
from benchmarks.gpu.models import RandomModel, random_model
from benchmarks.gpu.setting import Report, Setting, release
from benchmarks.gpu.timing import synchronize
from rootlace.wire.protocol import SamplingParams

BLOCK_SIZE = 16
ROUNDS = 3


def measure(setting: Setting, report: Report) -> None:
    """64 prompts of 256 random tokens, 256 tokens for each, greedy, no end of sequence: the best of
    three rounds of each engine, which take turns."""
    name, rows, prompt, new = (
        ("smoke", 3, 9, 6) if setting.smoke else ("1B", 64, 256, 128 if setting.quick else 256)
    )
    with random_model(name, setting.device) as model:
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(
            2, model.config.spec.vocab_size, (rows, prompt), generator=generator
        )
        makers: dict[str, Callable[[], Any]] = {
            "rootlace": lambda: _Rootlace(model, rows, prompt + new),
            "gpt-fast-style loop": lambda: _Loop(model, rows, prompt, new, compiled=False),
            "gpt-fast-style loop, compiled": lambda: _Loop(model, rows, prompt, new, compiled=True),
            "transformers generate_batch": lambda: _Transformers(model, rows, prompt + new),
        }
        if setting.smoke or setting.quick:
            del makers["gpt-fast-style loop, compiled"]
        what = {"shape": name, "rows": rows, "prompt": prompt, "new": new}
        for label in report.progress(list(makers), "serving"):
            with report.attempt(engine=label, **what):
                engine = makers[label]()
                seconds = []
                for _ in range(1 + (1 if setting.smoke else ROUNDS)):
                    synchronize(setting.device)
                    start = time.perf_counter()
                    count = engine.run(prompts, new)
                    synchronize(setting.device)
                    seconds.append(time.perf_counter() - start)
                    if count != rows * new:
                        raise RuntimeError(f"{count} tokens came, not {rows * new}")
                # The first round warms up: graphs are captured in it, kernels compiled.
                best = min(seconds[1:])
                report.add(
                    {
                        **what,
                        "engine": label,
                        "seconds": seconds[1:],
                        "first_seconds": seconds[0],
                        "tokens_per_second": rows * new / best,
                    }
                )
                engine.close()
                del engine
            release(setting.device)


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0.0, seed=0, ignore_eos=True)


class _Rootlace:
    """The engine's loop with captured graphs and overlap; no prefix is kept between rounds."""

    def __init__(self, model: RandomModel, rows: int, length: int) -> None:
        blocks = (rows + 2) * (-(-length // BLOCK_SIZE) + 1)
        runner = model.runner(blocks, max_running=rows)
        compiler = grammar_compiler(model.config.spec.vocab_size)
        self._engine = InProcessEngine(runner, compiler, max_running=rows)

    def run(self, prompts: torch.Tensor, new: int) -> int:
        return self._engine.serve(prompts.tolist(), greedy(new)).tokens

    def close(self) -> None:
        self._engine.close()


class _Loop:
    def __init__(
        self, model: RandomModel, rows: int, prompt: int, new: int, compiled: bool
    ) -> None:
        self._loop = FastLoop(model, rows, prompt, new, compiled=compiled)
        self._loop.prepare()
        self._device = model.device

    def run(self, prompts: torch.Tensor, new: int) -> int:
        return int(self._loop.generate(prompts.to(self._device)).numel())

    def close(self) -> None:
        del self._loop


class _Transformers:
    """transformers' continuous batching over the same weights."""

    def __init__(self, model: RandomModel, rows: int, length: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = model.transformers_twin()
        self._config = GenerationConfig
        self._rows = rows
        self._settings: dict[str, Any] = {}
        if model.device.type == "cpu":  # it would take nine tenths of the main memory
            settings = ContinuousBatchingConfig(
                num_blocks=rows * (1 + length // 256) + 1, max_batch_tokens=64
            )
            self._settings = {"continuous_batching_config": settings}

    def run(self, prompts: torch.Tensor, new: int) -> int:
        # No token ends a text: -1 is none.
        config = self._config(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        inputs = prompts.tolist()
        with torch.no_grad():
            found = self._model.generate_batch(
                inputs=inputs,
                generation_config=config,
                progress_bar=False,
                persistent_manager=True,  # its graphs and its cache outlive a round, as ours do
                **self._settings,
            )
        if len(found) != self._rows:
            raise RuntimeError(f"{len(found)} of {self._rows} requests were answered")
        return sum(len(output.generated_tokens) for output in found.values())

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
        del self._model
        gc.collect()
