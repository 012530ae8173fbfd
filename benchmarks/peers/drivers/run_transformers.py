"""transformers: batches of `generate`, padded and without reuse, or its continuous batching."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from serve import News, Request, arguments_of, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """The time of the first token: `put` gets the prompts, then the tokens of each step."""

    def __init__(self) -> None:
        self._puts = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Generate:
    """Requests that wait are taken `batch` at a time, the shortest first, padded on the left."""

    replies_are_ids = True

    def __init__(self, arguments: Any, model: Any) -> None:
        self.name = f"transformers-generate-b{arguments.batch}"
        self._model = model
        self._batch = arguments.batch
        self._waiting: list[Request] = []

    def reset(self) -> None:
        pass

    def cached(self) -> int:
        return 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[News]:
        self._waiting.sort(key=lambda request: (request.wanted, len(request.prompt)))
        wanted = self._waiting[0].wanted
        batch = [r for r in self._waiting if r.wanted == wanted][: self._batch]
        self._waiting = [r for r in self._waiting if r not in batch]
        width = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        first = FirstToken()
        with torch.inference_mode():
            outputs = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=wanted,
                min_new_tokens=wanted,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                streamer=first,
            )
        now = time.perf_counter()
        told = []
        for request, row in zip(batch, outputs, strict=True):
            tokens = row[width:].tolist()
            told.append(News(request.name, tokens[:1], False, first.at))
            told.append(News(request.name, tokens[1:], True, now))
        return told


class Continuous:
    """The manager behind `generate_batch`, which requests may join at any time."""

    replies_are_ids = True

    def __init__(self, arguments: Any, model: Any) -> None:
        self.name = f"transformers-cb-p{arguments.page_size}"
        self._model = model
        self._config = ContinuousBatchingConfig(
            page_size=arguments.page_size,
            max_batch_tokens=arguments.max_batch_tokens,
            num_blocks=arguments.num_blocks,
            max_requests_per_batch=arguments.max_requests,
        )
        self._manager: Any = None
        self._seen: dict[str, int] = {}

    def reset(self) -> None:
        """A new manager: there is no call that empties its cache."""
        if self._manager is not None:
            self._manager.stop(block=True)
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64
            ),
            continuous_batching_config=self._config,
        )
        self._manager.start()
        # Its thread makes the batches' memory at the first request.
        self.add(Request("warm-up", list(range(300, 320)), 2))
        while not any(news.finished for news in self.step()):
            pass

    def cached(self) -> None:
        return None

    def add(self, request: Request) -> None:
        self._seen[request.name] = 0
        self._manager.add_request(
            list(request.prompt),
            request_id=request.name,
            max_new_tokens=request.wanted,
            streaming=True,
            eos_token_id=-1,
        )

    def step(self) -> list[News]:
        output = self._manager.get_result(timeout=1.0)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the thread of continuous batching has ended")
            return []
        if output.error:
            raise RuntimeError(output.error)
        seen = self._seen[output.request_id]
        self._seen[output.request_id] = len(output.generated_tokens)
        tokens = list(output.generated_tokens[seen:])
        return [News(output.request_id, tokens, output.is_finished(), time.perf_counter())]


if __name__ == "__main__":
    options = arguments_of(
        mode="generate",
        batch=16,
        page_size=32,
        num_blocks=4096,
        max_batch_tokens=1024,
        max_requests=8,
    )
    torch.set_num_threads(options.threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    serve({"generate": Generate, "cb": Continuous}[options.mode](options, loaded))
    os._exit(0)  # threads of continuous batching would hold the process
