// The word being chosen: the most probable candidates as bars, with the model's probability and, as a thin line, the one after masks and
// processors. A held token stays in place of the newest one, with all that is known about it.

import { composed, composedBetween, piecesAround, saidBetween } from "../components/composed.js";
import { button, el, setText } from "../components/elements.js";
import { count, isNumber, percent } from "../components/numbers.js";
import { isEnd, pieceLabel, SPECIAL, writePiece } from "../components/pieces.js";
import { bars, reasonOf } from "../lane/probabilities.js";
import { leading, saySpecials } from "../run/candidates.js";
import { sayForced } from "../run/headers.js";
import { Panel } from "./panel.js";

const SHOWN_CANDIDATES = 6;
const WORDS_BEFORE = 8; // tokens before the gap
const THE_END = "the end of the text";

export class ChoicePanel extends Panel {
  constructor() {
    super({ name: "choice", title: "Choice", kinds: ["step"], expects: (header) => !header.canvas && !header.remote });
    this.line = el("p", "gap-line");
    this.rows = el("div", "choices");
    this.rest = el("p", "choice-rest");
    this.hint = el("p", "vacancy");
    this.more = el("div", "choice-more");
    this.body.append(this.line, this.rows, this.rest, this.hint, this.more);
  }

  /** Only where one view is shown with the text; elsewhere the card of a token has the candidates. */
  isThere(app) {
    return app.live.dataset.views !== "all" && super.isThere(app);
  }

  look(card, app) {
    const refusal = app.requests.forkRefusal(card.order);
    return `${card.state.version}/${this.placeIn(card, app)}/${app.card.pinned}/${app.inspector.showsSpecials}/${refusal}`;
  }

  /** The position whose choice is shown: the held one, or the newest with recorded probabilities. */
  placeIn(card, app) {
    const held = app.selection.heldOf(card.order);
    const { steps, tokens } = card.state.shown;
    if (held !== null) return held;
    for (let at = tokens.length - 1; at >= 0; at--) if (steps.has(at)) return at;
    return null;
  }

  draw(card, app) {
    const at = this.placeIn(card, app);
    const { steps, tokens } = card.state.shown;
    const step = steps.get(at);
    this.rows.hidden = this.rest.hidden = !step;
    this.line.hidden = at === null;
    setText(this.hint, at === null ? "The first word is about to be chosen." : "");
    this.drawMore(card, app);
    if (at === null) return;
    const { before, after } = piecesAround(tokens, at);
    this.line.replaceChildren(...wordsBefore(tokens, at), gapOf(tokens[at], before, after));
    if (!step) return;
    const refusal = app.requests.forkRefusal(card.order);
    const { shown, specials, others } = leading(step, SHOWN_CANDIDATES, app.inspector.showsSpecials);
    this.rows.replaceChildren(...shown.map((candidate) => choiceRow(candidate, { chosen: step.chosen, refusal, before, after: candidate[0] === step.chosen ? after : [], go: () => app.requests.fork(card.order, at, candidate[0], candidate[1]) })));
    setText(this.rest, [saySpecials(specials), others > 0.0005 && `all other tokens together ${percent(others)}`].filter(Boolean).join(", "));
    setText(this.hint, refusal ? "Press Run to continue with another word here." : "Choose another word, and the text continues with it.");
  }

  /** All else about a held token; drawn once, for the visitor may be typing in it. */
  drawMore(card, app) {
    const held = app.selection.heldOf(card.order);
    const named = card.state.said.get(held)?.length || 0; // overlays speak once the text has ended
    const look = held === null ? "" : `${app.trace.run}/${card.order}/${held}/${named}`;
    if (look === this.moreLook) return;
    this.moreLook = look;
    this.node.classList.toggle("is-held", held !== null);
    if (held === null) return this.more.replaceChildren();
    const back = button("quiet back-to-now", "Back to now", "Show the newest word again (Escape)", () => app.selection.unpin());
    this.more.replaceChildren(back, ...app.card.rest(card.order, card.state, card.state.shown.tokens[held]));
  }
}

function wordsBefore(tokens, at) {
  const pieces = tokens.slice(Math.max(0, at - WORDS_BEFORE), at).map(({ piece }) => piece);
  const characters = composed(pieces);
  return pieces.map((piece, i) => {
    const word = el("span");
    if (!SPECIAL.test(piece)) writePiece(word, piece, true, characters[i]);
    return word;
  });
}

function gapOf({ piece }, before, after) {
  const gap = el("span", "gap");
  if (isEnd(piece)) gap.append(THE_END);
  else if (SPECIAL.test(piece) || !piece.trim()) gap.append(piece.trim() || "␣");
  else writePiece(gap, piece.trim(), true, composedBetween(before, piece, after));
  return gap;
}

