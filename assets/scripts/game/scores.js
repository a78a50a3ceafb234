// Tables of a game: the score of every team beside model and text, and the tokens that cost the most.

import { el } from "../components/elements.js";
import { DASH, fixed, percent } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { bitsOf } from "./rules.js";
import { badge, pieceNode } from "./words.js";

const BEFORE = 8; // tokens of context for each of the hardest

/** The score of every team, by its name, and of those they are compared with. */
export function scoreTable(match, names) {
  const table = el("table", "scores");
  const head = el("tr");
  head.append(el("td"), ...[match.isFinished ? "last round" : "this round", "all rounds", "right"].map((name) => el("th", "", name)));
  const body = el("tbody");
  const rows = match.scores(names);
  const widest = Math.max(...rows.map(({ total }) => total), 1e-9);
  const best = Math.min(...rows.filter(({ team }) => team !== undefined).map(({ total }) => total));
  body.append(...rows.map((row) => scoreRow(row, widest, names.length > 1 && row.total === best, match.played.length)));
  const top = el("thead");
  top.append(head);
  table.append(top, body);
  return table;
}

function scoreRow({ name, team, last, total, right }, widest, leads, rounds) {
  const row = el("tr", team === undefined ? "reference" : "");
  const who = el("th", "who");
  who.scope = "row";
  if (team !== undefined) who.append(badge(team, ""));
  who.append(name);
  if (team !== undefined && leads) who.append(el("span", "leads", "leads"));
  const whole = el("td", "total", `${fixed(total, 2)} bits`);
  whole.dataset.bits = total;
  const bar = el("span", "bar");
  bar.append(el("i"));
  bar.firstChild.style.width = `${(100 * total) / widest}%`;
  whole.append(bar);
  row.append(who, el("td", "", fixed(last, 2)), whole, el("td", "", right === undefined ? DASH : `${right} of ${rounds}`));
  return row;
}

/** The rounds that cost the most, each with the text before its token and the teams that guessed it. */
export function hardestRounds(match, names) {
  const list = el("ol", "hardest");
  for (const round of match.hardest) {
    const item = el("li");
    const context = el("span", "context");
    const from = Math.max(0, round.position - BEFORE);
    if (from) context.append("…");
    for (const { piece } of match.tokens.slice(from, round.position)) context.append(pieceLabel(piece));
    const right = names.filter((_, i) => round.isRight(round.picks[i]));
    item.append(context, pieceNode(round.token.piece, "token came"));
    const { p } = round.token;
    item.append(el("span", "facts", `probability ${percent(p)}, ${fixed(bitsOf(p), 2)} bits; guessed by ${right.join(", ") || "no team"}`));
    list.append(item);
  }
  return list;
}
