// A canvas over time: positions from left to right, steps from top to bottom, each position coloured from the step that filled it by the
// confidence in its token, or by the entropy of its distribution then.

import { button, el, setText, svg } from "../components/elements.js";
import { count, isNumber, percent } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { COLOURS } from "../lane/colour.js";
import { confidenceClass, sayFill } from "../lane/text.js";
import { Panel, surface, ticks } from "./panel.js";

const FILLED_BY = {
  confidence: { class: (fill) => confidenceClass(fill.confidence), ends: ["high confidence", "low confidence"] },
  entropy: {
    class: ({ entropy }) => (isNumber(entropy) ? "h" + Math.round(COLOURS.entropy.level(null, { entropy })) : "unknown"),
    ends: ["low entropy", "high entropy"],
  },
};
const CANVAS = { left: 44, right: 8, top: 20, height: 320, row: [3, 22], widest: 110 };

export class CanvasPanel extends Panel {
  constructor() {
    super({ name: "canvas", title: "Canvas, step by step", kinds: ["fill"], wide: true });
    this.by = "confidence";
    this.scales = el("div", "segments");
    this.tools.append(this.scales);
  }

  has(card) {
    return card.record.header.canvas > 0 || super.has(card);
  }

  look(card) {
    return `${this.by}/${card.state.canvas.steps.length}/${card.state.canvas.size}/${fillingsIn(card.record)}`;
  }

  draw(card, app) {
    const { canvas } = card.state;
    setText(this.readout, sayCanvas(canvas, card.record));
    this.drawScales(canvas, app);
    const grid = canvasGrid(canvas.size, fillingsIn(card.record), this.width);
    const drawing = surface(this.width, grid.height, sayCanvas(canvas, card.record));
    drawing.append(...canvasAxes(grid), ...canvasGround(grid, canvas.steps.length));
    for (const fill of [...canvas.past, ...canvas.filled.values()]) drawing.append(fillMark(fill, grid, canvas.steps.length, this.by, () => app.seekEvent(card.order, fill.event)));
    this.body.replaceChildren(drawing, canvasKey(this.by, canvas.past.length > 0));
  }

  /** What the colour shows; traces without entropies offer no choice. */
  drawScales(canvas, app) {
    this.scales.hidden = ![...canvas.filled.values()].some(({ entropy }) => isNumber(entropy));
    if (this.scales.hidden) this.by = "confidence";
    this.scales.replaceChildren(...Object.keys(FILLED_BY).map((by) => {
      const choose = button("segment", by, "", () => {
        this.by = by;
        app.schedule();
      });
      choose.setAttribute("aria-pressed", String(by === this.by));
      return choose;
    }));
  }
}

/** Steps on the axis: those so far, rounded up while the lane runs. */
function fillingsIn({ fillings, over }) {
  return over ? Math.max(1, fillings) : Math.max(8, 2 ** Math.ceil(Math.log2(fillings + 1)));
}

function sayCanvas({ steps, filled, size }, record) {
  const last = steps[steps.length - 1];
  if (!last) return `${count(size, "position")}, all masked`;
  const total = record.over ? ` of ${record.fillings}` : "";
  const progress = `step ${steps.length}${total} filled ${count(last.positions.length, "position")}${sayTakenBack(last)}, ${filled.size} of ${size} are filled`;
  const confidences = last.confidences.filter(isNumber);
  return confidences.length ? `${progress}, lowest confidence ${percent(Math.min(...confidences))}` : progress;
}

function sayTakenBack({ replaced, remasked }) {
  const [others, masks] = [replaced, remasked].map((held) => Object.keys(held).length);
  return (others ? `, ${others} in place of another token` : "") + (masks ? ` and masked ${masks} again` : "");
}

function canvasGrid(size, steps, width) {
  const [least, most] = CANVAS.row;
  const row = Math.max(least, Math.min(most, Math.floor(CANVAS.height / steps)));
  const cell = Math.min(CANVAS.widest, Math.max(0, width - CANVAS.left - CANVAS.right) / Math.max(1, size));
  return { size, steps, row, cell, height: CANVAS.top + steps * row + 4 };
}

function canvasAxes(grid) {
  const tick = (x, y, anchor, text) => svg("text", { class: "tick", x, y, "text-anchor": anchor }, String(text));
  const steps = wholeTicks(grid.steps, (grid.steps * grid.row) / 16);
  const positions = wholeTicks(grid.size, (grid.size * grid.cell) / 40);
  return [
    svg("text", { class: "tick unit", x: 0, y: 11 }, "step"),
    ...steps.map((step) => tick(CANVAS.left - 8, CANVAS.top + (step - 0.5) * grid.row + 4, "end", step)),
    ...positions.map((position) => tick(CANVAS.left + (position - 0.5) * grid.cell, 11, "middle", position)),
  ];
}

/** Whole numbers from 1 to `top` for an axis with room for about `room` of them. */
function wholeTicks(top, room) {
  return ticks(top, Math.max(1, Math.min(16, room))).filter((value) => value >= 1 && value <= top && Number.isInteger(value));
}

/** The background: all positions masked in the steps so far; later steps are only outlined. */
function canvasGround(grid, now) {
  const box = { x: CANVAS.left, y: CANVAS.top, width: grid.size * grid.cell };
  const later = svg("rect", { class: "canvas-later", ...box, height: grid.steps * grid.row });
  return [later, svg("rect", { class: "canvas-masked", ...box, height: now * grid.row })];
}

function fillMark(fill, grid, now, by, go) {
  const group = svg("g", { class: "filled", "data-position": fill.position, "data-step": fill.step });
  group.classList.toggle("fresh", fill.step === now);
  group.classList.toggle("revised", fill.was !== null);
  const until = fill.until ?? now + 1; // the step that took it back
  group.classList.toggle("tiny", Math.min(grid.cell, grid.row) < 7);
  const [x, y] = [CANVAS.left + fill.position * grid.cell, CANVAS.top + (fill.step - 1) * grid.row];
  const gap = grid.cell > 5 ? 1 : 0;
  const box = { x: x + gap / 2, width: Math.max(0.5, grid.cell - gap), style: `fill: var(--${FILLED_BY[by].class(fill)}, var(--paper))` };
  group.append(svg("title", {}, `“${pieceLabel(fill.piece)}”, ${sayFill(fill)}`));
  group.append(svg("rect", { class: "since", ...box, y, height: (until - fill.step) * grid.row }));
  group.append(svg("rect", { class: "at", ...box, y, height: Math.max(1, grid.row - (grid.row > 6 ? 1 : 0)) }));
  group.append(...fillName(fill, grid, x + grid.cell / 2, y + grid.row / 2 + 4));
  group.addEventListener("click", go);
  return group;
}

/** The token in its cell, if there is room to read it. */
function fillName(fill, grid, x, y) {
  const name = fill.piece.trim() || fill.piece;
  const letters = Math.floor((grid.cell - 6) / 7);
  if (grid.row < 13 || letters < Math.min(5, name.length)) return [];
  return [svg("text", { x, y, "text-anchor": "middle" }, pieceLabel(name, letters))];
}

function canvasKey(by, revised) {
  const key = el("p", "chart-key");
  const [sure, unsure] = FILLED_BY[by].ends;
  key.append(el("span", "key-masked", "masked"), el("span", "key-sure", `filled, ${sure}`));
  key.append(el("span", "key-unsure", `filled, ${unsure}`), el("span", "key-fresh", "filled in this step"));
  if (revised) key.append(el("span", "key-revised", "in place of a token that was taken back"));
  return key;
}
