"""Steps under way while everything else happens at once, in any order.

Requests of every kind come, end, are aborted, preempted and taken back while none, one or two steps
are under way, and steps fail. Whoever comes to its end has what it would have got alone; whoever is
stopped has the beginning of that.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.scheduler import admission
from rootlace.runtime.scheduler.admission import Turns
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.errors import ConstraintNotMet, ContextLengthExceeded, InternalError, Overloaded
from tests.scheduler.matchers import Plain, Script, Stepped
from tests.scheduler.world import Job, World
from tests.simulated_executor import history_hash, made_up_logprobs

SIZES: list[dict[str, Any]] = [
    {"block_size": 4, "num_blocks": 400},
    {"block_size": 4, "num_blocks": 14, "max_step_tokens": 11},
    {"block_size": 1, "num_blocks": 40, "max_step_tokens": 7, "max_running": 5},
    {"block_size": 3, "num_blocks": 20, "policy": "lpm"},
    {"block_size": 16, "num_blocks": 6, "policy": "dfs"},
    {"block_size": 4, "num_blocks": 16, "enabled": False},
    {"block_size": 2, "num_blocks": 30, "context_length": 17, "max_running": 3},
    {"block_size": 4, "num_blocks": 24, "max_step_tokens": 3, "max_waiting": 4},
]


class Storm:
    """World with its possible next events."""

    def __init__(self, seed: int, automata: bool, **sizes: Any) -> None:
        self.dice = random.Random(seed)
        self.world = World(
            overlap=True, automata=automata, vocab_size=7, spot_seconds=seed % 2 * 1e9, **sizes
        )
        self.stems = [self._tokens(self.dice.randrange(1, 14)) for _ in range(3)]
        self.programs: list[str] = []

    def run(self, actions: int) -> None:
        choices: list[tuple[Callable[[], object], int]] = [
            (self.submit, 30),
            (self.fork, 6),
            (self.launch, 60),
            (self.world.land, 45),
            (self.abort, 8),
            (self.preempt, 4),
            (self.world.scheduler.cache.flush, 2),
            (self.fail, 2),
            (self.release, 2),
        ]
        names, weights = zip(*choices, strict=True)
        for _ in range(actions):
            self.dice.choices(names, weights)[0]()
        self.world.drain()
        for job in self.world.jobs.values():
            self.check(job)
        self.world.expect_empty()

    # ------------------------------------------------------------ what happens

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(7) for _ in range(count)]

    def _constraint(self) -> Callable[[], Plain] | None:
        dice = self.dice
        script, length = dice.randrange(4), dice.choice([1, 2, 9, 30])
        forcing, kind = dice.choice([0, 3, 7]), dice.randrange(7)
        if kind < 2:
            return partial(Script, script, length, 7, forcing, bool(kind))
        if kind < 4:
            return partial(Stepped, script, length, 7, forcing, hidden=dice.choice([0, 3, 6]))
        return None

    def _submit(self, prompt: list[int], limit: int, **options: Any) -> None:
        # What is forced from the start may fail; the queue may be full, the prompt too long.
        with contextlib.suppress(ConstraintNotMet, ContextLengthExceeded, Overloaded):
            self.world.submit(prompt, limit, **options)

    def _options(self, limit: int) -> dict[str, Any]:
        dice = self.dice
        logprobs = dice.random() < 0.3
        return {
            "stop_token_ids": (0, 1) if dice.random() < 0.3 else (),
            "min_tokens": min(dice.choice([0, 0, 3]), limit),
            "frequency_penalty": 0.5 if dice.random() < 0.2 else 0.0,
            "logprobs": logprobs,
            "top_logprobs": 2 if logprobs else 0,
            "prompt_logprobs_from": dice.choice([None, None, None, 0, 2]),
            "jump": dice.random() < 0.7,
            "namespace": dice.choice(["", "", "other"]),
            "adapter": dice.choice(["", "", "one", "two"]),
            "predict": self._predict if dice.random() < 0.4 else None,
        }

    def _predict(self, output: list[int]) -> list[int]:
        """Much of the output, with edits."""
        dice, found = self.dice, list(output)
        for _ in range(dice.randrange(4)):
            at = dice.randrange(len(found) + 1)
            found[at : at + dice.randrange(3)] = self._tokens(dice.randrange(3))
        return found

    def submit(self) -> None:
        dice = self.dice
        prompt = [*dice.choice(self.stems), *self._tokens(dice.randrange(3))]
        if dice.random() < 0.2:
            prompt = self._tokens(1)
        limit = dice.choice([0, 1, 1, 2, 3, 12, 40])
        program = ""
        if dice.random() < 0.2:
            program = f"program {len(self.programs)}"
            self.programs.append(program)
        self._submit(
            prompt, limit, constrain=self._constraint(), program=program, **self._options(limit)
        )

    def fork(self) -> None:
        """Several samples of one prompt."""
        prompt = [*self.dice.choice(self.stems), *self._tokens(2)]
        options, constrain = self._options(9), self._constraint()
        for _ in range(self.dice.randrange(2, 5)):
            self._submit(prompt, 9, constrain=constrain, **options)

    def launch(self) -> None:
        if len(self.world.flights) < 2:
            self.world.launch()

    def abort(self) -> None:
        if self.world.open_rids():
            self.world.abort(self.dice.choice(self.world.open_rids()))

    def preempt(self) -> None:
        running = self.world.scheduler._running
        if running.sequences[1:]:
            running.preempt(self.dice.choice(running.sequences[1:]))
            self.world.scheduler.check()

    def fail(self) -> None:
        self.world.fail(InternalError("injected"))

    def release(self) -> None:
        if self.programs:
            self.world.scheduler.cache.release_program(self.programs.pop())

    # ------------------------------------------------------------ what came of it

    def check(self, job: Job) -> None:
        if job.finish in ("stop", "length") or job.fails():
            self.world.expect_cold(job)
        else:
            cold = self.world.cold(job.prompt, job.params, job.constrain, job.adapter)
            if cold.finish != "error":
                assert job.output == cold.output[: len(job.output)]
        for update in job.updates:
            if update.prompt_scores is not None:
                start = max(job.params.prompt_logprobs_from or 0, 1)
                tokens = np.array(job.prompt)
                before = history_hash(tokens, job.adapter)[start - 1 : -1]
                wanted = made_up_logprobs(before, tokens[start:])
                assert update.prompt_scores.logprobs.tolist() == wanted.tolist()
        if job.finish == "length" and job.params.prompt_logprobs_from is not None:
            scored = any(update.prompt_scores is not None for update in job.updates)
            first = max(job.params.prompt_logprobs_from, 1)
            assert scored == (first < len(job.prompt))


def test_a_block_given_up_is_nobodys_until_the_step_is_planned() -> None:
    """Of several samples of one prompt, each computes what is forced, to score it. One had given
    its block up for the tree's, the tree gave it up for another's, and a third was to write there
    in the same step."""
    Storm(103, automata=False, **SIZES[0]).run(150)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("automata", [False, True])
def test_storm(sizes: dict[str, Any], automata: bool) -> None:
    for seed in range(3):
        Storm(seed, automata, **sizes).run(150)


@pytest.mark.parametrize("sizes", SIZES[:4], ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_storm_of_rows_that_take_turns(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Counter[bool]()
    part = Turns.part

    def noted(self: Turns, rows: list[RequestState], prompts: bool) -> list[RequestState]:
        found = part(self, rows, prompts)
        taken[len(found) < len(rows)] += 1
        return found

    monkeypatch.setattr(admission, "_ROWS_TO_STEP", 0.1)
    monkeypatch.setattr(Turns, "part", noted)
    for seed in range(3):
        Storm(seed, bool(seed % 2), step_seconds=1e-5, **sizes).run(150)
    assert taken[True] > 10
