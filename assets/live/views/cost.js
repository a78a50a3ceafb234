// Where the time went: every pass on the lane's clock, one track for each who computed, with the part of it that was in vain hatched;
// under it what each of them took in all, and how fast that is beside plain decoding.

const COST = { left: 62, right: 10, track: 20, gap: 4, foot: 18 };
const NEWEST = 24; // turns of the closer view
const COST_HINT = "Point at a pass to read it; click to go there.";

class CostPanel extends Panel {
  constructor() {
    super({
      name: "cost", title: "Cost on the lane's clock", kinds: ["forward"], wide: true, expects: () => true,
      empty: "Fills with the first pass: who computed when, for how long, and what of it was in vain.",
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

  /** The sentence on speed speaks of the plain lane too. */
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
    this.canvas.setAttribute("aria-label", `Timeline of passes of lane ${card.order + 1}: ${sayCost(ledger, card.state.clock)}`);
    this.totals.replaceChildren(...totalRows(ledger, card.state.clock, this.scale.workers));
    setText(this.pace, sayPace(card, app.cards));
  }

  drawSpans(app) {
    this.spans.replaceChildren(...[["whole run", false], [`last ${NEWEST} turns`, true]].map(([label, zoomed]) => {
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
    const style = { pen, scale, colours, vain: hatch(pen, colourOf(this.node, "--paper"), colours.target) };
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
    const moment = this.scale.momentAt(clientX - box.left);
    const worker = this.scale.workers[Math.floor((clientY - box.top) / (COST.track + COST.gap))];
    const { turns } = this.card.state.ledger;
    const first = upperBound(turns.length, (i) => turns[i].to, moment);
    if (first === turns.length || !worker || clientX - box.left < COST.left) return null;
    const slack = 2 * this.scale.moment; // what is narrower than the pointer's aim
    const works = turns.slice(first, first + NEWEST).flatMap((turn) => turn.works); // one of a later turn may have been made aside meanwhile
    const work = works.find((one) => one.worker === worker && one.from - slack <= moment && moment <= one.to + slack);
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

/** Seconds of the lane's clock on the axis: all there are of a lane that ended, else the next round number. */
function clockRoom(record) {
  if (record.over) return record.end || 1e-3;
  const power = 10 ** Math.floor(Math.log10(record.end || 0.1));
  return [1, 2, 5, 10].map((step) => step * power).find((room) => room >= record.end) || 0.1;
}

function newest(turns) {
  const last = turns.slice(-NEWEST);
  return last.length ? { from: last[0].from, to: last[last.length - 1].to } : { from: 0, to: 0.1 };
}

/** Who gets a track: all who ever compute in this lane, and those its header announces. */
function workersOf({ header, streams, kinds }) {
  const computing = new Set([...streams].map((stream) => WORKER_OF_STREAM[stream] || "beside"));
  if (header.draft) computing.add("draft");
  if (kinds.has("mask") || hasPart(header, "constraint")) computing.add("grammar");
  return Object.keys(WORKERS).filter((name) => computing.has(name) || name === "target" || name === "rest");
}

/** Where moments of the lane's clock and those who compute fall on the drawing. */
class ClockScale {
  constructor(width, workers, { from, to }) {
    Object.assign(this, { workers, from, to });
    this.inner = width - COST.left - COST.right;
    this.height = workers.length * (COST.track + COST.gap) + COST.foot;
    this.moment = (to - from) / this.inner; // seconds a pixel
  }

  x(moment) {
    return COST.left + (moment - this.from) / this.moment;
  }

  momentAt(x) {
    return this.from + (x - COST.left) * this.moment;
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

function paintTurn(turn, { pen, scale, colours, vain }) {
  const box = (worker, from, to, share = 1) => {
    const [x, height] = [Math.max(COST.left, scale.x(from)), COST.track * share];
    pen.fillRect(x, scale.top(scale.workers.indexOf(worker)) + COST.track - height, Math.max(0.5, scale.x(to) - x), height);
  };
  for (const { worker, from, to, waste } of turn.works) {
    pen.fillStyle = colours[worker];
    box(worker, from, to);
    if (!waste) continue;
    pen.fillStyle = vain;
    box(worker, from, to, waste);
  }
  pen.fillStyle = colours.rest;
  box("rest", turn.from + turn.used, turn.to);
}

function sayCost({ totals }, clock) {
  if (!clock) return "no time has passed at this point";
  const { seconds: took, wastedSeconds: vain } = totals.target;
  const share = vain ? `, ${percent(vain / clock)} for rows the text did not need` : "";
  return `${seconds(clock)} in all, ${percent(took / clock)} of it in the target${share}`;
}

function sayWork({ worker, event, turn, waste }) {
  if (turn) return `everything else, ${milliseconds(turn.to - turn.from - turn.used)}, until ${fixed(turn.to, 3)} s`;
  if (worker === "grammar") return `mask before token ${event.position + 1}, ${milliseconds(event.seconds)}`;
  const words = [`${event.stream.replaceAll("_", " ")}: ${event.phase.replace("_", " ")}`, count(event.tokens, "row"), milliseconds(event.seconds)];
  if (event.readers > 1) words.push(`its part of what was computed once for ${event.readers} lanes`);
  else if (event.lanes > 1) words.push(`its share of a pass of ${event.lanes} lanes`);
  if (event.meanwhile) words.push(`and ${milliseconds(event.meanwhile)} more while the lane went on`);
  if (waste) words.push(`${fixed(waste * event.tokens, 1).replace(".0", "")} of the rows in vain`);
  return words.join(", ");
}

function milliseconds(value) {
  return `${fixed(Math.max(0, value) * 1000, value < 0.01 ? 2 : 1)} ms`;
}

/** One line for each who computed, and one for what was in vain. */
function totalRows({ totals }, clock, workers) {
  const head = el("tr");
  head.append(...["", "time", "share", "passes", "rows"].map((name) => el("th", "", name)));
  const rows = workers.flatMap((worker) => {
    const { seconds: took, passes, rows: computed, wasted, wastedSeconds } = totals[worker];
    const line = totalRow({ name: WORKERS[worker].label, look: `by-${worker}`, help: WORKERS[worker].help, took, passes, computed, clock });
    if (worker !== "target" || !wasted) return [line];
    return [line, totalRow({ name: "of it in vain", look: "by-vain", help: VAIN_HELP, took: wastedSeconds, computed: wasted, clock })];
  });
  return [head, ...rows];
}

const VAIN_HELP = "Rows of the target that the text did not need: refused guesses, dropped branches, tokens taken back. Their time is their share of the rows of their pass.";

function totalRow({ name, look, help, took, passes, computed, clock }) {
  const row = el("tr");
  row.title = help;
  const share = el("td", "share");
  const meter = el("i", look);
  meter.style.width = clock ? Math.max(0, took / clock) * 100 + "%" : "0";
  share.append(meter, el("span", "num", clock ? percent(Math.max(0, took / clock)) : DASH));
  row.append(el("th", look, name), el("td", "num", seconds(Math.max(0, took))), share, el("td", "num", passes ? String(passes) : ""), el("td", "num", computed ? String(computed) : ""));
  return row;
}
