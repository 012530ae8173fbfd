#!/usr/bin/env bash
# transformers 5.23.0 reads a Llama model of a GGUF file (`from_pretrained(..., gguf_file=...)`) and leaves out how far its
# rotations are scaled: `llama.rope.scaling.type` linear or yarn with its factor, and the tensor `rope_freqs.weight`, in which
# llama.cpp's converter writes what Llama 3.1 to 3.3 scale each frequency by. The model loads without a word,
# `rope_parameters` says `default`, and the logits are those of a file that has none of it. So perplexity or tokens
# "as transformers computes the same file" are those of another model, from the first tokens on.
#
# Guessed before: linear and yarn are read, `rope_freqs.weight` is a tensor that is reported. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0

seen=$(cd "$folder" && "$python" -W ignore - 2>"$folder/log" <<'PYTHON'
import numpy
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoModelForCausalLM


def write(path, kind=None, rotations=None):
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list("abcdefgh"))
    writer.add_token_merges(["a b"])
    if kind:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    if rotations:
        writer.add_tensor("rope_freqs.weight", numpy.array(rotations, numpy.float32))
    numbers = numpy.random.default_rng(0)
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    sizes = {"token_embd": 8, "output": 8} | {f"blk.0.{name}": 32 for name in products}
    for name, rows in sizes.items():
        writer.add_tensor(f"{name}.weight", numbers.standard_normal((rows, 32), numpy.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(32, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(48)[None] % 8).logits


write("plain.gguf")
write("linear.gguf", RopeScalingType.LINEAR)
write("yarn.gguf", RopeScalingType.YARN)
write("llama3.gguf", rotations=[1, 1, 2, 4, 8, 8, 8, 8])
plain = AutoModelForCausalLM.from_pretrained(".", gguf_file="plain.gguf")
for name in ("linear", "yarn", "llama3"):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{name}.gguf")
    same = torch.equal(logits(model), logits(plain))
    print(name, model.config.rope_parameters["rope_type"], "logits as without", same)
    model.config.rope_parameters |= {"rope_type": "linear", "factor": 4.0}
    scaled = type(model)(model.config)
    scaled.load_state_dict(model.state_dict())
    print("  scaled by 4", "logits as without", torch.allclose(logits(scaled), logits(plain), atol=1e-2))
PYTHON
)
printf '%s\n' "$seen"
if grep -iE "rope|scal" "$folder/log"; then said=yes; else said=no; fi
echo "a word about it: $said"
expected=$(cat <<'TEXT'
linear default logits as without True
  scaled by 4 logits as without False
yarn default logits as without True
  scaled by 4 logits as without False
llama3 default logits as without True
  scaled by 4 logits as without False
TEXT
)
[ "$seen" = "$expected" ] && [ "$said" = no ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
