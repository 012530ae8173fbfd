"use strict";
// Draws a run: branches from top to bottom, time from left to right. Only what can be seen is drawn,
// so that thousands of branches move smoothly.

const run = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const canvas = $("canvas");
const pen = canvas.getContext("2d");

const LANE = 34; // height of a lane; in it, from above:
const METER = [5, 5]; // what of the prompt was cached: offset and height
const BAR = [12, 15]; // what took time
const AXIS = 22;
const MINUTES = [15, 30, 60, 120, 300, 600, 1800, 3600]; // steps of the axis of a long run, in seconds
const GUTTER = Math.min(220, Math.max(90, innerWidth * 0.22));
// As many lanes are shown at once, the rest by scrolling.
const MOST = Math.max(6, Math.min(20, Math.floor((innerHeight - 380) / LANE)));

const lanes = run.lanes.map((lane) => ({ ...lane, parent: lane.parent ?? null, spans: lane.spans ?? [] }));
lanes.forEach((lane, at) => {
  lane.depth = lane.parent === null ? 0 : lanes[lane.parent].depth + 1;
  lane.spans.forEach((span, place) => Object.assign(span, { lane: at, place }));
});
const spans = lanes.flatMap((lane) => lane.spans).sort((a, b) => a.start - b.start);
const seconds = Math.max(run.seconds, ...spans.map((span) => span.end), 1e-6);
const view = { from: 0, to: seconds * 1.02, top: 0 };
let chosen = null;
let colours = {};

