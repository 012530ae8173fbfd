// The playground: a conversation or a completion, constrained where asked, token by token.
// The next request sends the turns that the page shows, save those marked as left out.

import { events, hasKey } from "./api.js";

const $ = (id) => document.getElementById(id);
const KEPT = "rootlace-playground"; // what a reload of the tab brings back
const LEFT_OUT = "left out of the next request";

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function button(text, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

/** What is wrong with a field of the form, by the field's id. */
class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Reads a form field as JSON; says which field is wrong. */
function json(field, what) {
  try {
    return JSON.parse($(field).value);
  } catch (error) {
    throw new FieldError(field, `${what}: ${error.message}`);
  }
}

/** The number in a field; undefined where the field is empty, which means the default. */
function number(field) {
  const input = $(field);
  const { badInput, rangeUnderflow, rangeOverflow } = input.validity;
  if (badInput || rangeUnderflow || rangeOverflow) {
    throw new FieldError(field, `${input.labels[0].textContent.trim()}: ${input.validationMessage}`);
  }
  return input.value === "" ? undefined : Number(input.value);
}

/** To the clipboard. Over plain HTTP a browser gives pages of other hosts no `navigator.clipboard`. */
async function copy(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {
    // None here, or it is refused: by the older way, and where that is refused by hand.
  }
  $("to-copy").value = text;
  $("copy-dialog").showModal();
  $("to-copy").select();
  if (!document.execCommand("copy")) throw new Error("the browser does not let this page copy");
  $("copy-dialog").close();
}

/** Copies what `write` gives, and says so on the button. */
async function copyBy(made, write) {
  await copy(write());
  made.dataset.label ??= made.textContent;
  made.textContent = "Copied";
  setTimeout(() => (made.textContent = made.dataset.label), 1200);
}

export class Playground {
  constructor(report) {
    this.model = "";
    this.report = report;
    this.turns = [];
    this.cutOut = []; // what Undo brings back
    this.typed = new Set(); // fields that somebody has written into
    this.running = null; // what stops the answer that is being written
    this.form = new AnswerForm((error) => this.tell(error));
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("fresh").addEventListener("click", () => this.cut(this.turns[0]));
    $("undo").addEventListener("click", () => {
      for (const turn of this.cutOut.splice(0)) this.put(turn);
    });
    for (const [id, write] of [["as-curl", asCurl], ["as-python", asPython]]) {
      $(id).addEventListener("click", () => this.copyRequest($(id), write));
    }
    const typed = ({ target }) => {
      this.typed.add(target.id);
      this.tell(null);
    };
    $("ask").addEventListener("input", typed, true); // before what may tell again
    addEventListener("pagehide", () => this.keep());
    this.restore();
  }

  /** From now on of this model: fields left empty mean its own sampling, where it has one. */
  of({ id, default_sampling: own }) {
    this.model = id;
    for (const name of ["temperature", "top_p"]) {
      const field = $(name);
      field.placeholder = own?.[name] ?? "default";
      if (own?.[name] !== undefined && field.value === field.defaultValue) field.value = "";
      else if (own?.[name] === undefined && !field.value && !this.typed.has(name)) field.value = field.defaultValue;
    }
  }

  stop() {
    this.running?.abort();
  }

  /** Says what is wrong until something is changed or done; null: nothing is. */
  tell(error) {
    $("wrong").hidden = !error;
    $("wrong").textContent = error?.message ?? "";
    const field = error?.field && $(error.field);
    if (!field) return;
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.focus();
  }

  /** Everything typed and said, for when the tab is loaded again. */
  keep() {
    const fields = {};
    for (const field of $("ask").querySelectorAll("[id]:is(input, select, textarea)")) fields[field.id] = field.value;
    const kept = { fields, typed: [...this.typed], form: this.form.kept(), turns: this.turns.map((turn) => turn.said) };
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {
      sessionStorage.removeItem(KEPT); // nothing rather than what is no longer so
      this.tell(new Error("This is too long for the browser to keep: loading the page again loses the conversation."));
    }
  }

  restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? '{"fields": {}, "form": {}, "turns": []}');
      for (const [id, value] of Object.entries(kept.fields)) $(id).value = value;
      this.typed = new Set(kept.typed);
      this.form.restore(kept.form);
      for (const said of kept.turns) {
        const turn = this.add(said);
        if (!said.ended) this.end(turn, "stopped");
      }
    } catch {
      sessionStorage.removeItem(KEPT); // another version of the page wrote it
    }
    const settle = () => ($("system").disabled = $("tools").disabled = $("kind").value === "text");
    $("kind").addEventListener("change", settle);
    settle();
  }

  add(said) {
    this.cutOut = [];
    return this.put(new Turn(said, this));
  }

  put(turn) {
    this.turns.push(turn);
    $("conversation").append(turn.box);
    turn.box.scrollIntoView({ block: "nearest" });
    this.settle();
    return turn;
  }

  /** Takes a turn and all after it out of the conversation, until Undo. */
  cut(turn) {
    if (!turn) return;
    const last = this.turns.at(-1);
    if (!last.said.ended) this.end(last, "stopped");
    this.stop();
    unhover();
    this.cutOut = this.turns.splice(this.turns.indexOf(turn));
    for (const one of this.cutOut) one.box.remove();
    this.settle();
  }

  /** Back to the prompt with what was asked, before what has been typed since. */
  edit(turn) {
    const typed = $("prompt").value;
    if (typed !== turn.said.text) $("prompt").value = typed ? `${turn.said.text}\n${typed}` : turn.said.text;
    this.cut(turn);
    $("prompt").focus();
  }

  /** The last answer once more. */
  again(turn) {
    const asked = this.turns[this.turns.indexOf(turn) - 1];
    if (asked?.said.who === "you" && asked.said.left) {
      asked.leave(false);
      if ($("prompt").value === asked.said.text) $("prompt").value = "";
    }
    this.cut(turn);
    this.send("");
  }

  /** What can be done with which turn. */
  settle() {
    $("send").disabled = Boolean(this.running);
    $("stop").disabled = !this.running;
    $("undo").hidden = !this.cutOut.length;
    for (const turn of this.turns) turn.settle(turn === this.turns.at(-1), Boolean(this.running));
  }

  /** The turns that the next request sends. */
  sent() {
    return this.turns.filter(({ said }) => !said.left && said.who !== "completion");
  }

  /** Path and body of the request that the form asks for, `prompt` as its next words. */
  request(prompt, turns = this.sent()) {
    const body = { model: this.model };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const value = number(name);
      if (value !== undefined) body[name] = value;
    }
    this.form.constrain(body);
    Object.assign(body, {
      stream: true,
      stream_options: { include_usage: true },
      return_cache_report: true,
    });
    if ($("kind").value === "text") {
      if (!prompt) throw new FieldError("prompt", "The prompt is empty.");
      return { path: "v1/completions", body: { ...body, prompt, logprobs: 5 } };
    }
    body.logprobs = true;
    body.top_logprobs = 5;
    const system = $("system").value.trim();
    if (system) body.messages = [{ role: "system", content: system }];
    body.messages = [...(body.messages ?? []), ...turns.flatMap((turn) => turn.messages())];
    if (prompt) body.messages.push({ role: "user", content: prompt });
    if (!["user", "tool"].includes(body.messages.at(-1)?.role)) {
      throw new FieldError("prompt", "The prompt is empty.");
    }
    if ($("tools").value.trim()) {
      body.tools = json("tools", "Tools");
      // Results are answered in words too: else one call would follow another for ever.
      if (body.messages.at(-1).role === "user") body.tool_choice = $("tool_choice").value;
    }
    return { path: "v1/chat/completions", body };
  }

  async send(prompt = $("prompt").value) {
    if (this.running) return;
    let asked;
    try {
      asked = this.request(prompt);
    } catch (error) {
      this.tell(error);
      return;
    }
    this.tell(null);
    // After a click, too, what is typed is the next prompt and no shortcut; a phone would show its keyboard.
    const typing = document.activeElement.matches("input, textarea, select");
    if (!typing && matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
    const chat = "messages" in asked.body;
    if (chat && prompt) {
      this.add({ who: "you", text: prompt, ended: true });
      $("prompt").value = ""; // at once, so that what is typed from now on is the next prompt
    }
    const mine = new AbortController();
    this.running = mine;
    const turn = this.add(chat ? { who: "model", text: "" } : { who: "completion", asked: prompt, text: "" });
    this.keep();
    let how = "";
    try {
      for await (const event of events(asked.path, asked.body, mine.signal)) turn.take(event);
    } catch (error) {
      if (error.name === "AbortError") how = "stopped";
      else turn.fail(error.message);
      if (error.status === 401) this.report(error);
    }
    this.running = null;
    if (!turn.said.ended) this.end(turn, how);
    this.settle();
    this.keep();
  }

  /** An answer that has nothing to send on is left out together with what it was to answer. */
  end(turn, how) {
    turn.finish(how);
    const { who, text, wrong, calls } = turn.said;
    if (who !== "model" || text || calls.length || !(how || wrong)) return;
    turn.leave(true);
    const asked = this.turns[this.turns.indexOf(turn) - 1];
    if (asked?.said.who !== "you") return;
    asked.leave(true);
    $("prompt").value ||= asked.said.text;
  }

  async copyRequest(made, write) {
    try {
      // With nothing new to ask: what was asked last.
      let turns = this.sent();
      const prompt = $("prompt").value;
      if (!prompt && turns.at(-1)?.said.who === "model" && !turns.at(-1).said.calls.some((call) => call.result)) {
        turns = turns.slice(0, -1);
      }
      const { path, body } = this.request(prompt, turns);
      for (const name of ["stream", "stream_options", "return_cache_report", "logprobs", "top_logprobs"]) {
        delete body[name];
      }
      await copyBy(made, () => write(new URL(path, location.href), body));
      this.tell(null);
    } catch (error) {
      this.tell(error);
    }
  }
}

