"""The least time that a workload can take on a machine, from its measured ceilings.

    floor = distinct prompt tokens x flops per token / GEMM rate
          + decode steps x bytes per step / read bandwidth

- *Distinct prompt tokens* are those that no prefix cache can have, whatever it holds: all prompt
  tokens less the hits of an unlimited cache that is shared from the moment of submission. Flops
  per token: 2 per weight of the layers; the output head only for tokens that are sampled from.
- *Decode steps*: the longest chain of tokens that follow from each other, less those that come out
  of a prefill. Everything else can run beside it, so this is the fewest steps possible.
- *Bytes per step*: all weights but the embedding's table (of which a step reads a few rows), and
  the keys and values of the tokens that the rows of a step stand on, each of them once however many
  rows share it (all rows being in lockstep).

That is what a machine could do for which a product of a few rows costs no arithmetic, and attention
none at all. `arithmetic` counts both: attention of the prompts (4 x heads x head size x context per
token and layer), and in each decode step whichever takes longer, its bytes or its flops. It is the
fairer bound where many rows decode at once on a processor with little arithmetic beside its
bandwidth; both are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.workloads import Tokens, Workload


@dataclass(frozen=True)
class Shape:
    """A Llama-style model's sizes. `element` in bytes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    element: int

    @classmethod
    def read(cls, model: Path, dtype: str) -> Shape:
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            element=4 if dtype == "float32" else 2,
        )

    @property
    def layer_weights(self) -> int:
        """Of all layers' products (norms are nothing beside them)."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.layers * 2 * self.kv_heads * self.head_size * self.element

    def attention_flops(self, context: float) -> float:
        """Of one token that stands on `context` tokens: scores and their weighted values."""
        return 4.0 * self.layers * self.heads * self.head_size * context


@dataclass(frozen=True)
class Work:
    """What a workload is made of when nothing is done twice.

    `prompt_context`: the sum, over the computed prompt tokens, of the tokens they stand on.
    `step_tokens`: per decode step, distinct tokens that its rows stand on. `step_context`: the same
    with shared tokens counted for every row. `step_rows`: rows of each step.
    """

    requests: int
    prompt_tokens: int
    computed_tokens: int
    prompt_context: int
    step_rows: list[int]
    step_tokens: list[int]
    step_context: list[int]


def work_of(workload: Workload, replies: Mapping[str, Tokens]) -> Work:
    """Take a workload apart, its requests having been answered with `replies`."""
    ideal = IdealCache()
    requests = prompt_tokens = computed = prompt_context = 0
    rows: list[int] = []
    distinct: list[int] = []
    context: list[int] = []
    todo = workload.start()
    while todo:
        # Requests that are there together decode in lockstep: their first tokens come from the
        # prompts, each later one from a step.
        following = []
        steps = max(request.wanted for request in todo) - 1
        for step in range(1, steps + 1):
            live = [r for r in todo if r.wanted > step]
            rows.append(len(live))
            context.append(sum(len(r.prompt) + step for r in live))
        prompts = [request.prompt for request in todo]
        shared = _distinct(prompts)
        distinct += [shared + step * len(todo) for step in range(1, steps + 1)]
        for request in todo:
            known = ideal.submit(request.prompt)
            length = len(request.prompt)
            requests += 1
            prompt_tokens += length
            computed += length - known
            prompt_context += (length * (length + 1) - known * (known + 1)) // 2
        for request in todo:
            reply = list(replies[request.name])
            ideal.finish(request.prompt, reply)
            following += workload.answered(request, reply)
        todo = following
    return Work(requests, prompt_tokens, computed, prompt_context, rows, distinct, context)


def _distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that are left when common prefixes are counted once."""
    trie = IdealCache()
    for prompt in prompts:
        trie.submit(prompt)
    # The last token of a prompt counts as computed even if it is known; then it was counted twice.
    unlike = {tuple(prompt) for prompt in prompts}
    return trie.prompt_tokens - trie.cached_tokens - (len(prompts) - len(unlike))


@dataclass(frozen=True)
class Floor:
    """Seconds. `floor_s` is as defined above; `arithmetic_s` the bound with all flops."""

    floor_s: float
    prefill_s: float
    decode_s: float
    arithmetic_s: float
    distinct_prompt_tokens: int
    decode_steps: int
    bytes_per_step: float


def floor_of(work: Work, shape: Shape, rate: float, bandwidth: float) -> Floor:
    """`rate`: flop/s of a big product; `bandwidth`: bytes/s of reading what no cache holds."""
    weights = shape.layer_weights + shape.head_weights
    prompt_flops = (
        2.0 * shape.layer_weights * work.computed_tokens + 2.0 * shape.head_weights * work.requests
    )
    step_bytes = [weights * shape.element + tokens * shape.kv_bytes for tokens in work.step_tokens]
    step_flops = [
        2.0 * weights * rows + shape.attention_flops(context)
        for rows, context in zip(work.step_rows, work.step_context, strict=True)
    ]
    steps = sum(
        max(size / bandwidth, flops / rate)
        for size, flops in zip(step_bytes, step_flops, strict=True)
    )
    prompt_attention = shape.attention_flops(1) * work.prompt_context
    prefill, decode = prompt_flops / rate, sum(step_bytes) / bandwidth
    return Floor(
        floor_s=prefill + decode,
        prefill_s=prefill,
        decode_s=decode,
        arithmetic_s=(prompt_flops + prompt_attention) / rate + steps,
        distinct_prompt_tokens=work.computed_tokens,
        decode_steps=len(step_bytes),
        bytes_per_step=sum(step_bytes) / max(1, len(step_bytes)),
    )
