// A look inside at one token: the logit lens (each layer's prediction) and the attention of the heads. Shown on request, until
// another request or another run.

import { button, colourOf, el, option, pointIn, setText } from "../components/elements.js";
import { count, fixed, percent } from "../components/numbers.js";
import { writePiece } from "../components/pieces.js";
import { LEVELS } from "../lane/colour.js";
import { shortName } from "../run/headers.js";
import { titled } from "./figures.js";
import { Panel, sharpCanvas } from "./panel.js";

const ATTENTION_HEIGHT = 260; // px, at most, for all layers and heads
const WIDEST_COLUMN = 28; // px
const SHADED = 400; // tokens of the text that are shaded by attention

export class InsidePanel extends Panel {
  constructor() {
    super({ name: "inside", title: "Look inside", kinds: [], wide: true });
    this.close = button("icon close", "×", "Close this look", () => this.show(null));
    this.close.setAttribute("aria-label", "Close this look");
    this.tools.append(this.close);
    this.lens = el("div", "lens-scroll");
    this.lens.tabIndex = 0;
    this.lens.setAttribute("aria-label", "Logit lens");
    this.heads = el("select", "heads");
    this.heads.addEventListener("change", () => this.choose(this.heads.value));
    this.canvas = el("canvas", "heat");
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("click", (event) => this.point(event));
    this.text = el("p", "shaded");
    this.attends = titled("Attention", this.attention());
    this.body.append(titled("Logit lens: next token predicted from each layer", this.lens), this.attends);
    this.body.classList.add("look");
    this.show(null);
  }

  attention() {
    const host = el("div", "attention");
    const label = el("label", "pick", "Shade by ");
    label.append(this.heads);
    const help = el("p", "hover-line", "One row per layer and KV head, one column per token; click a row to shade the text by it.");
    host.append(this.canvas, help, label, this.text);
    return host;
  }

  /** Show the server's answer, or nothing for null. */
  show(found) {
    this.found = found;
    this.seen = (this.seen || 0) + 1;
    this.chosen = "mean";
    this.node.hidden = !found;
  }

  update(app) {
    this.node.hidden = !this.found;
    if (this.found) super.update(app);
  }

  /** It belongs to the lane it was asked for, which its heading names. */
  nameLane() {}

  has() {
    return true;
  }

  isThere() {
    return Boolean(this.found);
  }

  look() {
    return `${this.seen}/${this.chosen}`;
  }

  choose(row) {
    this.chosen = row;
    this.drawText();
  }

  draw(card, app) {
    const { found } = this;
    const piece = app.cards[found.lane] && app.cards[found.lane].record.header.model ? shortName(app.cards[found.lane].record.header.model) : "the model";
    setText(this.heading, `Look inside: lane ${found.lane + 1}, token ${found.position + 1}`);
    setText(this.readout, `One extra forward of ${piece} over the ${count(found.pieces.length, "token")} before it, with a full cache.`);
    this.lens.replaceChildren(lensTable(found));
    this.attends.hidden = !found.attention.length; // a model of recurrent layers alone
    if (this.attends.hidden) return;
    this.fillHeads();
    this.drawAttention();
    this.drawText();
  }

  fillHeads() {
    const rows = [["mean", "mean of all layers"]];
    const { attending = [] } = this.found;
    this.found.attention.forEach((heads, layer) => {
      const name = `layer ${(attending.length ? attending[layer] : layer) + 1}`;
      rows.push([`${layer}`, `${name}, all heads`]);
      if (heads.length > 1) heads.forEach((_, head) => rows.push([`${layer}/${head}`, `${name}, KV head ${head + 1}`]));
    });
    this.heads.replaceChildren(...rows.map(([value, label]) => option(value, label)));
    this.heads.value = this.chosen;
  }

  drawAttention() {
    const rows = this.found.attention.flat();
    const columns = this.found.pieces.length;
    this.rowHeight = Math.max(1, Math.min(12, Math.floor(ATTENTION_HEIGHT / rows.length)));
    const room = this.canvas.parentNode.clientWidth || this.width;
    const cell = Math.min(WIDEST_COLUMN, room / columns);
    const pen = sharpCanvas(this.canvas, Math.min(room, cell * columns), this.rowHeight * rows.length);
    const colours = Array.from({ length: LEVELS + 1 }, (_, level) => colourOf(this.node, level ? `--h${level}` : "--faint"));
    rows.forEach((weights, row) => weights.forEach((weight, i) => {
      pen.fillStyle = colours[shadeOf(weight)];
      pen.fillRect(i * cell, row * this.rowHeight, cell, this.rowHeight - (this.rowHeight > 3 ? 1 : 0));
    }));
    this.canvas.setAttribute("aria-label", `Attention of the last token: ${count(this.found.attention.length, "layer")} by ${count(columns, "token")}`);
  }

  point(event) {
    const heads = this.found.attention[0].length;
    const row = Math.floor(pointIn(this.canvas, event).y / this.rowHeight);
    const layer = Math.max(0, Math.min(this.found.attention.length - 1, Math.floor(row / heads)));
    this.heads.value = heads > 1 ? `${layer}/${row % heads}` : `${layer}`;
    this.choose(this.heads.value);
  }

  drawText() {
    const weights = meanOf(rowsNamed(this.found.attention, this.chosen));
    const hidden = Math.max(0, weights.length - SHADED);
    this.text.replaceChildren();
    if (hidden) {
      const share = weights.slice(0, hidden).reduce((sum, weight) => sum + weight, 0);
      this.text.append(el("span", "aside", `${count(hidden, "earlier token")}: ${percent(share)} `));
    }
    this.found.pieces.slice(hidden).forEach((piece, i) => {
      const span = el("span", `t h${shadeOf(weights[hidden + i])}`);
      span.title = percent(weights[hidden + i]);
      writePiece(span, piece);
      this.text.append(span);
    });
  }
}

/** One row per layer: the probability of the chosen token, the entropy, and the most likely tokens. */
function lensTable({ layers, chosen }) {
  const table = el("table", "lens");
  const head = el("tr");
  head.append(...["after", "chosen", "nats", "most likely"].map((name) => el("th", "", name)));
  head.lastChild.colSpan = layers[0].top.length;
  table.append(head, ...layers.map((lens, layer) => lensRow(lens, layer, layers.length - 1, chosen)));
  return table;
}

function lensRow({ entropy, chosen: probability, top }, layer, depth, chosen) {
  const row = el("tr");
  const name = layer === 0 ? "embedding" : layer === depth ? `layer ${layer}, the last` : `layer ${layer}`;
  row.append(el("th", "", name), el("td", "num", percent(probability)), el("td", "num", fixed(entropy, 2)));
  for (const [id, piece, p] of top) {
    const cell = el("td", `said h${shadeOf(p)}${id === chosen ? " is-chosen" : ""}`);
    cell.title = `${percent(p)}${id === chosen ? ", the chosen token" : ""}`;
    writePiece(cell, piece, true);
    row.append(cell);
  }
  return row;
}

/** The attention rows of an option: "mean", "layer" or "layer/head". */
function rowsNamed(attention, name) {
  if (name === "mean") return attention.flat();
  const [layer, head] = name.split("/").map(Number);
  return head === undefined ? attention[layer] : [attention[layer][head]];
}

function meanOf(rows) {
  return rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
}

/** Most weights are small; the square root separates them. */
function shadeOf(weight) {
  return Math.round(LEVELS * Math.sqrt(Math.max(0, Math.min(1, weight))));
}
