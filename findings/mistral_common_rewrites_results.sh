#!/usr/bin/env bash
# mistral-common 1.13.1, Mistral's own way from messages to tokens, reads a tool's result as JSON where it is JSON, for the models of its
# tokenizers v2 and v3 (Mistral 7B v0.3, Mixtral 8x22B, Nemo): the text 1.10, a version, reaches the model as 1.1, 1e5 as
# 100000.0, and of {"a": 1, "a": 2} the first is gone. 007 is no JSON and stays, in quotes. So do arguments of earlier calls in
# every version: 1.10 is 1.1. From v7 on results stay as they are. Consecutive turns of the user become one, and what the
# system says stands at the last of them in v3, and at the beginning in v7.
#
# Guessed before: a result is a text, and stays one. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mistral-common[sentencepiece]==1.13.1 sentencepiece==0.2.3 tiktoken==0.14.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

CALL = ToolCall(id="abcdefghi", function=FunctionCall(name="f", arguments='{"x": 1.10}'))


def written(tokenizer, messages):
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).text
    return text.replace("\u2581", " ").replace("<0x0A>", "\n")


for name, tokenizer in (
    ("v2", MistralTokenizer.v2()),
    ("v3", MistralTokenizer.v3()),
    ("v3, Tekken", MistralTokenizer.v3(is_tekken=True)),
    ("v7", MistralTokenizer.v7()),
):
    print(name)
    for result in ("1.10", "1e5", "007", '{"a": 1, "a": 2}'):
        messages = [UserMessage(content="Hi"), AssistantMessage(tool_calls=[CALL])]
        messages.append(ToolMessage(tool_call_id="abcdefghi", content=result))
        text = written(tokenizer, messages)
        print("  result", result, "->", text[text.index("[TOOL_RESULTS]") :])
    print("  arguments", CALL.function.arguments, "->", text[text.index('"arguments"') : text.index("}")])
    said = [SystemMessage(content="S"), UserMessage(content="A"), AssistantMessage(content="B")]
    text = written(tokenizer, [*said, UserMessage(content="C"), UserMessage(content="D")])
    print("  turns", text.encode("unicode_escape").decode())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
v2
  result 1.10 -> [TOOL_RESULTS] [{"name": null, "content": 1.1}][/TOOL_RESULTS]
  result 1e5 -> [TOOL_RESULTS] [{"name": null, "content": 100000.0}][/TOOL_RESULTS]
  result 007 -> [TOOL_RESULTS] [{"name": null, "content": "007"}][/TOOL_RESULTS]
  result {"a": 1, "a": 2} -> [TOOL_RESULTS] [{"name": null, "content": {"a": 2}}][/TOOL_RESULTS]
  arguments {"x": 1.10} -> "arguments": {"x": 1.1
  turns <s>[INST] A[/INST] B</s>[INST] S\n\nC\n\nD[/INST]
v3
  result 1.10 -> [TOOL_RESULTS] {"content": 1.1, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result 1e5 -> [TOOL_RESULTS] {"content": 100000.0, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result 007 -> [TOOL_RESULTS] {"content": "007", "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result {"a": 1, "a": 2} -> [TOOL_RESULTS] {"content": {"a": 2}, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  arguments {"x": 1.10} -> "arguments": {"x": 1.1
  turns <s>[INST] A[/INST] B</s>[INST] S\n\nC\n\nD[/INST]
v3, Tekken
  result 1.10 -> [TOOL_RESULTS]{"content": 1.1, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result 1e5 -> [TOOL_RESULTS]{"content": 100000.0, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result 007 -> [TOOL_RESULTS]{"content": "007", "call_id": "abcdefghi"}[/TOOL_RESULTS]
  result {"a": 1, "a": 2} -> [TOOL_RESULTS]{"content": {"a": 2}, "call_id": "abcdefghi"}[/TOOL_RESULTS]
  arguments {"x": 1.10} -> "arguments": {"x": 1.1
  turns <s>[INST]A[/INST]B</s>[INST]S\n\nC\n\nD[/INST]
v7
  result 1.10 -> [TOOL_RESULTS] abcdefghi[TOOL_CONTENT] 1.10[/TOOL_RESULTS]
  result 1e5 -> [TOOL_RESULTS] abcdefghi[TOOL_CONTENT] 1e5[/TOOL_RESULTS]
  result 007 -> [TOOL_RESULTS] abcdefghi[TOOL_CONTENT] 007[/TOOL_RESULTS]
  result {"a": 1, "a": 2} -> [TOOL_RESULTS] abcdefghi[TOOL_CONTENT] {"a": 1, "a": 2}[/TOOL_RESULTS]
  arguments {"x": 1.10} -> "arguments": {"x": 1.1
  turns <s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] A[/INST] B</s>[INST] C\n\nD[/INST]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
