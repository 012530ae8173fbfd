"""SGLang's engine on a CPU, with its radix cache."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import sglang
from serve import News, Request, arguments_of, serve


class Engine:
    """SGLang's front end in this process, with its scheduler and kernels in another."""

    replies_are_ids = True

    def __init__(self, arguments: Any) -> None:
        self._engine = sglang.Engine(
            model_path=arguments.model,
            dtype=arguments.dtype,
            device="cpu",
            disable_overlap_schedule=True,
            schedule_policy=arguments.policy,
            max_total_tokens=arguments.context,
            max_running_requests=64,
            skip_tokenizer_init=True,
            incremental_streaming_output=True,
            log_level="error",
        )
        # Without AMX SGLang does not use its own kernels, so the backend is recorded.
        self.name = f"sglang-{self._engine.server_args.attention_backend}"
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cached = 0

    def reset(self) -> None:
        if not self._engine.flush_cache().success:
            raise RuntimeError("the prefix cache was not emptied")
        self._cached = 0

    def cached(self) -> int:
        return self._cached

    def add(self, request: Request) -> None:
        task = self._engine.loop.create_task(self._ask(request))
        self._tasks.add(task)  # the loop alone would not keep it alive
        task.add_done_callback(self._tasks.discard)

    def step(self) -> list[News]:
        news = self._engine.loop.run_until_complete(self._news.get())
        if isinstance(news, Exception):
            raise news
        return [news]

    async def _ask(self, request: Request) -> None:
        params = {"temperature": 0, "max_new_tokens": request.wanted, "ignore_eos": True}
        try:
            chunks = await self._engine.async_generate(
                input_ids=request.prompt, sampling_params=params, stream=True
            )
            async for chunk in chunks:
                about, now = chunk["meta_info"], time.perf_counter()
                finished = about["finish_reason"] is not None
                if finished:
                    self._cached += about["cached_tokens"]
                self._news.put_nowait(News(request.name, chunk["output_ids"], finished, now))
        except Exception as error:
            self._news.put_nowait(error)


if __name__ == "__main__":
    serve(Engine(arguments_of(policy="fcfs", context=65536)))
