"""The embedded model gives transformers' tokens, cold and warm, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.engine.demo import prompts_about
from tests.engine.harness import Harness, greedy

NEW_TOKENS = 32
QUESTIONS = ["Where does Mara live?", "How old is Mara?", "What is her job?", "Hello!"]


@pytest.mark.parametrize("block_size", [1, 16])
def test_greedy_tokens_and_logprobs(demo_model: Path, block_size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    runner = ModelRunner.load(
        ExecutorConfig(model=str(demo_model), dtype="float32", device="cpu"),
        CacheConfig(block_size=block_size, num_blocks=2048 // block_size),
        max_step_tokens=64,
        max_running=16,
    )
    harness = Harness(runner, block_size=block_size, max_step_tokens=64)
    prompts = prompts_about(QUESTIONS, demo_model)
    for _ in ("cold", "warm"):
        rids = [harness.add(p, greedy(NEW_TOKENS, logprobs=True)) for p in prompts]
        harness.finish()
        for rid, prompt in zip(rids, prompts, strict=True):
            outcome = harness.outcomes[rid]
            ids = torch.tensor([prompt + outcome.token_ids])
            with torch.inference_mode():
                # Teacher-forced: one pass scores every token, so a tiny margin shows as one.
                logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert outcome.token_ids == logprobs.argmax(-1).tolist()
            wanted = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert outcome.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
    assert harness.outcomes[rids[1]].cached_tokens == len(prompts[1]) - 1
