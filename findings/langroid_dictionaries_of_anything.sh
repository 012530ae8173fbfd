#!/usr/bin/env bash
# langroid 0.69.16 describes a field `dict[str, int]` of a tool (`ToolMessage`) as {"type": "object"}: what its values are is
# gone, also within other models, so that a server which holds calls to their schemas takes any object, and the call is refused
# when it is read. pydantic writes {"additionalProperties": {"type": "integer"}, ...}. `dict[str, int] | None` goes out whole.
# (A stand-in for tiktoken's encoding: importing langroid downloads one.)
#
# Guessed before: `additionalProperties` is kept, as pydantic writes it. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check langroid==0.69.16 pydantic==2.14.4 tiktoken==0.14.0

seen=$(cd "$folder" && "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import tiktoken

ranks = {bytes([byte]): byte for byte in range(256)}
encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
tiktoken.get_encoding = tiktoken.encoding_for_model = lambda name: encoding

from langroid.agent.tool_message import ToolMessage
from pydantic import BaseModel, ValidationError


class Shelf(BaseModel):
    books: dict[str, int]


class Note(ToolMessage):
    request: str = "note"
    purpose: str = "To keep counts"
    counts: dict[str, int]
    shelf: Shelf
    more: dict[str, int] | None = None


sent = Note.llm_function_schema(request=True).parameters
print("counts", json.dumps(sent["properties"]["counts"]))
print("books", json.dumps(sent["$defs"]["Shelf"]["properties"]["books"]))
print("more", json.dumps(sent["properties"]["more"]["anyOf"][0], sort_keys=True))
try:
    Note.model_validate({"counts": {"a": "many"}, "shelf": {"books": {}}})
except ValidationError as error:
    print("read:", error.errors()[0]["type"])
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
counts {"type": "object"}
books {"type": "object"}
more {"additionalProperties": {"type": "integer"}, "type": "object"}
read: int_parsing
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
