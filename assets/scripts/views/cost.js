// Where the time went: every forward on the lane's clock, one track per model, wasted rows hatched; below it the totals and the
// speed-up over plain decoding. With several lanes, the others have one track each on the same axis, and their totals stand beside.

import { button, colourOf, el, pointIn, setText } from "../components/elements.js";
import { count, fixed, milliseconds, percent, seconds, upperBound } from "../components/numbers.js";
import { hatch } from "../components/vector.js";
import { hasPart } from "../run/headers.js";
import { WORKER_OF_STREAM, WORKERS } from "../run/ledger.js";
import { sayPace } from "../run/plain.js";
import { Panel, pinAt, Pins, sharpCanvas, tickStep } from "./panel.js";

const COST = { left: 62, right: 10, track: 20, gap: 4, foot: 18 };
const NEWEST = 24; // turns shown when zoomed in
const COST_HINT = "Point at a forward to read it; click to go there.";

export class CostPanel extends Panel {
  constructor() {
    super({
      name: "cost", title: "Cost on the lane's clock", kinds: ["forward"], wide: true, expects: () => true,
      empty: "Shows every forward: its model, its time, and its wasted rows.",
    });
    this.zoomed = false;
    this.spans = el("div", "segments");
    this.tools.append(this.spans);
    this.canvas = el("canvas", "heat");
    this.canvas.setAttribute("role", "img");
    this.place = new Pins(this.canvas);
    this.hover = el("p", "hover-line", COST_HINT);
    this.totals = el("div", "totals-of-lanes");
    this.body.append(this.place.node, this.hover, this.totals);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.hover, COST_HINT));
    this.canvas.addEventListener("click", (event) => this.go(event));
  }

  /** The axis ends where the slowest lane ends, and the speed-up depends on the plain lane. */
  look(card, app) {
    return `${this.zoomed}/${app.cards.map(({ state, record }) => `${state.version}:${clockRoom(record)}`)}`;
  }

  draw(card, app) {
    Object.assign(this, { card, app, cards: [card, ...this.besides(card, app)] });
    const { ledger } = card.state;
    this.drawSpans(app);
    const room = Math.max(...this.cards.map(({ record }) => clockRoom(record)));
    this.scale = new ClockScale(this.width, tracksOf(this.cards), this.zoomed ? newest(ledger.turns) : { from: 0, to: room });
    setText(this.readout, sayCost(ledger, card.state.clock));
    this.paint();
    this.canvas.setAttribute("aria-label", `Timeline of forwards of ${this.cards.map(({ order, state }) => `lane ${order + 1}: ${sayCost(state.ledger, state.clock)}`).join("; ")}`);
    this.totals.dataset.lanes = this.cards.length;
    this.totals.replaceChildren(...app.cards.filter((one) => this.cards.includes(one)).map((one) => this.totalsOf(one)));
  }

  /** A table of one lane's totals, and its speed-up. */
  totalsOf(card) {
    const { state: { ledger, clock } } = card;
    const part = el("div", `totals-of-lane${card === this.card ? " large" : ""}`);
    const name = el("p", "lane-label");
    name.dataset.lane = card.order;
    name.append(el("span", "number", String(card.order + 1)), ` ${card.title}`);
    const table = el("table", "totals");
    table.append(...totalRows(ledger, clock, workersOf(card.record)));
    part.append(...(this.cards.length > 1 ? [name] : []), table, el("p", "pace", sayPace(card)));
    return part;
  }

  drawSpans(app) {
    this.spans.replaceChildren(...[["whole run", false], ["latest part", true]].map(([label, zoomed]) => {
      const choose = button("segment", label, "", () => {
        this.zoomed = zoomed;
        app.schedule();
      });
      choose.setAttribute("aria-pressed", String(zoomed === this.zoomed));
      return choose;
    }));
  }

  paint() {
    const { scale } = this;
    const pen = sharpCanvas(this.canvas, this.width, scale.height);
    const colours = Object.fromEntries(Object.keys(WORKERS).map((worker) => [worker, colourOf(this.node, `--by-${worker}`)]));
    const style = { pen, scale, colours, wasted: hatch(pen, colourOf(this.node, "--paper"), colours.target) };
    this.paintGround(pen, scale);
    for (const card of this.cards) {
      const { turns } = card.state.ledger;
      const rowOf = scale.rowsOf(card);
      for (let i = scale.firstOf(turns); i < turns.length && turns[i].from <= scale.to; i++) paintTurn(turns[i], rowOf, style);
    }
  }

  paintGround(pen, scale) {
    const [mute, faint, paper] = ["--mute", "--faint", "--paper"].map((name) => colourOf(this.node, name));
    pen.font = `13px ${getComputedStyle(this.node).fontFamily}`;
    pen.textBaseline = "middle";
    scale.tracks.forEach(({ card, worker }, row) => {
      const y = scale.top(row);
      pen.fillStyle = faint;
      pen.fillRect(COST.left, y, scale.inner, COST.track);
      if (!worker) paintNumber(pen, card, y, paper);
      pen.fillStyle = mute;
      pen.fillText(worker ? WORKERS[worker].label : "all", worker ? 0 : 24, y + COST.track / 2);
    });
    pen.textAlign = "center";
    for (const { x, label } of scale.ticks()) pen.fillText(label, Math.min(this.width - 20, x), scale.height - 7);
    pen.textAlign = "left";
  }

  /** Frame the forward after which the selected token was committed, in every lane. */
  pointOut(card, app) {
    const marked = (this.cards || []).filter(({ order }) => app.selection.markOf(order) !== null);
    this.place.show(marked.flatMap((one) => this.boxOf(one, one.text.shown[app.selection.markOf(one.order)].pass)));
  }

  boxOf(card, pass) {
    const { scale } = this;
    const work = pass && workOf(card.state.ledger.turns, pass);
    if (!work || work.from >= scale.to || work.to <= scale.from) return [];
    const [left, right] = [Math.max(COST.left, scale.x(work.from)), scale.x(Math.min(scale.to, work.to))];
    return [pinAt(left, scale.top(scale.rowsOf(card)(work.worker)), right - left, COST.track)];
  }

  /** The work under the pointer, or null. */
  at(event) {
    const { x, y } = pointIn(this.canvas, event);
    const time = this.scale.timeAt(x);
    const track = this.scale.trackAt(y);
    if (!track || x < COST.left) return null;
    const { card, worker } = track;
    const { turns } = card.state.ledger;
    const first = upperBound(turns.length, (i) => turns[i].to, time);
    if (first === turns.length) return null;
    const slack = 2 * this.scale.perPixel; // precision of the pointer
    const works = turns.slice(first, first + NEWEST).flatMap((turn) => turn.works); // a concurrent forward belongs to a later turn
    const work = works.find((one) => (!worker || one.worker === worker) && one.from - slack <= time && time <= one.to + slack);
    return work ? { card, ...work } : !worker || worker === "rest" ? { card, worker: "rest", turn: turns[first] } : null;
  }

  point(event) {
    const found = this.card && this.at(event);
    const lane = found && this.cards.length > 1 ? `lane ${found.card.order + 1}: ` : "";
    setText(this.hover, found ? lane + sayWork(found) : COST_HINT);
  }

  go(event) {
    const found = this.card && this.at(event);
    if (found && found.event) this.app.seekEvent(found.card.order, found.event.index);
  }
}

