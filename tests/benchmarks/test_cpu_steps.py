"""The benchmark of steps on a CPU: its plans run, its parts add up, the least times by hand."""

import json
from math import prod
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from benchmarks.cpu_steps import SHOWN, Case, least_seconds, measure, product_bytes, show
from benchmarks.random_models import CONFIGS
from rootlace.runtime.doctor.ceilings import Elements
from rootlace.runtime.model.checkpoint.config import ModelConfig
from tests.model.checkpoints import configs, save
from tests.model.gguf.converting import convert
from tests.native import native_library


def test_parts_add_up(tmp_path: Path) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    cases = [
        Case("decode", 3, 1, 20),
        Case("prefill", 1, 40, 40),
        Case("extend", 2, 5, 30),
        Case("shared", 4, 1, 40, 32),
    ]
    for turn in range(20):
        beside = ("transformers", "reference")[turn % 2]
        results = measure("tiny", tmp_path, cases, 1, 0.01, (1e9, 1e9), beside)
        # A busy machine may stop us between two parts: not every time.
        if all(sum(one.parts.values()) > 0.5 * one.milliseconds for one in results):
            break
    assert [result.case for result in results] == ["decode", "prefill", "extend", "shared"]
    for result in results:
        assert result.beside and result.beside > 0
        assert set(result.parts) == set(SHOWN) > set(result.least)
        assert min(result.parts.values()) >= 0
        assert result.parts["linear"] > 0 and result.parts["attention"] > 0
        assert 0.5 < sum(result.parts.values()) / result.milliseconds < 1 + 1e-6
    show(results, Console())


def test_a_file_reads_its_codes(tmp_path: Path) -> None:
    """Of Q8_0: 34 bytes for 32 numbers; norms are not multiplied."""
    native_library()
    save(configs()["llama"], tmp_path / "hf")
    file = convert(tmp_path / "hf", tmp_path / "m.gguf", "Q8_0")
    spec = ModelConfig.read(file).spec
    layers, head = product_bytes(file)
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as stored:
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    numbers = sum(prod(shape) for name, shape in shapes.items() if "_proj." in name)
    assert layers == numbers * 34 // 32
    assert head == spec.vocab_size * spec.hidden_size * 34 // 32
    (found,) = measure("m", file, [Case("decode", 1, 1, 20)], 1, 0.01, (1e18, 1e9))
    assert found.least["linear"] == pytest.approx(1e3 * layers / 1e9)
    assert found.least["logits"] == pytest.approx(1e3 * head / 1e9)


LAYERS, HEAD = 12 * (2 * 768 * 768 + 2 * 256 * 768 + 3 * 768 * 3072), 32_000 * 768
NORMS = (2 * 12 + 1) * 768
KV_BYTES = 2 * 12 * 4 * 64 * 2


@pytest.mark.parametrize(("rate", "bandwidth"), [(1e18, 1e9), (1e9, 1e18)])
def test_the_least_time_is_that_of_reading_or_computing(
    tmp_path: Path, rate: float, bandwidth: float
) -> None:
    """Four rows of model b, which have 96 of their 100 tokens in common."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["b"]))
    spec = ModelConfig.read(tmp_path).spec
    found = least_seconds(spec, Case("", 4, 1, 100, 96), Elements(2, 2), (rate, bandwidth))
    read = {"linear": 2 * (LAYERS + NORMS), "attention": KV_BYTES * 112, "logits": 2 * HEAD}
    computed = {"linear": 8 * LAYERS, "attention": 4 * 768 * 12 * 400, "logits": 8 * HEAD}
    wanted = read if bandwidth < rate else computed
    assert found == pytest.approx({part: amount / 1e9 for part, amount in wanted.items()})
