// Base class of the views under the lanes: a titled panel, shown if the header or the events of a lane call for it, with a placeholder
// until the first event, redrawn only if something changed and it is in sight. A view draws the chosen lane large, or the first lane that
// has something for it, and the other lanes beside it.

import { button, el, pointIn, setAttribute, setText, svg, zoomOf } from "../components/elements.js";

export const DRAWN = 'svg[role="img"], canvas, .chart-key, .history-title'; // the parts of a picture, stacked as on the page

/** Whether a view shows anything but a message that there is nothing yet. */
function hasContents(body) {
  return Boolean(body.querySelector(`${DRAWN}, :scope > :not(.vacancy, :empty, [hidden])`));
}

const REST = 16; // pause between two drawings while a model runs, in multiples of the drawing time and of the lanes that are drawn
const REST_AT_PLAY = 4; // the same once all lanes have ended, as at reading speed

export class Panel {
  /** `kinds`: events that fill it; `expects`: whether a header announces them; `empty`: the placeholder until the first one. */
  constructor({ name, title, kinds, empty = "", expects = () => false, wide = false }) {
    Object.assign(this, { name, title, kinds, expects, wide });
    this.missed = Boolean(empty); // whether its absence is reported
    this.node = el("section", `panel panel-${name}${wide ? " wide" : ""}`);
    this.node.setAttribute("aria-label", title);
    this.heading = el("h3", "", title);
    this.badge = el("span", "number of-lane");
    this.badge.hidden = true;
    this.readout = el("p", "readout");
    this.tools = el("div", "tools");
    this.head = el("div", "panel-head");
    this.head.append(this.heading, this.badge, this.readout, this.tools);
    this.body = el("div", "panel-body");
    this.vacancy = el("p", "vacancy", empty);
    this.node.append(this.head, this.vacancy, this.body);
    this.inSight = true;
    this.restsUntil = 0;
    this.isBehind = false; // whether it rests although there is something new
    this.width = 0;
    this.drawn = "";
  }

  /** Whether the lane's trace has events for this view, now or later. */
  has(card) {
    return this.kinds.some((kind) => card.record.kinds.has(kind));
  }

  /** Whether the view is shown for this lane, drawn or still waiting. */
  suits(card) {
    return this.has(card) || (!card.record.over && this.expects(card.record.header));
  }

  /** Whether the run has anything for this view. */
  isThere(app) {
    return this.suits(this.leading(app));
  }

  /** The lane drawn large: the chosen one, or else the first that suits the view. */
  leading(app) {
    const chosen = app.cards[app.chosen];
    return this.suits(chosen) ? chosen : app.cards.find((card) => this.suits(card)) || chosen;
  }

  /** The other lanes with something for this view. */
  besides(card, app) {
    return app.cards.filter((other) => other !== card && this.has(other));
  }

  update(app) {
    this.isBehind = false;
    const card = this.leading(app);
    const has = this.has(card);
    if (this.node.classList.contains("empty") === has || this.drawn === "") {
      this.node.classList.toggle("empty", !has);
      this.vacancy.hidden = has;
      this.body.hidden = this.tools.hidden = this.readout.hidden = !has;
    }
    this.node.hidden = !this.isThere(app);
    this.nameLane(card, app);
    if (!has) {
      this.drawn = "empty";
      return;
    }
    if (!this.inSight) return;
    this.width ||= this.body.clientWidth; // updated by the page's ResizeObserver later
    if (!this.width) return;
    const look = `${card.order}/${app.trace.run}/${this.width}/${app.theme}/${this.look(card, app)}`;
    this.isBehind = look !== this.drawn && this.rests(app);
    if (this.isBehind) return;
    if (look !== this.drawn) {
      this.drawn = look;
      const start = performance.now();
      this.drawSafely(card, app);
      this.markKind();
      this.body.getBoundingClientRect(); // lays it out, which counts as drawing: a long text takes longer to lay out than to make
      const rest = app.trace.over ? REST_AT_PLAY : REST * app.cards.length;
      this.restsUntil = performance.now() + rest * (performance.now() - start);
    }
    this.pointOut(card, app);
  }

  /** Draw it although it is out of sight: a saved or printed page shows all of itself. */
  updateUnseen(app) {
    if (this.inSight) return;
    this.inSight = true;
    this.update(app);
    this.inSight = false;
  }

  /** Show the place of the selected token. Called after every change, so it must cost little and draw nothing anew. */
  pointOut() {}

  /** The number of the lane drawn large, if there are several. */
  nameLane(card, app) {
    this.badge.hidden = app.cards.length < 2;
    setText(this.badge, String(card.order + 1));
    for (const node of [this.badge, this.body]) setAttribute(node, "data-lane", card.order); // their hue
    this.badge.title = card.title;
  }