/** One candidate. A row that can be continued with is a button that forks. */
function choiceRow([id, piece, raw, final, fell], { chosen, refusal, before, after, go }) {
  const isChosen = id === chosen;
  const inWord = /^[\p{L}\p{N}]/u.test(piece); // continues the word before it
  const row = button("choice-row" + (isChosen ? " is-chosen" : "") + (fell ? " fell" : ""), "", "", go);
  row.disabled = isChosen || Boolean(refusal) || fell === "mask";
  if (isChosen) row.setAttribute("aria-current", "true");
  const name = el("span", isEnd(piece) ? "piece of-page" : "piece");
  if (isEnd(piece)) name.append("the end");
  else writePiece(name, inWord ? `…${piece}` : piece.trimStart() || piece, true, composedBetween(before, piece, after));
  const track = bars(raw, isNumber(final) && Math.abs(final - raw) > 0.0005 ? final : null);
  row.append(name, track, el("span", "num", percent(raw)));
  row.title = fell ? `${percent(raw)} of the model, removed: ${reasonOf(fell)}` : isNumber(final) ? `${percent(raw)} of the model, ${percent(final)} after processors` : "";
  if (!row.disabled) row.append(el("span", "onward", "continue with this"));
  return row;
}

/** What has just happened in a lane, in a sentence or two; empty before its first token. */
export function sayMoment(card, app) {
  const { state } = card;
  const { tokens, steps } = state.shown;
  const marked = app.selection.heldOf(card.order);
  const at = marked === null ? tokens.length - 1 : marked;
  const token = tokens[at];
  if (state.canvas.size) return sayFilled(state.canvas);
  if (!token) return "Every token of the vocabulary gets a probability. Then one is chosen.";
  if (token.round && token.round.verdict) return sayRound(token.round, card.record.header);
  const step = steps.get(at);
  const evicted = marked === null ? sayEvicted(state.lastCache("target")) : "";
  const { before, after } = piecesAround(tokens, at);
  const quoted = (piece) => quote(piece, before, piece === token.piece ? after : []);
  if (token.origin === "forced") return `${quoted(token.piece)} ${sayForced(card.record.header, at)}`;
  return [sayChosen(token, step, state.sequence(token.sequence).masks.get(token.position), quoted), evicted].filter(Boolean).join(" ");
}

function sayFilled({ size, filled, steps }) {
  return steps.length ? `Step ${steps.length}: ${count(filled.size, "position")} of ${size} filled, in any order.` : "";
}

/** "Drafted 5, kept 4. The large model preferred “first”." */
function sayRound(round, header) {
  const { verdict, draft } = round;
  const found = `Drafted ${draft.tokens.length}, kept ${verdict.kept.length}.`;
  if (!round.hasNext) return found;
  const piece = isEnd(verdict.piece) ? THE_END : `“${pieceLabel(verdict.piece.trim() || verdict.piece)}”`;
  if (verdict.origin === "redraw") return `${found} ${header.draft ? "The large model" : "The model"} ${round.replacedBy === "choice" ? "preferred" : "drew"} ${piece}.`;
  return verdict.origin === "bonus" ? `${found} The same forward gave one more: ${piece}.` : found;
}

function quote(piece, before, after) {
  if (isEnd(piece)) return THE_END;
  const said = saidBetween(before, piece, after);
  return `“${pieceLabel(said.trim() || said)}”`;
}

function sayChosen({ id, piece }, step, mask, quoted) {
  if (!step) return "";
  const word = quoted(piece);
  const allowed = mask ? ` The grammar allowed ${count(mask.allowed, "token")}.` : "";
  const rank = step.top.findIndex(([candidate]) => candidate === id);
  if (isEnd(piece)) return sayEnded(step, rank, quoted) + allowed;
  if (rank < 0) return `${word} was chosen, which is not among the likeliest.${allowed}`;
  const share = percent(step.top[rank][2]);
  const [first] = step.top;
  if (rank === 0) return `${word} was the most probable, with ${share}.${allowed}`;
  return `${word} was chosen with ${share}, although ${quoted(first[1])} had ${percent(first[2])}.${allowed}`;
}

function sayEnded({ top }, rank, quoted) {
  const ended = "The model ended its text here";
  if (rank < 0) return `${ended}, which was not among the likeliest.`;
  const share = percent(top[rank][2]);
  return rank === 0 ? `${ended}; that was the most probable, with ${share}.` : `${ended} with ${share}, although ${quoted(top[0][1])} had ${percent(top[0][2])}.`;
}

function sayEvicted(cache) {
  return cache && cache.evicted ? `The cache freed ${count(cache.evicted, "slot")}.` : "";
}
