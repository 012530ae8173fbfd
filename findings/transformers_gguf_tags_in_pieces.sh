#!/usr/bin/env bash
# transformers 5.24.0 (`from_pretrained(..., gguf_file=...)`) cuts DeepSeek's tags: of a GGUF file with a byte-level vocabulary it passes
# over every control token, and every one that its user defined, which has a character outside of the byte alphabet, as "｜" and "▁" in
# `<｜User｜>`. So a prompt has the twelve bytes of `<｜User｜>` in the place of one token, and the model has never seen a turn
# begin so. BOS and EOS that are spelt so are added anew, behind the vocabulary: 265 and 266 of 264, for which the embedding has
# no row. Nothing is said of it. Tags in ASCII, as <think>, are whole.
#
# Guessed before: each of these tokens is one id, that of the file. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.24.0 gguf==0.19.0
seen=$(cd "$folder" && "$python" -W ignore - 2>"$folder/log" <<'PYTHON'
import numpy
from gguf import GGUFWriter
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TAGS = {BEGIN: CONTROL, END: CONTROL, "<｜User｜>": USER_DEFINED, "<｜tool▁sep｜>": CONTROL, "<think>": USER_DEFINED, "<|end|>": CONTROL}
tokens = [*bytes_to_unicode().values(), "ab", *TAGS, "cd"]
kinds = [NORMAL] * 257 + [*TAGS.values(), NORMAL]
file = GGUFWriter("model.gguf", "qwen2")
file.add_tokenizer_model("gpt2")
file.add_tokenizer_pre("deepseek-r1-qwen")
file.add_token_list(tokens)
file.add_token_types(kinds)
file.add_token_merges(["a b", "c d"])
file.add_bos_token_id(tokens.index(BEGIN))
file.add_eos_token_id(tokens.index(END))
file.add_block_count(1)
file.add_context_length(64)
file.add_embedding_length(8)
file.add_head_count(1)
file.add_head_count_kv(1)
file.add_feed_forward_length(8)
file.add_layer_norm_rms_eps(1e-5)
file.add_tensor("token_embd.weight", numpy.zeros((len(tokens), 8), numpy.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()
tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
print(f"{len(tokens)} tokens in the file")
for tag in TAGS:
    ids = tokenizer.encode(tag, add_special_tokens=False)
    print(f"{tag}: {tokens.index(tag)} in the file;", ids if len(ids) == 1 else f"{len(ids)} ids")
PYTHON
) || { cat "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
264 tokens in the file
<｜begin▁of▁sentence｜>: 257 in the file; [265]
<｜end▁of▁sentence｜>: 258 in the file; [266]
<｜User｜>: 259 in the file; 12 ids
<｜tool▁sep｜>: 260 in the file; 18 ids
<think>: 261 in the file; [261]
<|end|>: 262 in the file; [262]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
