#!/usr/bin/env bash
# @modelcontextprotocol/sdk 1.32.2, the TypeScript SDK of the Model Context Protocol (`McpServer.registerTool`), shows a tool whose input is a
# union, a discriminated union, an intersection, a record or an object with a `transform` as one without parameters, {"type": "object",
# "properties": {}}, and holds its calls to the type that it does not show: a client that sends {}, as the shown schema suggests,
# is refused. `z.toJSONSchema` of zod 4.6.7, which writes the schemas of other tools, writes all of these. And where one tool has
# a date among its parameters, it can be called, and no tool of the server is listed any more.
#
# Guessed before: `anyOf` or an error at registration, and a date as a text. Found 2026-12-01. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @modelcontextprotocol/sdk@1.32.2 zod@4.6.7

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { InMemoryTransport } from "@modelcontextprotocol/sdk/inMemory.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { z } from "zod";

async function connect(tools) {
  const server = new McpServer({ name: "server", version: "1" });
  for (const [name, inputSchema] of tools) {
    server.registerTool(name, { inputSchema }, async () => ({ content: [{ type: "text", text: "ran" }] }));
  }
  const [here, there] = InMemoryTransport.createLinkedPair();
  await server.connect(here);
  const client = new Client({ name: "client", version: "1" });
  await client.connect(there);
  return client;
}

async function call(client, name, given) {
  const result = await client.callTool({ name, arguments: given });
  return `${JSON.stringify(given)} ${result.isError ? "is refused" : result.content[0].text}`;
}

const byId = z.object({ by: z.literal("id"), id: z.int() });
const byName = z.object({ by: z.literal("name"), name: z.string() });
const tools = [
  ["object", byId, { by: "id", id: 1 }],
  ["union", z.union([byId, byName]), { by: "id", id: 1 }],
  ["discriminated", z.discriminatedUnion("by", [byId, byName]), { by: "id", id: 1 }],
  ["intersection", z.object({ a: z.int() }).and(z.object({ b: z.int() })), { a: 1, b: 2 }],
  ["record", z.record(z.enum(["a", "b"]), z.int()), { a: 1, b: 2 }],
  ["transform", byId.transform((value) => value.id), { by: "id", id: 1 }],
];
const client = await connect(tools);
const shown = (await client.listTools()).tools;
for (const [index, [name, type, right]] of tools.entries()) {
  const { $schema, ...schema } = shown[index].inputSchema;
  const keys = Object.keys(schema.properties).join(", ") || "none";
  const whole = Object.keys(z.toJSONSchema(type, { io: "input" })).slice(1, 3).join(", ");
  const calls = `${await call(client, name, {})}, ${await call(client, name, right)}`;
  console.log(`${name}: parameters ${keys}; ${calls}; zod writes ${whole}`);
}
const dated = await connect([["plain", { a: z.int() }], ["dated", { day: z.coerce.date() }]]);
console.log("dated:", await call(dated, "dated", { day: "2020-01-01" }));
console.log("plain:", await call(dated, "plain", { a: 1 }));
console.log("listed:", await dated.listTools().catch((error) => error.message));
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
object: parameters by, id; {} is refused, {"by":"id","id":1} ran; zod writes type, properties
union: parameters none; {} is refused, {"by":"id","id":1} ran; zod writes anyOf
discriminated: parameters none; {} is refused, {"by":"id","id":1} ran; zod writes oneOf
intersection: parameters none; {} is refused, {"a":1,"b":2} ran; zod writes type, properties
record: parameters none; {} is refused, {"a":1,"b":2} ran; zod writes type, propertyNames
transform: parameters none; {} is refused, {"by":"id","id":1} ran; zod writes type, properties
dated: {"day":"2020-01-01"} ran
plain: {"a":1} ran
listed: MCP error -32603: Date cannot be represented in JSON Schema
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
