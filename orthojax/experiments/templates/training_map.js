// The attention map and its legend.

function layOut(canvas, tokens) {
  // Labels that would touch take turns in two or more rows, those of several letters are turned at the top.
  const size = tokens.length, letters = Math.min(Math.max(...tokens.map((text) => text.length)), 8), turned = letters > 3;
  const pixel = 1 / (devicePixelRatio || 1), wide = letters * 5.6 + 4, high = turned ? wide : 11;
  const rows = Math.min(Math.ceil(9 / ((canvas.clientWidth - 50) / size)), 3);
  const left = 16 + rows * wide, top = 16 + rows * high;
  const cell = Math.max(Math.floor((canvas.clientWidth - left - 1) / size / pixel) * pixel, pixel);
  const width = Math.floor(canvas.clientWidth / pixel);
  return { width, size, letters, turned, pixel, wide, high, rows, left, top, cell, side: cell * size };
}

function drawMap() {
  const canvas = byId("map"), run = current(), place = layOut(canvas, run.tokens);
  const { width, size, letters, turned, pixel, wide, high, rows, left, top, cell, side } = place;
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const colors = { first: color("--first"), trigger: color("--trigger"), other: color("--soft") };
  canvas.style.height = `${top + side + 1}px`;
  canvas.width = width;
  canvas.height = (top + side + 1) / pixel;
  const pen = canvas.getContext("2d");
  pen.scale(1 / pixel, 1 / pixel);
  const image = document.createElement("canvas"), map = new ImageData(size, size);
  const palette = palettes[dark.matches ? "dark" : "light"];
  for (let query = 0; query < size; query++)
    for (let key = 0; key < (run.causal ? query + 1 : size); key++)
      map.data.set([...palette.subarray(3 * code(query, key), 3 * code(query, key) + 3), 255], 4 * (query * size + key));
  image.width = image.height = size;
  image.getContext("2d").putImageData(map, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, left, top, side, side);
  pen.strokeStyle = color("--line");
  pen.strokeRect(left - 0.5, top - 0.5, side + 1, side + 1);
  const write = (text, x, y, align, angle = 0) => {
    pen.save();
    pen.translate(x, y);
    pen.rotate(angle);
    pen.textAlign = align;
    pen.fillText(text, 0, 0);
    pen.restore();
  };
  pen.textBaseline = "middle";
  for (let i = 0; i < size; i++) {
    const text = run.tokens[i].length > letters ? `${run.tokens[i].slice(0, letters - 1)}…` : run.tokens[i];
    const middle = (i + 0.5) * cell, row = i % rows;
    pen.fillStyle = colors[kind(i)];
    pen.font = `${kind(i) === "other" ? "" : "bold "}9.5px ui-monospace, Menlo, Consolas, monospace`;
    write(text, left - 5 - row * wide, top + middle, "right");
    if (turned) write(text, left + middle, top - 5 - row * high, "left", -Math.PI / 2);
    else write(text, left + middle, top - 9 - row * high, "center");
    if (kind(i) !== "other") {
      pen.fillRect(left - 4, top + i * cell, 3, cell);
      pen.fillRect(left + i * cell, top - 4, cell, 3);
    }
  }
  pen.fillStyle = color("--ink");
  pen.font = "11px system-ui, sans-serif";
  write("key", left + side / 2, 6, "center");
  write("query", 6, top + side / 2, "center", -Math.PI / 2);
  if (state.key !== null) {
    pen.strokeStyle = color("--link");
    pen.strokeRect(left + state.key * cell, top, cell, side);
    if (state.query !== null) pen.strokeRect(left, top + state.query * cell, side, cell);
  }
  const onFirst = (trigger) => mean([...run.tokens.keys()].filter((query) => query && run.triggers[query] === trigger)
    .map((query) => weight(query, 0)));
  byId("sink").textContent = `Mean attention to ${token(0)}: ${number(onFirst(false))}`
    + (run.triggers.includes(true) ? ` at tokens that are no triggers, ${number(onFirst(true))} at triggers` : "");
  byId("cell").textContent = state.query === null ? "Point at a cell or use the arrow keys."
    : `query ${state.query}, ${token(state.query)}; key ${state.key}, ${token(state.key)}: ${number(weight(state.query, state.key))}`;
  canvas.onpointermove = canvas.onpointerdown = (event) => {
    const [query, key] = [event.offsetY - top, event.offsetX - left].map((at) => Math.floor(at / cell));
    if (Math.min(query, key) >= 0 && Math.max(query, key) < size) choose({ query, key });
  };
}

function drawLegend() {
  const pen = byId("colors").getContext("2d"), palette = palettes[dark.matches ? "dark" : "light"];
  for (let i = 0; i < 256; i++) {
    pen.fillStyle = `rgb(${palette.subarray(3 * i, 3 * i + 3).join()})`;
    pen.fillRect(i, 0, 1, 1);
  }
  byId("weights").replaceChildren();
  for (const share of [0, 0.05, 0.2, 0.5, 1])
    add(byId("weights"), "span", { style: `left: ${100 * Math.sqrt(share)}%` }, number(share * current().scale));
}
