// What the reader does: controls, keys, and the place in the URL.
const slower = matchMedia("(prefers-reduced-motion: reduce)");
let timer = 0;

function choose(changes) {
  if (Object.entries(changes).every(([name, value]) => state[name] === value)) return;
  Object.assign(state, changes);
  draw();
}

function chooseRun(index) {  // at the step that is nearest to the one shown
  const step = current().steps[state.frame];
  Object.assign(state, { run: index, query: null, key: null });
  state.frame = nearest(step);
  refresh();
}

function refresh() {
  const { steps, layers, heads, tokens, token_count: count, about } = current(), slots = byId("ticks").clientWidth / 60;
  state.layer = Math.min(state.layer, layers - 1);
  state.head = Math.min(state.head, heads - 1);
  byId("run").value = state.run;
  for (const [name, count] of [["layer", layers], ["head", heads]]) {
    byId(name).replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`${i + 1} of ${count}`, i)));
    byId(name).value = state[name];
    byId(name).parentNode.hidden = count === 1;
  }
  byId("about").textContent = about;
  byId("cut").textContent = count > tokens.length ? `The first ${tokens.length} of ${count} tokens are shown.` : "";
  document.querySelectorAll(".strip").forEach((strip, i) => strip.classList.toggle("chosen", i === state.run));
  byId("step").max = steps.length - 1;
  byId("recorded").replaceChildren(...steps.map((_, i) => new Option("", i)));
  byId("ticks").replaceChildren();
  for (let i = steps.length - 1; i >= 0; i -= Math.ceil(steps.length / Math.max(slots, 2)))
    add(byId("ticks"), "span", { style: `left: ${100 * i / Math.max(steps.length - 1, 1)}%` }, number(steps[i]));
  drawLegend();
  draw();
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(advance, slower.matches ? 1500 : 500) : 0;
  byId("play").textContent = on ? "Pause" : "Play";
}

function advance() {
  if (state.frame === current().steps.length - 1) {
    play(false);
    keepPlace();
  } else choose({ frame: state.frame + 1 });
}

function keepPlace() {
  const place = { run: current().title, step: current().steps[state.frame], layer: state.layer + 1, head: state.head + 1 };
  history.replaceState(null, "", `#${new URLSearchParams(place)}`);
}

function readPlace() {
  const place = new URLSearchParams(location.hash.slice(1)), run = runs.findIndex(({ title }) => title === place.get("run"));
  Object.assign(state, { run: run >= 0 ? run : state.run, query: null, key: null });
  for (const name of ["layer", "head"]) if (place.get(name) >= 1) state[name] = Math.floor(place.get(name)) - 1;
  const step = parseFloat(place.get("step"));
  state.frame = step >= 0 ? nearest(step) : current().steps.length - 1;
  refresh();
}

byId("step").oninput = (event) => {
  play(false);
  choose({ frame: Number(event.target.value) });
};
byId("step").onchange = keepPlace;
byId("play").onclick = () => {
  if (!timer && state.frame === current().steps.length - 1) choose({ frame: 0 });
  play(!timer);
  if (!timer) keepPlace();
};
for (const name of ["run", "layer", "head"])
  byId(name).onchange = (event) => {
    const index = Number(event.target.value);
    if (name === "run") chooseRun(index);
    else choose({ [name]: index });
    keepPlace();
  };
for (const id of ["map", "values", "residuals"])
  byId(id).onpointerleave = (event) => { if (event.pointerType === "mouse") choose({ query: null, key: null }); };
byId("map").onkeydown = (event) => {
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
  if (event.key === "Escape") choose({ query: null, key: null });
  if (!down && !right) return;
  event.preventDefault();
  const last = current().tokens.length - 1, within = (at) => Math.min(Math.max(at, 0), last);
  choose(state.query === null ? { query: last, key: state.key ?? 0 }
    : { query: within(state.query + down), key: within(state.key + right) });
};
byId("curves").onclick = (event) => {
  const svg = event.target.closest("svg");
  if (!svg) return;
  const share = shareAt(event.clientX - svg.getBoundingClientRect().left, svg.clientWidth);
  choose({ frame: nearest(unitStep * Math.expm1(share * lastLog)) });
  keepPlace();
};
dark.onchange = refresh;
window.onresize = () => {  // of the width: on phones the height changes while one scrolls
  if (byId("map").width !== layOut(byId("map"), current().tokens).width) refresh();
};
window.onhashchange = readPlace;
document.documentElement.classList.add("js");
readPlace();