const KINDS = {
  string: { type: "string" },
  integer: { type: "integer" },
  number: { type: "number" },
  boolean: { type: "boolean" },
  "string list": { type: "array", items: { type: "string" } },
};
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** What the answer must look like. The text says it; the rows show and change properties of that text. */
class AnswerForm {
  constructor(tell) {
    this.tell = tell;
    this.kind = ""; // whose text stands in the field; "": nobody has said
    this.texts = {};
    this.rows = [];
    $("constraint").addEventListener("change", () => this.choose());
    $("source").addEventListener("input", () => this.read());
    $("field").addEventListener("click", () => {
      $("constraint").value = "json_schema";
      this.choose();
      try {
        this.schema();
      } catch (error) {
        this.tell(error);
        return;
      }
      this.row("", KINDS.string, true).name.focus();
    });
  }

  kept() {
    return { kind: this.kind, texts: this.texts };
  }

  restore({ kind = "", texts = {} }) {
    this.kind = kind;
    this.texts = texts;
    this.choose();
    this.read();
  }

  /** Each kind has its own text: to look at another loses none. */
  choose() {
    const next = $("constraint").value;
    $("source").classList.toggle("unused", !next);
    $("source").title = next ? "" : "Not used: no constraint is chosen.";
    if (!next || next === this.kind) return;
    if (this.kind) {
      this.texts[this.kind] = $("source").value;
      $("source").value = this.texts[next] ?? "";
    }
    this.kind = next;
    this.read();
  }

