"""Forced tokens of the embedded model: their scores, their limits, and how they are cut and shared.

The reference is the same request without jumps, one token a step.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.masks import MaskThreads
from rootlace.runtime.structured import GrammarCompiler, Matcher
from tests.engine.demo import prompts_about
from tests.engine.harness import Harness, Outcome, greedy

SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["baker", "teacher", "driver"]},
        "country_of_residence": {"type": "string", "maxLength": 30},
    },
    "required": ["full_name", "age", "occupation", "country_of_residence"],
    "additionalProperties": False,
}
QUESTIONS = ["Extract the person as JSON.", "Where does Mara live?"]


class Canonical:
    """Matcher whose mask allows a forced token alone. Then jumps and single steps give the same
    tokens by construction, and only the computation differs."""

    def __init__(self, inner: Matcher) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mask_row(self) -> None:
        return None

    def fill_bitmask(self, out: np.ndarray) -> None:
        forced = self._inner.forced_tokens()
        self._inner.fill_bitmask(out)
        if forced:
            out[:] = 0
            out.view(np.uint32)[forced[0] // 32] = 1 << (forced[0] % 32)


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(model=str(demo_model), dtype="float32", device="cpu"),
        CacheConfig(block_size=8, num_blocks=256),
        max_step_tokens=256,
        max_running=16,
    )


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    return prompts_about(QUESTIONS, demo_model)


def run(
    runner: ModelRunner,
    prompts: list[list[int]],
    compiler: GrammarCompiler,
    *,
    jump: bool,
    max_tokens: int = 80,
    schema: dict[str, Any] = SCHEMA,
    output: list[int] | None = None,
    **settings: Any,
) -> list[Outcome]:
    harness = Harness(runner, block_size=8, **settings)
    params = greedy(max_tokens, logprobs=True, top_logprobs=3)
    grammar = compiler.compile(json_schema=schema)
    rids = [
        harness.add(p, params, matcher=Canonical(grammar.matcher()), jump=jump, output=output)  # type: ignore[arg-type]
        for p in prompts
    ]
    harness.finish()
    return [harness.outcomes[rid] for rid in rids]


def same(one: Outcome, other: Outcome, start: int = 0) -> None:
    assert one.token_ids == other.token_ids[start:]
    assert one.finish == other.finish and one.error == other.error
    assert one.logprobs == pytest.approx(other.logprobs[start:], abs=1e-4)
    for (ids, values), (other_ids, other_values) in zip(one.top, other.top[start:], strict=True):
        assert ids == other_ids
        assert values == pytest.approx(other_values, abs=1e-4)


@pytest.fixture(scope="module")
def stepwise(runner, prompts, compiler) -> list[Outcome]:
    outcomes = run(runner, prompts, compiler, jump=False)
    assert all(outcome.finish == "stop" and not outcome.forced for outcome in outcomes)
    return outcomes


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_step_tokens": 5},
    "one at a time": {"max_running": 1},
    "starved": {"num_blocks": 17},
    "uncached": {"enabled": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_tokens_that_were_sampled(
    runner, prompts, compiler, stepwise, name
) -> None:
    filler = MaskThreads(2)
    for jump in (True, False):
        outcomes = run(runner, prompts, compiler, jump=jump, filler=filler, **SETTINGS[name])
        for outcome, wanted in zip(outcomes, stepwise, strict=True):
            same(outcome, wanted)
            assert len(outcome.logprobs) == len(outcome.token_ids) == len(outcome.top)
            assert (len(outcome.forced) > 10) == jump
    filler.close()


def test_any_limit_cuts_forced_text_where_it_cuts_sampled_text(
    runner, prompts, compiler, stepwise
) -> None:
    whole = stepwise[0]
    for limit in range(1, len(whole.token_ids) + 1):
        (outcome,) = run(runner, prompts[:1], compiler, jump=True, max_tokens=limit)
        assert outcome.token_ids == whole.token_ids[:limit]
        assert outcome.finish == ("stop" if limit == len(whole.token_ids) else "length")
        assert outcome.logprobs == pytest.approx(whole.logprobs[:limit], abs=1e-4)


def test_an_output_resumes_anywhere(runner, prompts, compiler, stepwise) -> None:
    whole = stepwise[0]
    for start in range(0, len(whole.token_ids), 3):
        (outcome,) = run(
            runner, prompts[:1], compiler, jump=True, output=whole.token_ids[:start] or None
        )
        same(outcome, whole, start)


def test_checked_constraints_rollback_on_the_model(runner, prompts, compiler) -> None:
    """No mask holds a multiple of 7, or distinct numbers."""
    checked = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7},
            "b": {
                "type": "array",
                "items": {"enum": [1, 2, 3, 4]},
                "uniqueItems": True,
                "minItems": 3,
            },
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(json_schema=checked)
    for jump in (False, True):
        harness = Harness(runner, block_size=8)
        params = greedy(240, logprobs=True)  # white space takes some
        for prompt in prompts:
            harness.add(prompt, params, matcher=grammar.matcher(), jump=jump)
        harness.finish()
        stats = harness.scheduler.stats()
        assert stats["retreats"] > 0 and (stats["forced_tokens"] > 0) == jump
        for outcome in harness.outcomes.values():
            assert outcome.finish == "stop", outcome.error
            text = b"".join(compiler.vocabulary.token_bytes[t] for t in outcome.token_ids)
            value = json.loads(text)
            assert value["a"] % 7 == 0 and len(set(value["b"])) == len(value["b"])
            assert len(outcome.logprobs) == len(outcome.token_ids)
