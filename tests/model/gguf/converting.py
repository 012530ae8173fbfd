"""Checkpoints and tokenizers of transformers as GGUF files, by what llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
"""What llama.cpp calls a `model_type`, where it is another name."""
PERMUTED = ("llama", "smollm3", "granite")
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
    of the architecture is added, with "__" for ".", or replaces what is there; None: it is left
    out."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file)
    keys = _keys(arch, config) | {key.replace("__", "."): one for key, one in metadata.items()}
    for key, value in keys.items():
        _put(writer, f"{arch}.{key}", value)
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
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
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
    match arch:
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
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = []
    for name, tensor in (load_file(folder / "model.safetensors") | blocks).items():
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


def _llama3_factors(rope: Json, head_dim: int) -> torch.Tensor:
    found, original = [], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for pair in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (pair / head_dim)
        share = np.clip((original / length - low) / (high - low), 0, 1)
        found.append(1 / ((1 - share) / factor + share))
    return torch.tensor(found, dtype=torch.float32)


def _write_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    if tensor.dim() == 1 or kind == "F32":
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
