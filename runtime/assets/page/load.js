// Load: figures over the last minutes, made of the server's counters; and what was noticed of prompts.

import { getJson, getText, ofModel } from "./api.js";

const $ = (id) => document.getElementById(id);
const KEPT = 300; // samples, one a second
const SHORTEST = 45; // the chart is at least so many wide

const FIGURES = [
  { name: "Tokens generated per second", of: (a, b, s) => [(b.output_tokens + b.forced_tokens - a.output_tokens - a.forced_tokens) / s] },
  {
    name: "Prompt tokens per second",
    legend: "computed, dashed: cached",
    of: (a, b, s) => [(b.computed_tokens - a.computed_tokens) / s, (b.cached_tokens - a.cached_tokens) / s],
  },
  {
    name: "Hit rate, %",
    of: (a, b) => {
      const cached = b.cached_tokens - a.cached_tokens;
      const all = cached + b.computed_tokens - a.computed_tokens;
      return [all ? (100 * cached) / all : null];
    },
  },
  { name: "Requests", legend: "running, dashed: waiting", of: (a, b) => [b.running, b.waiting] },
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
    this.series = FIGURES.map(() => []);
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
    const now = performance.now() / 1000;
    if (last) {
      const seconds = Math.max(now - last.now, 0.001);
      FIGURES.forEach((figure, at) => {
        const values = figure.of(last.status, status, seconds);
        this.series[at].push(values.map((value) => (Number.isFinite(value) ? value : null)));
        if (this.series[at].length > KEPT) this.series[at].shift();
      });
    }
    this.last = { now, status };
  }

  async refresh() {
    await this.sample();
    this.charts.forEach((chart, at) => chart.draw(this.series[at]));
    const { findings } = await getJson(ofModel("cache/lint"));
    const says = findings.map((one) => `${one.tokens_lost.toLocaleString()} tokens computed again: ${one.says}`);
    $("lint").replaceChildren(
      ...(says.length ? says : ["Nothing was noticed."]).map((text) => {
        const item = document.createElement("li");
        item.textContent = text;
        return item;
      }),
    );
  }
}

class Chart {
  constructor(figure) {
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = figure.name;
    const legend = document.createElement("small");
    legend.textContent = figure.legend ?? "";
    name.append(legend);
    this.now = document.createElement("b");
    caption.append(name, this.now);
    const make = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
    const svg = make("svg");
    this.svg = svg;
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", figure.name);
    this.lines = [make("path"), make("path")];
    this.lines[0].setAttribute("class", "line");
    this.lines[1].setAttribute("class", "line second");
    svg.append(...this.lines);
    this.figure.append(caption, svg);
  }

  draw(series) {
    const most = Math.max(...series.flat().map((value) => value ?? 0), 1e-9);
    const width = Math.max(series.length, SHORTEST);
    this.svg.setAttribute("viewBox", `0 0 ${width} 100`);
    this.lines.forEach((line, which) => {
      let path = "";
      let pen = "M";
      series.forEach((values, at) => {
        const value = values[which];
        if (value === null || value === undefined) {
          pen = "M";
          return;
        }
        path += `${pen}${width - series.length + at} ${98 - (94 * value) / most}`;
        pen = "L";
      });
      line.setAttribute("d", path);
    });
    const latest = series.at(-1)?.[0];
    const text = latest === null || latest === undefined ? "–" : format(latest);
    this.now.textContent = `${text} (to ${format(most)})`;
  }
}

function format(value) {
  if (value < 1e-6) return "0";
  return value >= 100 ? Math.round(value).toLocaleString() : value.toPrecision(3);
}
