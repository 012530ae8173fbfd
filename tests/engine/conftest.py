"""Embedded model in float32, prompts for it, and constraints over its vocabulary."""

from pathlib import Path

import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import GrammarCompiler
from tests.engine.demo import QUESTIONS, compiler_for, prompts_about


@pytest.fixture(scope="package")
def runner(demo_model: Path) -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(model=str(demo_model), dtype="float32", device="cpu"),
        CacheConfig(block_size=16, num_blocks=256),
        max_step_tokens=128,
        max_running=32,
    )


@pytest.fixture(scope="module")  # some modules have runners of their own
def compiler(demo_model: Path, runner: ModelRunner) -> GrammarCompiler:
    return compiler_for(runner, demo_model)


@pytest.fixture(scope="package")
def prompts(demo_model: Path) -> list[list[int]]:
    return prompts_about(QUESTIONS, demo_model)
