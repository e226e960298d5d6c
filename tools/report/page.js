"use strict";
// The page's data is text: it reaches the page by textContent and attributes of drawings alone, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const X_AXES = { tokens: "tokens", flops: "training FLOPs", seconds: "training time", step: "steps" };
const Y_AXES = {
  val_loss: "validation loss (nats per token)",
  loss: "training loss (nats per token)",
  val_bits_per_byte: "validation loss (bits per byte)",
};
const BELOW = { lr: "learning rate", grad_norm: "gradient norm" };
const MOST_AXES = 12; // of the parallel coordinates
const evaluations = (run) => Math.max(...[run, ...run.members].map((one) => one.curves.val_loss?.value.length ?? 0));
const USUAL = data.in_bits ? "val_bits_per_byte" : runs.every((run) => evaluations(run) > 2) ? "val_loss" : "loss";
const UNIT = data.in_bits ? "bits per byte" : "nats per token";
const view = { x: "tokens", y: USUAL, logX: false, logY: false, zoom: null, brushes: {}, off: new Set(), sort: null };

// ----- elements and numbers

const byId = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const el = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
  el.append(...children); // strings become text
  return el;
}

function draw(parent, name, attributes = {}, text = null) {
  const el = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
  if (text !== null) el.textContent = text;
  parent.append(el);
  return el;
}

function canvas(holder, height) {
  holder.replaceChildren();
  const width = Math.max(240, holder.clientWidth);
  const svg = draw(holder, "svg", { viewBox: `0 0 ${width} ${height}`, height });
  return [svg, width];
}

const brief = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const plain = (x, digits = 4) => String(Number(x.toPrecision(digits)));

function amount(x) {
  for (const [size, unit] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]])
    if (Math.abs(x) >= size && x < 1e16) return plain(x / size) + unit;
  return plain(x);
}

function power(x) {
  if (!x) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(x)) + 1e-9);
  const superscript = String(exponent).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  const factor = plain(x / 10 ** exponent, 3);
  return (factor === "1" ? "" : factor + "×") + "10" + superscript;
}

function clock(s) {
  if (s < 60) return plain(s, 3) + " s";
  if (s < 3600) return plain(s / 60, 3) + " min";
  return s < 172800 ? plain(s / 3600, 3) + " h" : plain(s / 86400, 3) + " d";
}

const SAY = { tokens: amount, flops: power, seconds: clock, step: amount };
const setting = (value) => (typeof value === "number" ? plain(value, 6) : value);

// ----- scales

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const width = f(high) - f(low) || 1;
  const at = (v) => from + ((f(v) - f(low)) / width) * (to - from);
  at.inverse = (p) => { const v = f(low) + ((p - from) / (to - from)) * width; return log ? 10 ** v : v; };
  at.ticks = () => (log && high / low > 8 ? logTicks(low, high) : linearTicks(low, high));
  return at;
}

function linearTicks(low, high, unit = 1) {
  const rough = (high - low) / unit / 6 || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * size >= rough * 0.999) * size * unit;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) && ticks.length < 30; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const few = Math.log10(high / low) < 3;
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
    for (const m of few ? [1, 2, 5] : [1]) if (m * 10 ** e >= low && m * 10 ** e <= high) ticks.push(m * 10 ** e);
  return ticks;
}

function timeTicks(low, high) {
  const unit = high < 120 ? 1 : high < 7200 ? 60 : high < 172800 ? 3600 : 86400;
  return linearTicks(low, high, unit);
}

// ----- which runs are to be seen, and which is looked at

function valueOn(axis, run) {
  return axis === "best" ? run.figures.best : run.settings[axis];
}

function visible(index) {
  if (view.off.has(index)) return false;
  return Object.entries(view.brushes).every(([name, [low, high]]) => {
    const axis = axes.find((a) => a.name === name);
    const y = axis.place(valueOn(name, runs[index]));
    return y !== null && y >= low && y <= high;
  });
}

function lookAt(index) {
  for (const el of document.querySelectorAll("[data-run]")) {
    const own = Number(el.dataset.run) === index;
    el.classList.toggle("lit", index !== null && own);
    if (el.ownerSVGElement) el.classList.toggle("faint", index !== null && !own);
  }
}

