// Load: figures over the last minutes, made of the server's counters; and what was noticed of prompts.

import { getJson, getText, ofModel } from "./api.js";

const $ = (id) => document.getElementById(id);
const KEPT = 300; // seconds
const SHORTEST = 45; // seconds that the chart is at least wide
const GAP = 10; // seconds without a sample (the tab was hidden, the server away) after which a line breaks
const LEFT = 44; // pixels for the figures of the axis, as the next two for their halves and for the times
const TOP = 8;
const BOTTOM = 18;

const FIGURES = [
  { name: "Tokens generated per second", of: (a, b, s) => [(b.output_tokens + b.forced_tokens - a.output_tokens - a.forced_tokens) / s] },
  {
    name: "Prompt tokens per second",
    legend: "computed, dashed: cached",
    of: (a, b, s) => [(b.computed_tokens - a.computed_tokens) / s, (b.cached_tokens - a.cached_tokens) / s],
  },
  {
    name: "Hit rate, %",
    top: 100,
    of: (a, b) => {
      const cached = b.cached_tokens - a.cached_tokens;
      const all = cached + b.computed_tokens - a.computed_tokens;
      return [all ? (100 * cached) / all : null];
    },
  },
  { name: "Requests", step: 1, legend: "running, dashed: waiting", of: (a, b) => [b.running, b.waiting] },
  {
    name: "First token, ms",
    of: (a, b) => {
      const count = b.first_token_count - a.first_token_count;
      return [count ? (1000 * (b.first_token_seconds - a.first_token_seconds)) / count : null];
    },
  },
  {
    name: "Blocks in use, %",
    legend: "cached or needed, dashed: needed",
    of: (a, b) => [(100 * (b.blocks_total - b.blocks_free)) / b.blocks_total, (100 * b.blocks_used) / b.blocks_total],
  },
];

export class Load {
  constructor() {
    this.of("");
    this.charts = FIGURES.map((figure) => new Chart(figure));
    $("charts").append(...this.charts.map((chart) => chart.figure));
  }

  /** From now on, of the model of this name ("": the server's only one). */
  of(model) {
    this.model = model;
    this.last = null;
    this.samples = []; // { now, values }: seconds since 1970, and for each figure those of its lines
  }

  async sample() {
    const { last, model } = this;
    this.last = null; // a server or model that fails to answer may count from 0 when it does again
    const { status } = await getJson(ofModel("get_server_info"));
    const metrics = await getText("metrics");
    if (model !== this.model) return; // another one was chosen meanwhile
    const label = model ? `{model="${model}"}` : "";
    const figure = (name) => {
      const line = metrics.split("\n").find((one) => one.startsWith(`rootlace_${name}${label} `));
      return Number(line?.slice(line.lastIndexOf(" ")));
    };
    status.first_token_seconds = figure("time_to_first_token_seconds_sum");
    status.first_token_count = figure("time_to_first_token_seconds_count");
    const now = (performance.timeOrigin + performance.now()) / 1000;
    if (last && now - last.now < GAP) {
      const seconds = Math.max(now - last.now, 0.001);
      const values = FIGURES.map((figure) => figure.of(last.status, status, seconds));
      this.samples.push({ now, values });
      while (this.samples[0].now < now - KEPT) this.samples.shift();
    }
    this.last = { now, status };
  }

  async refresh() {
    await this.sample();
    this.charts.forEach((chart, at) => chart.draw(this.samples.map(({ now, values }) => ({ now, values: values[at] }))));
    const { findings } = await getJson(ofModel("cache/lint"));
    const says = findings.map((one) => `${one.tokens_lost.toLocaleString()} tokens computed again: ${one.says}`);
    const items = (says.length ? says : ["Nothing was noticed."]).map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    });
    // Only where there is something new: what somebody has selected stays selected.
    const shown = [...$("lint").children].map((item) => item.textContent);
    if (JSON.stringify(shown) !== JSON.stringify(items.map((item) => item.textContent))) {
      $("lint").replaceChildren(...items);
    }
  }
}

const make = (tag, attributes = {}, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
};

/** A step of an axis: 1, 2 or 5 times a power of ten, not below `least`. */
export const stepOf = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least * 0.999);
};

