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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.workloads import Tokens, Workload
from rootlace.runtime.doctor.ceilings import Elements, Row, step_work
from rootlace.runtime.model.families.spec import ModelSpec


@dataclass(frozen=True)
class Work:
    """Work of a workload if nothing is computed twice.

    `prompts`: each prompt, and its computed tokens. `steps`: rows of each decode step.
    `step_tokens`: distinct tokens in the contexts of each decode step.
    """

    prompts: list[Row]
    steps: list[list[Row]]
    step_tokens: list[int]


def work_of(workload: Workload, replies: Mapping[str, Tokens]) -> Work:
    """Return a workload's work, if its requests are answered with `replies`."""
    ideal = IdealCache()
    work = Work([], [], [])
    for wave in workload.waves(replies):
        # Requests of one wave decode in lockstep: their first tokens come from the
        # prompts, each later one from a step.
        shared = _distinct([request.prompt for request in wave])
        for step in range(1, max(request.wanted for request in wave)):
            live = [r for r in wave if r.wanted > step]
            work.steps.append([Row(1, len(r.prompt) + step) for r in live])
            work.step_tokens.append(shared + step * len(wave))
        for request in wave:
            length = len(request.prompt)
            work.prompts.append(Row(length - ideal.submit(request.prompt), length))
        for request in wave:
            ideal.finish(request.prompt, replies[request.name])
    return work


def _distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Count tokens, with common prefixes counted once."""
    trie = IdealCache()
    for prompt in prompts:
        trie.submit(prompt)
    # A known last token of a prompt is computed again; then it was counted twice.
    unlike = {tuple(prompt) for prompt in prompts}
    return trie.prompt_tokens - trie.cached_tokens - (len(prompts) - len(unlike))


@dataclass(frozen=True)
class Floor:
    """Seconds. `floor_s` is as defined above; `arithmetic_s` the bound with all flops."""

    floor_s: float
    prefill_s: float
    decode_s: float
    arithmetic_s: float


def floor_of(work: Work, spec: ModelSpec, dtype: str, rate: float, bandwidth: float) -> Floor:
    """Return the floor. `rate`: flop/s of a large product; `bandwidth`: bytes/s of reads."""
    element = 4 if dtype == "float32" else 2
    size = Elements(element, element)
    weights = step_work(spec, [], size).read
    token = step_work(spec, [Row(1, 1)], size).read - weights
    prompts = [step_work(spec, [row], size) for row in work.prompts]
    steps = [step_work(spec, rows, size) for rows in work.steps]
    step_bytes = [weights + tokens * token for tokens in work.step_tokens]
    prefill, decode = sum(p.products for p in prompts) / rate, sum(step_bytes) / bandwidth
    return Floor(
        floor_s=prefill + decode,
        prefill_s=prefill,
        decode_s=decode,
        arithmetic_s=prefill
        + sum(prompt.attention for prompt in prompts) / rate
        + sum(
            max(read / bandwidth, (step.products + step.attention) / rate)
            for read, step in zip(step_bytes, steps, strict=True)
        ),
    )
