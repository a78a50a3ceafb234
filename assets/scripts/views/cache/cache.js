// Contents of the KV cache: one row per layer, or per KV head on demand, and one column per position of the text. Evicted positions
// stay visible as empty cells, so that windows, sinks and heavy hitters can be recognised. With several lanes, each has one bar, all on
// one axis; layers and heads of the lane drawn large are shown on demand.

import { button, colourOf, el, pointIn, setText } from "../../components/elements.js";
import { count } from "../../components/numbers.js";
import { hatch } from "../../components/vector.js";
import { Panel, pinAt, Pins, sharpCanvas, ticks } from "../panel.js";
import { CacheBars } from "./cache_bars.js";
import {
  holders, HOVER_HINT, oldest, pieceAt, sayBudget, sayCache, sayEdges, sayTogether, shadeOfShare, sharesOf,
  slotBytesOf,
} from "./cache_shares.js";

export class CachePanel extends Panel {
  constructor() {
    super({
      name: "cache", title: "KV cache", kinds: ["cache"], wide: true, expects: (header) => !header.canvas,
      empty: "Shows which positions are live, evicted, or reserved for draft tokens, once the lane reports its cache.",
    });
    this.streams = el("div", "segments");
    this.heads = button("segment", "each head", "One row per KV head, or one per layer with the colour showing how many heads hold the position");
    this.layers = button("segment", "layers", "Layers of the lane drawn large, below the bars of all lanes");
    const [heads, layers] = [el("div", "segments"), el("div", "segments")];
    heads.append(this.heads);
    layers.append(this.layers);
    this.tools.append(layers, heads, this.streams);
    this.apart = false; // whether each head has its own row
    this.unfolded = false; // whether layers are shown below the bars of several lanes
    this.bars = new CacheBars(this);
    this.stream = "target";
    this.canvas = el("canvas", "heat");
    this.canvas.setAttribute("role", "img");
    this.place = new Pins(this.canvas);
    this.history = el("canvas", "heat");
    this.history.setAttribute("role", "img");
    this.historyTitle = el("p", "history-title", "After each cache update, first on top; the colour shows how many layers and heads hold the position");
    this.hover = el("p", "hover-line");
    this.key = el("p", "chart-key");
    this.packedKey = el("span", "key-packed", "live, quantised");
    this.mergedKey = el("span", "key-merged", "live, with merged slots");
    this.scratchKey = el("span", "key-scratch");
    this.key.append(el("span", "key-live", "live"), this.packedKey, this.mergedKey, el("span", "key-evicted", "evicted"), this.scratchKey, el("span", "key-prompt", "end of the prompt"));
    this.held = el("p", "held");
    this.budget = el("p", "budget");
    this.together = el("p", "together");
    this.body.append(this.bars.node, this.place.node, this.hover, this.key, this.held, this.budget, this.together, this.historyTitle, this.history);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.hover, HOVER_HINT));
    this.heads.addEventListener("click", () => {
      this.apart = !this.apart;
      this.app.schedule();
    });
    this.layers.addEventListener("click", () => {
      this.unfolded = !this.unfolded;
      this.app.schedule();
    });
  }

  look(card, app) {
    const streams = [...card.record.widestCache.keys()];
    const updates = [card, ...this.besides(card, app)].map(({ state, record }) => {
      const all = state.caches.get(this.stream) || [];
      return `${all.length}/${record.widestCache.get(this.stream)}`;
    });
    return `${this.stream}/${streams}/${updates}/${this.apart}/${this.unfolded}`;
  }

  draw(card, app) {
    Object.assign(this, { card, app });
    const streams = [...card.record.widestCache.keys()];
    if (!streams.includes(this.stream)) this.stream = streams[0];
    this.drawStreams(streams, card, app);
    const several = this.besides(card, app).length > 0;
    const folded = several && !this.unfolded;
    this.layers.parentNode.hidden = !several;
    this.layers.setAttribute("aria-pressed", String(this.unfolded));
    this.heads.parentNode.hidden = !card.record.hasHeads || folded;
    this.heads.setAttribute("aria-pressed", String(this.apart));
    this.bars.draw(several ? app.cards.filter((each) => this.has(each)) : [], this.stream);
    this.packedKey.hidden = !card.record.packs.has(this.stream);
    this.mergedKey.hidden = !card.record.merges.has(this.stream);
    const reserving = [card, ...this.besides(card, app)].filter(({ record }) => record.scratches.has(this.stream));
    const reasons = new Set(reserving.map(({ record }) => holders(record)));
    this.scratchKey.hidden = !reserving.length;
    setText(this.scratchKey, `reserved for ${[...reasons].join(", ")} at the last update`);
    const cache = card.state.lastCache(this.stream);
    this.grid = cache && gridOf(cache, this.width, card.record.widestCache.get(this.stream), this.apart);
    this.mergedInto = card.record.merges.has(this.stream) ? mergedCounts(card.state.caches.get(this.stream) || [], this.apart) : [];
    setText(this.held, cache ? sayEdges(cache) : "");
    setText(this.budget, cache ? sayBudget(cache, slotBytesOf(card, app.cards, this.stream)) : "");
    setText(this.together, cache ? sayTogether(cache, app.cards.map((each) => each.state.lastCache(this.stream)).filter(Boolean)) : "");
    setText(this.readout, cache ? sayCache(cache, card.record) : "no cache at this point");
    setText(this.hover, HOVER_HINT);
    this.canvas.hidden = !cache || folded;
    if (cache) this.paint(cache);
    this.drawHistory(card);
  }

  pointOut(card, app) {
    this.bars.pointOut(app);
    const at = app.selection.markOf(card.order) === null || !this.grid ? null : card.record.header.prompt_ids.length + app.selection.markOf(card.order);
    const { left, cell, height } = this.grid || {};
    this.place.show(at === null || this.canvas.hidden ? [] : [pinAt(left + at * cell, 0, cell, height - 18)]);
  }

  drawStreams(streams, card, app) {
    this.streams.hidden = streams.length < 2;
    this.streams.replaceChildren(...streams.map((stream) => {
      const choose = button("segment", stream, `Show the cache of the ${stream} model`, () => {
        this.stream = stream;
        app.schedule();
      });
      choose.setAttribute("aria-pressed", String(stream === this.stream));
      return choose;
    }));
  }

  paint(cache) {
    const { left, cell, rowHeight, rows, gap, perLayer, height } = this.grid;
    const pen = sharpCanvas(this.canvas, this.width, height);
    const [live, evicted, scratch, ink, mute] = ["--live", "--evicted", "--scratch", "--ink", "--mute"].map((name) => colourOf(this.node, name));
    const coarse = hatch(pen, live, evicted);
    pen.font = `13px ${getComputedStyle(this.node).fontFamily}`;
    pen.textBaseline = "middle";
    rows.forEach((heads, row) => {
      const y = rowTop(this.grid, row);
      pen.fillStyle = evicted;
      pen.fillRect(left, y, cache.length * cell, rowHeight - gap);
      pen.fillStyle = live;
      for (const { from, to, share } of sharesOf(heads)) {
        pen.globalAlpha = shadeOfShare(share);
        pen.fillRect(left + from * cell, y, Math.max(0.75, (to - from) * cell), rowHeight - gap);
      }
      pen.globalAlpha = 1;
      pen.fillStyle = coarse;
      for (const [from, to] of oldest(heads[0], cache.packed)) pen.fillRect(left + from * cell, y, (to - from) * cell, rowHeight - gap);
      pen.fillStyle = ink;
      for (const position of (this.mergedInto[row] || new Map()).keys()) {
        pen.fillRect(left + (position + 0.3) * cell, y + rowHeight * 0.25, Math.max(1, cell * 0.4), rowHeight * 0.4);
      }
      pen.fillStyle = scratch;
      pen.fillRect(left + cache.length * cell, y, cache.scratch * cell, rowHeight - gap);
    });
    pen.fillStyle = mute;
    for (const [row, label] of layerLabels(this.grid, cache)) pen.fillText(label, 0, rowTop(this.grid, row) + (perLayer * rowHeight - gap) / 2);
    const prompt = this.card.record.header.prompt_ids.length;
    if (prompt && prompt < this.grid.span) {
      pen.fillStyle = ink;
      pen.fillRect(left + prompt * cell - 0.5, 0, 1, height - 16);
    }
    pen.fillStyle = mute;
    pen.fillText("position", 0, height - 6);
    pen.textAlign = "center";
    for (const value of ticks(this.grid.span, Math.max(2, Math.min(8, this.width / 110)))) {
      if (value > 0 && value <= this.grid.span) pen.fillText(String(value), Math.min(this.width - 10, left + value * cell), height - 6);
    }
    pen.textAlign = "left";
    this.canvas.setAttribute("aria-label", `KV cache of lane ${this.card.order + 1}: ${sayCache(cache, this.card.record)}`);
  }

  /** Describe the cell under the pointer. */
  point(event) {
    const cache = this.card && this.card.state.lastCache(this.stream);
    if (!cache || !this.grid) return;
    const { x, y } = pointIn(this.canvas, event);
    const position = Math.floor((x - this.grid.left) / this.grid.cell);
    const row = rowAt(this.grid, y);
    if (position < 0 || position >= cache.length + cache.scratch || row === null) return setText(this.hover, HOVER_HINT);
    const state = position < cache.length ? slotState(cache, this.grid.rows[row], position, this.mergedInto[row]) : `reserved for ${holders(this.card.record)}`;
    setText(this.hover, `${rowName(this.grid, row)}, position ${position + 1}${pieceAt(this.card, position)}: ${state}`);
  }

  /** One line per cache update, which makes windows, sinks and evictions visible over time. Forward, lines are only added. */
  drawHistory(card) {
    const all = card.state.caches.get(this.stream) || [];
    const room = updatesIn(card.record, this.stream);
    const shows = room > 1 && card.record.partial.has(this.stream); // without evictions there is nothing to see
    this.history.hidden = this.historyTitle.hidden = !shows;
    if (!shows) return;
    const height = room * Math.max(1, Math.min(4, Math.floor(240 / room)));
    const look = `${card.order}/${this.stream}/${this.width}/${room}/${card.record.widestCache.get(this.stream)}/${colourOf(this.node, "--live")}`;
    if (look !== this.historyLook || all.length < this.historyLines) {
      this.historyPen = sharpCanvas(this.history, this.width, height);
      this.historyLines = 0;
      this.historyLook = look;
    }
    if (!this.grid) return;
    const pen = this.historyPen;
    const style = { left: this.grid.left, cell: this.grid.cell, line: height / room, live: colourOf(this.node, "--live"), evicted: colourOf(this.node, "--evicted") };
    for (; this.historyLines < all.length; this.historyLines++) this.drawUpdate(pen, all[this.historyLines], this.historyLines, style);
    this.history.setAttribute("aria-label", `Live positions after each of ${count(all.length, "update")}`);
  }

  /** The history is painted line by line, so it is begun anew before and after. */
  repaint(card, app) {
    this.historyLook = "";
    super.repaint(card, app);
    this.historyLook = "";
  }

  drawUpdate(pen, cache, number, { left, cell, line, live, evicted }) {
    const y = number * line;
    pen.globalAlpha = 1;
    pen.fillStyle = evicted;
    pen.fillRect(left, y, cache.length * cell, line);
    pen.fillStyle = live;
    for (const { from, to, share } of sharesOf(cache.live.flat())) {
      pen.globalAlpha = shadeOfShare(share);
      pen.fillRect(left + from * cell, y, (to - from) * cell, line);
    }
    pen.globalAlpha = 1;
  }
}

