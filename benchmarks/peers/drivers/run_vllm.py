"""vLLM (the wheel for CPUs), with its prefix cache."""

from __future__ import annotations

import time
from typing import Any

from serve import News, Request, arguments_of, serve
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


class Engine:
    """vLLM's V1 engine, stepped in this process."""

    name = "vllm"
    replies_are_ids = True

    def __init__(self, arguments: Any) -> None:
        self._llm = LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=8192,
            enable_prefix_caching=True,
            max_num_seqs=64,
            max_num_batched_tokens=arguments.max_batched,
        )
        self._cached = 0

    def reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied")
        self._cached = 0

    def cached(self) -> int:
        return self._cached

    def add(self, request: Request) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request.wanted,
            min_tokens=request.wanted,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt}
        self._llm.llm_engine.add_request(request.name, prompt, params)

    def step(self) -> list[News]:
        outputs = self._llm.llm_engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.finished:
                self._cached += output.num_cached_tokens or 0
        return [
            News(output.request_id, list(output.outputs[0].token_ids), output.finished, now)
            for output in outputs
        ]


if __name__ == "__main__":
    serve(Engine(arguments_of(max_batched=4096)))
