// The live radix tree: positions to the right, one line for each end of a path. Drawn on a canvas,
// so that thousands of nodes move smoothly.

import { getJson, ofModel } from "./api.js";
import { stepOf } from "./load.js";

const $ = (id) => document.getElementById(id);
const LIMIT = 2000;
const LINE = 18; // height of a line at zoom 1
const AXIS = 20; // height of the axis, above the tree
const FADE_MS = 900;

/** Lines for all nodes: a node stands beside its first child. Returns how many lines there are. */
export function layOut(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const below = new Map();
  const roots = [];
  for (const node of nodes) {
    const parent = byId.get(node.parent);
    if (parent) (below.get(parent) ?? below.set(parent, []).get(parent)).push(node);
    else roots.push(node);
  }
  let line = 0;
  const place = (top) => {
    // Without recursion: a path may be thousands of nodes deep.
    const stack = [[top, false]];
    while (stack.length) {
      const [node, done] = stack.pop();
      const children = below.get(node) ?? [];
      if (done) {
        node.lines = line - node.line;
        continue;
      }
      node.line = line;
      if (!children.length) {
        line += 1;
        node.lines = 1;
        continue;
      }
      stack.push([node, true]);
      for (const child of [...children].reverse()) stack.push([child, false]);
    }
  };
  roots.forEach(place);
  return line;
}