const sum = (field) => spans.reduce((all, span) => all + (span[field] ?? 0), 0);
const whole = (number) => Math.round(number).toLocaleString("en");
const time = (value) => {
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 119.995 ? `${value.toFixed(2)} s` : `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
};
const part = (some, all) => (all ? `${Math.round((100 * some) / all)} %` : "");

function make(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// ---------------------------------------------------------------- facts

function rate(span) {
  const later = (span.completion_tokens ?? 0) - (span.samples ?? 1);
  return span.first === undefined || later <= 0 || span.end <= span.first ? null : later / (span.end - span.first);
}

function facts() {
  const found = [["took", time(run.seconds)]];
  const count = (number, one) => `${whole(number)} ${one}${number === 1 ? "" : "es"}`;
  found.push(["on", count(lanes.length, "branch")]);
  const firsts = spans.filter((span) => span.kind === "gen" && span.first !== undefined);
  if (firsts.length) found.push(["first token after", time(firsts[0].first - firsts[0].start)]);
  const prompt = sum("prompt_tokens");
  if (prompt) found.push(["prompts", `${whole(prompt)} tokens, ${part(sum("cached_tokens"), prompt)} cached`]);
  const written = sum("completion_tokens");
  const forced = sum("forced_tokens");
  if (written) found.push(["written", `${whole(written)} tokens${forced ? `, ${whole(forced)} forced` : ""}`]);
  if (written && run.seconds) found.push(["overall", `${whole(written / run.seconds)} tokens/s`]);
  const calls = spans.filter((span) => span.kind === "tool").length;
  if (calls) found.push(["tool calls", whole(calls)]);
  if (run.forgotten) found.push(["not shown, since it was too much", whole(run.forgotten)]);
  for (const [name, value] of found) {
    const fact = make("span", `${name} `, "dim");
    fact.append(make("b", value));
    $("facts").append(fact);
  }
  if (run.error) $("facts").append(make("span", run.error, "bad"));
}

// ---------------------------------------------------------------- drawing

const width = () => canvas.clientWidth;
const shown = () => Math.min(lanes.length, MOST);
const x = (at) => GUTTER + ((at - view.from) / (view.to - view.from)) * (width() - GUTTER - 8);
const at = (px) => view.from + ((px - GUTTER) / (width() - GUTTER - 8)) * (view.to - view.from);
const y = (lane) => AXIS + (lane - view.top) * LANE;

function colour(name) {
  colours[name] ??= resolve(name);
  return colours[name];
}

function resolve(name) {
  const probe = make("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

let frame = 0;
function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    paint();
  });
}

function size() {
  const height = AXIS + shown() * LANE + 6;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width() * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  paint();
}

function paint() {
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  axis();
  const first = Math.max(0, Math.floor(view.top));
  const last = Math.min(lanes.length, Math.ceil(view.top + shown()));
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, width(), shown() * LANE + 6);
  pen.clip();
  for (let index = first; index < last; index++) lane(lanes[index], index);
  forks(first, last);
  pen.restore();
  if (lanes.length > shown()) scrollbar();
}

/** A time on an axis of these steps, with as many digits as tell them apart. */
function label(tick, step) {
  if (step > 10) return `${Math.floor(tick / 60)}:${String(Math.round(tick % 60)).padStart(2, "0")} min`;
  const [scale, unit] = step < 0.1 ? [1000, "ms"] : [1, "s"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  return `${Number((tick * scale).toFixed(digits))} ${unit}`;
}

function axis() {
  const wide = (width() - GUTTER) / 90;
  const rough = (view.to - view.from) / Math.max(wide, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = rough > 10 ? MINUTES.find((n) => n >= rough) ?? Math.ceil(rough / 3600) * 3600 : [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  pen.fillStyle = colour("dim");
  pen.strokeStyle = colour("line");
  pen.beginPath();
  for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
    const said = label(tick, step);
    if (x(tick) + 3 + pen.measureText(said).width < width()) pen.fillText(said, x(tick) + 3, AXIS / 2);
    pen.moveTo(Math.round(x(tick)) + 0.5, 4);
    pen.lineTo(Math.round(x(tick)) + 0.5, canvas.clientHeight);
  }
  pen.stroke();
}

function box(from, to, top, height, fill) {
  const left = Math.max(x(from), GUTTER);
  const right = Math.min(x(to), width());
  if (right <= GUTTER || left >= width()) return;
  pen.fillStyle = colour(fill);
  pen.fillRect(left, top, Math.max(right - left, 0.7), height);
}

function lane(one, index) {
  const top = y(index);
  if (index === chosen?.lane) {
    pen.fillStyle = colour("box");
    pen.fillRect(0, top, width(), LANE);
  }
  box(one.start, one.end, top + BAR[0] + BAR[1] / 2 - 0.5, 1, "dim");
  for (const span of one.spans) bar(span, top);
  pen.fillStyle = colour("paper");
  pen.fillRect(0, top, GUTTER - 4, LANE);
  pen.fillStyle = colour(one.depth ? "dim" : "ink");
  const indent = 8 + Math.min(one.depth, 8) * 10;
  pen.fillText(fitted(one.name, GUTTER - indent - 8), indent, top + BAR[0] + BAR[1] / 2);
}

function bar(span, top) {
  if (x(span.end) < GUTTER || x(span.asked) > width()) return;
  const meter = top + METER[0];
  const y0 = top + BAR[0];
  if (span.prompt_tokens) {
    const edge = span.start + ((span.end - span.start) * (span.cached_tokens ?? 0)) / span.prompt_tokens;
    box(span.start, edge, meter, METER[1], "cached");
    box(edge, span.end, meter, METER[1], "computed");
  }
  const ready = span.admitted ?? span.start;
  box(span.start, ready, y0, BAR[1], "wait");
  if (span.kind === "tool") box(span.start, span.end, y0, BAR[1], "tool");
  else if (span.kind === "select") box(ready, span.end, y0, BAR[1], "select");
  else {
    box(ready, span.first ?? span.end, y0, BAR[1], "prompt");
    if (span.first !== undefined && !span.stretches?.length) box(span.first, span.end, y0, BAR[1], "sampled");
    for (const each of span.stretches ?? []) box(each.start, each.end, y0, BAR[1], each.kind);
  }
  const left = Math.max(x(span.start), GUTTER);
  const wide = Math.min(x(span.end), width()) - left;
  if (span === chosen || span.state) {
    pen.strokeStyle = colour(span === chosen ? "ink" : "bad");
    pen.lineWidth = 2;
    pen.strokeRect(left - 1, y0 - 1, Math.max(wide, 1) + 2, BAR[1] + 2);
    pen.lineWidth = 1;
  }
  const clear = Math.max(x(ready), GUTTER); // what waits is too pale to write on
  if (left + wide - clear > 30) {
    pen.fillStyle = colour("paper");
    pen.fillText(fitted(span.name || span.kind, left + wide - clear - 10), clear + 5, y0 + BAR[1] / 2 + 0.5);
  }
}

/** From each fork up to the branch that it began on. */
function forks(first, last) {
  pen.strokeStyle = colour("dim");
  pen.beginPath();
  for (let index = first; index < last; index++) {
    const one = lanes[index];
    if (one.parent === null || x(one.start) < GUTTER || x(one.start) > width()) continue;
    const middle = BAR[0] + BAR[1] / 2;
    pen.moveTo(x(one.start), Math.max(y(one.parent) + BAR[0] + BAR[1], AXIS));
    pen.lineTo(x(one.start), y(index) + middle);
  }
  pen.stroke();
}

function scrollbar() {
  const height = canvas.clientHeight - AXIS;
  pen.fillStyle = colour("dim");
  pen.fillRect(width() - 5, AXIS + (view.top / lanes.length) * height, 4, (shown() / lanes.length) * height);
}

const widths = new Map();
function fitted(text, most) {
  const key = `${text} ${Math.round(most)}`;
  if (!widths.has(key)) {
    let found = text;
    while (found && pen.measureText(found).width > most) found = found.length > 2 ? `${found.replace(/…$/, "").slice(0, -1)}…` : "";
    if (widths.size > 5000) widths.clear();
    widths.set(key, found);
  }
  return widths.get(key);
}

// ---------------------------------------------------------------- what is chosen

function choose(span) {
  chosen = span;
  if (span) {
    if (span.lane < view.top) view.top = span.lane;
    if (span.lane >= view.top + shown()) view.top = span.lane - shown() + 1;
    const wide = view.to - view.from;
    if (span.end < view.from || span.start > view.to) {
      view.from = Math.max(0, span.start - wide / 3);
      view.to = view.from + wide;
    }
  }
  tell();
  draw();
}

function told(span) {
  const found = [];
  if (span.state) found.push(span.state);
  found.push(`${time(span.end - span.start)}, from ${time(span.start)} on`);
  if (span.start - span.asked > 0.0005) found.push(`asked for ${time(span.start - span.asked)} before its turn came`);
  if (span.admitted - span.start > 0.0005) found.push(`waited ${time(span.admitted - span.start)} for a place`);
  if (span.first !== undefined && span.kind === "gen") found.push(`first token after ${time(span.first - span.start)}`);
  if (rate(span)) found.push(`then ${whole(rate(span))} tokens/s`);
  if (span.prompt_tokens) found.push(`${whole(span.cached_tokens ?? 0)} of ${whole(span.prompt_tokens)} prompt tokens cached (${part(span.cached_tokens ?? 0, span.prompt_tokens)})`);
  if (span.completion_tokens) {
    const forced = span.forced_tokens ? `, ${whole(span.forced_tokens)} of them forced` : "";
    found.push(`${whole(span.completion_tokens)} tokens written${forced}${span.samples > 1 ? ` in ${span.samples} samples` : ""}`);
  }
  if (span.kind !== "tool") found.push(span.clock === "server" ? "times by the server's clock" : "times by the program's clock");
  return found.join(" · ");
}

function tell() {
  const detail = $("detail");
  detail.replaceChildren();
  if (!chosen) {
    detail.append(make("p", "Choose a bar, with the mouse or the arrow keys, to read what it says.", "dim"));
    return;
  }
  detail.append(make("h2", `${chosen.kind} ${chosen.name ?? ""} on ${lanes[chosen.lane].name}`));
  detail.append(make("div", told(chosen)));
  if (chosen.line) detail.append(make("div", chosen.line, "dim"));
  if (chosen.error) quote("error", chosen.error, "bad");
  if (chosen.before) quote(chosen.kind === "tool" ? "arguments" : "before it", chosen.before);
  if (chosen.text) quote("gave", chosen.text);
  if (chosen.choices) detail.append(scores(chosen));
}

/** A text, with a button that copies it. */
function quote(title, text, kind) {
  const head = make("div", `${title} `, "dim");
  const copy = make("button", "Copy");
  const shown = make("pre", text, kind);
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Not where the page is shown over plain HTTP or within another: by the older way, or by hand.
      getSelection().selectAllChildren(shown);
      if (!document.execCommand("copy")) {
        copy.textContent = "Selected: press Ctrl+C";
        return;
      }
    }
    copy.textContent = "Copied";
  });
  head.append(copy);
  $("detail").append(head, shown);
}

function rows(titles, lines) {
  const table = make("table");
  const head = table.insertRow();
  for (const [title, kind] of titles) head.append(make("th", title, kind));
  for (const line of lines) {
    const row = table.insertRow();
    line.forEach((cell, index) => row.append(make("td", cell, titles[index][1])));
  }
  return table;
}

function scores(span) {
  const lines = span.choices.map((choice, index) => [choice, span.scores?.[index]?.toFixed(3) ?? ""]);
  return rows([["choice"], ["score", "number"]], lines);
}

function table() {
  const titles = [["branch"], ["what"], ["from", "number"], ["took", "number"], ["first token", "number"], ["tokens/s", "number"], ["prompt", "number"], ["cached", "number"], ["written", "number"], ["forced", "number"], ["state"]];
  const count = (span, field) => (span.kind === "tool" ? "" : whole(span[field] ?? 0));
  const lines = spans.map((span) => [
    lanes[span.lane].name, `${span.kind} ${span.name ?? ""}`, time(span.start), time(span.end - span.start),
    span.first === undefined ? "" : time(span.first - span.start), rate(span) ? whole(rate(span)) : "",
    count(span, "prompt_tokens"), count(span, "cached_tokens"), count(span, "completion_tokens"), count(span, "forced_tokens"), span.state ?? "done",
  ]);
  $("table").replaceChildren(rows(titles, lines));
}

// ---------------------------------------------------------------- mouse and keys

function under(event) {
  const place = canvas.getBoundingClientRect();
  const index = Math.floor((event.clientY - place.top - AXIS) / LANE + view.top);
  const when = at(event.clientX - place.left);
  const slack = ((view.to - view.from) / width()) * 3;
  return lanes[index]?.spans.find((span) => span.start - slack <= when && when <= span.end + slack) ?? null;
}

function zoom(factor, around = (view.from + view.to) / 2) {
  const wide = Math.min(Math.max((view.to - view.from) * factor, 1e-5), seconds * 1.02);
  const left = around - ((around - view.from) / (view.to - view.from)) * wide;
  view.from = Math.min(Math.max(left, 0), seconds * 1.02 - wide);
  view.to = view.from + wide;
  draw();
}

function move(time, lines) {
  const by = Math.min(Math.max(time, -view.from), seconds * 1.02 - view.to);
  view.from += by;
  view.to += by;
  view.top = Math.min(Math.max(view.top + lines, 0), lanes.length - shown());
  draw();
}

function all() {
  Object.assign(view, { from: 0, to: seconds * 1.02, top: 0 });
  draw();
}

canvas.addEventListener("wheel", (event) => {
  const scale = (view.to - view.from) / (width() - GUTTER);
  const sideways = event.shiftKey ? event.deltaY : event.deltaX;
  if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 200), at(event.offsetX));
  else if (sideways) move(sideways * scale, 0);
  else if (lanes.length > shown()) move(0, event.deltaY / LANE);
  else return;
  event.preventDefault();
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  let { clientX, clientY } = event;
  let moved = false;
  canvas.setPointerCapture(event.pointerId);
  const follow = (next) => {
    moved ||= Math.abs(next.clientX - event.clientX) + Math.abs(next.clientY - event.clientY) > 4;
    const scale = (view.to - view.from) / (width() - GUTTER);
    if (moved) move((clientX - next.clientX) * scale, (clientY - next.clientY) / LANE);
    ({ clientX, clientY } = next);
  };
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerup", (end) => {
    canvas.removeEventListener("pointermove", follow);
    if (!moved) choose(under(end));
  }, { once: true });
});

canvas.addEventListener("pointermove", (event) => {
  const span = under(event);
  canvas.style.cursor = span ? "pointer" : "default";
  canvas.title = span ? `${span.kind} ${span.name ?? ""}: ${told(span)}` : "";
});

/** The span of another lane, in the direction of `step`, that is nearest in time. */
function beside(step) {
  for (let index = chosen.lane + step; lanes[index]; index += step) {
    const near = [...lanes[index].spans].sort((a, b) => Math.abs(a.start - chosen.start) - Math.abs(b.start - chosen.start));
    if (near.length) return near[0];
  }
  return chosen;
}

const KEYS = {
  ArrowRight: () => choose(spans[Math.min(spans.indexOf(chosen) + 1, spans.length - 1)]),
  ArrowLeft: () => choose(spans[Math.max(spans.indexOf(chosen) - 1, 0)]),
  ArrowDown: () => choose(chosen ? beside(1) : spans[0]),
  ArrowUp: () => choose(chosen ? beside(-1) : spans[0]),
  Home: () => choose(spans[0]),
  End: () => choose(spans.at(-1)),
  PageDown: () => move(0, shown()),
  PageUp: () => move(0, -shown()),
  Escape: () => choose(null),
};
canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || !spans.length) return;
  event.preventDefault();
  KEYS[event.key]();
});

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  colours = {};
  draw();
}

const closer = () => zoom(0.5, chosen ? (chosen.start + chosen.end) / 2 : undefined);
const farther = () => zoom(2);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { t: theme, 0: all, "+": closer, "=": closer, "-": farther }[event.key];
  if (act) act();
});
$("theme").addEventListener("click", theme);
$("whole").addEventListener("click", all);
$("in").addEventListener("click", closer);
$("out").addEventListener("click", farther);
$("all").addEventListener("toggle", table, { once: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = {};
  draw();
});

$("program").textContent = run.program;
$("model").textContent = run.model;
facts();
tell();
new ResizeObserver(size).observe(canvas);
