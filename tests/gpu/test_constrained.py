"""Constrained decoding of the embedded model on the device: every output is checked by a parser."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness

pytest.importorskip("llguidance", reason="constraints need llguidance")

from rootlace.runtime.scheduler.masks import MaskThreads
from rootlace.runtime.structured import GrammarCompiler

BLOCK_SIZE = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["baker", "teacher", "driver"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "age", "job", "tags"],
    "additionalProperties": False,
}
REGEX = r"([A-Z][a-z]{1,8} ){1,3}is [0-9]{1,3} years old\."
CHOICES = ["Turin is where she lives.", "Turin isn't known.", "Rome, I think."]
SOURCES: dict[str, dict[str, Any]] = {
    "regex": {"regex": REGEX},
    "schema": {"json_schema": SCHEMA},
    "choices": {"choices": CHOICES},
    "grammar": {"ebnf": 'start: "(" start ")" | "x" | "y"'},  # not regular: masks of the host
}


def is_valid(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch(REGEX, text) is not None
    if name == "choices":
        return text in CHOICES
    if name == "grammar":
        inner = text.strip("()")
        return inner in ("x", "y") and text == "(" * text.count("(") + inner + ")" * text.count("(")
    jsonschema = pytest.importorskip("jsonschema", reason="checks outputs")
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def runner(demo_model: Path, device: torch.device) -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(model=str(demo_model), dtype="float32", device=str(device)),
        CacheConfig(block_size=BLOCK_SIZE, num_blocks=512),
        max_step_tokens=256,
        max_running=64,
    )


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any, runner: ModelRunner) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=runner.vocab_size)


def run(
    runner: ModelRunner,
    compiler: GrammarCompiler,
    tokenizer: Any,
    *,
    overlap: bool,
    jump: bool,
    rows: int,
) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """All constraints side by side in one batch, hot enough that the model would like to stray."""
    filler = MaskThreads(1)
    harness = Harness(
        runner, block_size=BLOCK_SIZE, overlap=overlap, automata=overlap, filler=filler
    )
    rids = {}
    try:
        for number in range(rows):
            for name, source in SOURCES.items():
                prompt = tokenizer(f"Mara {number} is a {name}.")["input_ids"]
                params = SamplingParams(
                    max_tokens=120,
                    temperature=1.0 if number else 0.0,
                    seed=number,
                    stop_token_ids=runner.eos_token_ids,
                )
                matcher = compiler.compile(**source).matcher()
                rids[name, number] = harness.add(prompt, params, matcher=matcher, jump=jump)
        harness.finish()
    finally:
        filler.close()
    return {
        key: (harness.outcomes[rid].token_ids, harness.outcomes[rid].finish)
        for key, rid in rids.items()
    }


@pytest.mark.parametrize("jump", [False, True])
def test_outputs_keep_to_their_constraints(
    runner: ModelRunner, compiler: GrammarCompiler, tokenizer: Any, real: bool, jump: bool
) -> None:
    """Automata that the device steps, and masks that the host fills; the same with and without
    overlap."""
    rows = 12 if real else 3
    found = {}
    for overlap in (False, True):
        # Once more than once: an automaton goes to the device when it is known whole.
        for _ in range(2):
            found[overlap] = run(runner, compiler, tokenizer, overlap=overlap, jump=jump, rows=rows)
    assert found[True] == found[False]
    finished = 0
    for (name, _), (tokens, finish) in found[True].items():
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if finish == "stop":
            finished += 1
            assert is_valid(name, text), (name, text)
        else:
            assert finish == "length", (name, finish)
            assert name in ("schema", "grammar"), text  # the others end by themselves
    assert finished > 0.7 * len(found[True])
