"use strict";
// Draws the state from the embedded data, whose form training_view.py describes.
const byId = (id) => document.getElementById(id);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const floats = (text) => new Float32Array(bytes(text).buffer);
const data = JSON.parse(byId("data").textContent);
const palettes = { light: bytes(data.palettes.light), dark: bytes(data.palettes.dark) };
const runs = data.runs.map((run) => ({ ...run, attention: bytes(run.attention), values: floats(run.value_norms),
                                       residuals: floats(run.residual_norms), curves: new Map(run.curves) }));
const dark = matchMedia("(prefers-color-scheme: dark)");
// What is shown; query and key are null where nothing is pointed at, query alone where it is a position.
const state = { run: 0, frame: runs[0].steps.length - 1, layer: 0, head: 0, query: null, key: null };
const current = () => runs[state.run];

// Numbers.

function code(query, key) {
  const { causal, attention, layers, heads, tokens } = current(), size = tokens.length;
  const map = (state.frame * layers + state.layer) * heads + state.head;
  if (!causal) return attention[(map * size + query) * size + key];
  return key > query ? 0 : attention[map * size * (size + 1) / 2 + query * (query + 1) / 2 + key];
}
const weight = (query, key) => (code(query, key) / 255) ** 2 * current().scale;

function norms(name, run = current(), frame = state.frame) {
  const size = run.tokens.length, line = frame * run.layers + state.layer;
  const start = (name === "values" ? line * run.heads + state.head : line) * size;
  return [...run[name].subarray(start, start + size)];
}
// Of all runs and steps, so that a dot that moves has changed.
const allNorms = (name) => runs.filter((run) => state.layer < run.layers && state.head < run.heads)
  .flatMap((run) => run.steps.flatMap((_, frame) => norms(name, run, frame)));

const number = (x) => x === null || x === undefined ? "-"
  : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)));
const mean = (list) => list.length ? list.reduce((a, b) => a + b) / list.length : null;
const median = (list) => list.length ? [...list].sort((a, b) => a - b)[list.length >> 1] : null;
// Steps on a logarithmic axis that begins at step 0; the first step after it of any run is the unit.
const unitStep = Math.min(...runs.flatMap((run) => run.steps.filter((step) => step > 0)), 1e9);
const lastStep = Math.max(...runs.map((run) => run.steps.at(-1))), lastLog = Math.log1p(lastStep / unitStep) || 1;
const stepShare = (step) => Math.log1p(step / unitStep) / lastLog;
const nearest = (step) => current().steps.reduce((best, found, i, steps) =>
  Math.abs(stepShare(found) - stepShare(step)) < Math.abs(stepShare(steps[best]) - stepShare(step)) ? i : best, 0);

function axis(given, mayBeLog) {
  const values = given.filter((x) => x !== null), smaller = (a, b) => Math.min(a, b);
  const least = values.filter((x) => x > 0).reduce(smaller, Infinity);
  let low = values.reduce(smaller, Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const log = mayBeLog && high > data.log_from * least;
  const ticks = [];
  if (log) {
    low = least;
    const few = Math.log10(high / low) < 2.5;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of few ? [1, 2, 5] : [1]) ticks.push(digit * 10 ** power);
  } else {
    if (low > 0 && low < 0.8 * high) low = 0;
    if (high === low) high = low + 1;
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const unit = power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
    for (let i = Math.ceil(low / unit); i * unit <= high * 1.0001; i++) ticks.push(i * unit);
  }
  const share = log ? (x) => Math.log(Math.max(x, low) / low) / Math.log(high / low) : (x) => (x - low) / (high - low);
  return { share, ticks: ticks.filter((tick) => share(tick) >= 0 && share(tick) <= 1.001 && (!log || tick >= low)) };
}

// Drawing. Every chart is as wide as its place, so that letters keep their size.

function add(parent, tag, attributes, text = "") {
  const node = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return parent.appendChild(node);
}

const LEFT = 40;  // of the plots, for the numbers of their axes
const shareAt = (x, width) => (x - LEFT - 6) / (width - LEFT - 12);

