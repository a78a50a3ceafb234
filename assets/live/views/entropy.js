// Entropy at every token, of the model and after processors, with the method's thresholds and events; below it the source of each
// token and the method's other series over the same tokens.

const CHART = { left: 34, right: 10, top: 20, bottom: 22 };

class EntropyPanel extends Panel {
  constructor() {
    super({
      name: "entropy", title: "Entropy per token", kinds: ["step"], wide: true, expects: (header) => !header.canvas,
      empty: "Shows the entropy at each token, before and after masks and processors.",
    });
  }

  look(card, app) {
    return `${card.state.version}/${app.markOf(card.order)}/${roomFor(card.record)}/${card.record.highestEntropy}`;
  }

  draw(card, app) {
    const { state, record } = card;
    const sequence = state.shown;
    const steps = sequence.tokens.map((token, i) => sequence.steps.get(i)).filter(Boolean);
    const followed = entropyFigures(state);
    const highest = Math.max(2, record.highestEntropy, ...followed.flatMap(({ limits }) => limits.map((limit) => limit.nats)));
    const scale = new Scale(this.width, 168, roomFor(record), highest);
    const marked = app.markOf(card.order);
    const marks = entropyMarks(state, sequence);
    const { drawing: strip, key } = hasSpeakers(record) ? speakerStrip(card, scale) : { drawing: "", key: "" };
    const legend = this.legend(followed, marks, state.switches.length);
    this.body.replaceChildren(this.chart(card, app, { steps, followed, marks, marked, scale }), strip, legend, key, ...this.figures(state, scale));
    this.readOut(sequence, marked ?? sequence.tokens.length - 1, marked !== null, marks);
  }

  chart(card, app, { steps, followed, marks, marked, scale }) {
    const words = marks.map(({ name, places }) => `${name}: ${places.length}`);
    const drawing = surface(this.width, scale.height, [`Entropy of ${count(steps.length, "token")} of lane ${card.order + 1}`, ...words].join("; "));
    drawing.append(...scale.axes("nats"));
    drawing.append(svg("path", { class: "area raw", d: areaPath(steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line raw", d: linePath(steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line final", d: linePath(steps, (s) => s.final_entropy, scale) }));
    for (const figure of followed) drawing.append(...followedLines(figure, scale));
    if (steps.length) drawing.append(...nowDots(steps[steps.length - 1], scale));
    for (const event of card.state.switches) drawing.append(...switchMark(event, scale));
    for (const mark of marks) drawing.append(svg("path", { class: `mark ${mark.look}`, d: mark.places.map((place) => markPath(place, mark.level, scale)).join("") }));
    const step = marked === null ? undefined : card.state.shown.steps.get(marked);
    if (step) drawing.append(...crosshair(step, scale));
    walkPositions(drawing, (x) => scale.positionAt(x, card.state.shown.tokens.length), app, card);
    return drawing;
  }

  readOut(sequence, i, marked, marks) {
    const token = sequence.tokens[i];
    const step = sequence.steps.get(i);
    if (!token) return setText(this.readout, "");
    const numbers = step ? `model ${fixed(step.entropy, 2)}, after processors ${fixed(step.final_entropy, 2)} nats` : "no row was computed";
    const here = marks.filter(({ places }) => places.some(([from, to]) => from <= i && i < to)).map(({ name }) => name);
    setText(this.readout, [`${marked ? "" : "newest: "}token ${i + 1} “${pieceLabel(token.piece)}”, ${numbers}`, ...here].join(", "));
  }

  legend(followed, marks, switches) {
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-raw", "model"), el("span", "key-final", "after processors"));
    if (switches) legend.append(el("span", "key-switch", `switch (${switches})`));
    for (const { series } of followed) legend.append(...series.map(({ name }) => el("span", "key-followed", name)));
    legend.append(...marks.map(({ name, look, places }) => el("span", `key-mark ${look}`, `${name} (${places.length})`)));
    return legend;
  }

  /** Other series share the token axis; each figure has its own scale. */
  figures(state, scale) {
    const scalars = [...state.figures.values()].filter((figure) => isOverTokens(figure.shape, figure.parts[0]) && !isEntropy(figure));
    return scalars.map((figure) => scalarFigure(figure, this.width, scale.room));
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

function limitLine(name, value, scale) {
  const y = scale.y(value);
  return [
    svg("line", { class: "limit", x1: CHART.left, x2: scale.width - CHART.right, y1: y, y2: y }),
    svg("text", { class: "tick limit-name", x: scale.width - CHART.right - 2, y: y - 4, "text-anchor": "end" }, name),
  ];
}

/** Events at tokens by kind, {name, look, level, places: [[from, to]]}: rejected draft tokens, and spans reported by the method. */
function entropyMarks(state, sequence) {
  const rejected = sequence.tokens.flatMap(({ origin }, i) => (origin === "redraw" ? [[i, i + 1]] : []));
  const marks = new Map(rejected.length ? [["redraw", { name: "rejected, resampled", look: "refused", level: 0, places: rejected }]] : []);
  for (const { name, shape, parts } of state.figures.values()) {
    if (shape !== "spans") continue;
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

/** Maps token positions and values to a chart. */
class Scale {
  constructor(width, height, room, top, bottom = 0) {
    Object.assign(this, { width, height, room, top, bottom });
    this.inner = width - CHART.left - CHART.right;
  }

  x(position) {
    return CHART.left + ((position + 0.5) / this.room) * this.inner;
  }

  y(value) {
    const share = (value - this.bottom) / (this.top - this.bottom || 1);
    return this.height - CHART.bottom - share * (this.height - CHART.top - CHART.bottom);
  }

  positionAt(x, length) {
    if (!length) return null;
    const position = Math.floor(((x - CHART.left) / this.inner) * this.room);
    return Math.max(0, Math.min(length - 1, position));
  }

  axes(unit) {
    const parts = [];
    for (const value of ticks(this.top - this.bottom, 3).map((tick) => tick + this.bottom)) {
      const y = this.y(value);
      parts.push(svg("line", { class: "grid", x1: CHART.left, x2: this.width - CHART.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: CHART.left - 6, y: y + 3.5, "text-anchor": "end" }, shortNumber(value)));
    }
    if (unit) parts.push(svg("text", { class: "tick unit", x: 0, y: 9 }, unit));
    const base = this.height - 6;
    parts.push(...this.positions(base));
    return parts;
  }

  /** Token numbers along the bottom, counted from 1. */
  positions(y) {
    const values = ticks(this.room, Math.max(2, Math.min(8, this.inner / 80))).filter((value) => value > 0 && value <= this.room && Number.isInteger(value));
    return values.map((value) => svg("text", { class: "tick", x: this.x(value - 1), y, "text-anchor": "middle" }, String(value)));
  }
}

/** At most three significant digits: there is little room beside an axis. */
function shortNumber(value) {
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
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

function crosshair(step, scale) {
  const x = scale.x(step.position);
  return [svg("line", { class: "cross", x1: x, x2: x, y1: CHART.top, y2: scale.height - CHART.bottom }), ...nowDots(step, scale)];
}