function tell(event, title, lines) {
  const tip = byId("tip");
  tip.replaceChildren(make("b", {}, title), ...lines.map((line) => make("div", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 16, innerWidth - width - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 8)) + "px";
}

function forget() {
  byId("tip").hidden = true;
  lookAt(null);
}

// ----- curves

function pointsOf(run, name, logY) {
  const columns = run.curves[name] ?? { value: [] }, xs = columns[view.x];
  const points = [];
  columns.value.forEach((y, i) => {
    if (y === null || xs[i] === null || (view.logX && xs[i] <= 0) || (logY && y <= 0)) return;
    points.push([xs[i], y, columns.step[i], columns.low?.[i] ?? y, columns.high?.[i] ?? y]);
  });
  return points;
}

function limits(lines, logY) {
  const points = lines.flatMap((line) => line.points);
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [low, high, left, right] = [least(ys), most(ys), least(xs), most(xs)];
  const margin = 0.04 * (high - low) || 0.05 * Math.abs(low) || 1;
  return {
    x: view.logX ? [left, right > left ? right * 1.02 : left * 2] : [Math.min(0, left), right * 1.01 || 1], // dots are whole
    y: logY ? [low * 0.97, high * 1.03] : [low - margin, high + margin],
  };
}

function drawCurves() {
  drawLegend();
  drawChart("curves", view.y, Y_AXES[view.y], 430, view.logY);
  for (const [name, title] of Object.entries(BELOW)) drawChart(name, name, title, 200, name === "grad_norm");
}

function drawChart(id, name, title, height, logY) {
  const left = 66, right = 20, top = 16, bottom = 50;
  const [svg, width] = canvas(byId(id), height);
  const lines = runs.flatMap((run, index) => (visible(index) ? [...run.members, run] : []).map((one) => ({
    run, index, name: one.name, thin: one !== run, points: pointsOf(one, name, logY),
  })));
  const shownCurves = lines.filter((line) => line.points.length);
  if (!shownCurves.length) {
    draw(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No run that is shown has these figures.");
    return;
  }
  const range = limits(shownCurves, logY);
  if (view.zoom) range.x = view.zoom.x;
  if (view.zoom?.y && id === "curves") range.y = view.zoom.y;
  const x = scale(...range.x, left, width - right, view.logX), y = scale(...range.y, height - bottom, top, logY);
  const xTicks = view.x === "seconds" && !view.logX ? timeTicks(...range.x) : x.ticks();
  let edge = -Infinity;
  for (const v of xTicks) {
    draw(svg, "line", { class: "grid", x1: x(v), x2: x(v), y1: top, y2: height - bottom });
    const text = SAY[view.x](v), half = text.length * 3.4;
    if (x(v) - half < edge + 8) continue;
    edge = x(v) + half;
    draw(svg, "text", { x: Math.min(x(v), width - half - 2), y: height - bottom + 18, "text-anchor": "middle" }, text);
  }
  for (const v of y.ticks()) {
    draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) });
    draw(svg, "text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, plain(v));
  }
  draw(svg, "text", { class: "name", x: (left + width - right) / 2, y: height - 10, "text-anchor": "middle" }, X_AXES[view.x]);
  const middle = (top + height - bottom) / 2;
  const turned = { class: "name", x: 16, y: middle, "text-anchor": "middle", transform: `rotate(-90 16 ${middle})` };
  draw(svg, "text", turned, title);
  draw(draw(svg, "clipPath", { id: "inside-" + id }), "rect", { x: left, y: top, width: width - left - right, height: height - top - bottom });
  const inside = draw(svg, "g", { "clip-path": `url(#inside-${id})` });
  const path = (points, at) => points.map((p) => `${x(p[0]).toFixed(1)},${y(Math.max(p[at], logY ? range.y[0] : -Infinity)).toFixed(1)}`).join(" ");
  for (const { run, index, thin, points } of [...shownCurves].reverse()) {
    const band = points.some((p) => p[3] < p[4]) && !thin && !run.members.length;
    if (band) draw(inside, "polygon", { class: "band", points: path(points, 3) + " " + path([...points].reverse(), 4), fill: run.colour });
    draw(inside, "polyline", { class: thin ? "run thin" : "run", points: path(points, 1), stroke: run.colour, "stroke-dasharray": run.dash, "data-run": index });
    if (!thin && (points.length === 1 || (points.length <= 40 && shownCurves.length <= 12)))
      for (const p of points) draw(inside, "circle", { class: "dot", cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: run.colour, "data-run": index });
  }
  const area = draw(svg, "rect", { class: "catch", x: left, y: top, width: width - left - right, height: height - top - bottom });
  listenToCurves(svg, area, shownCurves, x, y, title);
}