  /** Puts the constraint into the body of a request. */
  constrain(body) {
    const source = $("source").value;
    switch ($("constraint").value) {
      case "json_schema":
        body.response_format = {
          type: "json_schema",
          json_schema: { name: "answer", schema: json("source", "The schema") },
        };
        break;
      case "regex":
        body.regex = source;
        break;
      case "choice":
        body.guided_choice = source.split("\n").filter(Boolean);
        break;
    }
  }

  /** The schema that the text is, to which properties can be added. */
  schema() {
    if (!$("source").value.trim()) return { type: "object", properties: {}, required: [], additionalProperties: false };
    const schema = json("source", "The schema");
    if (!isObject(schema) || (schema.type ?? "object") !== "object" || !isObject(schema.properties ?? {})) {
      throw new FieldError("source", 'The schema: only one of "type": "object" has properties.');
    }
    return schema;
  }

  /** Rows for the properties of the text; none while it is no schema of an object. */
  read() {
    for (const { box } of this.rows) box.remove();
    this.rows = [];
    if (this.kind !== "json_schema" || !$("source").value.trim()) return;
    try {
      const { properties = {}, required = [] } = this.schema();
      for (const [name, schema] of Object.entries(properties)) this.row(name, schema, required.includes(name));
    } catch {
      // It is being typed; what is wrong with it is told when it is used.
    }
  }

