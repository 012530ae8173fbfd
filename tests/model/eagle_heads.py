"""EAGLE-3 heads of the shapes in `checkpoints`, and what one computes, in plain torch.

The reference follows the definition: Li et al. 2025 (arXiv:2503.01840), `eagle/model/cnets.py` of
its authors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.model.checkpoints import SHAPE

DRAFT_VOCAB = 77
HEAD: dict[str, Any] = {
    **SHAPE,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FLAT: dict[str, Any] = {
    **HEAD,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
}


def speculators(**changes: Any) -> dict[str, Any]:
    """A configuration in the layout of `speculators`."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": HEAD,
        **changes,
    }


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("transformer_layer_config", config)
    return found


def weights_of(config: dict[str, Any], *, embeds: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of a head, by their names."""
    draw = torch.Generator().manual_seed(seed)
    layer, name = layer_of(config), "layers.0." if "speculators_config" in config else "midlayer."
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    dim = layer.get("head_dim") or hidden // layer["num_attention_heads"]
    queries, keys = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    vocab, drafts = layer["vocab_size"], config["draft_vocab_size"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        f"{name}self_attn.q_proj": (queries, 2 * hidden),
        f"{name}self_attn.k_proj": (keys, 2 * hidden),
        f"{name}self_attn.v_proj": (keys, 2 * hidden),
        f"{name}self_attn.o_proj": (hidden, queries),
        f"{name}mlp.gate_proj": (inner, hidden),
        f"{name}mlp.up_proj": (inner, hidden),
        f"{name}mlp.down_proj": (hidden, inner),
        "lm_head": (drafts, hidden),
    }
    if embeds:
        shapes["embed_tokens"] = (vocab, hidden)
    found = {}
    for one, shape in shapes.items():
        spread = 1.3 * shape[-1] ** -0.5
        found[f"{one}.weight"] = spread * torch.randn(shape, generator=draw)
    norms = [f"{name}{one}" for one in ("hidden_norm", "input_layernorm")]
    for one in (*norms, f"{name}post_attention_layernorm", "norm"):
        found[f"{one}.weight"] = 0.5 + torch.rand(hidden, generator=draw)
    chosen = torch.randperm(vocab, generator=draw)[:drafts].sort().values
    found["d2t"] = chosen - torch.arange(drafts)
    found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return found


def save_head(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def save_head_for(model: Path, folder: Path, *, embeds: bool = False) -> Path:
    """A random head for the model in a folder, however few its layers are."""
    sizes = json.loads((model / "config.json").read_text())
    own = {key: sizes[key] for key in ("vocab_size", "hidden_size")}
    config = {**FLAT, **own, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return save_head(folder, config, weights_of(config, embeds=embeds))


class Reference:
    """Reference forward pass of a head, a whole sequence at a time."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], embedding: Tensor):
        """`embedding`: the model's."""
        self.config, self.layer = config, layer_of(config)
        self.weights = {
            name.replace("midlayer.", "").replace("layers.0.", "").removesuffix(".weight"): weight
            for name, weight in weights.items()
        }
        self.embedding = self.weights.get("embed_tokens", embedding)
        known = {key: value for key, value in self.layer.items() if key != "architectures"}
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**known))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"])
        return x * scale * self.weights[name]

    def __call__(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features [T, H], of the tokens before `token_ids` [T] -> logits [T, draft
        vocabulary], and the next features [T, H]."""
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        normed = self.norm("hidden_norm", features)
        residual = normed if self.config.get("norm_before_residual") else features
        embedded = self.norm("input_layernorm", self.embedding[token_ids])
        x = torch.cat((embedded, normed), -1)
        q, k, v = (
            (x @ self.weights[f"self_attn.{one}_proj"].T).unflatten(-1, (count, -1)).transpose(0, 1)
            for one, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        cos, sin = self.rotary(x, torch.arange(len(x))[None])
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        attended = functional.scaled_dot_product_attention(
            q, k, v[None], is_causal=True, enable_gqa=True
        )
        attended = attended[0].transpose(0, 1).flatten(1)
        residual = residual + attended @ self.weights["self_attn.o_proj"].T
        x = self.norm("post_attention_layernorm", residual)
        gate, up = (x @ self.weights[f"mlp.{one}_proj"].T for one in ("gate", "up"))
        residual = residual + (functional.silu(gate) * up) @ self.weights["mlp.down_proj"].T
        hidden = self.norm("norm", residual)
        logits = hidden @ self.weights["lm_head"].T
        return logits, hidden if self.config.get("norm_output") else residual

    def drafts(self, states: Tensor, token_ids: list[int], count: int) -> tuple[list[int], Tensor]:
        """states [T - 1, 3 H]: the model's, of all of the T tokens but the last -> the best
        `count` tokens behind them, and the logits of each, of the model's vocabulary."""
        features, ids = states @ self.weights["fc"].T, list(token_ids)
        targets = torch.arange(self.config["draft_vocab_size"]) + self.weights["d2t"]
        found = []
        for _ in range(count):
            logits, further = self(features, torch.tensor(ids[1:]))
            whole = torch.full((self.layer["vocab_size"],), -torch.inf)
            whole[targets] = logits[-1]
            found.append(whole)
            ids.append(int(whole.argmax()))
            features = torch.cat((features, further[-1:]))
        return ids[len(token_ids) :], torch.stack(found)
