"""The engine's scheduler, loop and executor in this process, on random weights.

What an engine process does, without the sockets: requests are handed to its loop, and what it says
about them is counted.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
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
IDLE_LIMIT = 600.0
"""Seconds without a token after which a run is given up."""


@dataclass(frozen=True)
class Served:
    """One load. `seconds` from the first request's submission to the last token; `decoding` from
    the moment every request had its first token to the moment the first one ended."""

    seconds: float
    decoding: float
    tokens: int
    decode_tokens: int
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decoding if self.decoding > 0 else float("nan")


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
        future: Future[Grammar] = Future()
        future.set_result(self._compiler.compile(constraint))
        return future


class InProcessEngine:
    """Serves one load after the other; `close` it."""

    def __init__(
        self,
        runner: ModelRunner,
        compiler: GrammarCompiler,
        max_running: int,
        overlap: bool | None = None,
        cached: bool = False,
    ) -> None:
        """`overlap`: plan a step while one runs (None: where the executor does). `cached`: prefixes
        are matched and kept."""
        self._overlap = runner.overlaps if overlap is None else overlap
        self._filler = MaskFiller(1)
        # As in an engine's process: a compiling or filling thread does not keep the loop waiting,
        # and what is there for good is not collected again.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        self._runner = runner
        cache = CacheConfig(
            block_size=runner.block_size, num_blocks=runner.num_blocks, enabled=cached
        )
        self._scheduler = Scheduler(
            SchedulerConfig(max_step_tokens=8192, max_running=max_running),
            cache,
            runner.context_length,
            vocab_size=runner.vocab_size,
            masks=StepMasks(runner.vocab_size, self._filler),
            automata=self._overlap or runner.overlaps,
        )
        self._compiler = Compiled(compiler)
        self._next_rid = 0

    def close(self) -> None:
        self._filler.close()
        sys.setswitchinterval(self._interval)
        gc.unfreeze()

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        constraint: Constraint | None = None,
        on_turn: Callable[[int], None] | None = None,
    ) -> Served:
        """All prompts at once, until every one of them has ended.

        `on_turn(n)` is called before the loop's n-th turn since all requests were decoding. Raises
        RuntimeError if a request fails.
        """
        first = self._next_rid
        self._next_rid += len(prompts)
        clock = _Clock(first, len(prompts), on_turn)
        submissions: list[ToEngine] = [
            Request(
                first + i,
                np.array(prompt, np.int32),
                msgspec.structs.replace(params, seed=i),
                constraint=constraint,
            )
            for i, prompt in enumerate(prompts)
        ]
        clock.incoming = submissions
        loop = EngineLoop(
            self._scheduler,
            self._runner,
            self._compiler,
            clock.receive,
            clock.send,
            overlap=self._overlap,
        )
        steps = int(self._scheduler.stats()["steps"])
        loop.run()
        return clock.served(int(self._scheduler.stats()["steps"]) - steps)


class _Clock:
    """The gateway's end of the loop: hands requests over and notes when tokens come."""

    def __init__(self, first: int, count: int, on_turn: Callable[[int], None] | None) -> None:
        self.incoming: list[ToEngine] = []
        self._left = set(range(first, first + count))
        self._started: set[int] = set()
        self._count = count
        self._tokens = self._decode_tokens = self._turns = 0
        self._on_turn = on_turn
        self._begin = time.perf_counter()
        self._news = self._begin
        self._all_started = self._first_end = self._end = 0.0

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        incoming, self.incoming = self.incoming, []
        if incoming:
            self._begin = self._news = time.perf_counter()
            return incoming
        if not self._left:
            return [Stop()]
        if time.perf_counter() - self._news > IDLE_LIMIT:
            raise RuntimeError(f"no token for {IDLE_LIMIT:.0f} s")
        if self._all_started and not self._first_end and self._on_turn is not None:
            self._on_turn(self._turns)
            self._turns += 1
        return []

    def send(self, said: list[FromEngine]) -> None:
        now = time.perf_counter()
        for message in said:
            if isinstance(message, Update):
                self._take(message, now)

    def _take(self, update: Update, now: float) -> None:
        if update.finish == "error":
            raise RuntimeError(f"request {update.rid} failed: {update.error}")
        count = len(update.token_ids)
        self._tokens += count
        if count:
            self._news = now
            self._started.add(update.rid)
        if self._all_started and not self._first_end:
            self._decode_tokens += count
        if not self._all_started and len(self._started) == self._count:
            self._all_started = now
        if update.finish is not None:
            self._left.discard(update.rid)
            self._first_end = self._first_end or now
            self._end = now

    def served(self, steps: int) -> Served:
        return Served(
            seconds=self._end - self._begin,
            decoding=self._first_end - self._all_started if self._all_started else 0.0,
            tokens=self._tokens,
            decode_tokens=self._decode_tokens,
            steps=steps,
        )


def synthetic_tokenizer(size: int, seed: int = 0) -> str:
    """A byte-level BPE `tokenizer.json` of `size` tokens, most of them words of small letters.

    Token 0 begins a text, token 1 ends it. What constraints cost depends on how many tokens a state
    allows; that is like a real vocabulary's, without a corpus and without training.
    """
    random = np.random.default_rng(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(["<s>", "</s>", *alphabet])
    letters = [*"etaoinshrdlucmfwypvbgkjqxz", "Ġ"]
    merges: list[tuple[str, str]] = []
    # Words grow at their ends by one or two letters; a space is a beginning.
    heads, tails = list(letters), letters[:-1]
    while len(words) < size:
        for left, right in random.random((4096, 2)).tolist():
            pair = heads[int(left * len(heads))], tails[int(right * len(tails))]
            whole = pair[0] + pair[1]
            if whole in words or len(words) == size:
                continue
            words[whole] = None
            merges.append(pair)
            if len(whole) < 9:
                heads.append(whole)
            if len(whole) == 2 and whole[0] != "Ġ":
                tails.append(whole)
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return str(tokenizer.to_str())


def grammar_compiler(vocab_size: int) -> GrammarCompiler:
    """For the synthetic tokenizer of this size; `EOS` ends a text."""
    return GrammarCompiler(Vocabulary(synthetic_tokenizer(vocab_size), vocab_size, [EOS]))
