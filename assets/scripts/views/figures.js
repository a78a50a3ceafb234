// Everything without a view of its own: figures sent by a strategy, one renderer per shape; model switches; notes.

import { el, svg } from "../components/elements.js";
import { DASH, isNumber } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { LEVELS } from "../lane/colour.js";
import { isOverTokens } from "../run/trace.js";
import { joinedPath, limitLine, Scale, shortNumber } from "./chart.js";
import { Panel, roomFor, surface } from "./panel.js";

export class FiguresPanel extends Panel {
  constructor() {
    super({ name: "figures", title: "From the method", kinds: ["figure", "note", "switch"], wide: true });
  }

  has(card) {
    const { kinds, figuresBeside } = card.record;
    return ["note", "switch"].some((kind) => kinds.has(kind)) || figuresBeside || (kinds.has("figure") && !kinds.has("step"));
  }

  draw(card) {
    const { state, record } = card;
    const parts = [];
    for (const figure of state.figures.values()) {
      if (record.kinds.has("step") && isOverTokens(figure.shape, figure.parts[0])) continue; // drawn below the entropy, on its axis
      const draw = FIGURES[figure.shape];
      if (!draw) continue;
      const drawing = draw(figure, this.width, roomFor(record), card);
      parts.push(draw === scalarFigure ? drawing : titled(figure.name, drawing)); // its legend shows its name
    }
    if (state.switches.length) parts.push(titled("Model switches", switchList(state.switches)));
    if (state.notes.length) parts.push(titled("Notes", noteList(state.notes)));
    if (!parts.length) parts.push(el("p", "vacancy", "Nothing yet at this point of the run."));
    this.body.replaceChildren(...parts);
  }
}

const MOST_SERIES = 5; // lines of one drawing
const MOST_SPANS = 40;
const PLANE = 380; // largest width in pixels
const FIGURES = { scalar: scalarFigure, bars: barsFigure, matrix: matrixFigure, tree: listFigure, spans: spansFigure, points: pointsFigure };

export function titled(name, node) {
  const part = el("div", "figure");
  part.append(el("h4", "", name), node);
  return part;
}

/** Series over token positions or over another axis, with thresholds as dashed lines. */
export function scalarFigure({ name, parts }, width, tokens) {
  const { axis } = parts[0];
  const room = axis ? 1 : tokens;
  const all = [...new Set(parts.flatMap((part) => Object.keys(part.series || {})))];
  const names = all.slice(0, MOST_SERIES);
  const limits = Object.assign({}, ...parts.map((part) => part.lines || {}));
  const values = parts.flatMap((part) => Object.values(part.series || {})).concat(Object.values(limits)).filter(isNumber);
  const low = Math.min(0, ...values);
  const scale = new Scale(width, 112, Math.max(room, ...parts.map((part) => (part.x || 0) + 1)), Math.max(...values, low + 1e-6), low);
  const drawing = surface(width, 112, `${name}: ${names.join(", ")} over ${axis || "tokens"}`);
  if (axis) scale.along = axis;
  drawing.append(...scale.axes(""));
  names.forEach((series, i) => {
    const points = parts.filter((part) => isNumber(part.series && part.series[series])).map((part) => ({ position: part.x || 0, value: part.series[series] }));
    drawing.append(svg("path", { class: `line series-${i}`, d: joinedPath(points, scale) }));
    if (axis) drawing.append(...points.map((point) => svg("circle", { class: `dot series-${i}`, cx: scale.x(point.position), cy: scale.y(point.value), r: 2.5 })));
  });
  for (const [label, value] of Object.entries(limits)) {
    if (isNumber(value)) drawing.append(...limitLine(`${label} ${shortNumber(value)}`, value, scale));
  }
  const host = el("div", "figure scalar");
  const key = el("p", "chart-key");
  key.append(el("b", "", name));
  names.forEach((series, i) => key.append(el("span", `key-series series-${i}`, series)));
  if (all.length > names.length) key.append(el("span", "key-words", `and ${all.length - names.length} more, not drawn`));
  host.append(key, drawing);
  return host;
}

function barsFigure({ parts }) {
  const { labels = [], values = [] } = parts[parts.length - 1];
  const top = Math.max(1e-9, ...values.filter(isNumber).map(Math.abs));
  const host = el("div", "bar-list");
  labels.forEach((label, i) => {
    const row = el("div", "row");
    const bar = el("span", "bars");
    const fill = el("i", values[i] < 0 ? "final below" : "final");
    fill.style.width = isNumber(values[i]) ? (Math.abs(values[i]) / top) * 100 + "%" : "0";
    bar.append(fill);
    row.append(el("span", "piece", pieceLabel(String(label))), bar, el("span", "num", isNumber(values[i]) ? shortNumber(values[i]) : DASH));
    host.append(row);
  });
  return host;
}

