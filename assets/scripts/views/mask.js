// The token mask before every token: how many tokens it allows, how much probability it masks, and the model's masked favourites. The
// masks of other lanes are drawn small.

import { el, setText, svg } from "../components/elements.js";
import { count, fixed, percent } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { bars } from "../lane/probabilities.js";
import { hasPart } from "../run/headers.js";
import { CHART, Scale } from "./chart.js";
import { Panel, roomFor, smallLane, surface, walkPositions } from "./panel.js";

export class MaskPanel extends Panel {
  constructor() {
    super({
      name: "mask", title: "Grammar mask", kinds: ["mask"], wide: true, expects: (header) => hasPart(header, "constraint"),
      empty: "Shows how many tokens each step allows, and which tokens the model would have preferred.",
    });
    this.chart = el("div", "mask-chart");
    this.side = el("div", "favourites");
    const columns = el("div", "mask-columns");
    columns.append(this.chart, this.side);
    this.others = el("div", "beside");
    this.body.append(columns, this.others);
    this.plotted = [];
  }

  look(card, app) {
    const others = this.besides(card, app).map(({ state, order }) => `${state.version}:${app.selection.markOf(order)}`);
    return `${card.state.version}/${app.selection.markOf(card.order)}/${roomFor(card.record)}/${others}`;
  }

  draw(card, app) {
    const { state } = card;
    const sequence = state.shown;
    const masks = masksOf(sequence);
    const marked = app.selection.markOf(card.order);
    const chosen = maskFor(masks, marked) || masks[masks.length - 1] || null;
    setText(this.readout, chosen ? sayMask(chosen) : "no mask yet at this point");
    this.plot(card, app, masks);
    this.length = Math.max(sequence.tokens.length, masks.length ? masks[masks.length - 1].position + 1 : 0);
    const line = chosen ? [crossLine(chosen.position, this.scale)] : [];
    this.over.replaceChildren(...line, ...forcedRuns(sequence.tokens).map((run) => forcedMark(run, this.scale, this.bar)));
    this.side.replaceChildren(...this.favourites(chosen, sequence, marked !== null), ...whyStopped(state, masks));
    this.others.replaceChildren(...this.besides(card, app).map((other) => this.small(other, app)));
  }

  small(card, app) {
    const masks = masksOf(card.state.shown);
    const chosen = maskFor(masks, app.selection.markOf(card.order)) || masks[masks.length - 1];
    return smallLane(card, app, smallMasks(masks, chosen, roomFor(card.record)), chosen ? `token ${chosen.position + 1}: ${sayMask(chosen)}` : "no mask yet");
  }

  /** Marks are only added while the axes stay the same: a long text has thousands of them. */
  plot(card, app, masks) {
    const vocabulary = masks.reduce((most, mask) => Math.max(most, mask.vocabulary), Math.max(10, card.record.header.vocabulary));
    const axes = [app.trace.run, card.order, this.width, roomFor(card.record), vocabulary].join("/");
    const known = this.plotted.length;
    const goesOn = axes === this.axes && known <= masks.length && this.plotted[known - 1] === masks[known - 1];
    if (!goesOn) this.startPlot(card, app, vocabulary);
    this.axes = axes;
    const marks = masks.slice(this.plotted.length).flatMap((mask) => maskMarks(mask, this.scale, this.bar));
    this.marks.append(...marks);
    this.plotted = masks;
  }

