#!/usr/bin/env bash
# @langchain/ollama 1.3.0 for JavaScript: stop strings that a `ChatOllama` is made with, as its type has them (`stop?: string[]` beside
# `temperature` and the others), are not sent; the other options are. So an answer goes on behind them, without a warning. Those of
# `Ollama`, of the same package and type, are sent, and so are those of a call (`invoke(..., { stop })`) and of `withConfig({ stop })`.
#
# Guessed before: sent, as all options of the constructor. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @langchain/ollama@1.3.0 @langchain/core@1.4.0
cat >"$folder/show.mjs" <<'JAVASCRIPT'
import { createServer } from "node:http";
import { ChatOllama, Ollama } from "@langchain/ollama";

let sent;
const server = createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    sent = JSON.parse(body).options;
    const text = { model: "m", message: { role: "assistant", content: "Hello" }, response: "Hello" };
    response.end(JSON.stringify({ ...text, done: true, done_reason: "stop" }) + "\n");
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const options = { model: "m", baseUrl: `http://127.0.0.1:${server.address().port}`, temperature: 0, numPredict: 5 };
for (const kind of [ChatOllama, Ollama]) {
  await new kind({ ...options, stop: ["###"] }).invoke("Hi");
  console.log(`${kind.name}, made with stop: ${JSON.stringify(sent)}`);
  await new kind(options).invoke("Hi", { stop: ["###"] });
  console.log(`${kind.name}, called with stop: ${JSON.stringify(sent)}`);
  await new kind(options).withConfig({ stop: ["###"] }).invoke("Hi");
  console.log(`${kind.name}, withConfig: ${JSON.stringify(sent)}`);
}
server.close();
process.exit(0);
JAVASCRIPT
grep -c "stop?: string\[\]" "$folder/node_modules/@langchain/ollama/dist/types.d.ts" >"$folder/typed"
seen=$(cat "$folder/typed"; node "$folder/show.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
1
ChatOllama, made with stop: {"num_predict":5,"temperature":0}
ChatOllama, called with stop: {"num_predict":5,"temperature":0,"stop":["###"]}
ChatOllama, withConfig: {"num_predict":5,"temperature":0,"stop":["###"]}
Ollama$1, made with stop: {"num_predict":5,"temperature":0,"stop":["###"]}
Ollama$1, called with stop: {"num_predict":5,"temperature":0,"stop":["###"]}
Ollama$1, withConfig: {"num_predict":5,"temperature":0,"stop":["###"]}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