  row(called, schema, required) {
    const box = element("div", "row");
    const name = element("input");
    name.placeholder = "name";
    name.ariaLabel = "Name of the property";
    name.value = called;
    const type = element("select");
    type.ariaLabel = "Type of the property";
    const same = (kind) => isObject(schema) && kind.type === schema.type && kind.items?.type === schema.items?.type;
    const own = Object.keys(KINDS).find((kind) => same(KINDS[kind]));
    for (const kind of own ? Object.keys(KINDS) : ["as written", ...Object.keys(KINDS)]) type.append(new Option(kind));
    if (own) type.value = own;
    const row = { box, name, schema, required };
    type.addEventListener("input", () => {
      const { title, description } = Object(schema);
      row.schema = type.value === (own ?? "as written") ? schema : { ...KINDS[type.value], title, description };
      this.write();
    });
    name.addEventListener("input", () => this.write());
    name.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
      event.preventDefault(); // it would send the form
      $("field").click();
    });
    const remove = button("✕", () => {
      this.rows.splice(this.rows.indexOf(row), 1);
      box.remove();
      this.write();
    });
    remove.ariaLabel = "Remove the property";
    box.append(name, type, remove);
    this.rows.push(row);
    $("fields").append(box);
    return row;
  }

  /** The rows into the text; whatever else the text says stays. */
  write() {
    let schema;
    try {
      schema = this.schema();
    } catch (error) {
      this.tell(error);
      return;
    }
    const before = Object.keys(schema.properties ?? {});
    const rows = new Map();
    for (const row of this.rows) {
      const taken = rows.has(row.name.value);
      row.name.setCustomValidity(taken ? "Another property has this name." : "");
      if (row.name.value && !taken) rows.set(row.name.value, row);
    }
    schema.properties = Object.fromEntries([...rows].map(([name, row]) => [name, row.schema]));
    const others = (schema.required ?? []).filter((name) => !before.includes(name));
    const required = [...[...rows.keys()].filter((name) => rows.get(name).required), ...others];
    if (required.length || schema.required) schema.required = required;
    $("source").value = JSON.stringify(schema, null, 2);
  }
}

/** One turn as it is shown, and, of an answer, as it is written: tokens, thoughts, calls, figures. */
class Turn {
  /** `said` is what is kept of the turn: who, text, thoughts, calls, facts, wrong, left, ended. */
  constructor(said, play) {
    this.said = said;
    said.calls ??= [];
    this.play = play;
    this.begun = performance.now();
    this.first = 0;
    this.ending = "";
    this.usage = null;
    this.box = element("article", "turn");
    this.thoughts = element("div", "thoughts", said.thoughts);
    this.thoughts.hidden = !said.thoughts;
    this.text = element("div", "text");
    this.text.addEventListener("pointerover", ({ target }) => hover(target));
    this.text.addEventListener("pointerout", unhover);
    this.text.addEventListener("keydown", (event) => this.step(event));
    this.text.addEventListener("blur", unhover);
    if (said.asked) this.text.append(element("span", "asked", said.asked));
    if (said.text) this.text.append(said.text);
    this.facts = element("div", "facts", said.facts);
    this.edit = button("Edit", () => play.edit(this));
    this.again = button("Again", () => play.again(this));
    const copied = button("Copy", (made) => copyBy(made, () => (said.asked ?? "") + said.text).catch((error) => play.tell(error)));
    const head = element("div", "head");
    this.note = element("span", "note");
    head.append(element("span", "who", said.who), this.note, copied, said.who === "you" ? this.edit : this.again);
    this.again.hidden = true;
    this.box.append(head, this.thoughts, this.text, this.facts);
    said.calls.forEach((_, at) => this.showCall(at));
    if (said.wrong) this.fail(said.wrong);
    this.leave(said.left);
  }

