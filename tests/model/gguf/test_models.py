"""Models from GGUF files compute the results of transformers with the original checkpoint."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import NativeUnavailable, read_processor
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.runner import ModelRunner, chosen_dtype
from rootlace.runtime.model.gguf.config import read_config
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model import lora
from tests.model.checkpoints import (
    EXPERTS,
    MULTI_HEAD,
    SHAPE,
    configs,
    reference,
    reference_logprobs,
    save,
)
from tests.model.gguf.converting import convert, gguf
from tests.model.gguf.writing import Entry, write
from tests.model.parallel.local_ranks import divided_logprobs
from tests.model.plans import Blocks, Row, Work, make_plan

TOP = SHAPE["vocab_size"] % 128
PARAMS = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=TOP, seed=0)
WINDOW_THETA = {"rope_type": "default", "rope_theta": 500000.0}
TOKENS = np.random.default_rng(3).integers(0, SHAPE["vocab_size"], 40).tolist()


def stated_by_gguf() -> dict[str, PreTrainedConfig]:
    """Models of which a GGUF file can say everything; of others llama.cpp knows no other form."""
    plain = configs()
    names = (
        "llama llama-tied llama-biased llama-mqa llama-llama3 llama-linear llama-yarn mistral "
        "granite phi3 phi3-partial olmo2 olmo2-biased qwen2 qwen3 qwen3-biased glm4 "
        "cohere cohere2 exaone4 exaone4-full falcon falcon-grouped gpt2 gpt_neox stablelm "
        "stablelm-parallel starcoder2 olmoe deepseek_v2 deepseek_v3"
    )
    long = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + pair / 8 for pair in range(8)],
        "long_factor": [2.0 + pair for pair in range(8)],
        "original_max_position_embeddings": 128,
        "attention_factor": 1.0,
    }
    # As OLMo 3's own config.json states it: the factor of attention is that which follows.
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    # Files say one number for both.
    plain["deepseek_v3"].rope_parameters["mscale"] = 1.3
    layers = {**SHAPE, "num_hidden_layers": 5}
    gemma = {**layers, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
    local = {"rope_type": "default", "rope_theta": 100.0}
    full = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    return {name: plain[name] for name in names.split()} | {
        "gemma2": Gemma2Config(**gemma, attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
        "gemma3": Gemma3TextConfig(
            **{**gemma, "num_hidden_layers": 7},
            rope_parameters={"full_attention": full, "sliding_attention": local},
        ),
        "smollm3": SmolLM3Config(**layers),
        "olmo3": Olmo3Config(
            **layers,
            sliding_window=5,
            rope_parameters={"full_attention": WINDOW_THETA, "sliding_attention": WINDOW_THETA},
        ),
        "olmo3-yarn": Olmo3Config(
            **layers,
            sliding_window=5,
            rope_parameters={"full_attention": yarn, "sliding_attention": WINDOW_THETA},
        ),
        "mixtral": MixtralConfig(**SHAPE, num_local_experts=5),
        "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40),
        "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True, head_dim=16),
        "gpt_oss": GptOssConfig(
            **SHAPE,
            num_local_experts=6,
            num_experts_per_tok=3,
            head_dim=16,
            sliding_window=6,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
        # Of a size that blocks can have, but for queries and latents.
        "deepseek_wide": DeepseekV3Config(
            **MULTI_HEAD,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            moe_intermediate_size=32,
            n_shared_experts=2,
            n_routed_experts=8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        "ministral3": Ministral3Config(
            **SHAPE,
            head_dim=16,
            rope_parameters={
                **yarn,
                "rope_type": "yarn",
                "attention_factor": None,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        "llama-longrope": LlamaConfig(**SHAPE, head_dim=16, rope_parameters=long),
        "glm4-half": Glm4Config(**SHAPE, head_dim=16),
    }


def check(path: Path, expected: torch.Tensor, adapter: int | None = None, **executor: Any) -> str:
    """The log-probabilities behind `TOKENS`; returns the name of the kernels."""
    runner = ModelRunner.load(
        ExecutorConfig(model=str(path), **{"dtype": "float32", **executor}),
        CacheConfig(4, 32),
        max_step_tokens=64,
        max_running=2,
    )
    row = Row(Blocks(32, 4), list(TOKENS))
    plan = make_plan([Work(row, params=PARAMS)])
    if adapter is not None:
        plan = replace(plan, adapters=np.array([adapter], np.int32))
    (scores,) = runner.run(plan).scores
    assert scores is not None
    wanted = expected.numpy()
    assert np.abs(scores.top_logprobs[0] - wanted[scores.top_ids[0]]).max() < 1e-4
    assert np.abs(scores.top_logprobs[0] - np.sort(wanted)[::-1][:TOP]).max() < 1e-4
    return runner.kernels


@pytest.mark.parametrize("name", stated_by_gguf())
def test_parity_with_transformers(name: str, tmp_path: Path) -> None:
    model = save(stated_by_gguf()[name], tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "m.gguf")
    expected = reference_logprobs(model, TOKENS)
    check(path, expected[-1])
    if name in DIVIDED:
        check_divided(path, expected)


DIVIDED = ("llama", "falcon-grouped", "mixtral", "gpt_oss", "deepseek_v3")
"""Rows in another order, joined by groups, and stacks of experts and of heads."""


def check_divided(path: Path, expected: torch.Tensor) -> None:
    """Two ranks, each of which reads its part of the file."""
    found = divided_logprobs(ModelConfig.read(path), 2, TOKENS, 9)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v2"])
def test_adapters(name: str, tmp_path: Path) -> None:
    """Adapters name modules, and order rows, as the original checkpoint does."""
    model = save(stated_by_gguf()[name], tmp_path / "hf")
    changed = lora.write(tmp_path / "a", model, r"model\.layers\.\d\.self_attn\.(q|o|qkv)_proj")
    path = convert(tmp_path / "hf", tmp_path / "m.gguf")
    expected = reference_logprobs(changed, TOKENS)[-1]
    check(path, expected, adapter=0, adapters=(f"a={tmp_path / 'a'}",))


QUANTISED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


def rounded(folder: Path, kind: str) -> None:
    """Replace a checkpoint's weights by their values in a GGUF file of this type."""
    number = gguf.GGMLQuantizationType[kind]

    def left(tensor: torch.Tensor) -> torch.Tensor:
        found = gguf.dequantize(gguf.quantize(tensor.contiguous().numpy(), number), number)
        return torch.from_numpy(found.astype(np.float32).reshape(tensor.shape))

    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "kv_b_proj" in name:  # of "deepseek_wide": files have a row of keys for each input
            keys, values = tensor.unflatten(0, (4, 64)).split(32, dim=1)
            keys = left(keys.transpose(1, 2)).transpose(1, 2)
            tensors[name] = torch.cat((keys, left(values)), dim=1).flatten(0, 1)
        elif tensor.dim() == 3:  # of gpt-oss, whose experts have a row for each input
            tensors[name] = left(tensor.transpose(1, 2)).transpose(1, 2).contiguous()
        elif tensor.dim() == 2 and not name.endswith("_bias"):
            tensors[name] = left(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("llama", "qwen3-biased", "phi3") for kind in QUANTISED),
        *(("deepseek_wide", "Q8_0"), ("gpt_oss", "MXFP4"), ("mixtral", "Q4_0"), ("mixtral", "F16")),
    ],
)
def test_quantised_weights(name: str, kind: str, tmp_path: Path) -> None:
    """Results equal those of transformers with the weights of equal values."""
    save(stated_by_gguf()[name], tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "m.gguf", kind)
    rounded(tmp_path / "hf", kind)
    model = reference(tmp_path / "hf", torch.float32)
    check(path, reference_logprobs(model, TOKENS)[-1], dtype="float32")


