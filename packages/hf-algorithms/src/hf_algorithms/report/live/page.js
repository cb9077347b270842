// The page asks what changed, fetches the parts that did, and keeps what the reader chose in the address.
// Every part is drawn by the server; a button says in data-set which choices it changes.
"use strict";

const PARTS = {
  health: ["runs"],
  curves: ["runs", "axis", "filter"],
  samples: ["run", "iteration", "set", "reward", "bin", "page", "row"],
  sample: ["run", "iteration", "set", "reward", "row", "colouring"],
  compare: ["runs"],
  gantt: ["run", "iteration"],
};
const AXES = ["iteration", "tokens", "seconds"];
const POLL_MS = 2000;
// Of a chart's width: where its plot begins and ends; see hf_protocols/drawing/curves.py.
const PLOT = [40 / 360, 350 / 360];

const chosen = new URLSearchParams(location.hash.slice(1));
const drawn = {};
let runs = [];
let versions = "";
let answers = true;

const element = (id) => document.getElementById(id);
const value = (name) => chosen.get(name) || "";

function change(values) {
  for (const [name, next] of Object.entries(values)) {
    if (next === "" || next === null) chosen.delete(name);
    else chosen.set(name, next);
  }
  history.replaceState(null, "", "#" + chosen.toString());
  drawChoices();
  return loadParts(Object.keys(values));
}

function loadParts(names) {
  const touched = Object.keys(PARTS).filter((part) => !names || PARTS[part].some((name) => names.includes(name)));
  return Promise.all(touched.map(loadPart));
}

async function loadPart(part) {
  const query = new URLSearchParams();
  for (const name of PARTS[part]) if (value(name)) query.set(name, value(name));
  const address = `parts/${part}?${query}`;
  const place = element(part);
  place.dataset.address = address;
  let text;
  try {
    const response = await fetch(address);
    text = await response.text();
    if (!response.ok) text = { refused: text };
    setAnswers(true);
  } catch {
    setAnswers(false);
    return;
  }
  if (place.dataset.address !== address) return; // the reader chose something else meanwhile
  replacePart(part, place, text);
}

function replacePart(part, place, text) {
  if (text.refused !== undefined) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = text.refused;
    place.replaceChildren(note);
    drawn[part] = undefined;
    return;
  }
  if (drawn[part] === text) return;
  drawn[part] = text;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const key = focused && (focused.dataset.key || focused.dataset.set);
  const open = [...place.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  place.innerHTML = text; // every text in it was escaped by the server
  for (const summary of place.querySelectorAll("details > summary"))
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  if (key) {
    const again = [...place.querySelectorAll("[data-key], [data-set]")].find(
      (each) => (each.dataset.key || each.dataset.set) === key,
    );
    if (again) again.focus({ preventScroll: true });
  }
}

function setAnswers(does) {
  if (answers === does) return;
  answers = does;
  drawNotes();
}

async function poll() {
  try {
    const response = await fetch("state");
    runs = (await response.json()).runs;
    setAnswers(true);
  } catch {
    setAnswers(false);
    return;
  }
  drawChoices();
  drawNotes();
  const now = JSON.stringify(runs.map((run) => run.version));
  if (now !== versions) {
    versions = now;
    await loadParts();
  }
}

function shownRuns() {
  const text = value("runs");
  return text ? text.split(",").map(Number).filter((index) => index < runs.length) : runs.map((run) => run.index);
}

function toggleRun(index) {
  const shown = shownRuns();
  const next = shown.includes(index) ? shown.filter((each) => each !== index) : [...shown, index].sort((a, b) => a - b);
  if (next.length) change({ runs: next.length === runs.length ? "" : next.join(",") });
}

function makeButton(text, set, key, pressed) {
  const button = document.createElement("button");
  button.textContent = text;
  button.dataset.set = set;
  button.dataset.key = key;
  button.setAttribute("aria-pressed", String(pressed));
  return button;
}

function drawChoices() {
  element("title").textContent = runs.length === 1 ? runs[0].name : "Runs";
  document.title = runs.length ? runs.map((run) => run.name).join(", ") + " - HybridFlow" : "HybridFlow runs";
  const shown = shownRuns();
  keepFocus(element("runs"), runs.map(drawRun(shown)));
  const focus = Number(value("run") || 0);
  for (const place of document.querySelectorAll(".focus")) {
    const buttons = runs.map((run) => {
      const button = makeButton(run.name, `run=${run.index || ""}&row=&bin=&page=`, "focus" + run.index, run.index === focus);
      button.classList.add("c" + run.colour);
      return button;
    });
    keepFocus(place, runs.length > 1 ? buttons : []);
  }
  const axis = value("axis") || "iteration";
  for (const button of element("axes").children)
    button.setAttribute("aria-pressed", String(button.dataset.set === "axis=" + axis));
  for (const [id, name] of [["filter", "filter"], ["iteration", "iteration"]])
    if (document.activeElement !== element(id)) element(id).value = value(name);
}