function plot(svg, height, yAxis) {
  const width = svg.clientWidth || 300, bottom = height - 20;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const y = (value) => bottom - 4 - (bottom - 12) * yAxis.share(value);
  for (const tick of yAxis.ticks) {
    add(svg, "path", { class: "grid", d: `M${LEFT} ${y(tick)}H${width}` });
    add(svg, "text", { x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end" }, number(tick));
  }
  return { bottom, y, x: (share) => LEFT + 6 + (width - LEFT - 12) * share };
}

const kind = (position) => position === 0 ? "first" : current().triggers[position] ? "trigger" : "other";
const token = (position) => `${current().tokens[position]}${kind(position) === "trigger" ? " (trigger)" : ""}`;

function drawNorms(id, name) {
  const svg = byId(id), values = norms(id), at = state.key, last = Math.max(values.length - 1, 1);
  const { bottom, x, y } = plot(svg, 200, axis(allNorms(id), true));
  for (const group of ["other", "trigger", "first"]) {
    const dots = values.map((value, i) => kind(i) === group ? `M${x(i / last)} ${y(value)}h0` : "");
    add(svg, "path", { class: group, d: dots.join("") });
  }
  if (at !== null) {
    const side = at > last / 2 ? -1 : 1;
    add(svg, "path", { class: "cursor", d: `M${x(at / last)} 4V${bottom}` });
    add(svg, "text", { class: "pointed", x: x(at / last) + 8 * side, y: bottom / 2, "text-anchor": side > 0 ? "start" : "end" },
      `${at}, ${token(at)}: ${number(values[at])}`);
  }
  for (let i = 0; i <= last; i += last > 32 ? 8 : 4)
    add(svg, "text", { x: x(i / last), y: bottom + 15, "text-anchor": "middle" }, i);
  svg.setAttribute("aria-label", `${name} by position: ${values.map(number).join(", ")}`);
  byId(`${id}-state`).textContent = `${token(0)}: ${number(values[0])}; median of the others: ${number(median(values.slice(1)))}`;
  svg.onpointermove = svg.onpointerdown = (event) => {
    const position = Math.round(shareAt(event.offsetX, svg.clientWidth) * last);
    choose({ query: null, key: Math.min(Math.max(position, 0), values.length - 1) });
  };
}

function drawCurves() {
  const place = byId("curves");
  place.replaceChildren();
  for (const [name, values] of current().curves) {
    const panel = add(place, "figure", {}), head = add(panel, "h3", {});
    add(head, "span", {}, name);
    add(head, "output", {}, number(values[state.frame]));
    const svg = panel.appendChild(byId("values").cloneNode(false));
    svg.removeAttribute("id");
    svg.setAttribute("aria-label", `${name} at each step: ${values.map(number).join(", ")}`);
    const having = runs.filter((run) => run.curves.has(name));
    const { bottom, x, y } = plot(svg, 130, axis(having.flatMap((run) => run.curves.get(name)), false));
    const at = (step) => x(stepShare(step));
    for (let step = 0; step <= lastStep; step = step * 10 || 10 ** Math.ceil(Math.log10(unitStep)))
      add(svg, "text", { x: at(step), y: bottom + 15, "text-anchor": "middle" }, number(step));
    for (const run of [...having.filter((run) => run !== current()), current()]) {
      let gap = true;
      const points = run.curves.get(name).map((value, i) => {
        const command = value === null ? "" : `${gap ? "M" : "L"}${at(run.steps[i])} ${y(value)}`;
        gap = value === null;
        return command;
      });
      const line = add(svg, "path", { class: run === current() ? "run chosen" : "run", d: points.join("") });
      add(line, "title", {}, run.title);
    }
    const step = current().steps[state.frame], value = values[state.frame];
    add(svg, "path", { class: "cursor", d: `M${at(step)} 4V${bottom}` });
    if (value !== null) add(svg, "path", { class: "point", d: `M${at(step)} ${y(value)}h0` });
  }
  byId("over").hidden = current().curves.size === 0;
}

function draw() {
  const { steps } = current(), slider = byId("step");
  slider.value = state.frame;
  slider.setAttribute("aria-valuetext", `step ${number(steps[state.frame])}`);
  byId("now").textContent = `step ${number(steps[state.frame])}`;
  drawMap();
  drawNorms("values", "value norms");
  drawNorms("residuals", "residual norms");
  drawCurves();
}
