"""A Llama or Qwen3 checkpoint with a byte-level BPE tokenizer in llama.cpp's format, GGUF.

    PEER_PYTHON to_gguf.py CHECKPOINT FILE.gguf          (needs gguf, torch, safetensors)

llama.cpp's own converter knows tokenizers by a hash of what they do, and so refuses new ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

NORMAL, CONTROL, UNUSED = 1, 3, 5  # types of tokens
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in llama.cpp's order of rotation: pairs side by side."""
    half = weight.shape[0] // heads // 2
    halves = weight.reshape(heads, 2, half, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_config(writer: Any, config: dict[str, Any], bfloat16: bool) -> None:
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_BF16 if bfloat16 else kinds.ALL_F32)


def write_tokenizer(writer: Any, tokenizer: dict[str, Any], size: int) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    missing = size - len(tokens)  # rows of the embedding without a token
    kinds = [CONTROL if token in special else NORMAL for token in tokens]
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(missing)])
    writer.add_token_types(kinds + [UNUSED] * missing)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def write_weights(writer: Any, config: dict[str, Any], folder: Path, bfloat16: bool) -> None:
    def put(name: str, weight: torch.Tensor) -> None:
        if weight.dim() == 1 or not bfloat16:
            writer.add_tensor(name, weight.float().numpy())
            return
        raw = weight.contiguous().view(torch.uint8).numpy()
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)

    kind = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config["model_type"] != "llama":  # only Llama's rows are rotated in another order
        heads = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        part = name.split(".")[-2]
        if part in heads:
            weight = interleaved(weight, heads[part])
        put(names.get_name(name, (".weight",)), weight)


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise SystemExit(f"{known} checkpoints are converted, not {config['model_type']!r}")
    bfloat16 = config["dtype"] == "bfloat16"
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_name(folder.name)
    write_config(writer, config, bfloat16)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write_tokenizer(writer, tokenizer, config["vocab_size"])
    write_weights(writer, config, folder, bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
