"""What files on the hub say beside the keys of their class: of Phi-4-mini, Gemma 2 (9B), Gemma 3
(1B and 270M), SmolLM3, OLMo 3, GLM-4, Command R7B, EXAONE 4 (32B), StarCoder2, GPT-NeoX (20B),
GPT-2, OPT and Galactica, StableLM 2 and Llama 3.2's like."""

from __future__ import annotations

from typing import Any

HUB_KEYS: dict[str, dict[str, Any]] = {
    "phi3": {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 6,
            "long_factor": [1.1] * 6,
        },
    },
    "gemma2": {
        "hidden_act": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
        "sliding_window": 6,
        "sliding_window_size": 6,
    },
    "gemma3": {
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": 6,
        "layer_types": None,
        "cache_implementation": "hybrid",
    },
    "smollm3": {"max_window_layers": 28, "rope_theta": 5000000.0, "rope_scaling": None},
    "olmo3": {
        "rope_parameters": None,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "glm4": {"rope_parameters": None, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    "cohere2": {
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "layer_types": None,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "exaone4": {
        "rope_parameters": None,
        "rope_theta": 1000000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_window_pattern": "LLLG",
    },
    "starcoder2": {
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "rope_parameters": None,
        "rope_theta": 999999.4420358813,
    },
    "cohere": {"model_max_length": 131072, "rope_parameters": None, "rope_theta": 8e6},
    "falcon": {
        "apply_residual_connection_post_layernorm": False,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
        "max_position_embeddings": 2048,
        "rope_parameters": None,
    },
    "gpt_neox": {
        "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0,
        "rope_parameters": None,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
    },
    "gpt2": {
        "n_ctx": 256,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "opt": {
        "activation_dropout": 0.0,
        "learned_embeddings": True,
        "prefix": "</s>",
        "scale_embeddings": False,
    },
    "stablelm": {"rope_parameters": None, "partial_rotary_factor": 0.25, "rope_theta": 10000},
    "llama": {"rope_parameters": None, "rope_theta": 500000.0, "pretraining_tp": 2}
    | {"rope_interleaved": False, "is_llama_config": True, "_flash_attn_2_enabled": True},
}
