// Sequences that grow side by side: their lineage, and the score, text and state of each.

import { el, setText, svg } from "../components/elements.js";
import { count, fixed, isNumber, percent } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { tokenClass } from "../lane/colour.js";
import { Scale } from "./chart.js";
import { Panel, roomFor, surface } from "./panel.js";

const LINEAGE = { height: 230, row: [8, 18], label: 24, margin: 6, bend: 40 };
const MOST_LINES = 96; // entries of the list; the sequences dropped earliest are left out
const SHARED_SHOWN = 8; // tokens of a shared prefix that are shown
const BRANCH_STATES = { text: "became the text", growing: "growing", ended: "ended", left: "not chosen", dropped: "dropped" };

export class BranchesPanel extends Panel {
  constructor() {
    super({ name: "branches", title: "Sequences", kinds: ["branches"], wide: true });
    this.lineage = el("div", "lineage");
    this.lineage.tabIndex = 0;
    this.lineage.setAttribute("aria-label", "Lineage of the sequences");
    this.list = el("ol", "branches");
    this.list.tabIndex = 0;
    this.list.setAttribute("aria-label", "Sequences, best first");
    this.earlier = el("p", "vacancy");
    this.why = el("p", "vacancy why-dropped");
    this.lines = new Map(); // by sequence
    this.body.append(this.lineage, lineageKey(), this.list, this.earlier, this.why);
    for (const host of [this.lineage, this.list]) this.linkTo(host);
  }

  look(card, app) {
    return `${card.state.version}/${app.channels}/${roomFor(card.record)}`;
  }

  draw(card, app) {
    const { state } = card;
    setText(this.readout, sayFamily(state));
    this.lineage.replaceChildren(lineageDrawing(card, this.width));
    this.drawList(state, app.channels);
  }

  drawList(state, channels) {
    const all = inOrder(state);
    const lines = all.slice(0, MOST_LINES).map((sequence) => this.lineOf(sequence));
    const seen = new Set(state.sequence(0).tokens);
    for (const line of lines) {
      line.draw(state, sharedLength(line.sequence.tokens, seen), channels);
      for (const token of line.sequence.tokens) seen.add(token);
    }
    const nodes = lines.map((line) => line.node);
    const present = this.list.children;
    if (nodes.length !== present.length || nodes.some((node, i) => node !== present[i])) this.list.replaceChildren(...nodes);
    this.list.classList.toggle("has-sums", lines.some(({ sequence }) => sequence.sum !== null));
    this.lines = new Map(lines.map((line) => [line.sequence, line]));
    setText(this.why, whyDropped(state));
    setText(this.earlier, all.length > MOST_LINES ? `and ${all.length - MOST_LINES} dropped earlier` : "");
  }

  lineOf(sequence) {
    return this.lines.get(sequence) || new BranchLine(sequence);
  }

  /** Pointing at a sequence highlights it in the drawing and in the list. */
  linkTo(host) {
    const mark = (event) => {
      const found = event.type === "pointerover" && event.target.closest("[data-sequence]");
      const number = found ? found.dataset.sequence : null;
      for (const node of this.body.querySelectorAll("[data-sequence]")) node.classList.toggle("pointed", node.dataset.sequence === number);
    };
    host.addEventListener("pointerover", mark);
    host.addEventListener("pointerleave", mark);
  }
}

/** One sequence in the list. Tokens are only appended and removed at the end. */
class BranchLine {
  constructor(sequence) {
    this.sequence = sequence;
    this.node = el("li", "branch");
    this.node.dataset.sequence = sequence.id;
    this.score = el("span", "num score");
    this.stateLabel = el("span", "branch-state");
    this.sum = el("span", "num sum");
    this.shared = el("span", "shared");
    this.own = el("span", "own");
    const text = el("span", "branch-text");
    text.append(this.shared, this.own);
    this.node.append(el("span", "num", `#${sequence.id}`), this.score, this.sum, this.stateLabel, text);
    this.node.title = sayOrigin(sequence);
    this.shown = [];
  }

