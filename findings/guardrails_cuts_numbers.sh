#!/usr/bin/env bash
# guardrails-ai 0.11.0 cuts a number before it validates: of a pydantic model with `count: int`, the answer {"count": 1.9} is
# {"count": 1}, `validation_passed`, {"count": -1.9} is -1; pydantic itself refuses both. And the schema that it makes for
# `response_format` (`response_format_json_schema`) has no bounds: of `Field(ge=0)` no `minimum` is left, so that a server
# which holds it may write -1, which `Guard` refuses then. The tool it makes of the same model has the bound.
#
# Guessed before: refused, as pydantic does it, and the bound is there. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check guardrails-ai==0.11.0 pydantic==2.14.4 openai==2.54.0

seen=$(OTEL_SDK_DISABLED=true "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import logging
from typing import Annotated

from guardrails import Guard
from pydantic import BaseModel, Field, ValidationError


class Basket(BaseModel):
    count: Annotated[int, Field(ge=0)]


class Change(BaseModel):
    count: int


logging.disable()
for model, text in ((Basket, '{"count": 1.9}'), (Change, '{"count": -1.9}'), (Basket, '{"count": -1}')):
    result = Guard.for_pydantic(model).parse(text, num_reasks=0)
    try:
        alone = model.model_validate_json(text)
    except ValidationError:
        alone = "refused"
    print(model.__name__, text, result.validation_passed, result.validated_output, "pydantic:", alone)
guard = Guard.for_pydantic(Basket)
form = guard.response_format_json_schema()["json_schema"]["schema"]
tool = guard.json_function_calling_tool()[-1]["function"]["parameters"]
for name, schema in (("response_format", form), ("tool", tool)):
    print(name, json.dumps(schema["properties"]["count"], sort_keys=True))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Basket {"count": 1.9} True {'count': 1} pydantic: refused
Change {"count": -1.9} True {'count': -1} pydantic: refused
Basket {"count": -1} False None pydantic: refused
response_format {"title": "Count", "type": "integer"}
tool {"minimum": 0, "title": "Count", "type": "integer"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
