"""What few bits cost: the measurement, on a tiny model and on a real one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.perplexity import BOUNDS, Case, as_numbers, log_likelihoods, measure, off_grid
from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.executor.refusals import check_memory
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import InvalidRequest
from tests.model.checkpoints import configs, reference, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import native_library
from tests.real_model import SMOLLM2, needs_smollm2
from tests.tiny_model import make_tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "perplexity.json"

TEXT = """The harbour lay still under a thin layer of fog when the first boats came back. Nobody had
expected them before noon, since the wind had turned in the night and the sea outside the bay was
rough. An old man counted the sails from the end of the pier, once and then again, and shook his
head. "There are seven," he said to the girl beside him. "Nine went out on Monday." She looked at
the water for a while before she answered. "Then two of them found more fish than the others, and
are still at work." He laughed, because that was what her grandmother would have said, and because
it was more likely than anything that he had thought of. By the evening both boats were home, low
in the water and late, and the price of mackerel fell by a third."""


def test_likelihoods_are_transformers_own(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    windows = [np.array(ids, np.int32) for ids in ([5, 150, 7, 32, 9, 11], [4, 77, 8, 3])]
    model = reference(tmp_path, torch.float32)
    expected = [
        reference_logprobs(model, list(ids))[range(len(ids) - 1), ids[1:]] for ids in windows
    ]
    found = log_likelihoods(str(tmp_path), "float32", windows, Case())
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-4)


def test_results_are_compared_with_the_model_as_it_is(tmp_path: Path) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    windows = [np.arange(3, 60, dtype=np.int32)]
    plain, int8, int4, cache = measure(
        str(tmp_path), "float32", windows, [Case("int8"), Case("int4"), Case("none", "int8")]
    )
    assert (plain.growth, plain.deviation) == (0, 0)
    assert 0 < int8.deviation < int4.deviation and cache.deviation > 0
    assert int4.growth == pytest.approx(int4.perplexity / plain.perplexity - 1)
    assert plain.bound is None and int8.bound is not None


def test_a_run_goes_on(tmp_path: Path) -> None:
    """What a folder has is not computed again, the rest is."""
    native_library()
    save(configs()["llama"], tmp_path)
    windows = [np.arange(3 + i, 20 + i, dtype=np.int32) for i in range(3)]
    given = (str(tmp_path), "float32", windows, Case("int4"))
    plain = log_likelihoods(*given)
    assert np.array_equal(log_likelihoods(*given, tmp_path), plain)
    kept = tmp_path / "int4-auto.npy"
    some = np.load(kept)[:2]
    np.save(kept, some + 1)
    found = log_likelihoods(*given, tmp_path)
    np.testing.assert_allclose(found - plain, [1] * 32 + [0] * 16)


def test_scaled_channels_compute_the_same(tmp_path: Path) -> None:
    """The weights are others, the model is not."""
    save(configs()["llama"], tmp_path)
    config = ModelConfig.read(tmp_path)
    weights = as_numbers(config, torch.float32, torch.device("cpu"))
    other = off_grid(weights, config.spec)
    for name in ("qkv", "output", "gate_up", "down"):
        one, changed = (getattr(found.layers[1], name).matrix for found in (weights, other))
        assert 0.1 < (changed / one).log().std() < 0.5

    def logits(found: ModelWeights) -> np.ndarray:
        executor = ExecutorConfig(model=str(tmp_path), kernels="reference", dtype="float32")
        cache = CacheConfig(4, 16)
        runner = ModelRunner.load(executor, cache, 64, 8, weights_of=lambda *_: found)
        plan = make_plan([Work(Row(Blocks(16, 4), [5, 150, 7, 32, 9, 11, 4, 77]))])
        forward = runner._steps._forward  # type: ignore[attr-defined]
        with torch.inference_mode():
            return forward.logits(forward.run(plan)).copy()

    np.testing.assert_allclose(logits(other), logits(weights), rtol=1e-4, atol=1e-4)


def test_refusals_recommend_what_the_table_allows(tmp_path: Path) -> None:
    """What grows no more than its bound, off a grid too, which is where weights lie that
    `--quantize` takes; there, by no more than two standard errors, since tokens are a sample."""
    rows = json.loads(RESULTS.read_text("utf-8"))["results"]
    assert {(row["case"]["quantize"], row["case"]["kv_dtype"]) for row in rows} >= set(BOUNDS)
    kept = dict.fromkeys(BOUNDS, True)
    for row in rows:
        pair = row["case"]["quantize"], row["case"]["kv_dtype"]
        if row["bound"] is not None:
            assert row["bound"] == BOUNDS[pair]
            sample = 2 * row["uncertainty"] if row["case"]["off_grid"] else 0.0
            kept[pair] &= row["growth"] <= row["bound"] + sample
    model = make_tiny_model(tmp_path / "model")
    executor = ExecutorConfig(model=str(model), dtype="float32")
    config, blocks = ModelConfig.read(model), 100
    cache = CacheConfig(num_blocks=blocks)
    setup = ModelSetup(config, executor, cache, FLOAT32)
    enough = weight_bytes(config, FLOAT32, "none", head_apart=True) + blocks * block_bytes(
        config, 16, FLOAT32
    )
    with pytest.raises(InvalidRequest) as refused:
        check_memory(setup, enough - 1, head_apart=True)
    for (quantize, kv_dtype), allowed in kept.items():
        way = f"kv_dtype {kv_dtype}" if quantize == "none" else f"quantize {quantize}"
        assert (way in str(refused.value)) == allowed, (way, str(refused.value))


@needs_smollm2
def test_few_bits_keep_a_real_model() -> None:
    """The mean |difference| of a token's log-probability. The file's weights lie on a grid of int4
    already: only its head is rounded, as with int8."""
    native_library()
    assert SMOLLM2 is not None
    ids = Tokenizer.read(ModelConfig.read(SMOLLM2).source).encode(TEXT)
    cases = [Case("int8"), Case("int4"), Case("none", "int8"), Case("none", "int4")]
    windows = [np.array(ids, np.int32)]
    plain, *found = measure(str(SMOLLM2), "float32", windows, cases)
    assert 5 < plain.perplexity < 40
    most = {"int8 auto": 0.02, "int4 auto": 0.06, "none int8": 0.04, "none int4": 0.4}
    assert all(one.deviation < most[f"{one.case.quantize} {one.case.kv_dtype}"] for one in found)
    assert all(one.growth < 0.15 for one in found), found
