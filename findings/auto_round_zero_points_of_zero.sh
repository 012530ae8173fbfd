#!/usr/bin/env bash
# auto-round 0.16.1 moves the weights of a group by a whole step where none of them is negative, in one of its formats. With
# `sym=False` such a group has the zero point 0. `auto_gptq` stores zero points less one, and other writers let 0 - 1 wrap
# around to 15, which readers turn back into 0. auto-round cuts it off at 0, which is read as 1: each weight of the group
# comes back smaller by one scale, without a word. `auto_awq`, of the same model and the same integers, is exact.
#
# Guessed before: the formats differ in nothing but how integers are packed. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 auto-round==0.16.1

cd "$folder"
seen=$(HF_HUB_OFFLINE=1 "$python" -W ignore - 2>"$folder/log" <<'PYTHON' | grep '^seen: '
import glob

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
name, group = "model.layers.0.self_attn.o_proj", 32
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"t{n}": n for n in range(64)}, "t0")))


def integers(words, order=range(8)):
    """The integers of four bits in each number of 32."""
    shifts = torch.tensor([4 * place for place in order])
    return (words.unsqueeze(-1) >> shifts & 15).flatten(1)


for form in ("auto_gptq", "auto_awq"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    weight = model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        weight.normal_(0.0, 0.1)
        weight[:2].abs_()  # two rows without a negative number
    wanted = weight.detach().clone()
    tokens = [torch.arange(16)[None] + at for at in range(4)]
    settings = {"iters": 0, "nsamples": 2, "seqlen": 16, "dataset": tokens, "disable_opt_rtn": True, "device_map": "cpu"}
    AutoRound(model, tokenizer, scheme="W4A16", sym=False, group_size=group, **settings).quantize_and_save(form, format=form)
    (file,) = glob.glob(f"{form}/**/*.safetensors", recursive=True)
    stored = {key.removeprefix(f"{name}."): tensor for key, tensor in load_file(file).items() if key.startswith(name)}
    if form == "auto_gptq":
        codes, zeros = integers(stored["qweight"].t()), integers(stored["qzeros"]).t() + 1 & 15
    else:
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        codes, zeros = integers(stored["qweight"], order).t(), integers(stored["qzeros"], order).t()
    scales = stored["scales"].t().float().repeat_interleave(group, 1)
    back = (codes - zeros.repeat_interleave(group, 1)) * scales
    steps = ((back - wanted) / scales).mean(1)
    print(f"seen: {form}: zero points {zeros[:3, 0].tolist()}, mean error of rows in steps", [round(one.item()) for one in steps[:3]])
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
seen: auto_gptq: zero points [1, 1, 5], mean error of rows in steps [-1, -1, 0]
seen: auto_awq: zero points [0, 0, 5], mean error of rows in steps [0, 0, 0]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