V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{V3} {V4} avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8", BFLOAT16),
        (f"{V3} {V4} avx512_bf16 avx512_vnni", BFLOAT16),
        (V3, BFLOAT16),
        ("sse2", FLOAT32),
    ],
)
def test_the_type_of_quantised_weights_is_what_the_processor_is_faster_at(
    flags: str, expected: np.dtype[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(stated_by_gguf()["llama"], tmp_path / "hf")
    coded = ModelConfig.read(convert(tmp_path / "hf", tmp_path / "q.gguf", "Q4_1"))
    dense = ModelConfig.read(convert(tmp_path / "hf", tmp_path / "f.gguf", "F16"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    processor = read_processor(tmp_path, "x86_64")

    def chosen(config: ModelConfig, **given: Any) -> np.dtype[Any]:
        return chosen_dtype(
            ExecutorConfig(device="cpu", **given), config, processor=processor, loads=True
        )

    assert chosen(coded) == chosen(dense, quantize="int8") == expected
    assert chosen(dense) == chosen(coded, dtype="float32") == FLOAT32
    assert chosen(coded, dtype="bfloat16") == chosen(dense, dtype="bfloat16") == BFLOAT16
    # What runs in torch keeps float32.
    assert chosen(coded, kernels="reference") == FLOAT32
    assert chosen(coded, kv_dtype="fp8_e4m3") == FLOAT32

    def none(*_: object) -> NoReturn:
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(native, "load", none)
    assert chosen(coded) == chosen(dense, quantize="int8") == FLOAT32


UNITS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Offsets of a block's float factors, for types that no package here can write."""


@pytest.mark.parametrize("kind", UNITS)
def test_weights_of_any_codes(kind: str, tmp_path: Path) -> None:
    wide = {**SHAPE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    save(LlamaConfig(**wide), tmp_path / "hf")
    number = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(5)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    blocks = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            data = rng.integers(0, 256, (len(tensor), 256 // numbers, size), dtype=np.uint8)
            for place in UNITS[kind]:
                unit = np.full((*data.shape[:2], 1), 0.001 if "NL" in kind else 0.0001, np.float16)
                data[..., place : place + 2] = unit.view(np.uint8)
            data = data.reshape(len(tensor), -1)
            blocks[name] = torch.from_numpy(data)
            tensors[name] = torch.from_numpy(gguf.dequantize(data, number).astype(np.float32))
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    path = convert(tmp_path / "hf", tmp_path / "m.gguf", kind, blocks=blocks)
    model = reference(tmp_path / "hf", torch.float32)
    expected = reference_logprobs(model, TOKENS)
    check(path, expected[-1])
    check_divided(path, expected)  # between the groups of a block


def test_parts_of_unlike_types(tmp_path: Path) -> None:
    """Files such as Q4_K_M have values in more bits than queries and keys."""
    folder = tmp_path / "hf"
    save(stated_by_gguf()["qwen2"], folder)
    tensors = load_file(folder / "model.safetensors")
    more = {name: one for name, one in tensors.items() if "v_proj.weight" in name}
    path = convert(folder, tmp_path / "m.gguf", "Q4_0", finer=tuple(more))
    rounded(folder, "Q4_0")
    left = load_file(folder / "model.safetensors")
    number = gguf.GGMLQuantizationType.Q8_0
    for name, one in more.items():
        left[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(one.numpy(), number), number))
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    check(path, reference_logprobs(reference(folder, torch.float32), TOKENS)[-1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"attention__temperature_scale": 0.5}, "llama.attention.temperature_scale"),
    "experts": ({"expert_count": 8}, "llama.expert_used_count is missing"),
    "not causal": ({"attention__causal": False}, "llama.attention.causal False"),
    "unlike layers": ({"feed_forward_length": [96, 96, 80]}, "llama.feed_forward_length"),
    "another scaling": ({"rope__scaling__type": "ntk"}, "llama.rope.scaling.type 'ntk'"),
    "longrope without factors": (
        {"rope__scaling__type": "longrope"},
        "llama.rope.scaling.type 'longrope': it takes rope_factors_long.weight and",
    ),
    "a factor of attention": (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 8.0,
            "rope__scaling__yarn_attn_factor": 1.3,
        },
        "llama.rope.scaling.yarn_attn_factor 1.2999999523162842: only 1.2079442 is supported",
    ),
    "longer values": ({"attention__value_length": 24}, "llama.attention.value_length 24"),
    "no context": ({"context_length": None}, "llama.context_length is missing"),
    "a text": ({"block_count": "3"}, "llama.block_count '3'"),
    "heads": ({"attention__head_count_kv": 3}, "num_key_value_heads 3"),
    "more layers": ({"block_count": 4}, "weights are missing: blk.3."),
    "fewer layers": ({"block_count": 2}, "does not have: blk.2."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    metadata, words = REFUSED[name]
    save(stated_by_gguf()["llama"], tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "m.gguf", **metadata)
    with pytest.raises(UnsupportedModel) as caught:
        check(path, torch.zeros(0))
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)


@pytest.mark.parametrize("name", ["phi3", "llama"])
@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ("long", None, "rope.scaling.type None: it takes"),
        ("short", "longrope", "rope.scaling.type 'longrope': it takes"),
        ("long short", "linear", "rope.scaling.type 'linear': rope_factors_long.weight and"),
        ("long short freqs", "longrope", "rope.scaling.type 'longrope': it takes"),
    ],
)
def test_factors_of_angles_are_read_or_refused(
    name: str, tensors: str, kind: str | None, words: str, tmp_path: Path
) -> None:
    metadata: dict[str, Any] = {f"{name}.embedding_length": 64, f"{name}.context_length": 64}
    metadata |= {f"{name}.{key}": 2 for key in ("attention.head_count", "feed_forward_length")}
    metadata |= {f"{name}.block_count": 1, f"{name}.attention.layer_norm_rms_epsilon": 1e-5}
    metadata["general.architecture"] = name
    if kind:
        metadata[f"{name}.rope.scaling.type"] = kind
    names = {"freqs": "rope_freqs", "long": "rope_factors_long", "short": "rope_factors_short"}
    entries = [Entry("token_embd.weight", (64, 8), 0, 0)]
    entries += [
        Entry(f"{names[one]}.weight", (16,), 0, 2048 + 64 * at)
        for at, one in enumerate(tensors.split())
    ]
    path = write(tmp_path / "m.gguf", metadata, entries, bytes(4096))
    with pytest.raises(UnsupportedModel, match=f"{name}.{words}"):
        read_config(GgufFile.read(path))


@pytest.mark.parametrize("name", ["smollm3", "granite", "qwen3"])
def test_windows_of_models_that_have_none(name: str, tmp_path: Path) -> None:
    """Only a file of `llama` may be Mistral's."""
    save(stated_by_gguf()[name], tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "m.gguf", attention__sliding_window=8)
    with pytest.raises(UnsupportedModel, match=rf"{name}\.attention\.sliding_window 8: this key"):
        ModelConfig.read(path)


def test_other_architectures_and_files(tmp_path: Path) -> None:
    for values, words in (
        ({"general.architecture": "rwkv7"}, "general.architecture 'rwkv7' is not supported"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "no whole model"),
        ({}, "general.architecture is missing"),
        ({"general.architecture": "llama"}, "embedding_length is missing"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "none")
        del writer.kv_data[0]["general.architecture"]
        for key, value in values.items():
            writer.add_string(key, value)
        writer.add_uint32("llama.attention.head_count", 4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(UnsupportedModel, match=words):
            ModelConfig.read(tmp_path / "m.gguf")


def test_a_split_model(tmp_path: Path) -> None:
    model = save(stated_by_gguf()["llama"], tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "m.gguf", tensors_per_file=10)
    first = min(tmp_path.glob("m-*.gguf"))
    assert first.name == "m-00001-of-00003.gguf"
    check(first, reference_logprobs(model, TOKENS)[-1])