function matrixFigure({ name, parts }) {
  const { rows = [], columns = [], values = [] } = parts[parts.length - 1];
  const numbers = values.flat().filter(isNumber);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const scroller = el("div", "matrix-scroll");
  scroller.tabIndex = 0;
  scroller.setAttribute("aria-label", name);
  const table = el("table", "matrix");
  const head = el("tr");
  head.append(el("th"), ...columns.map((label) => el("th", "", pieceLabel(String(label), 20))));
  table.append(head);
  rows.forEach((label, i) => {
    const row = el("tr");
    row.append(el("th", "", pieceLabel(String(label), 14)));
    for (const value of values[i] || []) {
      const level = isNumber(value) && high > low ? Math.round(((value - low) / (high - low)) * LEVELS) : 0;
      row.append(el("td", "h" + level, isNumber(value) ? shortNumber(value) : DASH));
    }
    table.append(row);
  });
  scroller.append(table);
  return scroller;
}

/** Points in a plane, [x, y, label, group, crossed out], coloured by group, and arrows from the origin, [x, y, label]. */
function pointsFigure({ name, parts }, width) {
  const points = parts.flatMap((part) => part.points || []);
  const path = parts.flatMap((part) => part.path || []);
  const groups = [...new Set(points.map((point) => point[3]).filter(Boolean))].slice(0, MOST_SERIES);
  const size = Math.min(width, PLANE);
  const reach = Math.max(1e-9, ...points.concat(path).flatMap(([x, y]) => [Math.abs(x), Math.abs(y)]));
  const place = (value, way) => size / 2 + (way * value * (size / 2 - 16)) / reach;
  const drawing = surface(size, size, `${name}: ${points.length} points in a plane, ${points.filter((point) => point[4]).length} of them crossed out`);
  for (const [x, y, label, group, crossed] of points) {
    const dot = svg("circle", { class: `dot ${groups.includes(group) ? `series-${groups.indexOf(group)}` : "apart"}`, cx: place(x, 1), cy: place(y, -1), r: 3 });
    dot.append(svg("title", {}, pieceLabel(String(label), 40)));
    drawing.append(dot);
    if (crossed) drawing.append(svg("path", { class: "struck", d: `M${place(x, 1) - 5} ${place(y, -1) - 5}l10 10m0 -10l-10 10` }));
  }
  path.forEach(([x, y, label], i) => drawing.append(...arrowTo(place(x, 1), place(y, -1), size, label, i === path.length - 1)));
  const key = el("p", "chart-key");
  groups.forEach((group, i) => key.append(el("span", `key-series series-${i}`, group)));
  const host = el("div", "figure points");
  host.append(drawing, key);
  return host;
}

/** An arrow from the origin; earlier ones are faint, and only the last one is labelled. */
function arrowTo(x, y, size, label, last) {
  const line = svg("line", { class: last ? "arrow last" : "arrow", x1: size / 2, y1: size / 2, x2: x, y2: y });
  if (!last) return [line];
  const inward = x > size / 2 ? { x: x - 7, "text-anchor": "end" } : { x: x + 7 };
  return [line, svg("circle", { class: "arrow-end", cx: x, cy: y, r: 4 }), svg("text", { class: "tick", y: y + 4, ...inward }, String(label))];
}

/** A tree as an indented list, readable at any size. */
function listFigure({ parts }) {
  const { labels = [], parents = [], values = [] } = parts[parts.length - 1];
  const host = el("ul", "tree-list");
  const lists = new Map([[-1, host]]);
  labels.forEach((label, node) => {
    const item = el("li");
    item.append(el("span", "piece", pieceLabel(String(label), 60)));
    if (isNumber(values[node])) item.append(el("span", "num", String(Number(values[node].toPrecision(3)))));
    const list = lists.get(parents[node]) || host;
    if (list.owner && !list.parentNode) list.owner.append(list);
    list.append(item);
    const below = el("ul"); // inserted with its first child
    below.owner = item;
    lists.set(node, below);
  });
  return host;
}

/** Labelled spans of the text, [from, to, label, value] in token positions; the entropy chart marks them too. */
function spansFigure({ parts }, width, room, card) {
  const spans = parts.flatMap((part) => part.spans || []);
  const host = el("table", "span-list");
  host.append(...spans.slice(-MOST_SPANS).map((span) => spanRow(span, card.state.shown.tokens)));
  if (spans.length > MOST_SPANS) host.prepend(el("caption", "vacancy", `The last ${MOST_SPANS} of ${spans.length}.`));
  return host;
}

function spanRow([from, to, label, value], tokens) {
  const row = el("tr");
  const text = tokens.slice(from, to).map((token) => pieceLabel(token.piece)).join("");
  row.append(el("th", "num", to - from > 1 ? `tokens ${from + 1}–${to}` : `token ${from + 1}`), el("td", "piece", pieceLabel(text, 60)));
  row.append(el("td", "label", String(label ?? "")), el("td", "num", isNumber(value) && !(label && (value === 0 || value === 1)) ? shortNumber(value) : ""));
  return row;
}

function switchList(switches) {
  const list = el("ol", "notes");
  for (const { position, to, why } of switches.slice(-30)) list.append(stamped(position, why ? `${to}: ${why}` : to));
  return list;
}

function noteList(notes) {
  const list = el("ol", "notes");
  for (const { position, text } of notes.slice(-30)) list.append(stamped(position, text));
  return list;
}

function stamped(position, text) {
  const item = el("li");
  item.append(el("span", "num", `token ${position + 1}`), el("span", "", text));
  return item;
}