function drawLegend() {
  byId("legend").replaceChildren(...runs.map((run, index) => entry(run, index)));
}

function entry(run, index) {
  const el = make("span", { class: visible(index) ? "entry" : "entry off", title: run.name }, swatchOf(run), " " + run.label);
  el.addEventListener("pointerenter", () => lookAt(index));
  el.addEventListener("pointerleave", forget);
  return el;
}

function swatchOf(run) {
  const svg = draw(document.createDocumentFragment(), "svg", { class: "swatch", viewBox: "0 0 24 10" });
  draw(svg, "line", { x1: 0, x2: 24, y1: 5, y2: 5, stroke: run.colour, "stroke-dasharray": run.dash });
  return svg;
}

function place(svg, event) {
  const box = svg.getBoundingClientRect();
  const factor = svg.viewBox.baseVal.width / box.width;
  return [(event.clientX - box.left) * factor, (event.clientY - box.top) * factor];
}

function listenToCurves(svg, area, curves, x, y, title) {
  let start = null, frame = null;
  area.addEventListener("pointerdown", (event) => { start = place(svg, event); area.setPointerCapture(event.pointerId); });
  area.addEventListener("pointermove", (event) => {
    const [px, py] = place(svg, event);
    if (start) {
      frame ??= draw(svg, "rect", { class: "zoom" });
      const box = { x: Math.min(px, start[0]), y: Math.min(py, start[1]), width: Math.abs(px - start[0]), height: Math.abs(py - start[1]) };
      for (const key in box) frame.setAttribute(key, box[key]);
      return;
    }
    let best = null, distance = 40 ** 2;
    for (const curve of curves)
      for (const p of curve.points) {
        const d = (x(p[0]) - px) ** 2 + (y(p[1]) - py) ** 2;
        if (d < distance) [best, distance] = [{ curve, p }, d];
      }
    if (!best) return forget();
    lookAt(best.curve.index);
    tell(event, best.curve.thin ? best.curve.name : best.curve.run.label, [`${plain(best.p[1], 5)} ${title}`, `after ${SAY[view.x](best.p[0])} ${view.x === "seconds" ? "" : X_AXES[view.x]} (step ${amount(best.p[2])})`]);
  });
  area.addEventListener("pointerup", (event) => {
    const [px, py] = place(svg, event), from = start;
    start = null;
    frame?.remove();
    frame = null;
    if (!from || Math.abs(px - from[0]) < 8 || Math.abs(py - from[1]) < 8) return;
    const sorted = (scale_, a, b) => [scale_.inverse(a), scale_.inverse(b)].sort((u, v) => u - v);
    const before = view.zoom;
    view.zoom = { x: sorted(x, px, from[0]), y: sorted(y, py, from[1]) };
    if (svg.parentNode.id !== "curves") view.zoom = { x: view.zoom.x, y: before?.y };
    drawCurves();
  });
  area.addEventListener("dblclick", () => { view.zoom = null; drawCurves(); });
  area.addEventListener("pointerleave", forget);
}

// ----- parallel coordinates

const axisKeys = data.keys.filter((key) => key !== "seed" || runs.every((run) => !run.members.length));
const axes = axisKeys.length ? [...axisKeys.slice(0, MOST_AXES), "best"].map(axisOf) : [];

function axisOf(name) {
  const values = [...new Set(runs.map((run) => valueOn(name, run)).filter((v) => v !== null))].sort(compare);
  const top = 72, bottom = 336;
  const numeric = values.every((v) => typeof v === "number");
  const [low, high] = [values[0], values[values.length - 1]];
  let at;
  if (numeric && low < high) at = scale(low, high, bottom, top, low > 0 && high / low >= 10 && name !== "best");
  else at = (v) => (values.length < 2 ? (top + bottom) / 2 : bottom - (values.indexOf(v) / (values.length - 1)) * (bottom - top));
  const few = values.length <= 8 && name !== "best";
  const ticks = few || !at.ticks ? values : at.ticks();
  return { name, top, bottom, ticks, few, place: (v) => (v === null ? null : at(v)) };
}

