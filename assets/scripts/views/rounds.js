// One bar per round: accepted and rejected draft tokens, and the token that follows them. Several lanes stand side by side, on one axis
// of tokens.

import { el, setText, svg } from "../components/elements.js";
import { count, fixed, percent } from "../components/numbers.js";
import { hasPart } from "../run/headers.js";
import { CHART, Scale } from "./chart.js";
import { Panel, surface } from "./panel.js";
import { roundsIn } from "./tree.js";

export class RoundsPanel extends Panel {
  constructor() {
    super({
      name: "rounds", title: "Accepted per round", kinds: ["verdict"], expects: (header) => hasPart(header, "verifier"),
      empty: "Shows accepted, rejected and added tokens, one bar per round.",
    });
  }

  look(card, app) {
    return [card, ...this.besides(card, app)].map(({ state: { rounds }, record }) => {
      const last = rounds[rounds.length - 1];
      return `${rounds.length}/${Boolean(last && last.verdict)}/${roundsIn(record)}`;
    }).join();
  }

  draw(card, app) {
    const cards = app.cards.filter((one) => one === card || this.has(one));
    this.node.classList.toggle("of-lanes", cards.length > 1);
    this.node.parentElement.classList.toggle("with-wide-rounds", cards.length > 1);
    setText(this.readout, cards.length > 1 ? "" : sayRounds(judgedOf(card)));
    const tallest = Math.max(4, ...cards.flatMap(judgedOf).map((round) => round.verdict.kept.length + round.hasNext + rejectedIn(round)));
    const columns = el("div", "columns");
    const fit = Math.min(cards.length, Math.max(1, Math.floor(this.width / NARROWEST_COLUMN)));
    columns.style.setProperty("--columns", fit);
    const width = Math.floor((this.width - (fit - 1) * COLUMN_GAP) / fit);
    columns.append(...cards.map((one) => this.column(one, app, { width, tallest, named: cards.length > 1 })));
    this.body.replaceChildren(columns, this.legend());
  }

  /** One lane: its bars, and its acceptance rate by depth. */
  column(card, app, { width, tallest, named }) {
    const column = el("div", "rounds-of-lane");
    column.dataset.lane = card.order;
    const name = el("p", "lane-label");
    name.append(el("span", "number", String(card.order + 1)), ` ${sayRounds(judgedOf(card))}`);
    column.append(...(named ? [name] : []), this.bars(card, app, { width, tallest }), this.depths(card.state.costs.depths));
    return column;
  }

  /** Frame the round of the selected token in every lane. */
  pointOut(card, app) {
    for (const column of this.body.querySelectorAll(".rounds-of-lane")) {
      const order = Number(column.dataset.lane);
      const at = app.selection.markOf(order);
      const { round } = (at === null ? null : app.cards[order].text.shown[at]) || {};
      const found = round ? column.querySelector(`.bar[data-round="${round.number}"]`) : null;
      for (const bar of column.querySelectorAll(".bar.marked")) bar.classList.toggle("marked", bar === found);
      if (found) found.classList.add("marked");
    }
  }

  bars(card, app, { width: room, tallest }) {
    const rounds = judgedOf(card);
    const height = 150;
    const scale = new Scale(room, height, Math.max(12, roundsIn(card.record)), tallest);
    const drawing = surface(room, height, `Draft tokens accepted in ${count(rounds.length, "round")} of lane ${card.order + 1}`);
    scale.along = "round";
    drawing.append(...scale.axes("tokens"));
    const width = Math.max(1, Math.min(22, (scale.inner / scale.room) * 0.72));
    const current = card.state.rounds.length - 1;
    for (const round of rounds) drawing.append(this.bar(round, scale, width, round.number - 1 === current, () => app.seekEvent(card.order, round.lastEvent)));
    return drawing;
  }

  bar(round, scale, width, current, go) {
    const bar = svg("g", { class: "bar" + (current ? " current" : ""), "data-round": round.number });
    const x = scale.x(round.number - 1) - width / 2;
    let level = 0;
    for (const [name, size] of [["kept", round.verdict.kept.length], [round.verdict.origin, Number(round.hasNext)], ["refused", rejectedIn(round)]]) {
      if (!size) continue;
      const top = scale.y(level + size);
      bar.append(svg("rect", { class: name, x, y: top, width, height: Math.max(0, scale.y(level) - top - 0.5) }), ...signOf(name, x + width / 2, (top + scale.y(level)) / 2, width));
      level += size;
    }
    const words = `round ${round.number}: ${round.verdict.kept.length} accepted, ${rejectedIn(round)} rejected of ${count(round.draft.tokens.length, "draft token")}`;
    bar.append(svg("title", {}, words), svg("rect", { class: "touch", x: x - 2, y: CHART.top, width: width + 4, height: scale.height - CHART.bottom - CHART.top }));
    bar.addEventListener("click", go);
    return bar;
  }

  legend() {
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-node kept", "accepted"), el("span", "key-node bonus", "bonus"), el("span", "key-node redraw", "replaced"), el("span", "key-node refused", "rejected"));
    return legend;
  }

  /** Acceptance rate by depth in the draft. */
  depths(depths) {
    const table = el("div", "depths");
    if (!depths.length) return table;
    table.append(el("p", "depths-title", "Accepted by draft position"));
    depths.slice(0, 12).forEach((depth, i) => {
      const { tested, accepted } = depth || { tested: 0, accepted: 0 };
      const row = el("div", "depth");
      row.title = tested ? `${accepted} of ${tested} tested draft tokens at position ${i + 1}` : "";
      const bar = el("span", "meter");
      const fill = el("i");
      fill.style.width = tested ? (accepted / tested) * 100 + "%" : "0";
      bar.append(fill);
      row.append(el("span", "num", `+${i + 1}`), bar, el("span", "num", tested ? percent(accepted / tested) : ""), el("span", "num of", `${accepted}/${tested}`));
      table.append(row);
    });
    return table;
  }
}

/** The sign of a bonus or a replaced token, as under the words of the text. */
function signOf(name, x, y, width) {
  if (width < 5) return [];
  if (name === "bonus") return [svg("circle", { class: "bonus-dot", cx: x, cy: y, r: 2.2 })];
  return name === "redraw" ? [svg("path", { class: "redraw-stroke", d: `M${x - 2.5} ${y + 3}l5 -6` })] : [];
}

function rejectedIn(round) {
  return round.rejectedNodes().length;
}

function judgedOf({ state }) {
  return state.rounds.filter((round) => round.verdict);
}

function sayRounds(rounds) {
  const accepted = rounds.reduce((sum, round) => sum + round.verdict.kept.length, 0);
  return rounds.length ? `${fixed(accepted / rounds.length, 2)} accepted per round, ${count(rounds.length, "round")}` : "no verdict yet";
}

const NARROWEST_COLUMN = 260; // px
const COLUMN_GAP = 28;
