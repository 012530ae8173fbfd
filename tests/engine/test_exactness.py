"""Exact mode: tokens and log-probabilities are the same bits, however their work was done.

Scheduler, native kernels and compiled constraints together; what `docs/exactness.md` promises.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.protocol import Constraint, SamplingParams
from tests.engine.harness import Harness, Outcome
from tests.model.checkpoints import SHAPE, configs, save
from tests.model.test_native_decoder import tokens
from tests.native import native_library

VOCAB = SHAPE["vocab_size"]
FAMILY = tokens(45, seed=1)
PROMPTS = [
    FAMILY + tokens(5, seed=2),
    FAMILY + tokens(9, seed=3),
    FAMILY,
    FAMILY[:20] + tokens(30, seed=4),
    tokens(3, seed=5),
    FAMILY + tokens(5, seed=2) + tokens(20, seed=6),
]
LENGTH = 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 9},
        "vegetarian": {"type": "boolean"},
    },
    "required": ["name", "vegetarian"],
    "additionalProperties": False,
}
DISTINCT = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True}
TAKES_BACK = 4
CONSTRAINTS = {
    1: Constraint("ebnf", 'root ::= "(" root ")" [a-z] | [a-z .]+ "!"'),
    2: Constraint("json_schema", json.dumps(PERSON)),
    TAKES_BACK: Constraint("json_schema", json.dumps(DISTINCT)),
    5: Constraint("regex", "(Dear (true|null), ?[a-z ]{9,19}; )+yours"),
}
"""Requests at these places have forced tokens, and tokens that are taken back."""
SCORED = {0: 18, 3: 25, 5: 40}
"""Places of requests with a scored prompt, and the first scored token."""

Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    native_library()
    folder = tmp_path_factory.mktemp("model")
    save(configs()["qwen3"], folder)

    def loaded(threads: int, block_size: int, max_step_tokens: int) -> ModelRunner:
        return ModelRunner.load(
            ExecutorConfig(
                model=str(folder), dtype=request.param, kernels="native", threads=threads
            ),
            CacheConfig(block_size, 2048 // block_size),
            max_step_tokens,
            16,
        )

    return loaded


@functools.cache
def grammars() -> dict[int, Grammar]:
    """Compiled for printable ASCII and a few words."""
    tokens = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ"]
    words = ("true", "false", "null", '":', '","', "Ġyour", "Dear", "name", "vege")
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    tokens += map("".join, merges)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    compiler = GrammarCompiler(tokenizer, eos_token_ids=[2], vocab_size=VOCAB)
    return {place: compiler.compile(constraint) for place, constraint in CONSTRAINTS.items()}


def add_all(
    harness: Harness,
    told: list[Outcome] | None = None,
    predictions: list[list[int]] | None = None,
) -> list[int]:
    """Add greedy and seeded requests, some with constraints or with scores of their prompts; each
    continues behind its tokens in `told`."""
    rids = []
    for i, prompt in enumerate(PROMPTS):
        output = told[i].token_ids if told else []
        params = SamplingParams(
            max_tokens=LENGTH,
            temperature=0.0 if i % 2 else 0.9,
            top_p=1.0 if i % 2 else 0.95,
            frequency_penalty=0.3 if i == 4 else 0.0,
            seed=100 + i,
            logprobs=i % 3 != 1,
            top_logprobs=3,
            prompt_logprobs_from=SCORED.get(i),
            ignore_eos=True,
        )
        matcher = grammars()[i].matcher() if i in CONSTRAINTS else None
        predicted = predictions[i] if predictions else []
        rids.append(
            harness.add(
                *(prompt, params),
                matcher=matcher,
                jump=True,
                output=output,
                prediction=predicted,
            )
        )
    return rids


def found(harness: Harness, rids: list[int]) -> list[tuple[object, ...]]:
    outcomes = [harness.outcomes[rid] for rid in rids]
    assert all(o.finish is not None and not o.error for o in outcomes)
    return [(o.token_ids, o.logprobs, o.top, o.prompt) for o in outcomes]


def one_by_one(runner: ModelRunner) -> list[tuple[object, ...]]:
    """Each request by itself, from nothing."""
    harness = Harness(runner, block_size=runner.block_size, max_running=1, enabled=False)
    rids = add_all(harness)
    harness.finish()
    assert harness.scheduler.stats()["retreats"]
    assert all(harness.outcomes[rids[i]].forced for i in (2, 4, 5))
    assert all(
        len(harness.outcomes[rids[i]].prompt) == len(PROMPTS[i]) - at for i, at in SCORED.items()
    )
    return found(harness, rids)


def test_company_chunks_cache_threads_and_blocks(load: Load) -> None:
    cold = one_by_one(load(1, 16, 512))
    for threads, block_size, max_step_tokens in ((2, 16, 19), (3, 4, 64)):
        runner = load(threads, block_size, max_step_tokens)
        harness = Harness(
            runner, block_size=block_size, max_step_tokens=max_step_tokens, overlap=threads == 2
        )
        for _ in range(2):  # the second time everything is cached
            rids = add_all(harness)
            harness.finish()
            assert found(harness, rids) == cold
        assert all(harness.outcomes[rid].cached_tokens > 0 for rid in rids)


def test_a_pool_too_small_for_all(load: Load) -> None:
    """Sequences give their blocks up and are computed again."""
    harness = Harness(load(2, 4, 64), block_size=4, num_blocks=24, max_step_tokens=64)
    rids = add_all(harness)
    harness.finish()
    assert harness.scheduler.stats()["retractions"] > 0
    assert found(harness, rids) == one_by_one(load(1, 16, 512))


def test_a_new_engine_goes_on_after_any_token(load: Load) -> None:
    """As after an engine's death, another engine gets the tokens that clients received."""
    expected = one_by_one(load(1, 16, 512))
    first = Harness(load(2, 16, 64), block_size=16, max_step_tokens=64)
    add_all(first)
    for _ in range(9):
        first.step()
    told = list(first.outcomes.values())
    assert any(o.token_ids for o in told)
    assert any(o.finish is None for o in told)
    going = [i for i, o in enumerate(told) if o.finish is None]
    second = Harness(load(1, 4, 512), block_size=4)
    rids = add_all(second, told)
    second.finish()
    for i in going:
        begun, (ids, logprobs, top, prompt) = told[i], found(second, rids)[i]
        whole = (begun.token_ids + ids, begun.logprobs + logprobs, begun.top + top)
        assert (*whole, begun.prompt + prompt) == expected[i]


