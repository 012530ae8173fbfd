"""Requests with LoRA adapters get the outputs of merged weights, in any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest
from tests.engine.harness import Harness, Outcome, greedy
from tests.model import lora
from tests.model.checkpoints import configs, reference_logprobs, save
from tests.model.device_runner import device_runner
from tests.model.fake_device import FakeDevice
from tests.model.fixed_kernels import fixed_kernels
from tests.native import skip_without

ATTENTION = r"model\.layers\.\d\.self_attn\.[qv]_proj"
ALL = r"model\.layers\.\d\.(self_attn|mlp)\.\w+_proj"
Asked = tuple[list[int], str]


def load(folder: Path, adapters: dict[str, Path], kernels: str, **more: Any) -> ModelRunner:
    skip_without(kernels)
    given = tuple(f"{name}={path}" for name, path in adapters.items())
    return ModelRunner.load(
        ExecutorConfig(model=str(folder), kernels=kernels, adapters=given, **more),  # type: ignore[arg-type]
        CacheConfig(block_size=4, num_blocks=300),
        max_step_tokens=512,
        max_running=16,
    )


def run(runner: ModelRunner, asked: list[Asked], **more: Any) -> list[Outcome]:
    harness = Harness(runner, block_size=4, **more)
    params = greedy(5, logprobs=True)
    rids = [harness.add(prompt, params, adapter=adapter) for prompt, adapter in asked]
    harness.finish()
    return [harness.outcomes[rid] for rid in rids]


def asked(names: tuple[str, ...]) -> list[Asked]:
    """The same prompts for all, with a common beginning."""
    rng = np.random.default_rng(3)
    first = rng.integers(3, 199, 9).tolist()
    prompts = [first, first + rng.integers(3, 199, 14).tolist(), rng.integers(3, 199, 21).tolist()]
    return [(prompt, name) for prompt in prompts for name in ("", *names)]


def check(models: dict[str, Any], some: list[Asked], outcomes: list[Outcome]) -> None:
    for (prompt, name), found in zip(some, outcomes, strict=True):
        scores = reference_logprobs(models[name], [*prompt, *found.token_ids])
        scores = scores[len(prompt) - 1 : -1]
        wanted = scores.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0].numpy()
        assert np.abs(found.logprobs - wanted).max() < 2e-4, name
        assert np.abs(scores.max(1).values.numpy() - wanted).max() < 1e-4


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_two_adapters_and_none_in_one_batch(kernels, tmp_path) -> None:
    model = save(configs()["qwen3"], tmp_path)
    paths = {"small": tmp_path / "small", "large": tmp_path / "large"}
    models = {
        "": model,
        "small": lora.write(paths["small"], model, ATTENTION, seed=1),
        "large": lora.write(paths["large"], model, ALL, rank=9, seed=2, use_rslora=True),
    }
    runner = load(tmp_path, paths, kernels)
    some = asked(tuple(paths))
    together = run(runner, some)
    check(models, some, together)
    assert len({tuple(one.token_ids) for one in together[:3]}) == 3
    if kernels == "native":  # the very bits, in chunks, from the cache and alone
        plain = run(load(tmp_path, {}, kernels), [one for one in some if not one[1]])
        assert [one.logprobs for one in plain] == [one.logprobs for one in together[::3]]
        harness = Harness(runner, block_size=4, max_step_tokens=7)
        for _ in range(2):
            params = greedy(5, logprobs=True)
            rids = [harness.add(prompt, params, adapter=adapter) for prompt, adapter in some]
            harness.finish()
            assert [harness.outcomes[rid].logprobs for rid in rids] == [
                one.logprobs for one in together
            ]
        for one, found in zip(some, together, strict=True):
            assert run(runner, [one])[0].logprobs == found.logprobs


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "joined": ("phi3", r"model\.layers\.[02]\.(self_attn\.qkv_proj|mlp\.gate_up_proj)", {}),
    "turned rows": ("glm4", r"model\.layers\.\d\.(self_attn\.[qk]_proj|mlp\.down_proj)", {}),
    "transposed": ("gpt2", r"transformer\.h\.\d\.(attn|mlp)\.c_\w+", {}),
    "by pattern": ("llama", ALL, {"ranks": {"k_proj": 2}, "alphas": {"up_proj": 3.0}}),
    "parallel": ("cohere2", ALL, {}),
    "latent": ("deepseek_v2", r"model\.layers\.\d\.self_attn\.(q|o|kv_a)_proj\w*", {}),
    "latent queries": ("deepseek_v3", r"model\.layers\.\d\.self_attn\.(q_a|q_b)_proj", {}),
    "shared expert": ("qwen2_moe", r".*\.shared_expert\.(gate|up|down)_proj", {}),
    "beside experts": ("gpt_oss", r"model\.layers\.\d\.self_attn\.[qkvo]_proj", {}),
    "by group": ("falcon-grouped", r"transformer\.h\.\d\.(self_attention|mlp)\.\w+", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_families(case, tmp_path) -> None:
    family, modules, more = CASES[case]
    model = save(configs()[family], tmp_path)
    changed = lora.write(tmp_path / "a", model, modules, **more)
    some = asked(("a",))[2:4]
    for kernels in ("native", "reference"):
        runner = load(tmp_path, {"a": tmp_path / "a"}, kernels)
        check({"": model, "a": changed}, some, run(runner, some))


STACKED = ("gate_up_proj", "down_proj")
APART = ("gate_proj", "up_proj", "down_proj")
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stacked": ("olmoe", r".*\.(q_proj|mlp\.gate)", {"experts": STACKED}),
    "alternating": ("gpt_oss", r".*\.(v_proj|router)", {"experts": STACKED}),
    "apart": ("qwen2_moe", r".*\.mlp\.(\w+|.*(gate|up|down)_proj)", {"experts": APART}),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_and_what_chooses_them(case, tmp_path, caplog) -> None:
    family, modules, more = MIXTURES[case]
    model = save(configs()[family], tmp_path)
    stacked = more["experts"] == STACKED
    if stacked:
        more |= {"target_parameters": [*STACKED, "gate.weight", "router.weight"]}
    paths = {"a": tmp_path / "a", "b": tmp_path / "b"}
    models = {"": model, "a": lora.write(paths["a"], model, modules, rank=2, **more)}
    models["b"] = lora.write(paths["b"], model, r".*\.o_proj", seed=1)
    some = asked(("a", "b"))
    runner = load(tmp_path, paths, "auto")
    assert runner.kernels == "reference"
    assert "slower than native ones: adapter 'a' changes experts" in caplog.text
    check(models, some, run(runner, some))
    with pytest.raises(InvalidRequest, match=r"native.*adapter 'a' changes experts"):
        load(tmp_path, paths, "native")


@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16"}, {"quantize": "int8"}], ids=["bfloat16", "int8"]
)
def test_in_bfloat16_and_behind_rounded_weights(more, tmp_path) -> None:
    model = save(configs()["llama"], tmp_path)
    changed = lora.write(tmp_path / "a", model, ALL)
    some = asked(("a",))[:4]
    runner = load(tmp_path, {"a": tmp_path / "a"}, "native", **more)
    together = run(runner, some)
    for (prompt, name), found in zip(some, together, strict=True):
        assert run(runner, [(prompt, name)])[0].logprobs == found.logprobs
        chosen = changed if name else model
        wanted = reference_logprobs(chosen, [*prompt, *found.token_ids])[len(prompt) - 1 : -1]
        wanted = wanted.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0].numpy()
        assert np.abs(found.logprobs - wanted).max() < 0.35


@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_device_beside_graphs(overlap, tmp_path) -> None:
    model = save(configs()["llama"], tmp_path)
    paths = {"a": tmp_path / "a", "b": tmp_path / "b"}
    models = {"": model} | {
        name: lora.write(path, model, ALL, seed=seed)
        for seed, (name, path) in enumerate(paths.items())
    }
    runner = device_runner(
        tmp_path,
        FakeDevice(),
        fixed_kernels(128)[0],
        blocks=300,
        block_size=4,
        max_rows=16,
        adapters=[f"{name}={path}" for name, path in paths.items()],
    )
    some = asked(tuple(paths))
    check(models, some, run(runner, some, overlap=overlap))
    plain = [one for one in some if not one[1]]
    check(models, plain, run(runner, plain, overlap=overlap))
    harness = Harness(runner, block_size=4, overlap=overlap, max_step_tokens=9)
    rids = {
        harness.add(prompt, greedy(0), adapter=name, pooling=pooling): (prompt, name, pooling)
        for prompt, name in some
        for pooling in ("last", "mean")
    }
    harness.finish()
    for rid, (prompt, name, pooling) in rids.items():
        with torch.inference_mode():
            states = models[name].model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = states[-1] if pooling == "last" else states.mean(dim=0)
        found = harness.outcomes[rid].vector
        assert found is not None and np.abs(found - wanted.numpy()).max() < 1e-4
