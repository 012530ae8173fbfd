"""Checkpoints and tokenizers of transformers as GGUF files, by the rules of llama.cpp's
converter."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""llama.cpp's name of a `model_type`, if different."""
OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_positions": "max_position_embeddings",
}
"""Names of keys that some families call differently."""
LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
PERMUTED = ("llama", "mistral3", "smollm3", "granite")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

Json = dict[str, Any]


def convert(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    finer: Sequence[str] = (),
    blocks: Mapping[str, torch.Tensor] | None = None,
    tensors_per_file: int = 0,
    **metadata: Any,
) -> Path:
    """The checkpoint in `folder`, whose matrices become of type `kind`, but Q8_0 those that are
    `finer`; `blocks` are those of matrices, as bytes. Its tokenizer too, if it has one. `metadata`
    of the architecture (of none, if it begins with general) is added, with "__" for ".", or
    replaces what is there; None: it is left out."""
    stated = json.loads((folder / "config.json").read_text())
    config = {OLD_NAMES.get(key, key): one for key, one in stated.items()}
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file)
    keys = _keys(arch, config) | {key.replace("__", "."): one for key, one in metadata.items()}
    for key, value in keys.items():
        _put(writer, key if key.startswith("general.") else f"{arch}.{key}", value)
    if (folder / "tokenizer.json").is_file():
        write_tokenizer(writer, folder)
    else:
        _write_made_up_tokenizer(writer, config["vocab_size"])
    for stored, name, tensor in _tensors(arch, config, folder, blocks or {}):
        _write_tensor(writer, name, tensor, "Q8_0" if stored in finer else kind)
    return finish(writer, path)


