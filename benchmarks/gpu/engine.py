"""The engine's scheduler, loop and executor in this process, on random weights.

What an engine process does, without the sockets: requests are handed to its loop, and what it says
about them is counted.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.constrained import Grammar, GrammarCompiler
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.messages import FromEngine, Stop, ToEngine
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.__main__ import SWITCH_SECONDS
from rootlace.runtime.engine.loop import EngineLoop
from rootlace.runtime.engine.mask_filler import MaskFiller
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.masks import StepMasks
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import Constraint, SamplingParams

EOS = 1


@dataclass(frozen=True)
class Served:
    """One load. `decode_tokens_per_second`: from when every request had its first token to when the
    first one ended."""

    tokens: int
    tokens_per_second: float
    decode_tokens_per_second: float

    @classmethod
    def of(cls, begin: float, heard: Sequence[tuple[float, Update]]) -> Served:
        """From what was said about all requests, and when; they came at `begin`."""
        started: dict[int, float] = {}
        for at, update in heard:
            if update.token_ids:
                started.setdefault(update.rid, at)
        low = max(started.values())
        high = min(at for at, update in heard if update.finish is not None)
        tokens = sum(len(update.token_ids) for _, update in heard)
        decoded = sum(len(update.token_ids) for at, update in heard if low < at <= high)
        rate = decoded / (high - low) if high > low else float("nan")
        return cls(tokens, tokens / (heard[-1][0] - begin), rate)


def greedy(new: int) -> SamplingParams:
    """`new` tokens, whatever they are."""
    return SamplingParams(max_tokens=new, temperature=0.0, seed=0, ignore_eos=True)


class Compiled:
    """The compiler of constraints as the loop knows it, with everything compiled beforehand."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def cached(self, constraint: Constraint) -> Grammar | None:
        return self._compiler.compile(constraint)

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        raise NotImplementedError


class InProcessEngine:
    """Serves one load after the other, without reusing prefixes."""

    def __init__(
        self,
        runner: ModelRunner,
        compiler: GrammarCompiler,
        max_running: int,
        overlap: bool | None = None,
    ) -> None:
        """`overlap`: plan a step while one runs (None: where the executor does)."""
        self._overlap = runner.overlaps if overlap is None else overlap
        self._filler = MaskFiller(1)
        # As in an engine's process: a compiling or filling thread does not keep the loop waiting,
        # and what is there for good is not collected again.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        self._runner = runner
        self._scheduler = Scheduler(
            SchedulerConfig(max_step_tokens=8192, max_running=max_running),
            CacheConfig(runner.block_size, runner.num_blocks, enabled=False),
            runner.context_length,
            vocab_size=runner.vocab_size,
            masks=StepMasks(runner.vocab_size, self._filler),
            automata=self._overlap or runner.overlaps,
        )
        self._compiler = Compiled(compiler)
        self._rids = itertools.count()

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._filler.close()
        sys.setswitchinterval(self._interval)
        gc.unfreeze()

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> Served:
        """All prompts at once, until every one of them has ended. Raises RuntimeError if a request
        fails."""
        requests: list[ToEngine] = []
        live = set()
        for seed, prompt in enumerate(prompts):
            rid, own = next(self._rids), msgspec.structs.replace(params, seed=seed)
            requests.append(Request(rid, np.array(prompt, np.int32), own, constraint=constraint))
            live.add(rid)
        heard: list[tuple[float, Update]] = []
        begin = time.perf_counter()

        def receive(timeout_ms: int) -> list[ToEngine]:
            incoming = requests.copy()
            requests.clear()
            return incoming if live else [Stop()]

        def send(said: list[FromEngine]) -> None:
            now = time.perf_counter()
            for update in said:
                if isinstance(update, Update):
                    if update.finish == "error":
                        raise RuntimeError(f"request {update.rid} failed: {update.error}")
                    heard.append((now, update))
                    if update.finish is not None:
                        live.discard(update.rid)

        EngineLoop(
            self._scheduler, self._runner, self._compiler, receive, send, overlap=self._overlap
        ).run()
        return Served.of(begin, heard)


def synthetic_tokenizer(size: int) -> str:
    """A byte-level BPE `tokenizer.json` of `size` tokens, most of them words of four small letters.

    Token 0 begins a text, token 1 ends it. What constraints cost depends on how many tokens a state
    allows; that is like a real vocabulary's, without a corpus and without training.
    """
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnopqrstuvwxyz"
    # A space is a beginning.
    merges = [(left, right) for left in [*letters, "Ġ"] for right in letters]
    merges = merges[: size - len(words)]
    pairs = ["".join(merge) for merge in merges]
    tails = [pair for pair in pairs if pair[0] != "Ġ"]
    for chosen in np.random.default_rng(0).permutation(len(pairs) * len(tails)).tolist():
        if len(words) + len(merges) == size:
            break
        merges.append((pairs[chosen // len(tails)], tails[chosen % len(tails)]))
    words += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return str(tokenizer.to_str())


def grammar_compiler(vocab_size: int) -> GrammarCompiler:
    """For the synthetic tokenizer of this size; `EOS` ends a text."""
    return GrammarCompiler(Vocabulary(synthetic_tokenizer(vocab_size), vocab_size, [EOS]))
