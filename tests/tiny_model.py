"""A random Llama of a few thousand parameters in Hugging Face layout, with a chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 32, 2, 4, 2, 64, 512
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    folder: Path,
    seed: int = 0,
    template: str = TEMPLATE,
    tags: Sequence[str] = (),
    ends: Sequence[str] = (),
    context: int = CONTEXT,
) -> Path:
    """Write the model to `folder`. Its tokens are bytes and the special tokens, with `tags` among
    them. `ends` end a sequence as `<|end|>` does."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    eos = [tokenizer.token_to_id(end) for end in ("<|end|>", *ends)]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "vocab_size": vocab,
                "max_position_embeddings": context,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": True,
                "eos_token_id": eos if ends else eos[0],
                "torch_dtype": "float32",
            }
        )
    )
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    head = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": weight(vocab, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            name + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            name + "self_attn.q_proj.weight": weight(HIDDEN, HIDDEN),
            name + "self_attn.k_proj.weight": weight(KV_HEADS * head, HIDDEN),
            name + "self_attn.v_proj.weight": weight(KV_HEADS * head, HIDDEN),
            name + "self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
            name + "mlp.gate_proj.weight": weight(INNER, HIDDEN),
            name + "mlp.up_proj.weight": weight(INNER, HIDDEN),
            name + "mlp.down_proj.weight": weight(HIDDEN, INNER),
        }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
