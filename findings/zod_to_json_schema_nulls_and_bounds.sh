#!/usr/bin/env bash
# zod-to-json-schema 3.25.2 (of zod 4.6.7's `zod/v3`). `z.literal(null)` becomes {"type": "object"}. With the target
# "openApi3" `z.null()` becomes {"enum": ["null"], "nullable": true}, a text. With the targets "openAi" and "jsonSchema2019-09" the
# bound of `z.number().positive()` is {"minimum": 0, "exclusiveMinimum": true}, as in draft 4, below a `$schema` of
# 2019-09, which wants a number there: ajv 8.20.0 refuses the schema. And `z.string().cidr()` is a network of both
# versions at once, which nothing is; `z.string().ip()` is an address of either.
#
# Guessed before: `null`, a number as the bound, a network of either version. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" zod@4.6.7 zod-to-json-schema@3.25.2 ajv@8.20.0
cat >"$folder/show.mjs" <<'JAVASCRIPT'
import { Ajv } from "ajv";
import { Ajv2019 } from "ajv/dist/2019.js";
import { z } from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";

function shown(type, target, ...values) {
  const schema = zodToJsonSchema(type, { target });
  const { $schema: draft, ...written } = schema;
  const pattern = (key, value) => (key === "pattern" ? "..." : value);
  console.log(target, JSON.stringify(written, pattern));
  const ajv = new (draft?.includes("2019-09") ? Ajv2019 : Ajv)({ strict: false, validateFormats: false });
  let says;
  try {
    says = ajv.compile(schema);
  } catch (error) {
    console.log(`    ${error.message}`);
    return;
  }
  for (const value of values) {
    console.log(`    ${JSON.stringify(value)}: zod ${type.safeParse(value).success}, the schema ${says(value)}`);
  }
}

shown(z.literal(null), "jsonSchema7", null, {});
shown(z.null(), "openApi3", null, "null");
shown(z.number().positive(), "jsonSchema7", 0, 1);
shown(z.number().positive(), "openAi", 0, 1);
shown(z.number().positive(), "jsonSchema2019-09", 0, 1);
shown(z.string().cidr(), "jsonSchema7", "10.0.0.0/8", "::/0");
shown(z.string().ip(), "jsonSchema7", "10.0.0.0", "::");
JAVASCRIPT
seen=$(node "$folder/show.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
jsonSchema7 {"type":"object"}
    null: zod true, the schema false
    {}: zod false, the schema true
openApi3 {"enum":["null"],"nullable":true}
    "nullable" cannot be used without "type"
jsonSchema7 {"type":"number","exclusiveMinimum":0}
    0: zod false, the schema false
    1: zod true, the schema true
openAi {"type":"number","exclusiveMinimum":true,"minimum":0}
    schema is invalid: data/exclusiveMinimum must be number
jsonSchema2019-09 {"type":"number","exclusiveMinimum":true,"minimum":0}
    schema is invalid: data/exclusiveMinimum must be number
jsonSchema7 {"type":"string","allOf":[{"pattern":"..."},{"pattern":"..."}]}
    "10.0.0.0/8": zod true, the schema false
    "::/0": zod true, the schema false
jsonSchema7 {"type":"string","anyOf":[{"format":"ipv4"},{"format":"ipv6"}]}
    "10.0.0.0": zod true, the schema true
    "::": zod true, the schema true
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