/** The place of a forward on the clock. */
function workOf(turns, event) {
  const turn = turns[upperBound(turns.length, (i) => turns[i].to, event.at - 1e-9)];
  return turn && turn.works.find((work) => work.event === event);
}

/** Seconds on the axis: all of a lane that ended, otherwise rounded up. */
function clockRoom(record) {
  if (record.over) return record.end || 1e-3;
  const power = 10 ** Math.floor(Math.log10(record.end || 0.1));
  return [1, 2, 5, 10].map((step) => step * power).find((room) => room >= record.end) || 0.1;
}

function newest(turns) {
  const last = turns.slice(-NEWEST);
  return last.length ? { from: last[0].from, to: last[last.length - 1].to } : { from: 0, to: 0.1 };
}

/** The tracks: all workers that compute in this lane, and those its header announces. */
function workersOf({ header, streams, kinds }) {
  const computing = new Set([...streams].map((stream) => WORKER_OF_STREAM[stream] || "beside"));
  if (header.draft) computing.add("draft");
  if (kinds.has("mask") || hasPart(header, "constraint")) computing.add("grammar");
  return Object.keys(WORKERS).filter((name) => computing.has(name) || name === "target" || name === "rest");
}

/** The tracks, {card, worker}: one per worker of the first lane, and one for all workers of each other lane, where `worker` is null. */
function tracksOf([first, ...others]) {
  return [...workersOf(first.record).map((worker) => ({ card: first, worker })), ...others.map((card) => ({ card, worker: null }))];
}

function paintNumber(pen, card, y, paper) {
  pen.fillStyle = colourOf(card.node, "--lane");
  pen.fillRect(0, y + 1, 18, 18);
  pen.fillStyle = paper;
  pen.fillText(String(card.order + 1), 6, y + COST.track / 2);
}

/** Maps times of the lanes' clocks and tracks to the drawing. */
class ClockScale {
  constructor(width, tracks, { from, to }) {
    Object.assign(this, { tracks, from, to });
    this.inner = width - COST.left - COST.right;
    this.height = tracks.length * (COST.track + COST.gap) + COST.foot;
    this.perPixel = (to - from) / this.inner; // seconds
  }

  x(time) {
    return COST.left + (time - this.from) / this.perPixel;
  }