function drawParallel() {
  byId("settings-section").hidden = !axes.length;
  if (!axes.length) return;
  const [svg, width] = canvas(byId("parallel"), 356);
  const gap = (width - 190) / Math.max(1, axes.length - 1), x = (i) => 95 + i * gap;
  runs.map((run, index) => index).reverse().forEach((index) => {
    const spread = 14 * (index / Math.max(1, runs.length - 1) - 0.5); // or runs of one value would hide each other
    const places = axes.map((axis, i) => [x(i), axis.place(valueOn(axis.name, runs[index])), axis.few ? spread : 0])
      .filter((p) => p[1] !== null).map(([px, py, off]) => [px, py + off]);
    const shade = visible(index) ? "run" : "run faint";
    const path = places.map((p, i) => (i ? `C${p[0] - gap / 2},${places[i - 1][1]} ${p[0] - gap / 2},${p[1]} ${p[0]},${p[1]}` : `M${p[0]},${p[1]}`));
    const line = draw(svg, "path", { class: shade, d: path.join(" "), stroke: runs[index].shade });
    if (!visible(index)) return;
    line.dataset.run = index;
    line.addEventListener("pointermove", (event) => { lookAt(index); tell(event, runs[index].label, [lossOf(runs[index])]); });
    line.addEventListener("pointerleave", forget);
  });
  axes.forEach((axis, i) => drawAxis(svg, axis, x(i), i, gap));
}

const rangeOf = ({ runs: n, low, high }) => (n > 1 && low !== null ? `${loss4(low)} to ${loss4(high)} (${n} runs)` : "");
const lossOf = (run) => (run.figures.best === null ? "not evaluated" : `lowest validation loss ${run.figures.best.toFixed(4)} ${rangeOf(run.figures)}`);

function drawAxis(svg, axis, x, i, gap) {
  const room = Math.max(6, Math.floor((i === 0 ? 180 : gap * 0.92) / 7));
  const [head, tail] = axis.name === "best" ? ["lowest loss", UNIT] : [axis.name.split(".").slice(0, -1).join("."), axis.name.split(".").pop()];
  const title = draw(svg, "g");
  draw(title, "title", {}, axis.name);
  draw(title, "text", { x, y: 22, "text-anchor": "middle" }, brief(head, room));
  draw(title, "text", { class: "name", x, y: 38, "text-anchor": "middle" }, brief(tail, room));
  draw(svg, "line", { class: "axis", x1: x, x2: x, y1: axis.top, y2: axis.bottom });
  const last = i === axes.length - 1;
  let before = Infinity;
  for (const v of axis.ticks) {
    const y = axis.place(v);
    if (before - y < 13) continue;
    before = y;
    draw(svg, "line", { class: "axis", x1: x - 4, x2: x + 4, y1: y, y2: y });
    const text = draw(svg, "text", { x: last ? x + 9 : x - 9, y: i && !last ? y - 9 : y + 4, "text-anchor": last ? "start" : "end", class: "value" }, brief(setting(v), i ? Math.min(room, 14) : 12));
    draw(text, "title", {}, setting(v));
  }
  if (view.brushes[axis.name]) {
    const [low, high] = view.brushes[axis.name];
    draw(svg, "rect", { class: "brush", x: x - 8, width: 16, y: low, height: high - low });
  }
  listenToAxis(svg, axis, draw(svg, "rect", { class: "catch", x: x - 11, width: 22, y: axis.top - 8, height: axis.bottom - axis.top + 16 }));
}

function listenToAxis(svg, axis, area) {
  let start = null;
  area.style.cursor = "ns-resize";
  area.addEventListener("pointerdown", (event) => { start = place(svg, event)[1]; area.setPointerCapture(event.pointerId); });
  area.addEventListener("pointerup", (event) => {
    const end = place(svg, event)[1];
    if (Math.abs(end - start) < 4) delete view.brushes[axis.name];
    else view.brushes[axis.name] = [Math.min(start, end), Math.max(start, end)];
    update();
  });
}

// ----- heat map

const heatKeys = axisKeys.filter((key) => axisValues(key).length <= 12); // a search gives every run values of its own

