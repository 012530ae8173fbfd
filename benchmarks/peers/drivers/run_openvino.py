"""OpenVINO GenAI: its continuous batching with prefix caching, on the CPU."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from serve import News, Request, arguments_of, serve


class Engine:
    """`--model` is a folder that `optimum-cli export openvino` wrote."""

    name = "openvino"
    replies_are_ids = True

    def __init__(self, arguments: Any) -> None:
        self._model = arguments.model
        self._options = {
            "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[arguments.dtype],
            "INFERENCE_NUM_THREADS": arguments.threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if arguments.kv_precision:
            self._options["KV_CACHE_PRECISION"] = arguments.kv_precision
        self._scheduler = openvino_genai.SchedulerConfig()
        self._scheduler.cache_size = arguments.kv_gib
        self._scheduler.enable_prefix_caching = True
        self._scheduler.dynamic_split_fuse = True
        self._scheduler.max_num_batched_tokens = arguments.max_batched
        self._scheduler.max_num_seqs = 64
        self._pipeline: Any = None
        self._count = 0
        self._live: dict[int, list[Any]] = {}  # request, handle, tokens so far
        self.reset()

    def reset(self) -> None:
        """Make a new pipeline, because no call empties a pipeline's cache."""
        self._pipeline = None
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._model, self._scheduler, "CPU", self._options
        )
        # Compiling and allocating at the first request do not belong to the workload.
        self.add(Request("warm-up", list(range(3, 40)), 4))
        while self._live:
            self.step()

    def cached(self) -> None:
        return None

    def add(self, request: Request) -> None:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request.wanted, min_new_tokens=request.wanted, ignore_eos=True
        )
        prompt = openvino.Tensor(np.asarray(request.prompt, dtype=np.int64)[None])
        self._count += 1
        handle = self._pipeline.add_request(self._count, prompt, config)
        self._live[self._count] = [request, handle, 0]

    def step(self) -> list[News]:
        self._pipeline.step()
        now = time.perf_counter()
        news = []
        for number, entry in list(self._live.items()):
            request, handle, _ = entry
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            entry[2] += len(tokens)
            finished = entry[2] >= request.wanted
            if tokens:
                news.append(News(request.name, tokens, finished, now))
            if finished:
                del self._live[number]
        return news


if __name__ == "__main__":
    serve(Engine(arguments_of(max_batched=4096, kv_gib=4, kv_precision="")))