export class TreeView {
  constructor(report) {
    this.report = report;
    this.nodes = [];
    this.gone = []; // evicted nodes, with the time at which they went
    this.lines = 1;
    this.longest = 1;
    this.usual = 1;
    this.view = null; // { x, y, sx, sy }: the place at the upper left, pixels per token and per line
    this.chosen = 0;
    this.canvas = $("canvas");
    this.frame = 0;
    $("whole").addEventListener("click", () => this.whole());
    $("salt").addEventListener("change", () => {
      this.other();
      this.refresh(true).catch(report);
    });
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  shown() {
    this.draw();
  }

  /** What it shows next are other nodes, and none of these was evicted. */
  other() {
    this.nodes = [];
    this.chosen = 0;
    $("tree-sum").textContent = "";
    this.tell();
    this.draw();
  }

  async refresh(always = false) {
    if (!always && !$("follow").checked && this.nodes.length) return;
    const query = new URLSearchParams({ limit: LIMIT });
    if ($("salt").value) query.set("namespace", $("salt").value);
    this.take(await getJson(ofModel(`cache/tree?${query}`)));
  }

  take(page) {
    const now = performance.now();
    const ids = new Set(page.nodes.map((node) => node.id));
    // A node that fell off the page is not gone: only what a whole page lacks was evicted.
    const complete = page.complete !== false; // what is so by default is left out
    if (complete) {
      for (const node of this.nodes) if (!ids.has(node.id)) this.gone.push({ ...node, at: now });
    }
    const before = new Set(this.nodes.map((node) => node.id));
    this.nodes = page.nodes;
    if (before.size) for (const node of this.nodes) if (!before.has(node.id)) node.born = now;
    this.lines = Math.max(layOut(this.nodes), 1);
    const ends = this.nodes.filter((node) => node.lines === 1).map((node) => node.end);
    ends.sort((a, b) => a - b);
    this.longest = Math.max(ends.at(-1) ?? 1, 1);
    this.usual = Math.max(1.05 * (ends[Math.floor(0.95 * ends.length)] ?? 1), 1);
    const total = page.total ?? null;
    const count = counted(total ?? page.nodes.length, "node");
    const tokens = total === null ? "" : `, ${page.tokens.toLocaleString()} tokens`;
    const shown = complete ? "" : `, ${page.nodes.length.toLocaleString()} shown`;
    $("tree-sum").textContent = count + tokens + shown;
    this.tell();
    this.draw();
  }

  whole() {
    this.view = this.fitting(this.longest);
    this.draw();
  }

  // ---------------------------------------------------------------- drawing

  /** Where to look: until somebody moves, so that all but a few long paths fit. */
  place() {
    return this.view ?? this.fitting(Math.min(this.usual, this.longest));
  }

  fitting(tokens) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const sy = Math.min(LINE, Math.max((height - AXIS - 4) / this.lines, 0.5));
    return { x: 0, y: 0, sx: (width - 12) / tokens, sy };
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const canvas = this.canvas;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const dark = isDark(getComputedStyle(document.body).backgroundColor);
    const ink = getComputedStyle(document.body).color;
    const view = this.place();
    const now = performance.now();
    pen.font = "11px ui-monospace, monospace";
    pen.textBaseline = "middle";
    this.axis(pen, view, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height);
    pen.clip();
    for (const node of this.nodes) {
      const alpha = node.born ? Math.min((now - node.born) / FADE_MS, 1) : 1;
      this.box(pen, view, node, alpha, dark, ink, width, height);
    }
    this.gone = this.gone.filter((node) => now - node.at < FADE_MS);
    for (const node of this.gone) {
      this.box(pen, view, node, 1 - (now - node.at) / FADE_MS, dark, ink, width, height, true);
    }
    pen.restore();
    const moving = this.gone.length || this.nodes.some((node) => node.born && now - node.born < FADE_MS);
    if (moving && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.draw();
  }

  /** The positions of tokens, above the tree. */
  axis(pen, view, width, height) {
    const step = Math.max(stepOf(90 / view.sx), 1);
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.globalAlpha = 0.6;
    for (let token = Math.ceil(Math.max(view.x, 0) / step) * step; ; token += step) {
      const x = (token - view.x) * view.sx + 6;
      if (x > width) break;
      const text = token ? token.toLocaleString("en") : "0 tokens";
      if (x + pen.measureText(text).width + 4 < width) pen.fillText(text, x + 4, AXIS / 2);
      pen.fillRect(Math.round(x), 4, 1, AXIS - 4);
    }
    pen.globalAlpha = 1;
  }

  box(pen, view, node, alpha, dark, ink, width, height, gone = false) {
    const x = (node.start - view.x) * view.sx + 6;
    const y = (node.line - view.y) * view.sy + AXIS;
    const w = Math.max((node.end - node.start) * view.sx - 1, 1);
    const h = Math.max(Math.min(node.lines * view.sy, node.lines * view.sy - 1), 0.5);
    if (x > width || y > height || x + w < 0 || y + h < AXIS) return;
    pen.globalAlpha = alpha;
    pen.fillStyle = gone ? "#b04a3a" : heat(node.idle_seconds ?? 0, dark);
    pen.fillRect(x, y, w, h);
    if (node.requests?.length || node.id === this.chosen) {
      pen.lineWidth = node.id === this.chosen ? 2 : 1.5;
      pen.strokeStyle = node.id === this.chosen ? ink : dark ? "#ffd479" : "#b36b00";
      pen.strokeRect(x, y, w, h);
    }
    if (h >= 11 && w > 30 && !gone) {
      pen.save();
      pen.beginPath();
      pen.rect(x, y, w, h);
      pen.clip();
      pen.fillStyle = ink;
      const text = (node.head_text ?? "").replace(/\s+/g, " ");
      pen.fillText(text, Math.max(x, 0) + 4, Math.max(y, AXIS) + Math.min(h, LINE) / 2);
      pen.restore();
    }
    pen.globalAlpha = 1;
  }

  // ---------------------------------------------------------------- moving about

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const view = this.place();
    const position = (event.clientX - box.left - 6) / view.sx + view.x;
    const line = (event.clientY - box.top - AXIS) / view.sy + view.y;
    return { position, line };
  }

  /** By the wheel, about the pointer; by a key, about the middle. */
  zoom(event) {
    event.preventDefault();
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const wheel = event.type === "wheel";
    const { position, line } = this.at(wheel ? event : { clientX: left + width / 2, clientY: top + height / 2 });
    const view = this.place();
    const factor = wheel ? Math.exp(-event.deltaY / 300) : event.key === "-" ? 0.67 : 1.5;
    const sx = Math.min(Math.max(view.sx * factor, 1e-4), 60);
    const sy = event.shiftKey ? view.sy : Math.min(Math.max(view.sy * factor, 0.5), 4 * LINE);
    this.view = {
      x: position - ((position - view.x) * view.sx) / sx,
      y: line - ((line - view.y) * view.sy) / sy,
      sx,
      sy,
    };
    this.draw();
  }