function drawHeat() {
  byId("heat-section").hidden = heatKeys.length < 2;
  if (heatKeys.length < 2) return;
  const rows = axisValues(view.row), columns = axisValues(view.column);
  const cell = (row, column) => {
    const inside = runs.filter((run, i) => visible(i) && run.settings[view.row] === row && run.settings[view.column] === column);
    return inside.filter((run) => run.figures.best !== null).sort((a, b) => a.figures.best - b.figures.best);
  };
  const head = make("tr", {}, make("th", { class: "text" }, make("small", {}, `${view.row} ↓   ${view.column} →`)), ...columns.map((c) => make("th", {}, brief(setting(c), 24))));
  const body = rows.map((row) => make("tr", {}, make("th", { class: "text" }, brief(setting(row), 40)), ...columns.map((column) => heatCell(cell(row, column)))));
  byId("heat").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function heatCell(found) {
  if (!found.length) return make("td", {}, "–");
  const td = make("td", {}, found[0].figures.best.toFixed(4));
  if (found.length > 1) td.append(make("small", {}, `best of ${found.length}`));
  if (found[0].members.length) td.append(make("small", {}, rangeOf(found[0].figures)));
  td.style.background = found[0].shade;
  td.style.color = isBright(found[0].shade) ? "#10151a" : "#ffffff";
  td.title = found[0].label;
  return td;
}

function isBright(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * r + 0.59 * g + 0.11 * b > 130;
}

function axisValues(key) {
  return [...new Set(runs.map((run) => run.settings[key]))].sort(compare);
}

// ----- table

const loss4 = (x) => x.toFixed(4);
const COLUMNS = [
  ["", "validation loss", "nats", loss4], ["", "range of runs", "range", null], ["", "at step", "best_step", (x) => x.toLocaleString("en")],
  ["", "bits/byte", "bits", loss4], ["", "training loss", "loss", loss4],
  ["", "steps", "step", null], ["", "tokens", "tokens", amount], ["", "FLOPs", "flops", power],
  ["", "time", "seconds", clock], ["", "tokens/s", "rate", amount], ["", "parameters", "n_params", amount],
].filter(([, , key]) => (key === "range" ? runs.some((run) => run.members.length) : runs.some((run) => run.figures[key] !== null)));

function steps(run) {
  const { step, max_steps: most } = run.figures;
  if (step === null) return "–";
  return most === null || step >= most ? step.toLocaleString("en") : `${step.toLocaleString("en")} of ${most.toLocaleString("en")}`;
}

function tableColumns() {
  const settings = data.keys.map((key) => {
    const parts = key.split(".");
    const last = parts.pop();
    return { head: parts.join("."), name: last, id: key, value: (run) => run.settings[key], say: setting, text: runs.some((run) => typeof run.settings[key] !== "number") };
  });
  const figures = COLUMNS.map(([head, name, key, say]) => ({ head, name, id: "figure " + key, value: (run) => run.figures[key === "range" ? "high" : key], say, run: { step: steps, range: (run) => rangeOf(run.figures) || "–" }[key] }));
  const failed = { head: "", name: "failed", id: "failed", value: (run) => run.failure, say: (v) => v, text: true };
  return [...settings, ...figures, ...(runs.some((run) => run.failure) ? [failed] : []), { head: "", name: "folder", id: "folder", value: (run) => run.name, say: (v) => v, text: true }];
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function drawTable() {
  const columns = tableColumns(), order = runs.map((_, i) => i);
  const sorted = columns.find((c) => c.id === view.sort?.id);
  if (sorted)
    order.sort((i, j) => {
      const [a, b] = [sorted.value(runs[i]), sorted.value(runs[j])];
      return a === null || b === null ? compare(a, b) : view.sort.sign * compare(a, b);
    });
  const head = make("tr", {}, make("th"), ...columns.map((column) => {
    const arrow = sorted === column ? (view.sort.sign > 0 ? " ▲" : " ▼") : "";
    const button = make("button", { type: "button" }, make("small", {}, column.head), column.name + arrow);
    button.addEventListener("click", () => {
      view.sort = { id: column.id, sign: sorted === column ? -view.sort.sign : 1 };
      drawTable();
    });
    return make("th", { class: column.text ? "text" : "", "aria-sort": !arrow ? "none" : view.sort.sign > 0 ? "ascending" : "descending" }, button);
  }));
  byId("runs").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...order.map((i) => rowOf(i, columns)))));
}

function rowOf(index, columns) {
  const run = runs[index];
  const cells = columns.map((column) => {
    const value = column.value(run);
    const text = column.run ? column.run(run) : value === null || value === undefined ? "–" : column.say(value);
    return make("td", { class: column.text ? "text long" : "", "data-name": column.head ? column.id : column.name, title: column.text ? String(value) : "" }, text);
  });
  const row = make("tr", { "data-run": index, class: visible(index) ? "" : "off" }, make("td", {}, swatchOf(run)), ...cells);
  row.addEventListener("click", () => { view.off[view.off.has(index) ? "delete" : "add"](index); update(); });
  row.addEventListener("pointerenter", () => lookAt(index));
  row.addEventListener("pointerleave", () => lookAt(null));
  return row;
}

