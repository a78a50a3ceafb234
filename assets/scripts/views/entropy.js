// Entropy at every token, of the model and after processors, with the method's thresholds and events; below it the source of each
// token and the method's other series over the same tokens. With several lanes, their curves lie over each other, each in the colour
// of its lane, and a band between the lowest and the highest shows how far they differ.

import { el, setText, svg } from "../components/elements.js";
import { count, fixed, isNumber } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { isOverTokens } from "../run/trace.js";
import { CHART, joinedPath, limitLine, Scale, shortNumber } from "./chart.js";
import { scalarFigure } from "./figures.js";
import { Panel, roomFor, surface, walkPositions } from "./panel.js";
import { hasSpeakers, speakerStrip } from "./speakers.js";

const ALIKE = 0.005; // nats; curves closer than this lie under each other

export class EntropyPanel extends Panel {
  constructor() {
    super({
      name: "entropy", title: "Entropy per token", kinds: ["step"], wide: true, expects: (header) => !header.canvas,
      empty: "Shows the entropy at each token, before and after masks and processors.",
    });
  }

  look(card, app) {
    return [card, ...this.besides(card, app)].map(({ state, record }) => `${state.version}/${roomFor(record)}/${record.highestEntropy}`).join();
  }

  draw(card, app) {
    const { state } = card;
    this.curves = [card, ...this.besides(card, app)].map(curveOf);
    const followed = entropyFigures(state);
    const limits = followed.flatMap((figure) => figure.limits.map((limit) => limit.nats));
    const highest = Math.max(2, ...limits, ...this.curves.map(({ record }) => record.highestEntropy));
    const scale = this.scale = new Scale(this.width, 168, Math.max(...this.curves.map(({ record }) => roomFor(record))), highest);
    const marks = this.marks = entropyMarks(state, state.shown);
    const { drawing: strip, key } = hasSpeakers(card.record) ? speakerStrip(card, scale) : { drawing: "", key: "" };
    const legend = this.legend(followed, marks, state.switches.length);
    this.over = svg("g");
    this.body.replaceChildren(this.chart(card, app, followed), strip, legend, key, ...this.figures([card, ...this.besides(card, app)], scale));
    this.pointed = undefined;
  }