  grab(event) {
    const from = { x: event.clientX, y: event.clientY, view: this.place() };
    let moved = false;
    const move = (next) => {
      const dx = next.clientX - from.x;
      const dy = next.clientY - from.y;
      moved ||= Math.abs(dx) + Math.abs(dy) > 4;
      if (!moved) return;
      const { x, y, sx, sy } = from.view;
      this.view = { x: x - dx / sx, y: y - dy / sy, sx, sy };
      this.draw();
    };
    const drop = (last) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", drop);
      if (!moved) this.choose(this.hit(last));
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", drop);
  }

  hit(event) {
    const { position, line } = this.at(event);
    return this.nodes.find(
      (node) =>
        node.start <= position && position < node.end && node.line <= line && line < node.line + node.lines,
    );
  }

  key(event) {
    if (["+", "=", "-"].includes(event.key)) this.zoom(event);
    const node = this.nodes.find((one) => one.id === this.chosen) ?? this.nodes[0];
    if (!node) return;
    const siblings = this.nodes.filter((one) => one.parent === node.parent).sort((a, b) => a.line - b.line);
    const at = siblings.indexOf(node);
    const next = {
      ArrowLeft: () => this.nodes.find((one) => one.id === node.parent),
      ArrowRight: () => this.nodes.filter((one) => one.parent === node.id).sort((a, b) => a.line - b.line)[0],
      ArrowUp: () => siblings[at - 1],
      ArrowDown: () => siblings[at + 1],
    }[event.key];
    if (!next) return;
    event.preventDefault();
    this.choose(next() ?? node);
    this.reveal(next() ?? node);
  }

  /** Moves as little as shows where a node begins. */
  reveal(node) {
    const { x, y, sx, sy } = this.place();
    const tokens = (this.canvas.clientWidth - 40) / sx;
    const lines = Math.max((this.canvas.clientHeight - AXIS) / sy - 1, 0);
    const near = (at, from, wide) => Math.min(Math.max(from, at - wide), Math.max(at, 0));
    const seen = { x: near(node.start, x, tokens), y: near(node.line, y, lines) };
    if (seen.x !== x || seen.y !== y) this.view = { ...seen, sx, sy };
  }

  choose(node) {
    this.chosen = node?.id ?? 0;
    this.tell();
    this.draw();
  }

  tell() {
    const node = this.nodes.find((one) => one.id === this.chosen);
    const [facts, words] = $("node").children;
    if (!node) {
      facts.textContent = words.textContent = "";
      return;
    }
    const said = [
      `tokens ${node.start.toLocaleString()} to ${node.end.toLocaleString()}`,
      counted(node.blocks, "block"),
      counted(node.children, "continuation"),
      `used ${counted(node.uses, "time")}, ${(node.idle_seconds ?? 0).toFixed(0)} s ago`,
    ];
    if (node.requests?.length) said.push(`held by ${counted(node.requests.length, "running request")}`);
    if (node.programs?.length) said.push(`programs ${node.programs.join(", ")}`);
    if (node.namespace) said.push(`cache salt ${node.namespace}`);
    if (node.adapter) said.push(`adapter ${node.adapter}`);
    const text = (node.head_text ?? "") + (node.tail_text ? ` … ${node.tail_text}` : "");
    facts.textContent = said.join(" · ");
    if (words.textContent !== text) words.textContent = text; // else what is selected of it stays so
  }
}

const counted = (count = 0, what) => `${count.toLocaleString()} ${what}${count === 1 ? "" : "s"}`;

/** Warm for what was used just now, cold for what was not used for minutes. */
function heat(seconds, dark) {
  const age = Math.min(Math.log1p(seconds) / Math.log1p(600), 1);
  const hue = 45 + 160 * age;
  return dark ? `hsl(${hue} ${45 - 20 * age}% ${34 - 10 * age}%)` : `hsl(${hue} ${80 - 45 * age}% ${72 + 12 * age}%)`;
}

function isDark(color) {
  const [r, g, b] = color.match(/[\d.]+/g).map(Number);
  return 0.3 * r + 0.6 * g + 0.1 * b < 128;
}