  /** During playback, pause after each drawing in proportion to its duration: views must not delay the text. */
  rests(app) {
    const left = app.player.playing ? this.restsUntil - performance.now() : 0;
    if (left <= 0) return false;
    clearTimeout(this.later);
    this.later = setTimeout(() => app.schedule(), left);
    return true;
  }

  /** A trace from a file may be inconsistent; then only this view fails, with a message. */
  drawSafely(card, app) {
    try {
      this.draw(card, app);
    } catch (reason) {
      console.error(reason);
      setText(this.readout, "This view cannot be drawn: the events of this lane are inconsistent here.");
    }
  }

  /** Mark whether there is anything that can be saved. */
  markKind() {
    this.node.classList.toggle("is-drawn", hasContents(this.body));
  }

  /** Draw all of it once more, whatever was painted before. */
  repaint(card, app) {
    this.draw(card, app);
  }

  /** What the drawing depends on besides lane, width and theme. */
  look(card) {
    return card.state.version;
  }
}

/** One line that names the views that no lane has. */
export function sayAbsent(panels, cards) {
  const names = panels.filter((panel) => panel.missed && panel.node.hidden).map(({ title }) => title.replace(/^[A-Z](?=[a-z])/, (letter) => letter.toLowerCase()));
  const why = cards.some(({ record }) => record.header.remote) ? "Not in this run, or not reported by the server" : "Not in this run";
  return names.length ? `${why}: ${names.join(", ")}.` : "";
}

/** A drawing surface in page pixels. */
export function surface(width, height, label) {
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  drawing.append(svg("title", {}, label));
  return drawing;
}

/** A canvas that is sharp on any screen; draws in page pixels. */
export function sharpCanvas(canvas, width, height) {
  if (canvas.vector) return canvas.vector.begin(width, height); // the drawing is being saved as SVG
  const ratio = Math.max(2, (window.devicePixelRatio || 1) * zoomOf(canvas)); // at least two, for saved pictures
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/** Frames over a painted drawing, which move without painting it anew: the places of the selected token. */
export class Pins {
  constructor(canvas) {
    this.node = el("div", "pinned-drawing");
    this.host = el("div", "pins");
    this.node.append(canvas, this.host);
    this.look = "";
  }

  /** Boxes in pixels of the drawing, {left, top, width, height}. */
  show(boxes) {
    const look = JSON.stringify(boxes);
    if (look === this.look) return;
    this.look = look;
    this.host.replaceChildren(...boxes.map((box) => {
      const pin = el("i", "pin");
      for (const side in box) pin.style[side] = `${box[side].toFixed(1)}px`;
      return pin;
    }));
  }
}

/** A frame around a cell, wide enough to be seen where cells are narrow. */
export function pinAt(left, top, width, height) {
  const wide = Math.max(5, width + 2);
  return { left: left + width / 2 - wide / 2, top: top - 2, width: wide, height: height + 4 };
}

/** A lane drawn small: its number, a drawing and a few words. A click chooses it. */
export function smallLane(card, app, drawing, words) {
  const node = button("small-lane", "", `Show lane ${card.order + 1}, ${card.title}, large`, () => app.choose(card.order));
  node.dataset.lane = card.order;
  node.append(el("span", "number", String(card.order + 1)), drawing, el("span", "", words));
  return node;
}

/** Tokens on the axis: all of a lane that ended, otherwise rounded up. */
export function roomFor(record) {
  const known = Math.max(record.tokens, 1);
  if (record.over) return known;
  const limit = record.header.max_new_tokens || Infinity;
  return Math.max(known, Math.min(limit, Math.max(32, 2 ** Math.ceil(Math.log2(known + 1)))));
}

/** Round values for an axis from 0 to `top`. */
export function ticks(top, wanted = 4) {
  const step = tickStep(top / wanted);
  const values = [];
  for (let value = 0; value <= top * 1.001; value += step) values.push(Number(value.toPrecision(6)));
  return values;
}

/** Round values for an axis from `bottom` to `top`. */
export function roundValues(bottom, top, wanted) {
  const step = tickStep((top - bottom) / wanted);
  const first = Math.ceil(bottom / step - 0.001);
  const last = Math.floor(top / step + 0.001);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

/** The next round number: 1, 2 or 5 with any number of zeros. */
export function tickStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
}

/** Highlight the token under the pointer in a chart; a click pins its card. */
export function walkPositions(drawing, positionAt, app, card) {
  drawing.addEventListener("pointermove", (event) => app.selection.mark(card.order, positionAt(pointIn(drawing, event).x)));
  drawing.addEventListener("pointerleave", () => app.selection.unmark());
  drawing.addEventListener("click", (event) => app.selection.reveal(card.order, positionAt(pointIn(drawing, event).x)));
}