class Predicted(NamedTuple):
    """Pieces of outputs, and other tokens."""

    runner: ModelRunner
    cold: list[tuple[object, ...]]

    def predictions(self, dice: random.Random) -> list[list[int]]:
        found = []
        for token_ids, *_ in self.cold:
            assert isinstance(token_ids, list)
            tokens = token_ids * dice.choice([0, 1, 1, 1, 2])
            for _ in range(dice.randrange(4)):
                at = dice.randrange(len(tokens) + 1)
                tokens[at : at + dice.randrange(4)] = [dice.randrange(VOCAB)] * dice.randrange(4)
            found.append(tokens)
        return found


@pytest.fixture(scope="module")
def predicted(load: Load) -> Predicted:
    runner = load(2, 4, 64)
    return Predicted(runner, one_by_one(runner))


@settings(max_examples=6)
@given(
    dice=st.randoms(use_true_random=False), overlap=st.booleans(), blocks=st.sampled_from([512, 48])
)
def test_predictions(predicted: Predicted, dice: random.Random, overlap: bool, blocks: int) -> None:
    """Right and wrong predictions change only the number of steps."""
    harness = Harness(
        predicted.runner,
        block_size=4,
        num_blocks=blocks,
        max_step_tokens=64,
        overlap=overlap,
        spot_seconds=1e9,
    )
    rids = add_all(harness, predictions=predicted.predictions(dice))
    harness.finish()
    assert found(harness, rids) == predicted.cold
    harness.scheduler.cache.flush()
    assert harness.scheduler.stats()["blocks_used"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_of_what_others_wrote(predicted: Predicted, overlap: bool) -> None:
    """The second time all is known; a sample that was other than the first one's would differ."""
    harness = Harness(
        predicted.runner,
        block_size=4,
        max_step_tokens=64,
        overlap=overlap,
        spot_seconds=1e9,
        speculation_tokens=4096,
    )
    for times in range(3):
        rids = add_all(harness)
        harness.finish()
        assert found(harness, rids) == predicted.cold
        stats = harness.scheduler.stats()
        assert (stats["accepted_tree_tokens"] > 0) == (times > 0)


def test_a_right_prediction_takes_few_steps(predicted: Predicted) -> None:
    """A request that takes text back has the same steps to take: what it predicts comes last."""
    steps = []
    for right in (False, True):
        harness = Harness(predicted.runner, block_size=4, spot_seconds=1e9)
        outputs = [token_ids if right else [] for token_ids, *_ in predicted.cold]
        rids = add_all(harness, predictions=outputs)  # type: ignore[arg-type]
        others = [rid for place, rid in enumerate(rids) if place != TAKES_BACK]
        taken = 0
        while any(harness.outcomes[rid].finish is None for rid in others):
            harness.step()
            taken += 1
        harness.finish()
        assert found(harness, rids) == predicted.cold
        assert harness.scheduler.stats()["retreats"] > 0
        steps.append(taken)
    assert steps[1] <= steps[0] / 2
