// The playground: a conversation or a completion, constrained where asked, token by token.

import { events, hasKey } from "./api.js";

const $ = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Reads a form field as JSON; says which field is wrong. */
function json(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
}

export class Playground {
  constructor(report) {
    this.model = "";
    this.report = report;
    this.messages = [];
    this.running = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("fresh").addEventListener("click", () => this.fresh());
    $("field").addEventListener("click", () => this.addField());
    $("as-curl").addEventListener("click", () => this.copy("as-curl", asCurl));
    $("as-python").addEventListener("click", () => this.copy("as-python", asPython));
    $("kind").addEventListener("change", () => {
      $("system").disabled = $("tools").disabled = $("kind").value === "text";
    });
  }

  fresh() {
    this.stop();
    this.messages = [];
    $("conversation").replaceChildren();
  }

  stop() {
    this.running?.abort();
  }

  /** A row of the schema form: the schema's text follows from all rows. */
  addField() {
    const row = element("div", "row");
    const name = element("input");
    name.placeholder = "name";
    const type = element("select");
    for (const kind of ["string", "integer", "number", "boolean", "string list"]) {
      type.append(element("option", "", kind));
    }
    const remove = element("button", "", "✕");
    remove.type = "button";
    remove.ariaLabel = "Remove";
    remove.addEventListener("click", () => {
      row.remove();
      this.writeSchema();
    });
    for (const part of [name, type]) part.addEventListener("input", () => this.writeSchema());
    row.append(name, type, remove);
    $("fields").append(row);
    $("constraint").value = "json_schema";
    name.focus();
  }

  writeSchema() {
    const properties = {};
    for (const row of $("fields").children) {
      const [name, type] = row.children;
      if (!name.value) continue;
      properties[name.value] =
        type.value === "string list"
          ? { type: "array", items: { type: "string" } }
          : { type: type.value };
    }
    const required = Object.keys(properties);
    const schema = { type: "object", properties, required, additionalProperties: false };
    $("source").value = JSON.stringify(schema, null, 2);
  }

  /** Path and body of the request that the form asks for. */
  request() {
    const body = {
      model: this.model,
      temperature: Number($("temperature").value),
      top_p: Number($("top_p").value),
      max_tokens: Number($("max_tokens").value),
      stream: true,
      stream_options: { include_usage: true },
      return_cache_report: true,
    };
    if ($("seed").value) body.seed = Number($("seed").value);
    const source = $("source").value;
    switch ($("constraint").value) {
      case "json_schema":
        body.response_format = {
          type: "json_schema",
          json_schema: { name: "answer", schema: json(source, "The schema") },
        };
        break;
      case "regex":
        body.regex = source;
        break;
      case "choice":
        body.guided_choice = source.split("\n").filter(Boolean);
        break;
    }
    if ($("kind").value === "text") {
      return { path: "v1/completions", body: { ...body, prompt: $("prompt").value, logprobs: 5 } };
    }
    body.logprobs = true;
    body.top_logprobs = 5;
    const system = $("system").value.trim();
    const opening = system ? [{ role: "system", content: system }] : [];
    const asked = { role: "user", content: $("prompt").value };
    body.messages = [...opening, ...this.messages, asked];
    if ($("tools").value.trim()) body.tools = json($("tools").value, "Tools");
    return { path: "v1/chat/completions", body };
  }

  async send() {
    if (this.running || !$("prompt").value) return;
    let asked;
    try {
      asked = this.request();
    } catch (error) {
      this.report(error);
      return;
    }
    const chat = asked.path.includes("chat");
    if (chat) this.turn("you").text.textContent = $("prompt").value;
    const answer = new Answer(this.turn(chat ? "model" : "completion"));
    this.running = new AbortController();
    let whole = false;
    $("send").disabled = true;
    $("stop").disabled = false;
    try {
      for await (const event of events(asked.path, asked.body, this.running.signal)) {
        answer.take(event);
      }
      whole = true;
    } catch (error) {
      if (error.name !== "AbortError") answer.fail(error.message);
      if (error.status === 401) this.report(error);
    } finally {
      this.running = null;
      $("send").disabled = false;
      $("stop").disabled = true;
    }
    answer.finish();
    // An answer that was stopped or failed is no part of the conversation.
    if (chat && whole) {
      this.messages.push(asked.body.messages.at(-1), answer.message());
      $("prompt").value = "";
    }
  }

  turn(who) {
    const box = element("article", "turn");
    const thoughts = element("div", "thoughts");
    const text = element("div", "text");
    const facts = element("div", "facts");
    thoughts.hidden = true;
    box.append(element("div", "who", who), thoughts, text, facts);
    $("conversation").append(box);
    box.scrollIntoView({ block: "nearest" });
    return { thoughts, text, facts };
  }

  async copy(button, write) {
    try {
      const { path, body } = this.request();
      const plain = { ...body };
      for (const name of ["stream", "stream_options", "return_cache_report", "logprobs", "top_logprobs"]) {
        delete plain[name];
      }
      await navigator.clipboard.writeText(write(new URL(path, location.href), plain));
      const label = $(button).textContent;
      $(button).textContent = "Copied";
      setTimeout(() => ($(button).textContent = label), 1200);
    } catch (error) {
      this.report(error);
    }
  }
}