/** Lines of the history: the updates so far, rounded up while the lane runs, so that the panel keeps its height. */
function updatesIn(record, stream) {
  const known = record.events.reduce((sum, event) => sum + (event.kind === "cache" && event.stream === stream), 0);
  return record.over ? known : Math.max(32, 2 ** Math.ceil(Math.log2(known + 1)));
}

/** How many tokens were merged into each live position, by row of the drawing. Merging a slot adds the tokens merged into it. */
function mergedCounts(caches, apart) {
  const layers = [];
  for (const { joined } of caches) {
    (joined || []).forEach((heads, layer) => heads.forEach((pairs, head) => {
      const held = ((layers[layer] ||= [])[head] ||= new Map());
      for (const [from, into] of pairs) {
        held.set(into, (held.get(into) || 0) + 1 + (held.get(from) || 0));
        held.delete(from);
      }
    }));
  }
  const live = layers.map((heads, layer) => heads.map((held, head) => stillLive(held, caches[caches.length - 1].live, layer, head)));
  return apart ? live.flat() : live.map(summed);
}

function stillLive(held, live, layer, head) {
  const heads = live[layer] || live[0];
  const runs = heads[head] || heads[0];
  return new Map([...held].filter(([position]) => runs.some(([from, to]) => from <= position && position < to)));
}

