// The frame: views, keyboard, colours, the key, and whether the server answers.

import { ApiError, getJson, hasKey, setKey, setModel } from "./api.js";
import { Load } from "./load.js";
import { Playground } from "./playground.js";
import { TreeView } from "./tree.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["play", "tree", "load"];
const POLL_MS = 1000;
const MODEL = "rootlace-model";

function say(text) {
  if ($("state").textContent !== text) $("state").textContent = text;
}

/** Tells what keeps the page from the server; asks for the key where that is it. */
function report(error) {
  if (error instanceof ApiError && error.status === 401) {
    say(hasKey() ? "The API key is wrong." : "An API key is needed.");
    // Once: who has closed it would not be rid of it otherwise.
    if ($("ask-key").hidden) $("key-dialog").showModal();
    $("ask-key").hidden = false;
  } else {
    say(error.message);
  }
}

const play = new Playground(report);
const views = { play, tree: new TreeView(report), load: new Load(report) };
let shown = "play";

function show(name) {
  shown = name;
  for (const view of VIEWS) {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", String(view === name));
  }
  history.replaceState(null, "", `#${name}`);
  views[name].shown?.();
  poll();
}

let polling = false;

async function poll() {
  if (polling || document.hidden) return;
  polling = true;
  if (!models.length) await begin();
  // The charts go on while another view is looked at, and while it cannot be shown.
  const asked = [views[shown].refresh?.(), shown !== "load" && views.load.sample()];
  const { reason } = (await Promise.allSettled(asked)).find(({ reason }) => reason) ?? {};
  if (reason) report(reason);
  else if (models.length) say("");
  // What answers after it did not may serve another model.
  if (reason?.status === 0) models = [];
  polling = false;
}

async function begin() {
  try {
    const { data } = await getJson("v1/models");
    models = data;
    const before = $("model").value || sessionStorage.getItem(MODEL);
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === before)));
    $("model").disabled = data.length === 1;
    choose();
  } catch (error) {
    report(error);
  }
}

let models = [];

/** Look at the chosen model; its adapters share its cache and its load. */
function choose() {
  const card = models[$("model").selectedIndex];
  play.of(card);
  sessionStorage.setItem(MODEL, card.id);
  const name = models.some(({ id }) => id === card.parent) ? card.parent : card.id;
  const several = models.filter(({ parent }) => !parent).length > 1;
  const of = several ? name : "";
  setModel(of);
  if (views.load.model === of) return;
  views.load.of(of);
  views.tree.other();
}

function theme(next) {
  const root = document.documentElement;
  root.dataset.theme = next;
  localStorage.setItem("rootlace-theme", next);
  views.tree.draw();
}

$("model").addEventListener("change", () => {
  choose();
  poll();
});
for (const view of VIEWS) $(`tab-${view}`).addEventListener("click", () => show(view));
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  theme(now === "dark" ? "light" : "dark");
});
$("ask-key").addEventListener("click", () => $("key-dialog").showModal());
$("key-dialog").addEventListener("submit", () => {
  if (!$("key").value) return;
  setKey($("key").value);
  $("key").value = "";
  $("ask-key").hidden = true;
  models = [];
  poll();
});
document.querySelector("nav").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const next = VIEWS.at((VIEWS.indexOf(shown) + step) % VIEWS.length);
  show(next);
  $(`tab-${next}`).focus();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (shown === "play") play.send();
  } else if (event.key === "Escape") play.stop();
  else if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  else if (["1", "2", "3"].includes(event.key)) show(VIEWS[Number(event.key) - 1]);
  else if (event.key === "t") $("theme").click();
  else if (event.key === "0" && shown === "tree") views.tree.whole();
});

const kept = localStorage.getItem("rootlace-theme");
if (kept) document.documentElement.dataset.theme = kept;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.tree.draw());
show(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "play");
setInterval(poll, POLL_MS);
