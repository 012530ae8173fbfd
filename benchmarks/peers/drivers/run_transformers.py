"""transformers: batches of `generate`, padded and without reuse."""

from __future__ import annotations

import time
from typing import Any

import torch
from serve import News, Request, arguments_of, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """The time of the first token: `put` gets the prompts, then each step's tokens."""

    def __init__(self) -> None:
        self._puts = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Engine:
    """Takes waiting requests `batch` at a time, the shortest first, padded on the left."""

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


if __name__ == "__main__":
    options = arguments_of(batch=16)
    torch.set_num_threads(options.threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    serve(Engine(options, loaded))