function summed(maps) {
  const sum = new Map();
  for (const [position, number] of maps.flatMap((map) => [...map])) sum.set(position, (sum.get(position) || 0) + number);
  return sum;
}

function slotState(cache, heads, position, merged) {
  const state = liveness(cache, heads, position);
  const number = merged && merged.get(position);
  return number ? `${state}, ${count(number, "other")} merged into it` : state;
}

function liveness(cache, heads, position) {
  const within = (stretches) => stretches.some(([from, to]) => from <= position && position < to);
  const holding = heads.filter(within).length;
  if (!holding) return "evicted";
  if (within(oldest(heads[0], cache.packed))) return "live, quantised";
  return holding === heads.length ? "live" : `live in ${holding} of ${heads.length} heads`;
}

/** Sizes of the drawing. A row represents one head or all heads of a layer; one entry may represent all layers. */
function gridOf(cache, width, widest, apart) {
  const rows = apart ? cache.live.flat().map((runs) => [runs]) : cache.live;
  const perLayer = apart ? Math.max(1, ...cache.live.map((layer) => layer.length)) : 1;
  const span = Math.max(16, widest || 0, cache.length + cache.scratch);
  const rowHeight = Math.max(1, Math.min(rows.length === 1 ? 26 : 12, Math.floor(240 / Math.max(1, rows.length))));
  const gap = rowHeight >= 4 ? 1 : 0;
  const layerGap = perLayer > 1 && rowHeight >= 3 ? 3 : 0;
  const left = rows.length === 1 ? 0 : 52;
  const height = rows.length * rowHeight + Math.max(0, cache.live.length - 1) * layerGap + 18;
  const alike = { layers: cache.live.length === 1 && cache.layers !== 1, heads: perLayer === 1 };
  return { rows, perLayer, span, rowHeight, gap, layerGap, left, height, alike, cell: (width - left - 2) / span };
}

function rowTop(grid, row) {
  return row * grid.rowHeight + Math.floor(row / grid.perLayer) * grid.layerGap;
}

function rowAt(grid, y) {
  for (let row = 0; row < grid.rows.length; row++) {
    if (y >= rowTop(grid, row) && y < rowTop(grid, row) + grid.rowHeight) return row;
  }
  return null;
}

function rowName(grid, row) {
  const layer = grid.alike.layers ? "every layer" : `layer ${Math.floor(row / grid.perLayer) + 1}`;
  return grid.alike.heads ? layer : `${layer}, head ${(row % grid.perLayer) + 1}`;
}

function layerLabels(grid, cache) {
  if (grid.left === 0) return [];
  const every = Math.max(1, Math.ceil(14 / (grid.perLayer * grid.rowHeight + grid.layerGap)));
  return cache.live.map((_, layer) => [layer * grid.perLayer, `layer ${layer + 1}`]).filter((_, layer) => layer % every === 0);
}