function drawRun(shown) {
  return (run) => {
    const button = document.createElement("button");
    button.className = "c" + run.colour;
    button.dataset.toggle = run.index;
    button.dataset.key = "run" + run.index;
    button.setAttribute("aria-pressed", String(shown.includes(run.index)));
    const name = document.createElement("b");
    name.textContent = run.name;
    const detail = document.createElement("small");
    const parts = [run.algorithm, run.state, run.iteration ? `iteration ${run.iteration}` : "", run.detail];
    detail.textContent = parts.filter(Boolean).join(", ");
    button.append(document.createElement("i"), name, detail);
    return button;
  };
}

// Puts other elements in a place, unless they are the same; the one that has the focus keeps it.
function keepFocus(place, elements) {
  const before = [...place.children].map((each) => each.outerHTML).join("");
  if (before === elements.map((each) => each.outerHTML).join("")) return;
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  place.replaceChildren(...elements);
  const again = key && elements.find((each) => each.dataset.key === key);
  if (again) again.focus({ preventScroll: true });
}

function drawNotes() {
  const several = runs.length > 1;
  const texts = runs.flatMap((run) => run.notes.map((note) => (several ? `${run.name}: ${note}` : note)));
  if (!answers) texts.unshift("The server does not answer: hybridflow serve has ended. What is shown is what it said last.");
  const notes = texts.map((text) => {
    const note = document.createElement("p");
    note.className = "warning";
    note.textContent = text;
    return note;
  });
  element("notes").replaceChildren(...notes);
}

function applySet(text, inside) {
  const values = Object.fromEntries(new URLSearchParams(text));
  // What the reader looks into stays, though newer samples come.
  const shown = document.querySelector("#samples [data-iteration]");
  if (inside && shown && !value("iteration") && values.iteration === undefined) values.iteration = shown.dataset.iteration;
  return change(values);
}

async function openRow(card) {
  await applySet(card.dataset.set, true);
  element("sample").scrollIntoView({ block: "nearest" });
}

function pickIteration(svg, event) {
  const box = svg.getBoundingClientRect();
  const share = ((event.clientX - box.left) / box.width - PLOT[0]) / (PLOT[1] - PLOT[0]);
  const [low, high] = [Number(svg.dataset.low), Number(svg.dataset.high)];
  const iteration = Math.round(low + Math.min(Math.max(share, 0), 1) * (high - low));
  change({ iteration: String(iteration), row: "", bin: "", page: "" });
  element("samples-section").scrollIntoView({ block: "start" });
}

function showToken(token) {
  for (const other of document.querySelectorAll(".tok.now")) other.classList.remove("now");
  token.classList.add("now");
  document.querySelector(".token-line").textContent = token.title;
  token.scrollIntoView({ block: "nearest" });
}

function moveToken(step) {
  const tokens = [...document.querySelectorAll(".tok")];
  const now = tokens.findIndex((token) => token.classList.contains("now"));
  const next = tokens[Math.min(Math.max(now + step, 0), tokens.length - 1)];
  if (next) showToken(next);
}

function moveRow(step) {
  const cards = [...document.querySelectorAll(".card")];
  const now = cards.findIndex((card) => card.dataset.row === value("row"));
  const next = cards[now < 0 ? 0 : now + step];
  if (next) openRow(next);
}

function cycle(buttons) {
  const now = buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true");
  const next = buttons[(now + 1) % buttons.length];
  if (next) applySet(next.dataset.set, next.closest("#sample") !== null);
}

const KEYS = {
  n: () => document.querySelector('[data-key="after"]')?.click(),
  p: () => document.querySelector('[data-key="before"]')?.click(),
  j: () => moveRow(1),
  k: () => moveRow(-1),
  c: () => cycle([...document.querySelectorAll(".colourings button")]),
  x: () => change({ axis: AXES[(AXES.indexOf(value("axis") || "iteration") + 1) % AXES.length] }),
  f: () => element("filter").focus(),
  r: () => cycle([...document.querySelector(".focus").children]),
  l: () => document.querySelector('[data-key="latest"]').click(),
  Escape: () => change({ row: "" }),
  "?": () => element("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || element("keys").open) return;
  if (event.target.matches("input")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const inTokens = event.target.matches(".tokens");
  if (inTokens && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    event.preventDefault();
    moveToken(event.key === "ArrowRight" ? 1 : -1);
  } else if (/^[1-9]$/.test(event.key) && Number(event.key) <= runs.length) {
    toggleRun(Number(event.key) - 1);
  } else if (KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.toggle !== undefined) toggleRun(Number(button.dataset.toggle));
  else if (button?.classList.contains("card")) openRow(button);
  else if (button?.dataset.set !== undefined) applySet(button.dataset.set, button.closest("#samples, #sample") !== null);
  else if (button?.id === "open-keys") element("keys").showModal();
  else if (event.target.matches(".tok")) showToken(event.target);
  else if (event.target.closest(".curve svg") && (value("axis") || "iteration") === "iteration")
    pickIteration(event.target.closest("svg"), event);
});

element("filter").addEventListener("input", (event) => change({ filter: event.target.value.trim() }));
element("iteration").addEventListener("change", (event) => {
  if (/^\d*$/.test(event.target.value.trim())) change({ iteration: event.target.value.trim(), row: "", bin: "", page: "" });
});

async function watch() {
  if (!document.hidden) await poll();
  setTimeout(watch, POLL_MS);
}
watch();
