// Where the time went: every forward on the lane's clock, one track per model, wasted rows hatched; below it the totals and the
// speed-up over plain decoding.

const COST = { left: 62, right: 10, track: 20, gap: 4, foot: 18 };
const NEWEST = 24; // turns shown when zoomed in
const COST_HINT = "Point at a forward to read it; click to go there.";

class CostPanel extends Panel {
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
    this.hover = el("p", "hover-line", COST_HINT);
    this.totals = el("table", "totals");
    this.pace = el("p", "pace");
    this.body.append(this.canvas, this.hover, this.totals, this.pace);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.hover, COST_HINT));
    this.canvas.addEventListener("click", (event) => this.go(event));
  }

  /** The speed-up depends on the plain lane too. */
  look(card, app) {
    const plain = plainLane(card, app.cards);
    return `${card.state.version}/${this.zoomed}/${plain ? plain.state.version : ""}/${clockRoom(card.record)}`;
  }

  draw(card, app) {
    Object.assign(this, { card, app });
    const { ledger } = card.state;
    this.drawSpans(app);
    this.scale = new ClockScale(this.width, workersOf(card.record), this.zoomed ? newest(ledger.turns) : { from: 0, to: clockRoom(card.record) });
    setText(this.readout, sayCost(ledger, card.state.clock));
    this.paint(ledger.turns);
    this.canvas.setAttribute("aria-label", `Timeline of forwards of lane ${card.order + 1}: ${sayCost(ledger, card.state.clock)}`);
    this.totals.replaceChildren(...totalRows(ledger, card.state.clock, this.scale.workers));
    setText(this.pace, sayPace(card, app.cards));
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

  paint(turns) {
    const { scale } = this;
    const pen = sharpCanvas(this.canvas, this.width, scale.height);
    const colours = Object.fromEntries(scale.workers.map((worker) => [worker, colourOf(this.node, `--by-${worker}`)]));
    const style = { pen, scale, colours, wasted: hatch(pen, colourOf(this.node, "--paper"), colours.target) };
    this.paintGround(pen, scale);
    for (let i = scale.firstOf(turns); i < turns.length; i++) paintTurn(turns[i], style);
  }

  paintGround(pen, scale) {
    const [mute, faint] = ["--mute", "--faint"].map((name) => colourOf(this.node, name));
    pen.font = `11px ${getComputedStyle(this.node).fontFamily}`;
    pen.textBaseline = "middle";
    scale.workers.forEach((worker, row) => {
      pen.fillStyle = faint;
      pen.fillRect(COST.left, scale.top(row), scale.inner, COST.track);
      pen.fillStyle = mute;
      pen.fillText(WORKERS[worker].label, 0, scale.top(row) + COST.track / 2);
    });
    pen.textAlign = "center";
    for (const { x, label } of scale.ticks()) pen.fillText(label, Math.min(this.width - 20, x), scale.height - 7);
    pen.textAlign = "left";
  }

  /** The work under the pointer, or null. */
  at({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    const time = this.scale.timeAt(clientX - box.left);
    const worker = this.scale.workers[Math.floor((clientY - box.top) / (COST.track + COST.gap))];
    const { turns } = this.card.state.ledger;
    const first = upperBound(turns.length, (i) => turns[i].to, time);
    if (first === turns.length || !worker || clientX - box.left < COST.left) return null;
    const slack = 2 * this.scale.perPixel; // precision of the pointer
    const works = turns.slice(first, first + NEWEST).flatMap((turn) => turn.works); // a concurrent forward belongs to a later turn
    const work = works.find((one) => one.worker === worker && one.from - slack <= time && time <= one.to + slack);
    return work || (worker === "rest" ? { worker, turn: turns[first] } : null);
  }

  point(event) {
    const found = this.card && this.at(event);
    setText(this.hover, found ? sayWork(found) : COST_HINT);
  }

  go(event) {
    const found = this.card && this.at(event);
    if (found && found.event) this.app.seekEvent(this.card.order, found.event.index);
  }
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

/** Maps times of the lane's clock and workers to the drawing. */
class ClockScale {
  constructor(width, workers, { from, to }) {
    Object.assign(this, { workers, from, to });
    this.inner = width - COST.left - COST.right;
    this.height = workers.length * (COST.track + COST.gap) + COST.foot;
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

function paintTurn(turn, { pen, scale, colours, wasted }) {
  const box = (worker, from, to, share = 1) => {
    const [x, height] = [Math.max(COST.left, scale.x(from)), COST.track * share];
    pen.fillRect(x, scale.top(scale.workers.indexOf(worker)) + COST.track - height, Math.max(0.5, scale.x(to) - x), height);
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

function milliseconds(value) {
  return `${fixed(Math.max(0, value) * 1000, value < 0.01 ? 2 : 1)} ms`;
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
  share.append(meter, el("span", "num", clock ? percent(Math.max(0, took / clock)) : DASH));
  row.append(el("th", look, name), el("td", "num", seconds(Math.max(0, took))), share, el("td", "num", passes || ""), el("td", "num", computed ? String(computed) : ""));
  return row;
}