  startPlot(card, app, vocabulary) {
    const width = Math.max(240, this.width > 720 ? this.width - 320 : this.width);
    const height = 194;
    const scale = this.scale = new LogScale(width, height - 48, roomFor(card.record), vocabulary);
    this.bar = Math.max(1.5, Math.min(9, (scale.inner / scale.room) * 0.7));
    this.marks = svg("g");
    this.over = svg("g");
    this.plotted = [];
    const drawing = surface(width, height, `Tokens the grammar allowed before each token of lane ${card.order + 1}, and the probability it masked`);
    const floor = height - 12;
    drawing.append(...scale.axes(), svg("text", { class: "tick", x: 0, y: height - 1 }, "masked"));
    drawing.append(svg("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: floor, y2: floor }), this.marks, this.over);
    walkPositions(drawing, (x) => scale.positionAt(x, this.length), app, card);
    this.chart.replaceChildren(drawing, maskKey());
  }

  favourites(mask, sequence, marked) {
    if (!mask) return [];
    const token = sequence.tokens[mask.position];
    const parts = [el("p", "favourites-title", `${marked ? "Before" : "Newest: before"} token ${mask.position + 1}${token ? ` “${pieceLabel(token.piece)}”` : ""}`), maskFacts(mask)];
    if (mask.forced.length) parts.push(el("p", "aside", `${count(mask.forced.length, "token")} forced without a forward.`));
    if (mask.favourites.length) parts.push(el("p", "favourites-title", "Masked tokens the model preferred"), ...mask.favourites.map(favouriteRow));
    return parts;
  }
}

function masksOf(sequence) {
  return [...sequence.masks.values()].filter((mask) => mask.position <= sequence.tokens.length).sort((a, b) => a.position - b.position);
}

const SMALL_MASKS = { width: 180, height: 30 };

/** How much probability was masked before each token, as bars without axes; the selected one is framed. */
function smallMasks(masks, chosen, room) {
  const { width, height } = SMALL_MASKS;
  const drawing = svg("svg", { class: "small-masks", width, height, "aria-hidden": "true" });
  const bar = Math.max(1.5, (width / room) * 0.8);
  drawing.append(svg("line", { class: "grid", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }));
  const path = masks.map(({ position, banned }) => `M${((position / room) * width).toFixed(1)} ${height}v${(-height * banned).toFixed(1)}h${bar.toFixed(1)}V${height}Z`);
  drawing.append(svg("path", { class: "banned", d: path.join("") }));
  if (chosen) drawing.append(svg("line", { class: "cross", x1: (chosen.position / room) * width + bar / 2, x2: (chosen.position / room) * width + bar / 2, y1: 0, y2: height }));
  return drawing;
}

function favouriteRow([, piece, raw]) {
  const row = el("div", "row");
  const name = el("span", "piece");
  writePiece(name, piece, true);
  row.append(name, bars(raw, null), el("span", "num raw", percent(raw)));
  return row;
}

/** For a complete text: whether grammar, model or limit ended it. */
function whyStopped({ done, shown }, masks) {
  if (!done) return [];
  const last = masks[masks.length - 1];
  const open = last && !last.accepting ? "the grammar was not complete" : "the grammar allowed the end";
  const reasons = {
    grammar: `the grammar was complete after token ${shown.tokens.length}`,
    end: "the model ended the text where the grammar allowed it",
    length: `token limit reached; ${open}`,
    stop_string: "stop string",
    stopped: "stopped by the user",
  };
  return [el("p", "aside stopped", `Why it stopped: ${reasons[done.reason] || done.reason}.`)];
}

function maskKey() {
  const key = el("p", "chart-key");
  key.append(el("span", "key-allowed", "allowed"), el("span", "key-forced", "forced run"), el("span", "key-accepting", "the text may end here"), el("span", "key-banned", "masked probability"));
  return key;
}

function crossLine(position, scale) {
  return svg("line", { class: "cross", x1: scale.x(position), x2: scale.x(position), y1: CHART.top, y2: scale.height - CHART.bottom });
}

/** The mask of a position: its own, or that of the forced run it belongs to. */
function maskFor(masks, position) {
  if (position === null) return null;
  return masks.find((mask) => mask.position <= position && position < mask.position + Math.max(1, mask.forced.length)) || null;
}

function sayMask(mask) {
  return `${mask.allowed} of ${mask.vocabulary} tokens allowed, ${percent(mask.banned)} of the probability masked`;
}

function maskFacts(mask) {
  const list = el("dl", "facts");
  const add = (name, value) => {
    const pair = el("div");
    pair.append(el("dt", "", name), el("dd", "", value));
    list.append(pair);
  };
  add("allowed", `${mask.allowed}`);
  add("masked", percent(mask.banned));
  add("may end", mask.accepting ? "yes" : "no");
  if (mask.state) add("state", mask.state.length > 40 ? mask.state.slice(0, 39) + "…" : mask.state);
  if (mask.seconds) add("mask took", `${fixed(mask.seconds * 1e6, 0)} µs`);
  return list;
}

/** Tokens on a logarithmic axis from 1 to the vocabulary. */
class LogScale extends Scale {
  constructor(width, height, room, top) {
    super(width, height, room, Math.log10(top));
  }

  allowed(number) {
    return this.y(Math.log10(Math.max(1, number)));
  }

  axes() {
    const parts = [];
    for (let power = 0; power <= this.top; power++) {
      const y = this.y(power);
      const label = power < 3 ? String(10 ** power) : `${10 ** (power - 3)}k`;
      parts.push(svg("line", { class: "grid", x1: CHART.left, x2: this.width - CHART.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: CHART.left - 6, y: y + 3.5, "text-anchor": "end" }, label));
    }
    parts.push(...this.positions(this.height - 6));
    return parts;
  }
}

function maskMarks(mask, scale, width) {
  const [x, y] = [scale.x(mask.position), scale.allowed(mask.allowed)];
  const marks = [
    svg("line", { class: "stem", x1: x, x2: x, y1: y, y2: scale.y(0) }),
    svg("rect", { class: "allowed", x: x - width / 2, y: y - 2, width, height: 4, rx: 1.5, "data-position": mask.position, "data-allowed": mask.allowed }),
    bannedBar(mask, scale, width, scale.height + 36),
  ];
  if (mask.accepting) marks.push(svg("circle", { class: "accepting", cx: x, cy: Math.max(4, y - 8), r: 3 }));
  return marks;
}

/** Forced stretches of the text, [from, to) in token positions. */
function forcedRuns(tokens) {
  const runs = [];
  tokens.forEach((token, i) => {
    if (token.origin !== "forced") return;
    const last = runs[runs.length - 1];
    if (last && last.to === i) last.to += 1;
    else runs.push({ from: i, to: i + 1 });
  });
  return runs;
}

function forcedMark({ from, to }, scale, width) {
  const left = scale.x(from) - width / 2;
  const mark = svg("rect", { class: "forced-run", x: left, y: scale.y(0) - 4, width: scale.x(to - 1) + width / 2 - left, height: 8, rx: 2, "data-from": from, "data-to": to });
  mark.append(svg("title", {}, `${count(to - from, "token")} forced, from token ${from + 1}`));
  return mark;
}

function bannedBar(mask, scale, width, floor) {
  const height = 28 * Math.max(0, Math.min(1, mask.banned));
  return svg("rect", { class: "banned", x: scale.x(mask.position) - width / 2, y: floor - height, width, height });
}
