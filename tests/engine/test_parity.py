"""Scheduler and model together give transformers' tokens, however the work is cut and shared."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.engine.harness import Harness, greedy
from tests.model.checkpoints import reference_logprobs

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=24, head_dim=8),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}
NEW_TOKENS = 24


# Each block size beside each kind of attention, not beside each model.
MODELS_AND_BLOCKS = [("llama", 4), ("mistral", 1), ("mistral", 16), ("qwen2", 1), ("qwen3", 16)]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # wide enough that greedy margins are not tiny
                parameter.normal_(0, 0.25)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def runner(folder: Path, block_size: int, num_blocks: int = 512) -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(model=str(folder), dtype="float32", device="cpu"),
        CacheConfig(block_size=block_size, num_blocks=num_blocks),
        max_step_tokens=512,
        max_running=64,
    )


def expected(
    model: PreTrainedModel, prompt: list[int], found: list[int]
) -> tuple[list[int], list[float]]:
    """transformers' greedy token after the prompt and after each of the tokens that were `found`,
    and its log-probability; EOS ignored. Equal tokens are those that it decodes by itself."""
    scores = reference_logprobs(model, [*prompt, *found])[len(prompt) - 1 : -1]
    logprobs, tokens = scores.max(-1)
    return tokens.tolist(), logprobs.tolist()


def prompts() -> list[list[int]]:
    """Seven prompts: two families with a common prefix, one prompt inside another, strangers."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 160, (n,), generator=generator).tolist()

    first, second = ids(37), ids(50)
    return [
        first + ids(5),
        first + ids(9),
        first,
        second + ids(3),
        second + ids(20),
        ids(8),
        ids(1),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "block_size"), MODELS_AND_BLOCKS, indirect=["reference"])
def test_batched_chunked_warm_and_evicted_agree_with_transformers(reference, block_size) -> None:
    folder, model = reference
    model_runner = runner(folder, block_size)
    wanted: list[tuple[list[int], list[float]]] = []
    settings = {
        "batched": {},
        "chunked": {"max_step_tokens": 11},
        "one at a time": {"max_running": 1},
        # Room for about three of the seven: evictions on the way.
        "starved": {"num_blocks": -(-230 // block_size)},
        "uncached": {"enabled": False},
    }
    for name, setting in settings.items():
        harness = Harness(model_runner, block_size=block_size, **setting)
        for round_name in ("cold", "warm"):
            where = f"{name}, {round_name}"
            rids = [harness.add(p, greedy(NEW_TOKENS, logprobs=True)) for p in prompts()]
            harness.finish()
            outcomes = [harness.outcomes[rid] for rid in rids]
            wanted = wanted or [
                expected(model, prompt, outcome.token_ids)
                for prompt, outcome in zip(prompts(), outcomes, strict=True)
            ]
            for outcome, (tokens, logprobs) in zip(outcomes, wanted, strict=True):
                assert outcome.finish == "length" and len(tokens) == NEW_TOKENS, where
                assert outcome.token_ids == tokens, where
                assert outcome.logprobs == pytest.approx(logprobs, abs=1e-4), where
        stats = harness.scheduler.stats()
        if name == "starved":
            assert stats["evicted_blocks"] > 0
        if name == "uncached":
            assert stats["cached_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "block_size"), MODELS_AND_BLOCKS, indirect=["reference"])
def test_preempted_sequences_go_on_as_if_nothing_had_been(reference, block_size) -> None:
    folder, model = reference
    # More output than the scheduler keeps in reserve: five start, and not all can stay.
    count, short = 90, [prompt[:10] for prompt in prompts()[:5]]
    harness = Harness(
        runner(folder, block_size), block_size=block_size, num_blocks=256 // block_size
    )
    rids = [harness.add([*prompt, i], greedy(count)) for i, prompt in enumerate(short)]
    harness.finish()
    assert harness.scheduler.stats()["retractions"] > 0
    for i, (rid, prompt) in enumerate(zip(rids, short, strict=True)):
        found = harness.outcomes[rid].token_ids
        assert len(found) == count
        assert found == expected(model, [*prompt, i], found)[0]


@pytest.mark.parametrize(("reference", "block_size"), MODELS_AND_BLOCKS, indirect=["reference"])
def test_turns_of_a_conversation_reuse_all_but_the_last_token(reference, block_size) -> None:
    folder, model = reference
    harness = Harness(runner(folder, block_size), block_size=block_size)
    history = prompts()[0]
    for turn in range(3):
        rid = harness.add(history, greedy(NEW_TOKENS))
        harness.finish()
        outcome = harness.outcomes[rid]
        tokens = outcome.token_ids
        assert len(tokens) == NEW_TOKENS
        assert tokens == expected(model, history, tokens)[0]
        if turn:
            # All but the last sampled token (its KV was never needed) and the new user tokens.
            assert outcome.cached_tokens == len(history) - 4
        history = history + tokens + [5, 6, 7]


def test_a_shared_prefix_is_computed_once_within_the_step(reference) -> None:
    folder, model = reference
    harness = Harness(runner(folder, 16), block_size=16)
    prefix = prompts()[3]
    rids = [harness.add([*prefix, 10 + i], greedy(NEW_TOKENS)) for i in range(8)]
    harness.step()
    assert harness.scheduler.stats()["computed_tokens"] == len(prefix) + 8
    harness.finish()
    for i, rid in enumerate(rids):
        found = harness.outcomes[rid].token_ids
        assert len(found) == NEW_TOKENS
        assert found == expected(model, [*prefix, 10 + i], found)[0]


def test_seeded_sampling_does_not_depend_on_company_or_cache(reference) -> None:
    from rootlace.wire.protocol import SamplingParams

    folder, _ = reference
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=seed)
        for seed in range(7)
    ]
    model_runner = runner(folder, 4)
    alone = Harness(model_runner, block_size=4, max_running=1, enabled=False)
    together = Harness(model_runner, block_size=4)
    for harness in (alone, together):
        for prompt, param in zip(prompts(), params, strict=True):
            harness.add(prompt, param)
        harness.finish()
    assert [o.token_ids for o in alone.outcomes.values()] == [
        o.token_ids for o in together.outcomes.values()
    ]