/** One answer as it is written: tokens with their log-probabilities, thoughts, calls, figures. */
class Answer {
  constructor(turn) {
    this.turn = turn;
    this.content = "";
    this.begun = performance.now();
    this.first = 0;
    this.tokens = 0;
    this.usage = null;
    this.calls = [];
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      this.turn.thoughts.hidden = false;
      this.turn.thoughts.textContent += delta.reasoning_content;
    }
    for (const call of delta.tool_calls ?? []) this.call(call);
    const scored = tokensOf(choice.logprobs);
    if (!this.first && (delta.content || scored.length)) this.first = performance.now();
    this.tokens += scored.length;
    if (delta.content) {
      this.content += delta.content;
      this.show(delta.content, scored);
    }
    if (choice.finish_reason && choice.finish_reason !== "stop") {
      this.turn.facts.textContent = `ended by ${choice.finish_reason}`;
    }
  }

  /** Tokens apart where they make up the text exactly; else the text as it is. */
  show(text, scored) {
    const joined = scored.map((token) => token.token).join("");
    if (joined !== text) {
      const plain = element("span", scored.every((t) => t.forced) && scored.length ? "token forced" : "", text);
      this.turn.text.append(plain);
      return;
    }
    for (const token of scored) {
      const span = element("span", token.forced ? "token forced" : "token", token.token);
      span.addEventListener("pointerenter", (event) => hover(event, token));
      span.addEventListener("pointerleave", unhover);
      this.turn.text.append(span);
    }
  }

  call(delta) {
    this.calls[delta.index] ??= { id: "", name: "", arguments: "", shown: element("div", "text") };
    const call = this.calls[delta.index];
    call.id ||= delta.id ?? "";
    call.name ||= delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
    if (!call.shown.isConnected) this.turn.facts.before(call.shown);
    call.shown.textContent = `→ ${call.name} ${call.arguments}`;
  }

  /** What it is in the conversation. */
  message() {
    const said = { role: "assistant", content: this.content };
    if (this.calls.length) {
      said.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return said;
  }

  fail(message) {
    this.turn.text.append(element("span", "bad", message));
  }

  finish() {
    const end = performance.now();
    const said = [this.turn.facts.textContent];
    const explained = [];
    if (this.first) said.push(`first token ${((this.first - this.begun) / 1000).toFixed(2)} s`);
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details, completion_tokens_details } = this.usage;
      said.push(`prompt ${prompt_tokens}, ${prompt_tokens_details.cached_tokens} cached`);
      const forced = completion_tokens_details.forced_tokens;
      said.push(`answer ${completion_tokens}` + (forced ? `, ${forced} forced` : ""));
      const rate = (1000 * completion_tokens) / Math.max(end - this.begun, 1);
      said.push(`${rate.toFixed(1)} tokens/s`);
      for (const report of this.usage.cache_reports ?? []) {
        explained.push(report.says);
        if (report.advice) explained.push(report.advice);
      }
    }
    this.turn.facts.style.whiteSpace = "pre-wrap";
    this.turn.facts.textContent = [said.filter(Boolean).join(" · "), ...explained].join("\n");
  }
}

/** The tokens of a choice's `logprobs`, chat's or completions'. */
function tokensOf(logprobs) {
  if (logprobs?.content) return logprobs.content;
  return (logprobs?.tokens ?? []).map((token, at) => ({
    token,
    logprob: logprobs.token_logprobs[at],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([text, logprob]) => ({
      token: text,
      logprob,
    })),
  }));
}

function hover(event, token) {
  unhover();
  const box = element("table");
  box.id = "hover";
  const rows = token.top_logprobs?.length ? token.top_logprobs : [token];
  for (const one of rows) {
    const row = element("tr");
    const chosen = one.token === token.token ? "●" : "";
    const share = `${(100 * Math.exp(one.logprob ?? 0)).toFixed(1)} %`;
    for (const cell of [chosen, JSON.stringify(one.token), share]) row.append(element("td", "", cell));
    box.append(row);
  }
  if (token.forced) box.append(element("caption", "", "forced by the constraint"));
  document.body.append(box);
  const at = event.target.getBoundingClientRect();
  box.style.left = `${Math.min(at.left, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${at.bottom + 4 + box.offsetHeight > innerHeight ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
}

function unhover() {
  document.getElementById("hover")?.remove();
}

function asCurl(url, body) {
  const data = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  const key = hasKey() ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${url} -H 'Content-Type: application/json'${key} -d '${data}'\n`;
}

function asPython(url, body) {
  const known = ["model", "messages", "prompt", "temperature", "top_p", "max_tokens", "seed", "tools", "response_format"];
  const given = Object.entries(body).filter(([name]) => known.includes(name));
  const extra = Object.entries(body).filter(([name]) => !known.includes(name));
  const call = body.messages ? "chat.completions" : "completions";
  const lines = given.map(([name, value]) => `    ${name}=${python(value)},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra))},`);
  const answer = body.messages ? "message.content" : "text";
  const base = new URL(url);
  base.pathname = base.pathname.replace(/v1\/.*$/, "v1");
  const [first, key] = hasKey() ? ["import os\n\n", 'os.environ["API_KEY"]'] : ["", '"none"'];
  return (
    `${first}from openai import OpenAI\n\nclient = OpenAI(base_url=${python(base.href)}, api_key=${key})\n` +
    `reply = client.${call}.create(\n${lines.join("\n")}\n)\nprint(reply.choices[0].${answer})\n`
  );
}

/** A JSON value as Python writes it. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
