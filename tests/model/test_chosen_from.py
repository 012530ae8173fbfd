"""Logits of forbidden tokens are neither computed nor read."""

from typing import Any

import numpy as np
import pytest
import torch

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, TokenScores
from rootlace.runtime.model.decoder.native_decoder import NativeDecoder
from rootlace.runtime.model.executor.plain_steps import PlainSteps, score_samples
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, configs, save
from tests.native import native_library

VOCAB = SHAPE["vocab_size"]

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": True, "top_logprobs": 5},
    {"logit_bias": {7: 3.0, 11: -2.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 12},
    {"temperature": 0.7, "min_p": 0.1, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 3},
)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> PlainSteps:
    native_library()
    folder = tmp_path_factory.mktemp("model")
    save(configs()["llama-tied"], folder)
    executor = ExecutorConfig(model=str(folder), kernels="native", dtype="float32")
    runner = ModelRunner.load(executor, CacheConfig(4, 64), 64, 16)
    steps = runner._steps
    assert isinstance(steps, PlainSteps) and isinstance(steps._forward, NativeDecoder)
    return steps


def row_of(index: int, random: np.random.Generator, *, greedy: bool = False) -> SampleRow:
    kind = {} if greedy else KINDS[random.integers(len(KINDS))]
    params = SamplingParams(**{"temperature": 0.0, "seed": index, **kind})
    banned = (3, 5) if random.random() < 0.2 and not greedy else ()
    edits = {"logit_bias", "repetition_penalty", "temperature"} & kind.keys()
    mask = None
    if random.random() < 0.8:
        bits = np.zeros(-(-VOCAB // 32) * 32, bool)
        bits[random.integers(0, VOCAB, random.choice([1, 2, 30]))] = True
        mask = np.packbits(bits, bitorder="little").view(np.int32)
    tokens = random.integers(3, VOCAB, 9).astype(np.int32)
    return SampleRow(
        index, params, tokens, 4, mask, banned, simple=not edits and not banned
    )  # fmt: skip


def poisoned(steps: PlainSteps, hidden: np.ndarray, rows: list[SampleRow]) -> Any:
    steps._forward.logits(hidden)
    assert isinstance(steps._forward, NativeDecoder)
    steps._forward._logits.fill(np.nan)
    return steps._sample(hidden, rows)


def values(scores: TokenScores | None) -> Any:
    if scores is None:
        return None
    return [part.tolist() for part in (scores.logprobs, scores.top_ids, scores.top_logprobs)]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_all_logits(steps: PlainSteps, seed: int, greedy: bool) -> None:
    random = np.random.default_rng(seed)
    rows = [row_of(index, random, greedy=greedy) for index in range(random.integers(1, 12))]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(rows), SHAPE["hidden_size"], generator=generator).numpy()
    tokens, scores = poisoned(steps, hidden, rows)

    whole = steps._forward.logits(hidden).copy()
    expected = steps._sampler.sample(whole, rows)
    assert tokens.tolist() == expected.tolist()
    for found, wanted in zip(
        scores, score_samples(steps._score, whole, expected, rows), strict=True
    ):
        assert values(found) == values(wanted)
    for at, row in enumerate(rows):
        alone, own = poisoned(steps, hidden[at : at + 1], [row])
        assert alone.tolist() == [tokens[at]] and values(own[0]) == values(scores[at])