// ----- controls, and all of it

function choice(holder, label, options, key, redraw) {
  const select = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  select.value = view[key];
  select.addEventListener("change", () => { view[key] = select.value; view.zoom = null; redraw(); });
  holder.append(make("label", {}, label, select));
}

function tick(holder, label, key) {
  const box = make("input", { type: "checkbox" });
  box.checked = view[key];
  box.addEventListener("change", () => { view[key] = box.checked; view.zoom = null; drawCurves(); });
  holder.append(make("label", {}, box, " " + label));
}

function drawHead() {
  const all = runs.reduce((total, run) => total + run.figures.runs, 0);
  const groups = all > runs.length ? ` in ${runs.length} groups of seeds` : "", again = data.refresh ? `, read again every ${data.refresh} s` : "";
  byId("made").textContent = `${all} ${all === 1 ? "run" : "runs"}${groups}, ${data.made}${again}`;
  document.querySelector("h1").textContent = document.title = data.title;
  const sum = (key) => runs.reduce((total, run) => total + (run.figures[key] ?? 0) * run.figures.runs, 0);
  const known = (key) => {
    const some = runs.filter((run) => run.figures[key] !== null && run.figures[key] !== undefined).length;
    return some < runs.length ? `of ${some} of ${runs.length} rows` : all > 1 ? "all runs together" : "";
  };
  const best = runs[0].figures.best === null ? null : runs[0];
  const atEnd = (run) => run.figures.max_steps !== null && run.figures.step >= run.figures.max_steps;
  const ended = runs.reduce((total, run) => total + (atEnd(run) ? run.figures.runs : 0), 0);
  const cards = [
    [`lowest validation loss (${UNIT})`, best ? best.figures.best.toFixed(4) : "–", best ? `${best.label} ${rangeOf(best.figures).replace(/ \(.*/, "")}` : "no run has been evaluated"],
    ["runs at their end", `${ended} of ${all}`, ""], ["tokens", amount(sum("tokens")), ""],
    ["training time", clock(sum("seconds")), known("seconds")], ["training FLOPs", power(sum("flops")), known("flops")],
  ].filter(([name]) => !(name === "training FLOPs" && !sum("flops")) && !(name === "training time" && !sum("seconds")));
  byId("cards").append(...cards.map(([name, value, note]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, note)))));
  const omitted = axisKeys.length - MOST_AXES;
  byId("omitted").textContent = omitted > 0 ? `${omitted} more settings differ: they are in the table.` : "";
}

// A page that is loaded again shows what it showed before, as far as the browser keeps it.
function recall() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("view " + data.title) ?? "{}");
    const off = runs.flatMap((run, index) => (kept.off ?? []).includes(run.name) ? [index] : []);
    Object.assign(view, kept, { off: new Set(off) });
  } catch (error) {
    console.warn(error); // a browser may forbid it
  }
  addEventListener("pagehide", () => {
    const kept = { ...view, y: view.y === USUAL ? undefined : view.y, brushes: {}, off: [...view.off].map((index) => runs[index].name) };
    sessionStorage.setItem("view " + data.title, JSON.stringify(kept));
  });
}

function update() {
  drawCurves();
  drawParallel();
  drawHeat();
  drawTable();
}

function begin() {
  drawHead();
  recall();
  const ys = Object.entries(Y_AXES).filter(([key]) => runs.some((run) => run.curves[key]));
  const known = (key) => (run) => Object.values(run.curves).some((columns) => columns[key].some((v) => v !== null));
  const xs = Object.entries(X_AXES).filter(([key]) => runs.some(known(key)));
  if (ys.length && !ys.some(([key]) => key === view.y)) view.y = ys[0][0];
  choice(byId("controls"), "Show", ys, "y", drawCurves);
  choice(byId("controls"), "over", xs, "x", drawCurves);
  tick(byId("controls"), "logarithmic x", "logX");
  tick(byId("controls"), "logarithmic y", "logY");
  if (!heatKeys.includes(view.row) || !heatKeys.includes(view.column)) [view.row, view.column] = heatKeys;
  const keys = heatKeys.map((key) => [key, key]);
  choice(byId("heat-controls"), "Rows", keys, "row", drawHeat);
  choice(byId("heat-controls"), "Columns", keys, "column", drawHeat);
  update();
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; update(); } });
}

begin();