/** One figure over time: lines, the values at the left, the times of day below. */
export class Chart {
  constructor(figure) {
    this.of = figure;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = figure.name;
    const legend = document.createElement("small");
    legend.textContent = figure.legend ?? "";
    name.append(legend);
    this.told = document.createElement("b");
    caption.append(name, this.told);
    this.svg = make("svg", { role: "img" });
    this.axes = make("g", { class: "axes" });
    this.lines = [make("path", { class: "line" }), make("path", { class: "line second" })];
    this.svg.append(this.axes, ...this.lines);
    this.figure.append(caption, this.svg);
    this.pointer = null; // where it is, of the chart's width
    this.svg.addEventListener("pointermove", (event) => {
      this.pointer = event.clientX - this.svg.getBoundingClientRect().left;
      this.tell();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.tell();
    });
    new ResizeObserver(() => this.samples && this.draw(this.samples)).observe(this.svg);
  }

  draw(samples) {
    this.samples = samples;
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width) return;
    const last = samples.at(-1)?.now ?? (performance.timeOrigin + performance.now()) / 1000;
    const span = Math.max(last - (samples[0]?.now ?? last), SHORTEST);
    const highest = Math.max(...samples.flatMap(({ values }) => values.filter(Number.isFinite)), 0);
    const step = Math.max(stepOf((this.of.top ?? (highest || 1)) / 4), this.of.step ?? 0);
    const top = this.of.top ?? Math.max(Math.ceil(highest / step - 1e-9), 1) * step;
    this.x = (now) => width - 6 - ((last - now) * (width - LEFT - 6)) / span;
    const y = (value) => height - BOTTOM - (value * (height - TOP - BOTTOM)) / top;
    this.axes.replaceChildren();
    for (let value = 0; value <= top * 1.001; value += step) {
      this.axes.append(
        make("path", { d: `M${LEFT} ${y(value)}H${width}` }),
        make("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end", class: "value" }, format(value, step)),
      );
    }
    const fits = Math.max((width - LEFT) / 70, 1);
    const seconds = [5, 10, 15, 20, 30, 60, 120, 300].find((one) => span / one <= fits) ?? 300;
    for (let now = Math.ceil((last - span) / seconds) * seconds; now <= last; now += seconds) {
      // A time is left out where it would not be whole.
      if (this.x(now) < LEFT + 26 || this.x(now) > width - 26) continue;
      this.axes.append(
        make("path", { d: `M${this.x(now)} ${height - BOTTOM}v4` }),
        make("text", { x: this.x(now), y: height - 3, "text-anchor": "middle", class: "time" }, clock(now)),
      );
    }
    this.lines.forEach((line, which) => {
      const found = samples.map(({ now, values }) => ({ now, value: values[which] }));
      const joined = (a, b) => Number.isFinite(a?.value) && Number.isFinite(b?.value) && b.now - a.now < GAP;
      const path = found.filter(({ value }) => Number.isFinite(value)).map((one) => {
        const at = found.indexOf(one);
        const place = `${this.x(one.now).toFixed(1)} ${y(one.value).toFixed(1)}`;
        if (joined(found[at - 1], one)) return `L${place}`;
        // A value that stands alone is a mark: no line would show it.
        return `M${place}` + (joined(one, found[at + 1]) ? "" : "m-2 0l2 -2 2 2 -2 2z");
      }).join("");
      line.setAttribute("d", path);
    });
    this.tell();
  }

  /** The values now, or those that the pointer is at, with their time. */
  tell() {
    const all = this.samples ?? [];
    const far = ({ now }) => Math.abs(this.x(now) - this.pointer);
    const at = this.pointer === null ? all.at(-1) : all.reduce((a, b) => (far(b) < far(a) ? b : a), all[0]);
    const values = (at?.values ?? [null]).map((value) => (Number.isFinite(value) ? format(value) : "–")).join(" / ");
    this.told.textContent = this.pointer === null || !at ? values : `${values} at ${clock(at.now)}`;
    this.svg.setAttribute("aria-label", `${this.of.name}: ${this.told.textContent}`);
  }
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });

/** A value with three digits, or, on an axis of steps, with as many as tell the steps apart. */
function format(value, step) {
  if (step) return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) });
  if (value < 1e-6) return "0";
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}
