"""Scheduler with a device's executor, steps launched ahead and graphs replayed: the same results as
with the plain executor."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.masks import MaskThreads
from rootlace.runtime.scheduler.speculation import DraftPace
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.protocol import SamplingParams
from tests.engine.demo import CONSTRAINTS
from tests.engine.harness import Harness, greedy
from tests.model.device_runner import device_runner
from tests.model.fake_device import FakeDevice
from tests.model.fixed_kernels import fixed_kernels

BLOCKS, SIZE, CONTEXT, ROWS = 160, 16, 320, 24


@pytest.fixture(scope="module")
def plain(demo_model: Path) -> ModelRunner:
    config = ExecutorConfig(
        model=str(demo_model), dtype="float32", device="cpu", context_length=CONTEXT
    )
    return ModelRunner.load(config, CacheConfig(SIZE, BLOCKS), 128, ROWS)


@pytest.fixture(scope="module")
def device(demo_model: Path) -> ModelRunner:
    kernels, _ = fixed_kernels(CONTEXT // SIZE)
    return device_runner(
        demo_model,
        FakeDevice(),
        kernels,
        blocks=BLOCKS,
        block_size=SIZE,
        max_rows=ROWS,
        context_length=CONTEXT,
    )


def compare(
    plain: ModelRunner,
    device: ModelRunner,
    fill: Callable[[Harness], None],
    filler: MaskThreads | None = None,
    num_blocks: int | None = None,
) -> Harness:
    harnesses = []
    for runner in (plain, device):
        ahead = runner is device
        harness = Harness(
            runner,
            block_size=SIZE,
            num_blocks=num_blocks,
            max_step_tokens=128,
            max_running=ROWS,
            filler=filler,
            overlap=ahead,
            automata=ahead,
        )
        fill(harness)
        harness.finish()
        harnesses.append(harness)
    for rid, one in harnesses[0].outcomes.items():
        other = harnesses[1].outcomes[rid]
        assert one.finish in ("stop", "length"), one
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert (one.forced, one.error) == (other.forced, other.error)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [ids for ids, _ in one.top] == [ids for ids, _ in other.top]
    return harnesses[1]


def test_sampled_penalised_scored_and_stopped(
    plain: ModelRunner, device: ModelRunner, prompts: list[list[int]]
) -> None:
    def fill(harness: Harness) -> None:
        for i, prompt in enumerate(prompts):
            for params in (
                {"temperature": 0.9, "top_p": 0.9},
                {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
                {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": (1, 2, 3, 300)},
                {"temperature": 1.2, "logit_bias": {17: 3.0}, "prompt_logprobs_from": 5},
            ):
                wanted = {"logprobs": bool(i % 2), "top_logprobs": 2 * (i % 2)}
                harness.add(
                    prompt,
                    SamplingParams(max_tokens=16 + i, seed=i, **params, **wanted),  # type: ignore[arg-type]
                )
            harness.step()

    before = device.stats()["graph_replays"]
    compare(plain, device, fill)
    assert device.stats()["graph_replays"] > before + 5


@pytest.mark.slow
def test_forks_and_turns_and_a_pool_too_small(
    plain: ModelRunner, device: ModelRunner, prompts: list[list[int]]
) -> None:
    def fill(harness: Harness) -> None:
        stem = harness.add(prompts[0], greedy(24), program="p")
        for _ in range(9):
            harness.step()
        for i in range(5):
            harness.add([*prompts[0], 40 + i, 50 + i], greedy(16), program="p")
        harness.finish()
        told = harness.outcomes[stem].token_ids
        for i in range(4):
            harness.add([*prompts[0], *told[: 5 * i + 3], 60 + i], greedy(28), program="p")
        for i in range(6):
            harness.add([*prompts[1][:30], i], greedy(48))

    harness = compare(plain, device, fill, num_blocks=28)
    assert harness.scheduler.stats()["retractions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrained(
    plain: ModelRunner,
    device: ModelRunner,
    prompts: list[list[int]],
    demo_model: Path,
    name: str,
) -> None:
    """Constraints run by automata on the device, or by masks of the host behind the forward
    pass."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    grammar = GrammarCompiler(tokenizer, vocab_size=plain.vocab_size).compile(**CONSTRAINTS[name])

    def fill(harness: Harness) -> None:
        for i, prompt in enumerate(prompts):
            harness.add(prompt, greedy(40), matcher=grammar.matcher(), jump=bool(i % 2))
            harness.step()
        harness.add(prompts[0], greedy(30, stop_token_ids=(2,)))
        params = greedy(30, logprobs=True, top_logprobs=2)
        harness.add(prompts[3], params, matcher=grammar.matcher(), jump=True)

    filler = MaskThreads(1)
    try:
        compare(plain, device, fill, filler)
    finally:
        filler.close()


def test_predictions(
    plain: ModelRunner,
    device: ModelRunner,
    prompts: list[list[int]],
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts, with automata at each of their tokens, in steps that are not planned ahead."""
    # Else drafts are as long as they are worth on this machine, at this moment.
    monkeypatch.setattr(DraftPace, "note", lambda self, rows, drafted, seconds: 1.0)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    compiler = GrammarCompiler(tokenizer, vocab_size=plain.vocab_size)
    grammar = compiler.compile(regex=r"([a-z]{3,8} ){9}")
    told: list[list[int]] = []

    def fill(harness: Harness) -> None:
        for i, prompt in enumerate(prompts):
            harness.add(
                prompt,
                greedy(24, logprobs=i < 2),
                matcher=grammar.matcher() if i % 2 else None,
                jump=True,
                prediction=[*told[i][:9], 7, *told[i][10:]] if told else None,
            )
        harness.finish()
        told[:] = told or [outcome.token_ids for outcome in harness.outcomes.values()]

    stats = compare(plain, device, fill).scheduler.stats()
    assert stats["drafted_tokens"] > stats["accepted_tokens"] > 24
