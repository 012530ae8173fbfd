"""Small random checkpoints of every architecture, written by transformers."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    InternLM3Config,
    IQuestCoderConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MULTI_HEAD = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
GPT2: dict[str, Any] = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    **{key: value for key, value in SHAPE.items() if key.endswith("_token_id")},
}
OPT = {key: value for key, value in MULTI_HEAD.items() if key != "intermediate_size"}
OPT["ffn_dim"] = 96
FALCON = {**{key: value for key, value in OPT.items() if key != "ffn_dim"}, "ffn_hidden_size": 128}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
THETA = 10000.0


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": THETA, **parameters}


def configs() -> dict[str, PreTrainedConfig]:
    """Name -> configuration; between them every feature of the families that this release of
    transformers has. Each call gives copies, which a test may change."""
    return deepcopy(_configs())


@cache
def _configs() -> dict[str, PreTrainedConfig]:
    newer: dict[str, dict[str, Any]] = {
        "exaone": {**SHAPE, "rms_norm_eps": 0.25, "tie_word_embeddings": True},
        "sarvam_mla": {
            **SHAPE,
            **LATENT,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
        },
    }
    there = [kind for kind in newer if kind in CONFIG_MAPPING]
    wide_heads = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
    return {
        **{kind: AutoConfig.for_model(kind, **newer[kind]) for kind in there},
        "llama": LlamaConfig(**SHAPE, head_dim=16),
        "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "llama-biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        "internlm3": InternLM3Config(**SHAPE, head_dim=16),
        "internlm3-biased": InternLM3Config(**SHAPE, attention_bias=True, mlp_bias=True),
        "iquestcoder": IQuestCoderConfig(**SHAPE, rms_norm_eps=0.25),
        "llama-mha": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
        "llama-mqa": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=24),
        "llama-llama3": LlamaConfig(
            **SHAPE,
            rope_parameters=_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        "llama-linear": LlamaConfig(**SHAPE, rope_parameters=_rope("linear", factor=4.0)),
        "llama-dynamic": LlamaConfig(**SHAPE, rope_parameters=_rope("dynamic", factor=2.0)),
        "llama-yarn": LlamaConfig(
            **SHAPE,
            rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
        ),
        "granite": GraniteConfig(
            **SHAPE,
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
        "phi3": Phi3Config(**SHAPE, sliding_window=9),
        "phi3-partial": Phi3Config(
            **SHAPE,
            rope_parameters=_rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0 + i / 8 for i in range(6)],
                long_factor=[2.0 + i for i in range(6)],
            ),
            original_max_position_embeddings=128,
        ),
        "smollm3": SmolLM3Config(**SHAPE, no_rope_layer_interval=2),
        "smollm3-sliding": SmolLM3Config(
            **SHAPE,
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=6,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        "olmo2": Olmo2Config(**SHAPE),
        "olmo2-biased": Olmo2Config(**{**SHAPE, "num_key_value_heads": 1}, attention_bias=True),
        "gemma2": Gemma2Config(
            **SHAPE,
            head_dim=16,
            sliding_window=6,
            query_pre_attn_scalar=9,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
        "gemma3": Gemma3TextConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=6,
            sliding_window_pattern=2,
            query_pre_attn_scalar=9,
            rope_parameters={
                "full_attention": _rope("linear", factor=8.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        "olmo3": Olmo3Config(
            **{**SHAPE, "num_hidden_layers": 4},
            sliding_window=5,
            rope_parameters={
                "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        "glm": GlmConfig(**SHAPE, head_dim=16),
        "glm4": Glm4Config(
            **SHAPE, head_dim=24, rope_parameters=_rope("default", partial_rotary_factor=0.75)
        ),
        "cohere": CohereConfig(**SHAPE, logit_scale=0.4, use_qk_norm=True),
        "falcon": FalconConfig(**FALCON, bias=True),
        "falcon-serial": FalconConfig(
            **FALCON, multi_query=False, parallel_attn=False, tie_word_embeddings=False
        ),
        "falcon-grouped": FalconConfig(
            **FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True
        ),
        "falcon-one-norm": FalconConfig(
            **FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            activation="gelu_pytorch_tanh",
        ),
        "cohere2": Cohere2Config(**SHAPE, sliding_window=6, logit_scale=0.4),
        "cohere2-biased": Cohere2Config(
            **SHAPE,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "exaone4": Exaone4Config(**SHAPE, sliding_window=6, sliding_window_pattern=2),
        "exaone4-full": Exaone4Config(
            **SHAPE, sliding_window=None, layer_types=["full_attention"] * 3
        ),
        "gpt2": GPT2Config(**GPT2, n_inner=96),
        "gpt2-unscaled": GPT2Config(
            **GPT2,
            scale_attn_weights=False,
            activation_function="relu",
            tie_word_embeddings=False,
        ),
        "opt": OPTConfig(**OPT, word_embed_proj_dim=64),
        "opt-unbiased": OPTConfig(
            **OPT, enable_bias=False, activation_function="gelu", tie_word_embeddings=False
        ),
        "gpt_neox": GPTNeoXConfig(**MULTI_HEAD),
        "gpt_neox-serial": GPTNeoXConfig(
            **MULTI_HEAD,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_fast",
            rope_parameters=_rope("linear", factor=4.0, partial_rotary_factor=1.0),
        ),
        "stablelm": StableLmConfig(**SHAPE),
        "stablelm-parallel": StableLmConfig(
            **SHAPE,
            use_parallel_residual=True,
            use_qkv_bias=True,
            qk_layernorm=True,
            rope_parameters=_rope("default", partial_rotary_factor=0.5),
        ),
        "starcoder2": Starcoder2Config(**SHAPE),
        "starcoder2-sliding": Starcoder2Config(
            **SHAPE, use_bias=False, sliding_window=6, tie_word_embeddings=False, hidden_act="gelu"
        ),
        "mistral": MistralConfig(**SHAPE, sliding_window=None),
        "mistral-sliding": MistralConfig(**wide_heads, sliding_window=7),
        "ministral": MinistralConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "ministral3": Ministral3Config(
            **SHAPE,
            head_dim=16,
            sliding_window=9,
            rope_parameters=_rope(
                "yarn", factor=32.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.3
            ),
        ),
        "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, sliding_window=7, head_dim=16),
        "qwen2_moe": Qwen2MoeConfig(
            **SHAPE,
            **EXPERTS,
            shared_expert_intermediate_size=40,
            use_sliding_window=True,
            sliding_window=6,
        ),
        "qwen3_moe": Qwen3MoeConfig(
            **SHAPE, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1], head_dim=16
        ),
        "gpt_oss": GptOssConfig(
            **SHAPE,
            num_local_experts=6,
            num_experts_per_tok=3,
            head_dim=16,
            sliding_window=6,
            swiglu_limit=0.8,
            rope_parameters=_rope(
                "yarn", factor=4.0, original_max_position_embeddings=64, truncate=False
            ),
        ),
        "deepseek_v2": DeepseekV2Config(
            **MULTI_HEAD,
            **LATENT,
            q_lora_rank=None,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=3,
            topk_group=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.5,
        ),
        "deepseek_v3": DeepseekV3Config(
            **MULTI_HEAD,
            num_key_value_heads=4,
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            attention_bias=True,
            rope_parameters=_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.7,
                mscale_all_dim=1.3,
            ),
        ),
        "olmoe": OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3),
        "qwen2": Qwen2Config(**SHAPE),
        "qwen2-sliding": Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**SHAPE, head_dim=32),
        "qwen3-biased": Qwen3Config(
            **SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True
        ),
    }


def save(
    config: PreTrainedConfig,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    seed: int = 0,
    kind: type[_BaseAutoModelClass] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Write a seeded random checkpoint of a `kind`; returns transformers' own model of it.

    Weights are spread wider than the initialiser does, norms and biases are not left at 1 and 0:
    otherwise attention is flat and a forgotten weight changes nothing.
    """
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
            elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                parameter.normal_(0.0, 0.6)
            else:
                parameter.normal_(0.0, 1.3 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return reference(folder, dtype, kind)


def reference(
    folder: Path, dtype: torch.dtype, kind: type[_BaseAutoModelClass] = AutoModelForCausalLM
) -> PreTrainedModel:
    """Transformers' model of a folder. Loaded, not cast: a cast would round the frequencies too."""
    return kind.from_pretrained(folder, dtype=dtype).eval()


def reference_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Log-softmax of transformers' logits after each token, float64 [len, V]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)
