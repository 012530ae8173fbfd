"""Engines whose weights an earlier start has packed import no torch, for any request."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import native_library
from tests.real_model import SMOLLM2, needs_smollm2

PROGRAM = """
import json, sys, threading
import numpy as np
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import PooledRow, PromptScoreRow, SampleRow
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import plan_of_rows
from rootlace.wire.protocol import SamplingParams

def load(options):
    executor = ExecutorConfig(device="cpu", weight_cache=sys.argv[1], threads=1, **options)
    return ModelRunner.load(executor, CacheConfig(num_blocks=8), 256, 4)

ids = np.array([1, 504, 3575, 282, 649, 314], np.int32)
found, imported = [], []
for runner in map(load, json.loads(sys.argv[2])):
    mask = np.zeros(-(-runner.vocab_size // 32), np.int32)
    mask[7] = 0b101100
    for params, row in (
        (SamplingParams(temperature=0.0, seed=0), {}),
        (SamplingParams(temperature=0.0, seed=0), {"mask": mask}),
        (SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=True, top_logprobs=3), {}),
        (SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5), {"banned": (7, 9)}),
        (SamplingParams(temperature=0.7, seed=3, logit_bias={5: 4.0}), {"mask": mask}),
    ):
        plan = plan_of_rows(
            [ids],
            16,
            samples=[SampleRow(0, params, ids, 6, **row)],
            prompt_scores=[PromptScoreRow(0, 0, ids[1:], 2)],
            pooled=[PooledRow(5, 1)],
        )
        result = runner.run(plan)
        found.append([result.token_ids.tolist(), result.pooled[0].tolist()])
        for one in (*result.prompt_scores, *filter(None, result.scores)):
            found += [one.logprobs.tolist(), one.top_ids.tolist(), one.top_logprobs.tolist()]
    for thread in threading.enumerate():
        if thread.name == "weights":  # which keeps packed weights for the next start
            thread.join()
    imported.append("torch" in sys.modules)
print(json.dumps([imported, found]))
"""


def start(folder: Path, demo: Path) -> tuple[list[bool], object]:
    """Whether torch was imported, and what steps of all kinds found: of a GGUF file, and of a
    folder with two types of weights and two of caches."""
    of_demo: list[dict[str, str]] = [{"kv_dtype": "int8"}, {"dtype": "float32"}]
    options = [{"model": str(SMOLLM2)}, *({"model": str(demo), **one} for one in of_demo)]
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    imported, found = json.loads(done.stdout)
    return imported, found


@needs_smollm2
@pytest.mark.slow
def test_the_second_start_needs_no_torch_and_finds_the_same(
    tmp_path: Path, demo_model: Path
) -> None:
    native_library()
    imported, first = start(tmp_path, demo_model)
    assert imported[0] and list(tmp_path.glob("*.packed"))
    imported, second = start(tmp_path, demo_model)
    assert not any(imported)
    assert second == first