  leave(out) {
    this.said.left = Boolean(out);
    this.box.classList.toggle("left", this.said.left);
    this.note.textContent = this.said.left ? LEFT_OUT : "";
  }

  settle(last, busy) {
    this.again.hidden = !last || busy || this.said.who !== "model";
    for (const field of this.box.querySelectorAll(".result textarea")) field.readOnly = !last;
    for (const send of this.box.querySelectorAll(".result button")) send.hidden = !last;
  }

  take(event) {
    // Who looks at the end of the answer goes on to see it.
    const follows = this.facts.getBoundingClientRect().top < innerHeight;
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      this.said.thoughts = (this.said.thoughts ?? "") + delta.reasoning_content;
      this.thoughts.hidden = false;
      this.thoughts.append(delta.reasoning_content);
    }
    for (const call of delta.tool_calls ?? []) this.call(call);
    const scored = tokensOf(choice.logprobs);
    if (!this.first && (delta.content || scored.length)) this.first = performance.now();
    if (delta.content) {
      this.said.text += delta.content;
      this.show(delta.content, scored);
    }
    if (choice.finish_reason && choice.finish_reason !== "stop") this.ending = `ended by ${choice.finish_reason}`;
    if (follows) this.facts.scrollIntoView({ block: "nearest" });
  }

  /** Tokens apart where they make up the text exactly; else the text as it is. */
  show(text, scored) {
    const joined = scored.map((token) => token.token).join("");
    if (joined !== text) {
      const plain = element("span", scored.every((t) => t.forced) && scored.length ? kindOf(scored[0]) : "", text);
      this.text.append(plain);
      return;
    }
    for (const token of scored) {
      const span = element("span", kindOf(token), token.token);
      SCORED.set(span, token);
      this.text.append(span);
      this.text.tabIndex = 0;
      this.text.title = "Arrows: from token to token";
    }
  }

  /** From token to token by the arrow keys. */
  step(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const tokens = [...this.text.querySelectorAll(".token")].filter((token) => SCORED.has(token));
    const at = tokens.findIndex((token) => token.matches(".told"));
    const next = tokens[Math.min(Math.max(at + step, 0), tokens.length - 1)];
    next.scrollIntoView({ block: "nearest" });
    hover(next);
  }

  call(delta) {
    const { calls } = this.said;
    calls[delta.index] ??= { id: "", name: "", arguments: "", result: "" };
    const call = calls[delta.index];
    call.id ||= delta.id ?? "";
    call.name ||= delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
    this.showCall(delta.index);
  }

  showCall(at) {
    const call = this.said.calls[at];
    this.shown ??= [];
    if (!this.shown[at]) this.facts.before((this.shown[at] = element("div", "text call")));
    this.shown[at].textContent = `→ ${call.name} ${call.arguments}`;
    if (this.said.ended) this.askResult(call, this.shown[at]);
  }

  /** A field for what the tool gives back. */
  askResult(call, shown) {
    const field = element("textarea");
    field.rows = 1;
    field.value = call.result;
    field.placeholder = `what ${call.name} gives back`;
    field.ariaLabel = `Result of ${call.name}`;
    field.addEventListener("input", () => {
      call.result = field.value;
      this.play.tell(null);
    });
    call.field = field.id = `result-${call.id}`;
    const result = element("div", "result");
    result.append(field);
    if (call === this.said.calls.at(-1)) result.append(button("Send the results", () => this.play.send()));
    shown.after(result);
  }

  /** What it is in the conversation: the words, and the results of tools that it called. */
  messages() {
    const { who, text, calls } = this.said;
    if (who === "you") return [{ role: "user", content: text }];
    if (!calls.length) return [{ role: "assistant", content: text }];
    const missing = calls.find((call) => !call.result);
    if (missing) {
      throw new FieldError(missing.field, `The result of ${missing.name} is missing: enter it below its call, or take the question back with Edit.`);
    }
    const made = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
    return [
      { role: "assistant", content: text, tool_calls: calls.map(made) },
      ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })),
    ];
  }

  fail(message) {
    this.said.wrong = message;
    this.facts.before(element("div", "bad", message));
  }

  finish(how) {
    const { said } = this;
    const end = performance.now();
    const told = [how || this.ending];
    said.ended = true;
    const calls = said.calls.map((call, at) => ({ call, shown: this.shown[at] }));
    said.calls = said.calls.filter(isWhole);
    for (const { call, shown } of calls) {
      if (isWhole(call)) {
        this.askResult(call, shown);
        continue;
      }
      shown.classList.add("left");
      told.push(`the call of ${call.name} was cut off: ${LEFT_OUT}`);
    }
    if (this.first) told.push(`first token ${((this.first - this.begun) / 1000).toFixed(2)} s`);
    const explained = [];
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details, completion_tokens_details } = this.usage;
      told.push(`prompt ${prompt_tokens}, ${prompt_tokens_details.cached_tokens} cached`);
      const forced = completion_tokens_details.forced_tokens;
      const drafts = Object.values(completion_tokens_details.drafts ?? {}).reduce((sum, one) => sum + one.accepted, 0);
      told.push(`answer ${completion_tokens}` + (forced ? `, ${forced} forced` : "") + (drafts ? `, ${drafts} drafted` : ""));
      const rate = (1000 * completion_tokens) / Math.max(end - this.begun, 1);
      told.push(`${rate.toFixed(1)} tokens/s`);
      for (const report of this.usage.cache_reports ?? []) {
        explained.push(report.says);
        if (report.advice) explained.push(report.advice);
      }
    }
    said.facts = [told.filter(Boolean).join(" · "), ...explained].filter(Boolean).join("\n");
    this.facts.textContent = said.facts;
  }
}

