// The KV caches of all lanes: one bar a lane, all on one axis of positions. The colour shows how many layers and heads hold a position.

import { colourOf, el, pointIn, setText } from "../../components/elements.js";
import { hatch } from "../../components/vector.js";
import { mostSlots } from "../../run/metrics.js";
import { pinAt, Pins, sharpCanvas, ticks } from "../panel.js";
import { holders, HOVER_HINT, oldest, pieceAt, sayCache, shadeOfShare, sharesOf } from "./cache_shares.js";

const BARS = { left: 30, right: 104, bar: 18, gap: 7, foot: 18 }; // px

export class CacheBars {
  constructor(panel) {
    this.panel = panel;
    this.canvas = el("canvas", "heat bars-of-lanes");
    this.canvas.setAttribute("role", "img");
    this.pins = new Pins(this.canvas);
    this.node = this.pins.node;
    this.rows = [];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => setText(panel.hover, HOVER_HINT));
    this.canvas.addEventListener("click", (event) => this.choose(event));
  }

  /** Draw the caches of these lanes, or nothing if there are none. */
  draw(cards, stream) {
    this.rows = cards.map((card) => ({ card, cache: card.state.lastCache(stream) })).filter(({ cache }) => cache);
    this.node.hidden = !this.rows.length;
    if (!this.rows.length) return;
    const widest = this.rows.map(({ card, cache }) => Math.max(card.record.widestCache.get(stream) || 0, cache.length + cache.scratch));
    const { width } = this.panel;
    this.cell = (width - BARS.left - BARS.right) / Math.max(16, ...widest);
    this.height = this.rows.length * (BARS.bar + BARS.gap) + BARS.foot;
    this.paint(sharpCanvas(this.canvas, width, this.height), Math.max(16, ...widest));
    this.canvas.setAttribute("aria-label", `KV caches: ${this.rows.map(({ card, cache }) => `lane ${card.order + 1}, ${sayCache(cache, card.record)}`).join("; ")}`);
  }

  paint(pen, span) {
    const { node } = this.panel;
    const style = Object.fromEntries(["live", "evicted", "scratch", "ink", "mute"].map((name) => [name, colourOf(node, `--${name}`)]));
    style.packed = hatch(pen, style.live, style.evicted);
    pen.font = `13px ${getComputedStyle(node).fontFamily}`;
    pen.textBaseline = "middle";
    this.rows.forEach((row, i) => this.paintRow(pen, row, i * (BARS.bar + BARS.gap), style));
    pen.fillStyle = style.mute;
    pen.fillText("position", 0, this.height - 6);
    pen.textAlign = "center";
    for (const value of ticks(span, Math.max(2, Math.min(8, this.panel.width / 110)))) {
      if (value > 0 && value <= span) pen.fillText(String(value), BARS.left + value * this.cell, this.height - 6);
    }
    pen.textAlign = "left";
  }

  paintRow(pen, { card, cache }, y, { live, evicted, scratch, packed, ink, mute }) {
    const box = (from, to, colour) => {
      pen.fillStyle = colour;
      pen.fillRect(BARS.left + from * this.cell, y, Math.max(0.75, (to - from) * this.cell), BARS.bar);
    };
    pen.fillStyle = colourOf(card.node, "--lane");
    pen.fillRect(0, y + 1, 17, 17);
    pen.fillStyle = colourOf(card.node, "--paper");
    pen.fillText(String(card.order + 1), 5, y + BARS.bar / 2 + 1);
    box(0, cache.length, evicted);
    for (const { from, to, share } of sharesOf(cache.live.flat())) {
      pen.globalAlpha = shadeOfShare(share);
      box(from, to, live);
    }
    pen.globalAlpha = 1;
    for (const [from, to] of oldest(cache.live[0][0], cache.packed)) box(from, to, packed);
    if (cache.scratch) box(cache.length, cache.length + cache.scratch, scratch);
    const prompt = card.record.header.prompt_ids.length;
    pen.fillStyle = ink;
    if (prompt) pen.fillRect(BARS.left + prompt * this.cell - 0.5, y - 1, 1, BARS.bar + 2);
    pen.fillStyle = mute;
    pen.fillText(`${mostSlots(cache)} of ${cache.length} live`, this.panel.width - BARS.right + 8, y + BARS.bar / 2 + 1);
  }

  /** Frame the position of the selected token in every bar. */
  pointOut({ selection: { marked: { position } } }) {
    this.pins.show(this.rows.flatMap(({ card, cache }, i) => {
      const at = position === null ? Infinity : card.record.header.prompt_ids.length + position;
      return at < cache.length ? [pinAt(BARS.left + at * this.cell, i * (BARS.bar + BARS.gap), this.cell, BARS.bar)] : [];
    }));
  }

  /** The lane and the position under the pointer, or null. */
  at(event) {
    const { x, y } = pointIn(this.canvas, event);
    const row = this.rows[Math.floor(y / (BARS.bar + BARS.gap))];
    const position = Math.floor((x - BARS.left) / this.cell);
    return row && position < row.cache.length + row.cache.scratch ? { ...row, position } : null;
  }

  point(event) {
    const found = this.at(event);
    if (!found || found.position < 0) return setText(this.panel.hover, HOVER_HINT);
    const { card, cache, position } = found;
    const state = position < cache.length ? sayHeld(cache, position) : `reserved for ${holders(card.record)}`;
    setText(this.panel.hover, `lane ${card.order + 1}, position ${position + 1}${pieceAt(card, position)}: ${state}`);
  }

  choose(event) {
    const found = this.at(event);
    if (!found) return;
    this.panel.app.choose(found.card.order);
    this.panel.app.selection.reveal(found.card.order, found.position - found.card.record.header.prompt_ids.length);
  }
}

/** How many layers and heads hold a position. */
function sayHeld(cache, position) {
  const rows = cache.live.flat();
  const holding = rows.filter((runs) => runs.some(([from, to]) => from <= position && position < to)).length;
  if (!holding) return "evicted";
  return holding === rows.length ? "live" : `live in ${holding} of ${rows.length} layers and heads`;
}