  draw(state, shared, channels) {
    const branchState = branchStateOf(this.sequence, state);
    this.node.dataset.state = branchState;
    this.node.classList.toggle("shown", this.sequence === state.shown);
    setText(this.stateLabel, BRANCH_STATES[branchState]);
    setText(this.sum, sayRawScore(this.sequence));
    setText(this.score, fixed(this.sequence.score, 3));
    const { tokens } = this.sequence;
    const folded = shared > SHARED_SHOWN + 1;
    const beginning = tokens.slice(folded ? shared - SHARED_SHOWN : 0, shared);
    setText(this.shared, (folded ? "… " : "") + beginning.map((token) => pieceLabel(token.piece, 40)).join(""));
    this.drawOwn(tokens.slice(shared), channels);
  }

  drawOwn(tokens, channels) {
    let same = channels === this.channels ? Math.min(this.shown.length, tokens.length) : 0;
    while (same > 0 && this.shown[same - 1] !== tokens[same - 1]) same -= 1;
    while (this.own.children.length > same) this.own.lastChild.remove();
    this.own.append(...tokens.slice(same).map((token) => this.token(token, channels)));
    this.shown = tokens;
    this.channels = channels;
  }

  token(token, channels) {
    const span = el("span", tokenClass(token, this.sequence.steps.get(token.position) || null, channels));
    if (isNumber(token.logprob)) span.title = `token ${token.position + 1}, probability ${percent(Math.exp(token.logprob))}`;
    writePiece(span, token.piece, true);
    return span;
  }
}

/** What length normalisation made the score from; empty if the score is not normalised. */
function sayRawScore({ sum, scoredAt }) {
  return sum === null ? "" : `from sum ${fixed(sum, 3)} over ${count(scoredAt, "token")}`;
}

/** Why a dropped sequence may show a better score than the text: it has the score of an earlier step. */
function whyDropped({ family }) {
  const chosen = family.findLast((sequence) => sequence.becameText);
  const better = chosen && family.filter(({ alive, score }) => !alive && isNumber(score) && score > (chosen.score ?? Infinity));
  if (!better || !better.length) return "";
  const norm = chosen.sum === null ? "" : " Scores are sums of log-probabilities, normalised by length.";
  const one = better.length === 1;
  const named = better.map(({ id, tokens }) => `#${id} (after ${count(tokens.length, "token")})`).join(", ");
  return `${named} ${one ? "has a better score" : "have better scores"} than the text, but from before ${one ? "it was" : "they were"} dropped; the search compares the scores of one step.${norm}`;
}

/** The sequence that became the text, then live ones by score, then dropped ones, the latest first. */
function inOrder(state) {
  const rank = (sequence) => (sequence.becameText ? 0 : sequence.alive ? 1 : 2);
  const score = (sequence) => (sequence.alive ? sequence.score ?? -Infinity : state.family.indexOf(sequence));
  return [...state.family].sort((a, b) => rank(a) - rank(b) || score(b) - score(a) || a.id - b.id);
}

/** Length of the prefix already shown by a sequence above: branches share the token objects of their parent. */
function sharedLength(tokens, seen) {
  const first = tokens.findIndex((token) => !seen.has(token));
  return first < 0 ? tokens.length : first;
}

function branchStateOf(sequence, state) {
  if (sequence.becameText) return "text";
  if (!sequence.alive) return "dropped";
  if (sequence.ended) return "ended";
  return state.done || state.failed || sequence.leftBehind ? "left" : "growing";
}

function sayFamily(state) {
  const states = state.family.map((sequence) => branchStateOf(sequence, state));
  const number = (name) => states.filter((branchState) => branchState === name).length;
  const alive = states.length - number("dropped");
  const over = Boolean(state.done || state.failed);
  const words = [`${count(alive, "sequence")} ${over ? "at the end" : "alive"}`];
  if (number("ended") && !over) words.push(`${number("ended")} of them ended`);
  if (number("dropped")) words.push(`${number("dropped")} dropped`);
  const chosen = state.family.filter((sequence) => sequence.becameText).map((sequence) => `#${sequence.id}`);
  if (chosen.length) words.push(`${chosen.join(", ")} became the text`);
  return words.join(", ");
}

function sayOrigin({ id, parent, bornAt }) {
  return parent && parent.id ? `Sequence ${id}, from ${parent.id} after token ${bornAt}` : `Sequence ${id}`;
}

// The drawing: columns are tokens, every sequence is a line from its branching point to its last token.