  timeAt(x) {
    return this.from + (x - COST.left) * this.perPixel;
  }

  top(row) {
    return row * (COST.track + COST.gap);
  }

  trackAt(y) {
    return this.tracks[Math.floor(y / (COST.track + COST.gap))];
  }

  /** A function from a worker to its track in one lane. */
  rowsOf(card) {
    const rows = new Map();
    this.tracks.forEach((track, row) => track.card === card && rows.set(track.worker, row));
    return (worker) => rows.get(rows.has(null) ? null : worker);
  }

  firstOf(turns) {
    return upperBound(turns.length, (i) => turns[i].to, this.from);
  }

  ticks() {
    const step = tickStep((this.to - this.from) / Math.max(2, Math.min(8, this.inner / 90)));
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const first = Math.ceil(this.from / step - 1e-6);
    const values = Array.from({ length: Math.max(0, Math.floor(this.to / step + 1e-6) - first + 1) }, (_, i) => (first + i) * step);
    return values.map((value) => ({ x: this.x(value), label: `${value.toFixed(digits)} s` }));
  }
}

function paintTurn(turn, rowOf, { pen, scale, colours, wasted }) {
  const box = (worker, from, to, share = 1) => {
    const [x, height] = [Math.max(COST.left, scale.x(from)), COST.track * share];
    const end = Math.min(COST.left + scale.inner, scale.x(to));
    pen.fillRect(x, scale.top(rowOf(worker)) + COST.track - height, Math.max(0.5, end - x), height);
  };
  for (const { worker, from, to, waste } of turn.works) {
    pen.fillStyle = colours[worker];
    box(worker, from, to);
    if (!waste) continue;
    pen.fillStyle = wasted;
    box(worker, from, to, waste);
  }
  pen.fillStyle = colours.rest;
  box("rest", turn.from + turn.used, turn.to);
}

function sayCost({ totals }, clock) {
  if (!clock) return "0 s at this point";
  const { seconds: took, wastedSeconds: wasted } = totals.target;
  const share = wasted ? `, ${percent(wasted / clock)} on wasted rows` : "";
  return `${seconds(clock)} in all, ${percent(took / clock)} of it in the target${share}`;
}

function sayWork({ worker, event, turn, waste }) {
  if (turn) return `other work, ${milliseconds(turn.to - turn.from - turn.used)}, until ${fixed(turn.to, 3)} s`;
  if (worker === "grammar") return `mask before token ${event.position + 1}, ${milliseconds(event.seconds)}`;
  const words = [`${event.stream.replaceAll("_", " ")}: ${event.phase.replace("_", " ")}`, count(event.tokens, "row"), milliseconds(event.seconds)];
  if (event.readers > 1) words.push(`its share of a forward computed once for ${event.readers} lanes`);
  else if (event.lanes > 1) words.push(`its share of a batched forward of ${event.lanes} lanes`);
  if (event.meanwhile) words.push(`and ${milliseconds(event.meanwhile)} concurrently with the lane`);
  if (waste) words.push(`${fixed(waste * event.tokens, 1).replace(".0", "")} of the rows wasted`);
  return words.join(", ");
}

/** The number of forwards, as under the lane; prefills are counted apart. */
function sayForwards({ passes, prefills }) {
  return [passes && String(passes), prefills && count(prefills, "prefill")].filter(Boolean).join(" + ");
}

/** One line per worker, and one for the wasted rows. */
function totalRows({ totals }, clock, workers) {
  const head = el("tr");
  head.append(...["", "time", "share", "forwards", "rows"].map((name) => el("th", "", name)));
  const rows = workers.flatMap((worker) => {
    const { seconds: took, rows: computed, wasted, wastedSeconds } = totals[worker];
    const line = totalRow({ name: WORKERS[worker].label, look: `by-${worker}`, help: WORKERS[worker].help, took, passes: sayForwards(totals[worker]), computed, clock });
    if (worker !== "target" || !wasted) return [line];
    return [line, totalRow({ name: "wasted", look: "by-vain", help: WASTED_HELP, took: wastedSeconds, computed: wasted, clock })];
  });
  return [head, ...rows];
}

const WASTED_HELP = "Target rows the text did not need: rejected draft tokens, dropped branches, rolled back tokens. Their time is proportional to their share of the rows.";

function totalRow({ name, look, help, took, passes, computed, clock }) {
  const row = el("tr");
  row.title = help;
  const share = el("td", "share");
  const meter = el("i", look);
  meter.style.width = clock ? Math.max(0, took / clock) * 100 + "%" : "0";
  share.append(meter, el("span", "num", clock ? percent(Math.max(0, took / clock)) : ""));
  row.append(el("th", look, name), el("td", "num", seconds(Math.max(0, took))), share, el("td", "num", passes || ""), el("td", "num", computed ? String(computed) : ""));
  return row;
}