def finish(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _put(writer: Any, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _head_dim(config: Json) -> int:
    found = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(found)


def _rope(config: Json) -> Json:
    old = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    rope = config.get("rope_parameters", old)
    return dict(rope.get("full_attention", rope))


def _keys(arch: str, config: Json) -> Json:
    head_dim, rope = _head_dim(config), _rope(config)
    layer_types = config.get("layer_types")
    windows = layer_types and "sliding_attention" in layer_types
    found = {
        "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": _kv_heads(config),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    epsilon = next((config[name] for name in LAYER_NORM if name in config), None)
    if epsilon is None:
        found["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    else:
        found["attention.layer_norm_epsilon"] = epsilon
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "yarn":
        for stated in ("attention_factor", "beta_fast", "beta_slow"):
            key = stated.replace("attention", "attn")
            if rope.get(stated) is not None:
                found[f"rope.scaling.yarn_{key}"] = float(rope[stated])
    if rope["rope_type"] == "longrope":
        found["rope.scaling.type"] = "longrope"
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    experts = next((config[name] for name in EXPERTS if name in config), None)
    if experts:
        found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    match arch:
        case "qwen2moe" | "qwen3moe":
            found["expert_feed_forward_length"] = config["moe_intermediate_size"]
            shared = config.get("shared_expert_intermediate_size")
            found["expert_shared_feed_forward_length"] = shared
        case "deepseek2":
            found |= _latent_keys(config, rope)
        case "mistral3":
            found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
            found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        case "gpt-oss":
            found["expert_feed_forward_length"] = config["intermediate_size"]
            found["attention.sliding_window"] = config["sliding_window"]
        case "command-r" | "cohere2":
            found["logit_scale"] = config["logit_scale"]
        case "gptneox" | "stablelm":
            found["use_parallel_residual"] = config["use_parallel_residual"]
        case "falcon":
            found["tensor_data_layout"] = "jploski"
    match arch:
        case "cohere2" | "exaone4" if windows:
            found["attention.sliding_window"] = config["sliding_window"]
            pattern = [kind == "sliding_attention" for kind in layer_types]
            found["attention.sliding_window_pattern"] = pattern
        case "gemma2":
            found["attention.sliding_window"] = config["sliding_window"]
            found["attn_logit_softcapping"] = config["attn_logit_softcapping"]
            found["final_logit_softcapping"] = config["final_logit_softcapping"]
        case "gemma3":
            found["attention.sliding_window"] = config["sliding_window"]
            local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
            found["rope.freq_base_swa"] = float(local)
        case "olmo2" if windows:
            found["attention.sliding_window"] = config["sliding_window"]
            pattern = [kind == "sliding_attention" for kind in layer_types]
            found["attention.sliding_window_pattern"] = pattern
        case "phi3":
            found["attention.sliding_window"] = config["sliding_window"] or 0
            original = config["original_max_position_embeddings"]
            found["rope.scaling.original_context_length"] = original
            if "long_factor" in rope:
                grown = config["max_position_embeddings"] / original
                factor = (1 + np.log(grown) / np.log(original)) ** 0.5 if grown > 1 else 1.0
                found["rope.scaling.attn_factor"] = float(factor)
        case "granite":
            names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
            keys = ("attention.scale", "embedding_scale", "residual_scale")
            found |= {key: config[name] for key, name in zip(keys, names, strict=True)}
            found["logit_scale"] = config["logits_scaling"]
    return found


def _tensors(
    arch: str, config: Json, folder: Path, blocks: Mapping[str, torch.Tensor]
) -> list[tuple[str, str, torch.Tensor]]:
    """Their names in the checkpoint and in the file."""
    architecture = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": _kv_heads(config)}
    found = []
    stored = _rearranged(arch, config, load_file(folder / "model.safetensors") | blocks)
    for name, tensor in stored.items():
        module = name.split(".")[-2]
        if arch in PERMUTED and module in heads:
            halves = tensor.unflatten(0, (heads[module], 2, -1))
            tensor = halves.swapaxes(1, 2).flatten(0, 2)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        found.append((name, names.get_name(name, (".weight", ".bias")), tensor))
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        found.append(("", "rope_freqs.weight", _llama3_factors(rope, _head_dim(config))))
    for which in ("long", "short"):
        if f"{which}_factor" in rope:
            found.append(
                ("", f"rope_factors_{which}.weight", torch.tensor(rope[f"{which}_factor"]))
            )
    return found


def _latent_keys(config: Json, rope: Json) -> Json:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "leading_dense_block_count": config["first_k_dense_replace"],
    }
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _kv_heads(config: Json) -> int:
    if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        return 1 if config["multi_query"] else int(config["num_attention_heads"])
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ONE_OF_SEVERAL = re.compile(r"(.*\.(?:experts|norms)\.)(\d+)\.(.*)")


def _rearranged(
    arch: str, config: Json, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors as in files, by the names of checkpoints for this layout."""
    found: dict[str, Any] = {}
    heads, kv_heads = config["num_attention_heads"], _kv_heads(config)
    for name, tensor in stored.items():
        match = ONE_OF_SEVERAL.fullmatch(name)
        if match is not None:
            stack = match[1].removesuffix("norms.") + match[3]
            found.setdefault(stack, {})[int(match[2])] = tensor
        elif "kv_b_proj" in name:
            plain = config["qk_nope_head_dim"]
            whole = tensor.unflatten(0, (heads, plain + config["v_head_dim"]))
            found[name.replace("kv_b", "k_b")] = _turned(whole[:, :plain])
            found[name.replace("kv_b", "v_b")] = whole[:, plain:].contiguous()
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        elif "query_key_value" in name:
            groups = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
            parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
            found[name] = torch.cat([part.flatten(0, 2) for part in parts])
        elif arch == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
            found[name] = tensor.t().contiguous()
        elif ".experts.gate_up_proj" in name:
            # Columns of gate and up alternate.
            for start, which in enumerate(("gate_proj", "up_proj")):
                found[_renamed(name, which)] = _turned(tensor[..., start::2])
        elif ".experts.down_proj" in name:
            found[_renamed(name, "down_proj")] = _turned(tensor)
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor.squeeze(0) if "shared_expert_gate" in name else tensor
    return {
        name: torch.stack([one[at] for at in sorted(one)]) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def _renamed(name: str, which: str) -> str:
    """Return the name of an expert's module in a file of gpt-oss, with other names of biases."""
    prefix = name.rpartition(".")[0]
    return f"{prefix}.{which}.{'bias' if name.endswith('_bias') else 'weight'}"


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.transpose(1, 2) if tensor.dim() == 3 else tensor).contiguous()


def _llama3_factors(rope: Json, head_dim: int) -> torch.Tensor:
    found, original = [], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for pair in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (pair / head_dim)
        share = np.clip((original / length - low) / (high - low), 0, 1)
        found.append(1 / ((1 - share) / factor + share))
    return torch.tensor(found, dtype=torch.float32)


def _write_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    if tensor.dim() == 1 or kind == "F32" or name.endswith(".bias"):
        writer.add_tensor(name, tensor.float().numpy())
        return
    if tensor.dtype == torch.uint8:
        writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        return
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(tensor.numpy(), number), raw_dtype=number)


# ---------------------------------------------------------------- tokenizers


def _write_made_up_tokenizer(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(size)])
    writer.add_token_types([NORMAL] * size)
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_tokenizer(writer: Any, folder: Path, pre: str = "gpt-2") -> None:
    """A `tokenizer.json` of BPE: with bytes as GPT-2 has them, or as SentencePiece's are, whose
    scores are then the order of merges."""
    stated = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    model = stated["model"]
    tokens = {index: token for token, index in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in stated["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    spm = model["byte_fallback"]
    if spm:
        for index, token in tokens.items():
            if token.startswith("<0x"):
                kinds[index] = BYTE
            elif token == model["unk_token"]:
                kinds[index] = UNKNOWN
    ids = {token: index for index, token in tokens.items()}
    count = max(tokens) + 1
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(count)]
    writer.add_tokenizer_model("llama" if spm else "gpt2")
    writer.add_tokenizer_pre("default" if spm else pre)
    writer.add_token_list(texts)
    writer.add_token_types([kinds.get(index, UNUSED) for index in range(count)])
    if spm:
        scores = [0.0] * count
        for rank, (one, other) in reversed(list(enumerate(merges))):
            scores[ids[one + other]] = -float(rank)
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for name in ("bos", "eos", "unk"):
        token = config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(ids[token])
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