  chart(card, app, followed) {
    const { scale, marks, curves: [own, ...others] } = this;
    const words = marks.map(({ name, places }) => `${name}: ${places.length}`);
    const against = others.length ? ` and ${count(others.length, "other lane")}` : "";
    const drawing = surface(this.width, scale.height, [`Entropy of ${count(own.steps.length, "token")} of lane ${card.order + 1}${against}`, ...words].join("; "));
    drawing.classList.toggle("has-lanes", others.length > 0);
    drawing.setAttribute("data-lane", card.order);
    drawing.append(...scale.axes("nats"));
    if (others.length) drawing.append(svg("path", { class: "band", d: bandPath(this.curves, scale) }), ...others.map((curve) => laneLine(curve, scale)));
    else drawing.append(svg("path", { class: "area raw", d: areaPath(own.steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line raw", d: linePath(own.steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line final", d: linePath(own.steps, (s) => s.final_entropy, scale) }));
    for (const figure of followed) drawing.append(...followedLines(figure, scale));
    if (own.steps.length) drawing.append(...nowDots(own.steps[own.steps.length - 1], scale));
    for (const event of card.state.switches) drawing.append(...switchMark(event, scale));
    for (const mark of marks) drawing.append(svg("path", { class: `mark ${mark.look}`, d: mark.places.map((place) => markPath(place, mark.level, scale)).join("") }));
    drawing.append(this.over);
    const longest = Math.max(...this.curves.map(({ sequence }) => sequence.tokens.length));
    walkPositions(drawing, (x) => scale.positionAt(x, longest), app, card);
    return drawing;
  }

  /** A line at the selected token, and its entropies in every lane. */
  pointOut(card, app) {
    const { position } = app.selection.marked;
    if (position === this.pointed || !this.curves) return;
    this.pointed = position;
    const here = this.curves.map(({ order, sequence }) => ({ order, step: sequence.steps.get(position) })).filter(({ step }) => step);
    const dots = this.curves.length > 1 ? here.map((one) => laneDot(one, this.scale)) : here.flatMap(({ step }) => nowDots(step, this.scale));
    this.over.replaceChildren(...(dots.length ? [crosshair(position, this.scale), ...dots] : []));
    const { sequence } = this.curves[0];
    setText(this.readout, sequence.tokens.length || dots.length ? this.sentence(sequence, position) : "");
  }

  sentence(sequence, marked) {
    const i = marked ?? sequence.tokens.length - 1;
    const [token, step] = [sequence.tokens[i], sequence.steps.get(i)];
    const own = step ? `model ${fixed(step.entropy, 2)}, after processors ${fixed(step.final_entropy, 2)} nats` : "no row was computed";
    const numbers = token ? own : "no token yet";
    const here = this.marks.filter(({ places }) => places.some(([from, to]) => from <= i && i < to)).map(({ name }) => name);
    const which = `${marked === null ? "newest: " : ""}token ${i + 1}${token ? ` “${pieceLabel(token.piece)}”` : ""}`;
    return [which, numbers, ...here].join(", ") + this.elsewhere(i);
  }

  /** The model's entropies at the same token in the other lanes, and the difference between the lowest and the highest of all. */
  elsewhere(i) {
    const steps = this.curves.map(({ sequence }) => sequence.steps.get(i));
    const others = this.curves.map(({ order }, lane) => (lane && steps[lane] ? `lane ${order + 1}: ${fixed(steps[lane].entropy, 2)}` : "")).filter(Boolean);
    if (!others.length) return "";
    const all = steps.filter(Boolean).map(({ entropy }) => entropy);
    const apart = all.length > 1 ? `; difference ${fixed(Math.max(...all) - Math.min(...all), 2)} nats` : "";
    return `; ${others.join(", ")}${apart}`;
  }

  legend(followed, marks, switches) {
    const legend = el("p", "chart-key");
    const [own, ...others] = this.curves;
    const lanes = others.map((curve, i) => laneKey("key-lane", nameOfCurve(curve) + sayHidden(curve, this.curves.slice(0, i + 1)), curve.order));
    if (others.length) legend.append(laneKey("key-lane", `${nameOfCurve(own)}, model`, own.order), laneKey("key-lane-final", "after processors", own.order), ...lanes, el("span", "key-band", "between the lowest and the highest lane"));
    else legend.append(el("span", "key-raw", "model"), el("span", "key-final", "after processors"));
    if (switches) legend.append(el("span", "key-switch", `switch (${switches})`));
    for (const { series } of followed) legend.append(...series.map(({ name }) => el("span", "key-followed", name)));
    legend.append(...marks.map(({ name, look, places }) => el("span", `key-mark ${look}`, `${name} (${places.length})`)));
    return legend;
  }

  /** Other series of all lanes share the token axis; each figure has its own scale. */
  figures(cards, scale) {
    return cards.flatMap((card) => {
      const { state } = card;
      const scalars = [...state.figures.values()].filter((figure) => isOverTokens(figure.shape, figure.parts[0]) && !isEntropy(figure));
      return scalars.map((figure) => scalarFigure(cards.length > 1 ? { ...figure, name: `${nameOfCurve(card)}: ${figure.name}` } : figure, this.width, scale.room));
    });
  }
}

const NATS = { nats: 1, bits: Math.LN2 };
const ENTROPY_SERIES = /^(.*\bentropy), (nats|bits)$/;

/** Whether all series of a figure are entropies with a unit: these are drawn on this chart. */
function isEntropy({ shape, parts }) {
  const names = Object.keys(parts[0].series || {});
  return isOverTokens(shape, parts[0]) && names.length > 0 && names.every((name) => ENTROPY_SERIES.test(name));
}

/** A method's entropy series and thresholds, {series: [{name, points}], limits: [{name, nats}]}; the model's own entropy is drawn already. */
function entropyFigures(state) {
  return [...state.figures.values()].filter(isEntropy).map(({ parts }) => {
    const names = Object.keys(parts[0].series);
    const [, , unit] = ENTROPY_SERIES.exec(names[0]);
    const lines = Object.entries(Object.assign({}, ...parts.map((part) => part.lines || {}))).filter(([, value]) => isNumber(value));
    return {
      series: names.filter((name) => !name.startsWith("entropy")).map((name) => ({ name: ENTROPY_SERIES.exec(name)[1], points: pointsInNats(parts, name) })),
      limits: lines.map(([name, value]) => ({ name: sayLimit(name, value, unit), nats: value * NATS[unit] })),
    };
  });
}

/** The label of a threshold, in nats like the axis; a method that uses bits adds its own value. */
function sayLimit(name, value, unit) {
  const own = unit === "nats" ? "" : ` (${shortNumber(value)} ${unit})`;
  return `${name}: ${shortNumber(value * NATS[unit])} nats${own}`;
}

function pointsInNats(parts, name) {
  const factor = NATS[ENTROPY_SERIES.exec(name)[2]];
  return parts.filter((part) => isNumber(part.series?.[name])).map((part) => ({ position: part.x || 0, value: part.series[name] * factor }));
}

function followedLines({ series, limits }, scale) {
  const lines = series.map(({ points }) => svg("path", { class: "line followed", d: joinedPath(points, scale) }));
  return [...lines, ...limits.flatMap(({ name, nats }) => limitLine(name, nats, scale))];
}

/**
 * Events at tokens by kind, {name, look, level, places: [[from, to]]}: rejected draft tokens, and spans reported by the method.
 * Spans that shade the tokens are left out.
 */
function entropyMarks(state, sequence) {
  const rejected = sequence.tokens.flatMap(({ origin }, i) => (origin === "redraw" ? [[i, i + 1]] : []));
  const marks = new Map(rejected.length ? [["redraw", { name: "rejected, replaced", look: "refused", level: 0, places: rejected }]] : []);
  for (const { name, shape, parts } of state.figures.values()) {
    if (shape !== "spans" || parts[0].shades) continue;
    for (const [from, to, label] of parts.flatMap((part) => part.spans || [])) {
      const title = label ? `${name}: ${label}` : name;
      if (!marks.has(title)) marks.set(title, { name: title, look: `span-${marks.size % 3}`, level: marks.size % 3, places: [] });
      marks.get(title).places.push([from, to]);
    }
  }
  return [...marks.values()];
}

/** A small bar above the plot; each kind has its own level. */
function markPath([from, to], level, scale) {
  const [left, right] = [scale.x(from - 0.5), scale.x(to - 0.5)];
  const middle = (left + right) / 2;
  const half = Math.max(1.5, (right - left) / 2 - 0.5);
  return `M${(middle - half).toFixed(1)} ${14 - 5 * level}h${(2 * half).toFixed(1)}v4h${(-2 * half).toFixed(1)}Z`;
}

function linePath(points, valueOf, scale) {
  let path = "";
  let last = null;
  for (const point of points) {
    path += (last !== null && point.position === last + 1 ? "L" : "M") + scale.x(point.position).toFixed(1) + " " + scale.y(valueOf(point)).toFixed(1);
    last = point.position;
  }
  return path;
}

function areaPath(points, valueOf, scale) {
  if (!points.length) return "";
  const base = scale.y(0).toFixed(1);
  const over = points.map((point) => scale.x(point.position).toFixed(1) + " " + scale.y(valueOf(point)).toFixed(1));
  return `M${scale.x(points[0].position).toFixed(1)} ${base}L${over.join("L")}L${scale.x(points[points.length - 1].position).toFixed(1)} ${base}Z`;
}

function switchMark(event, scale) {
  const x = scale.x(event.position - 0.5);
  const line = svg("line", { class: "switch", x1: x, x2: x, y1: CHART.top, y2: scale.height - CHART.bottom });
  line.append(svg("title", {}, `${event.to}${event.why ? `: ${event.why}` : ""}`));
  return [line, svg("circle", { class: "switch-dot", cx: x, cy: CHART.top, r: 3 })];
}

function nowDots(step, scale) {
  const x = scale.x(step.position);
  return [
    svg("circle", { class: "dot raw", cx: x, cy: scale.y(step.entropy), r: 3.5 }),
    svg("circle", { class: "dot final", cx: x, cy: scale.y(step.final_entropy), r: 3.5 }),
  ];
}

function crosshair(position, scale) {
  const x = scale.x(position);
  return svg("line", { class: "cross", x1: x, x2: x, y1: CHART.top, y2: scale.height - CHART.bottom });
}

function laneDot({ order, step }, scale) {
  const [dot] = nowDots(step, scale);
  dot.setAttribute("data-lane", order);
  return dot;
}

/** The steps of a lane's shown text by position, {order, title, record, sequence, steps}. */
function curveOf({ order, title, record, state: { shown } }) {
  return { order, title, record, sequence: shown, steps: shown.tokens.map((token, i) => shown.steps.get(i)).filter(Boolean) };
}

export function nameOfCurve({ order, title }) {
  return `${order + 1} ${title}`;
}

/** Words for a curve that cannot be seen because one of these is equal to it; else none. */
function sayHidden(curve, before) {
  const same = before.find((other) => areAlike(curve.steps, other.steps));
  return same ? `, same curve as ${same.order + 1}` : "";
}

function areAlike(steps, others) {
  return steps.length > 0 && steps.length === others.length
    && steps.every(({ position, entropy }, i) => position === others[i].position && Math.abs(entropy - others[i].entropy) < ALIKE);
}

function laneLine({ order, steps }, scale) {
  return svg("path", { class: "line of-lane", "data-lane": order, d: linePath(steps, (s) => s.entropy, scale) });
}

function laneKey(look, text, order) {
  const key = el("span", look, text);
  key.dataset.lane = order;
  return key;
}

/** The area between the lowest and the highest curve, wherever at least two lanes have a step. */
function bandPath(curves, scale) {
  const longest = Math.max(...curves.map(({ sequence }) => sequence.tokens.length));
  const stretches = [];
  let open = null;
  for (let position = 0; position < longest; position++) {
    const values = curves.map(({ sequence }) => sequence.steps.get(position)).filter(Boolean).map(({ entropy }) => entropy);
    if (values.length < 2) {
      open = null;
      continue;
    }
    if (!open) stretches.push(open = { above: [], below: [] });
    const x = scale.x(position).toFixed(1);
    open.above.push(`${x} ${scale.y(Math.max(...values)).toFixed(1)}`);
    open.below.push(`${x} ${scale.y(Math.min(...values)).toFixed(1)}`);
  }
  return stretches.map(({ above, below }) => `M${[...above, ...below.reverse()].join("L")}Z`).join("");
}
