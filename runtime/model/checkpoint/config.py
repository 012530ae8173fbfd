"""A decoder's shape, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from rootlace.wire.errors import UnsupportedModel

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know.

    `windows[i]` is layer i's sliding window (a token sees itself and the `window - 1` before it),
    None for full attention. `checkpoint_dtype` is None where the configuration does not say.
    `max_context` is the most positions the model was made for. `hf` is what transformers read: the
    rotary frequencies are computed from it by transformers' own functions.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    max_context: int
    checkpoint_dtype: torch.dtype | None
    eos_token_ids: tuple[int, ...]
    hf: PreTrainedConfig = field(repr=False, compare=False)

    @classmethod
    def read(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, if any) of a model folder.

        Raises `UnsupportedModel`, naming the file and field, for whatever cannot be run exactly as
        the checkpoint means it.
        """
        path = Path(folder)
        raw = _read_json(path, "config.json")
        architecture = _architecture(path, raw)
        if _quantized_weights(raw):
            raise UnsupportedModel(
                f"{path / 'config.json'}: quantization_config: quantized weights are not supported"
            )
        try:
            hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise UnsupportedModel(f"{path / 'config.json'}: {error}") from error
        if hf.hidden_act != "silu":
            raise UnsupportedModel(
                f"{path / 'config.json'}: hidden_act {hf.hidden_act!r} is not supported (only silu)"
            )
        if hf.num_attention_heads % hf.num_key_value_heads:
            raise UnsupportedModel(
                f"{path / 'config.json'}: num_attention_heads ({hf.num_attention_heads}) is not a "
                f"multiple of num_key_value_heads ({hf.num_key_value_heads})"
            )
        bias = bool(getattr(hf, "attention_bias", False))
        llama_like = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        return cls(
            path=path,
            architecture=architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            rms_norm_eps=hf.rms_norm_eps,
            qkv_bias=architecture == "Qwen2ForCausalLM" or (llama_like and bias),
            output_bias=llama_like and bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(getattr(hf, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied_embeddings=bool(hf.tie_word_embeddings),
            windows=_windows(path, architecture, hf),
            max_context=hf.max_position_embeddings,
            checkpoint_dtype=_dtype(hf.dtype),
            eos_token_ids=_eos(path, hf),
            hf=hf,
        )


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_dir():
        raise UnsupportedModel(f"{path}: no such model folder")
    file = path / name
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{file}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object")
    return raw


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise UnsupportedModel(
        f"{path / 'config.json'}: architectures {names} is not supported "
        f"(supported: {', '.join(ARCHITECTURES)})"
    )


def _quantized_weights(raw: dict[str, Any]) -> bool:
    """False also where only the KV cache is to be quantized (its scales are used if it is)."""
    found = raw.get("quantization_config")
    if not isinstance(found, dict):
        return bool(found)
    only_cache = found.get("kv_cache_scheme") and not found.get("config_groups")
    return bool(found) and not (only_cache and found.get("quant_method") == "compressed-tensors")


def _windows(path: Path, architecture: str, hf: PreTrainedConfig) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * hf.num_hidden_layers
    if architecture == "MistralForCausalLM":
        # Mistral's layers all share one mask, whatever `layer_types` says (as in transformers).
        return (hf.sliding_window,) * hf.num_hidden_layers
    windows: list[int | None] = []
    for kind in hf.layer_types:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and hf.sliding_window:
            windows.append(hf.sliding_window)
        else:
            raise UnsupportedModel(
                f"{path / 'config.json'}: layer_types: {kind!r} with sliding_window "
                f"{hf.sliding_window} is not supported"
            )
    if len(windows) != hf.num_hidden_layers:
        raise UnsupportedModel(
            f"{path / 'config.json'}: layer_types names {len(windows)} layers, "
            f"num_hidden_layers is {hf.num_hidden_layers}"
        )
    return tuple(windows)


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        value = getattr(torch, value, None)
    return value if isinstance(value, torch.dtype) else None


def _eos(path: Path, hf: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that end a text: `generation_config.json` decides where it says anything."""
    eos = None
    if (path / "generation_config.json").exists():
        eos = _read_json(path, "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = hf.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
