#!/usr/bin/env bash
# griptape 1.13.0 says of the schemas that it writes of pydantic models what they are not: `"$schema"` is draft 7, while
# pydantic writes 2020-12. So the types of a `tuple[int, str]` (`prefixItems`, which draft 7 does not have) hold nothing for a
# server that reads `$schema`: ["a", "b"] is valid. And `"$id"` is a name: of an answer "Output Format", which is no
# URI reference, so that jsonschema_rs 0.61.2 refuses the schema; of a tool the URI of draft 7's meta-schema itself.
# In the form of the `schema` package {"k": {str: int}} is any object.
#
# Guessed before: neither keyword, or 2020-12. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  griptape==1.13.0 openai==3.57.0 pydantic==2.14.4 schema==0.7.8 jsonschema==4.26.0 jsonschema-rs==0.61.2

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import jsonschema_rs
import schema
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.tasks import PromptTask
from griptape.tokenizers import SimpleTokenizer
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from jsonschema.validators import validator_for
from pydantic import BaseModel


class Row(BaseModel):
    pair: tuple[int, str]


class Notes(BaseTool):
    @activity(config={"description": "Keep notes", "schema": schema.Schema({"counts": {str: int}})})
    def keep(self, values: dict) -> TextArtifact:
        return TextArtifact("kept")


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": '{"pair": [1, "a"]}'}
        reply = {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        reply = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


logging.disable()
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
driver = OpenAiChatPromptDriver(
    model="m", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-",
    tokenizer=SimpleTokenizer(characters_per_token=4, max_input_tokens=8000, max_output_tokens=1000),
)
PromptTask(input="Hi", prompt_driver=driver, output_schema=Row).run()
sent = server.asked["response_format"]["json_schema"]["schema"]
print("answer:", sent["$schema"], json.dumps(sent["$id"]))
for text in ('{"pair": [1, "a"]}', '{"pair": ["a", "b"]}'):
    plain = Row.model_json_schema()
    print(" ", text, *(validator_for(one)(one).is_valid(json.loads(text)) for one in (sent, plain)))
try:
    jsonschema_rs.validator_for(sent)
except ValueError as error:
    print("  jsonschema_rs:", str(error).splitlines()[0])
PromptTask(input="Hi", prompt_driver=driver, tools=[Notes()]).run()
sent = server.asked["tools"][0]["function"]["parameters"]
print("tool:", sent["$schema"], json.dumps(sent["$id"]))
print(" ", json.dumps(sent["properties"]["counts"]))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
answer: http://json-schema.org/draft-07/schema# "Output Format"
  {"pair": [1, "a"]} True True
  {"pair": ["a", "b"]} True False
  jsonschema_rs: "Output Format" is not a "uri-reference"
tool: http://json-schema.org/draft-07/schema# "http://json-schema.org/draft-07/schema#"
  {"type": "object", "properties": {}, "required": [], "additionalProperties": true}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