/** Whether all of a call's arguments are there: of what was cut off nobody can give a result. */
function isWhole(call) {
  try {
    return isObject(JSON.parse(call.arguments));
  } catch {
    return false;
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

const DRAFTED_FROM = { prediction: "from the prediction", tree: "from other requests' texts", output: "from this request's text", model: "by the draft model" };

/** The class of a token's span: what was forced or drafted has a tint. */
function kindOf(token) {
  return "token" + (token.forced ? " forced" : token.drafted ? " drafted" : "");
}

const SCORED = new WeakMap(); // of the span of a token: its log-probabilities

/** Tells what stood to choose where this token stands. */
function hover(span) {
  unhover();
  const token = SCORED.get(span);
  if (!token) return;
  span.classList.add("told");
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
  else if (token.drafted) box.append(element("caption", "", `drafted: ${DRAFTED_FROM[token.drafted]}`));
  document.body.append(box);
  const at = span.getBoundingClientRect();
  box.style.left = `${Math.max(Math.min(at.left, innerWidth - box.offsetWidth - 8), 0)}px`;
  box.style.top = `${at.bottom + 4 + box.offsetHeight > innerHeight ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
}

function unhover() {
  document.getElementById("hover")?.remove();
  document.querySelector(".token.told")?.classList.remove("told");
}

function asCurl(url, body) {
  const data = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  const key = hasKey() ? ' -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${url} -H 'Content-Type: application/json'${key} -d '${data}'\n`;
}

function asPython(url, body) {
  const known = ["model", "messages", "prompt", "temperature", "top_p", "max_tokens", "seed", "tools", "tool_choice", "response_format"];
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