function lineageDrawing(card, width) {
  const { state, record } = card;
  const scale = new LineageScale(width, lineageRows(state.family), roomFor(record));
  const drawing = surface(width, scale.height, sayFamily(state));
  drawing.classList.add("tree-of-births");
  drawing.append(...scale.positions(scale.height - 6));
  const lines = state.family.map((sequence) => lineageLine(sequence, branchStateOf(sequence, state), scale));
  const best = state.family.findLast((sequence) => sequence.becameText) || (state.shown.id ? state.shown : null);
  drawing.append(...lines, ...ancestry(best).map(([sequence, until]) => svg("path", { class: "descent", d: descent(sequence, until, scale) })));
  drawing.append(...state.family.flatMap((sequence) => lineageEnd(sequence, branchStateOf(sequence, state), scale)));
  return drawing;
}

/** The row of every sequence: its parent's if the parent ends where it branches, otherwise the first free row. */
function lineageRows(family) {
  const last = []; // by row: the last sequence in it
  const rows = new Map();
  for (const child of family) {
    const free = (one) => !one.alive && one.tokens.length <= child.bornAt;
    const own = free(child.parent) ? last.indexOf(child.parent) : -1;
    const row = [own, last.findIndex(free), last.length].find((place) => place >= 0);
    last[row] = child;
    rows.set(child, row);
  }
  return rows;
}

class LineageScale extends Scale {
  constructor(width, rows, room) {
    const number = Math.max(1, ...[...rows.values()].map((row) => row + 1));
    const [least, most] = LINEAGE.row;
    const pitch = Math.max(least, Math.min(most, Math.floor(LINEAGE.height / number)));
    super(width, number * pitch + 30, room, 1);
    this.pitch = pitch;
    this.inner -= LINEAGE.label;
    this.rows = rows;
    this.middle = (number - 1) / 2; // the row of the lane's own text, parent of the first branches
  }

  row(sequence) {
    return 8 + (this.rows.get(sequence) ?? this.middle) * this.pitch;
  }
}

function lineageLine(sequence, branchState, scale) {
  const group = svg("g", { class: `birth ${branchState}`, "data-sequence": sequence.id });
  const score = isNumber(sequence.score) ? `, score ${fixed(sequence.score, 3)}` : "";
  group.append(svg("title", {}, `${sayOrigin(sequence)}, ${BRANCH_STATES[branchState]}${score}`));
  group.append(svg("path", { d: descent(sequence, sequence.tokens.length, scale) }));
  return group;
}

/** From the parent's last token to this sequence's row, and along it to the token before position `until`. */
function descent(sequence, until, scale) {
  const from = Math.max(LINEAGE.margin, scale.x(sequence.bornAt - 1));
  const to = scale.x(sequence.bornAt);
  const bend = Math.max(from, to - LINEAGE.bend);
  const middle = (bend + to) / 2;
  const end = Math.max(to, scale.x(until - 1));
  const [above, row] = [scale.row(sequence.parent), scale.row(sequence)];
  const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  return `M${at(from, above)}L${at(bend, above)}C${at(middle, above)} ${at(middle, row)} ${at(to, row)}L${at(end, row)}`;
}

/** A sequence and its ancestors, each with the position up to which it belongs to the path. */
function ancestry(sequence) {
  const path = [];
  let until = sequence ? sequence.tokens.length : 0;
  for (let one = sequence; one && one.parent; one = one.parent) {
    path.push([one, until]);
    until = one.bornAt;
  }
  return path;
}

function lineageEnd(sequence, branchState, scale) {
  const x = Math.max(scale.x(sequence.bornAt), scale.x(sequence.tokens.length - 1));
  const y = scale.row(sequence);
  if (branchState === "dropped") return [svg("path", { class: "end dropped", d: `M${x - 2.5} ${y - 2.5}l5 5m0 -5l-5 5` })];
  const mark = branchState === "ended" ? svg("rect", { x: x - 3, y: y - 3, width: 6, height: 6 }) : svg("circle", { cx: x, cy: y, r: branchState === "text" ? 4 : 3 });
  mark.setAttribute("class", `end ${branchState}`);
  return scale.pitch < 11 ? [mark] : [mark, svg("text", { class: "tick", x: x + 7, y: y + 3.5 }, `#${sequence.id}`)];
}

function lineageKey() {
  const key = el("p", "chart-key");
  key.append(el("span", "key-descent", "the best sequence and its ancestors"), el("span", "key-birth", "alive"));
  key.append(el("span", "key-ended", "ended"), el("span", "key-dropped", "dropped"));
  return key;
}
