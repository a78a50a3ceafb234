// Entropy of every token, as the model had it and as it was drawn from; under it the numbers a method follows over the same tokens.

const CHART = { left: 34, right: 10, top: 20, bottom: 22 };

class EntropyPanel extends Panel {
  constructor() {
    super({
      name: "entropy", title: "Entropy per token", kinds: ["step"], wide: true,
      empty: "Fills when the lane computes a row for a token: how open each choice was, before and after masks and samplers.",
    });
  }

  look(card, app) {
    return `${card.state.version}/${app.markOf(card.order)}/${roomFor(card.record)}/${card.record.highestEntropy}`;
  }

  draw(card, app) {
    const { state, record } = card;
    const sequence = state.shown;
    const steps = sequence.tokens.map((token, i) => sequence.steps.get(i)).filter(Boolean);
    const scale = new Scale(this.width, 168, roomFor(record), Math.max(2, record.highestEntropy));
    const drawing = surface(this.width, scale.height, `Entropy of ${count(steps.length, "token")} of lane ${card.order + 1}`);
    drawing.append(...scale.axes("nats"));
    drawing.append(svg("path", { class: "area raw", d: areaPath(steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line raw", d: linePath(steps, (s) => s.entropy, scale) }));
    drawing.append(svg("path", { class: "line final", d: linePath(steps, (s) => s.final_entropy, scale) }));
    if (steps.length) drawing.append(...nowDots(steps[steps.length - 1], scale));
    for (const event of state.switches) drawing.append(...switchMark(event, scale));
    const marked = app.markOf(card.order);
    this.readOut(sequence, marked ?? sequence.tokens.length - 1, marked !== null);
    if (marked !== null && sequence.steps.get(marked)) drawing.append(...crosshair(sequence.steps.get(marked), scale));
    walkPositions(drawing, (x) => scale.positionAt(x, sequence.tokens.length), app, card);
    this.body.replaceChildren(drawing, this.legend(), ...this.figures(card, scale));
  }

  readOut(sequence, i, marked) {
    const token = sequence.tokens[i];
    const step = sequence.steps.get(i);
    if (!token) return setText(this.readout, "");
    const numbers = step ? `model ${fixed(step.entropy, 2)}, drawn from ${fixed(step.final_entropy, 2)} nats` : "no row was computed";
    setText(this.readout, `${marked ? "" : "newest: "}token ${i + 1} “${pieceLabel(token.piece)}”, ${numbers}`);
  }

  legend() {
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-raw", "as the model had it"), el("span", "key-final", "as it was drawn from"));
    return legend;
  }

  /** Scalar figures share the axis of tokens, each on a scale of its own. */
  figures(card, scale) {
    const scalars = [...card.state.figures.values()].filter((figure) => isOverTokens(figure.shape, figure.parts[0]));
    return scalars.map((figure) => scalarFigure(figure, this.width, scale.room));
  }
}

/** Where tokens and values fall on a chart. */
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

  /** Numbers of tokens along the foot, counted from 1. */
  positions(y) {
    const values = ticks(this.room, Math.max(2, Math.min(8, this.inner / 80))).filter((value) => value > 0 && value <= this.room && Number.isInteger(value));
    return values.map((value) => svg("text", { class: "tick", x: this.x(value - 1), y, "text-anchor": "middle" }, String(value)));
  }
}

/** At most three digits, and no row of zeros before them: there is little room beside an axis. */
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
