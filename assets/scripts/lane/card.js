// The card of one token: the candidates at its position, how it got into the text, and the forks that are possible there.

import { composedBetween, piecesAround } from "../components/composed.js";
import { boxOf, button, el, zoomOf } from "../components/elements.js";
import { count, fixed, isNumber, percent } from "../components/numbers.js";
import { isEnd, writePiece } from "../components/pieces.js";
import { leading } from "../run/candidates.js";
import { nameOf, sayForced } from "../run/headers.js";
import { isCertain, TEST_NUMBERS, testNumbers } from "../run/round.js";
import { COLOURS, ORIGINS } from "./colour.js";
import { bars, leftoverPart, reasonOf } from "./probabilities.js";
import { processedEntropy, stagesPart } from "./stages.js";
import { sayFill } from "./text.js";

const LONGEST_WORDS = 500;
const BRIEF = 3; // candidates shown for a word that is pointed at
const GAP = 6; // px between a token and its card, and between the card and the edge of the window
const HEAD = 58; // px that the player covers while it sticks to the top of the window
const LOWEST = 220; // px, so that the card keeps some candidates however little room there is

export class Card {
  constructor(root, acts) {
    this.root = root;
    this.node = root.querySelector(".card");
    this.acts = acts; // the actions available here, and the reasons they are unavailable
    this.pinned = false;
    this.anchor = null;
    this.node.addEventListener("pointerenter", () => clearTimeout(this.leaving));
    this.node.addEventListener("pointerleave", () => this.leave());
  }

  show(anchor, lane, state, token, pinned = false) {
    clearTimeout(this.leaving);
    if (this.pinned && !pinned) return;
    if (this.token === token && this.pinned === pinned && !this.node.hidden) return;
    Object.assign(this, { anchor, token, pinned, lane });
    if (pinned && this.acts.holds()) { // the view of the choice has all of it
      this.node.hidden = true;
      return;
    }
    const step = state.sequence(token.sequence).steps.get(token.position);
    const mask = state.sequence(token.sequence).masks.get(token.position);
    this.around = piecesAround(state.sequence(token.sequence).tokens, token.position);
    this.node.dataset.lane = lane; // its hue
    this.node.replaceChildren(...this.parts(lane, state, token, step, mask));
    this.node.classList.toggle("pinned", pinned);
    this.node.hidden = false;
    this.place();
  }

  leave() {
    if (this.pinned) return;
    clearTimeout(this.leaving);
    this.leaving = setTimeout(() => this.hide(), 160);
  }

  hide() {
    clearTimeout(this.leaving);
    this.node.hidden = true;
    this.pinned = false;
    this.token = null;
  }

  /** Place the card below or above the token and inside the window, where it scrolls if it is higher than the room. */
  place() {
    this.node.style.maxHeight = "";
    const frame = boxOf(this.root);
    const token = boxOf(this.root, this.anchor.getClientRects()[0] || this.anchor.getBoundingClientRect());
    const width = Math.min(380, frame.width);
    this.node.style.width = width + "px";
    const left = Math.max(0, Math.min(token.left - frame.left - 12, frame.width - width));
    const [above, under] = [token.top - HEAD, window.innerHeight / zoomOf(this.root) - token.bottom].map((room) => room - 2 * GAP);
    const below = this.node.offsetHeight <= under || under >= above;
    this.node.style.maxHeight = Math.max(LOWEST, below ? under : above) + "px";
    const top = below ? token.bottom + GAP : token.top - this.node.offsetHeight - GAP;
    this.node.style.left = left + "px";
    this.node.style.top = top - frame.top + "px";
  }

  parts(lane, state, token, step, mask) {
    if (!this.pinned && this.acts.isBrief()) return [this.heading(token), ...(step && step.top.length ? [this.candidates(lane, token, step, BRIEF)] : [])];
    const parts = [this.heading(token), facts(token, step)];
    if (token.round) parts.push(draftPart(token, step));
    if (step && step.top.length) parts.push(this.candidates(lane, token, step, this.acts.rivals()));
    else parts.push(...this.instead(state, token));
    parts.push(...behind(state, token, step, mask));
    if (this.pinned) parts.push(...this.switches(lane, state, token), this.asks(lane, token));
    return parts;
  }

  /** All about a held token but its candidates, for the view that shows these. */
  rest(lane, state, token) {
    const [step, mask] = ["steps", "masks"].map((known) => state.sequence(token.sequence)[known].get(token.position));
    const parts = [...(token.round ? [draftPart(token, step)] : []), ...(step && step.top.length ? [] : this.instead(state, token))];
    return [...parts, ...behind(state, token, step, mask), ...this.switches(lane, state, token), this.asks(lane, token), facts(token, step)];
  }

  /** What is known of a token without recorded candidates. */
  instead(state, token) {
    const { reported } = state.sequence(token.sequence);
    if (reported.has(token.position)) return [reportedPart(reported.get(token.position))];
    return [el("p", "aside", whyNoRow(state.record.header, token, state.canvas.filled.get(token.position)))];
  }

  /** What can be asked of the model at a token. */
  asks(lane, token) {
    const foot = el("div", "asks");
    foot.append(...(this.acts.refusal(lane) ? [] : [this.ownWords(lane, token)]), this.requests(lane, token));
    return foot;
  }

  /** Buttons that run a copy of the lane without a part of the network that an overlay names at the token. */
  switches(lane, state, token) {
    const named = partsNamed(state, token);
    if (!named.length) return [];
    const why = this.acts.refusal(lane);
    const row = el("div", "switches");
    row.append(el("span", "", "Switch off in a copy:"), ...named.map((part) => {
      const off = button("quiet switch-off", part, why || `Run a copy of the lane without ${part}, beside it`, () => {
        this.acts.switchOff(lane, part);
        this.hide();
      });
      off.setAttribute("aria-label", `Switch ${part} off in a copy`);
      off.disabled = Boolean(why);
      return off;
    }));
    return [row];
  }

  heading(token) {
    const head = el("div", "card-head");
    const piece = el("span", "piece");
    writePiece(piece, token.piece, true, composedBetween(this.around.before, token.piece, this.around.after));
    const origin = ORIGINS[token.origin] || { label: token.origin, help: "" };
    const label = el("span", "origin", origin.label);
    label.title = origin.help;
    head.append(piece, label, el("span", "where", `token ${token.position + 1}, id ${token.id < 0 ? "not reported" : token.id}`));
    if (this.pinned) {
      const close = button("icon close", "×", "Close (Escape)", () => this.hide());
      close.setAttribute("aria-label", "Close");
      head.append(close);
    }
    return head;
  }

  /** The buttons that ask the model about this position: logit lens and attention, and attribution to the prompt. */
  requests(lane, token) {
    const why = this.acts.lookRefusal(lane);
    const request = (kind, name, help, act) => {
      const ask = button(`quiet ${kind}`, name, why || help, () => {
        act(lane, token);
        this.hide();
      });
      ask.disabled = Boolean(why);
      return ask;
    };
    const row = el("div", "requests");
    row.append(request("look", "Look inside", "What each layer would predict here, and what its heads attend to", this.acts.look),
      request("attribute", "Attribute to the prompt", "How much less probable this token becomes without each word of the prompt", this.acts.attribute));
    if (why) row.append(el("p", "aside", `${why}.`)); // a touch screen shows no titles
    return row;
  }

  /** A form that continues the text with the user's words, taken literally: no space is added before them. */
  ownWords(lane, token) {
    const form = el("form", "own-words");
    const words = el("input", "");
    Object.assign(words, { type: "text", maxLength: LONGEST_WORDS, autocomplete: "off", placeholder: "or your own words" });
    words.setAttribute("aria-label", "Your own words to continue with, with a leading space if needed");
    const go = button("quiet", "Write this here", "Run again from here with these words instead");
    go.type = "submit";
    form.append(words, go);
    words.addEventListener("focus", () => {
      words.value ||= /^\s/.test(token.piece) ? " " : "";
      words.setSelectionRange(words.value.length, words.value.length);
    });
    words.addEventListener("blur", () => { words.value = words.value.trim() && words.value; });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!words.value.trim()) return words.focus();
      this.acts.write(lane, token.position, words.value);
      this.hide();
    });
    return form;
  }

  /** `most`: how many candidates; the chosen one is among them in any case. */
  candidates(lane, token, step, most) {
    const part = el("div", "candidates");
    const head = el("div", "row head");
    head.append(el("span", "", ""), el("span", "", ""), el("span", "num raw", "model"), el("span", "num final", "processed"));
    part.append(head);
    const { shown, specials, others } = leading(step, most, this.acts.showsSpecials());
    part.append(...shown.map((candidate) => this.candidate(lane, token, step, candidate)));
    if (specials.count) part.append(restRow(count(specials.count, "special token"), specials.raw));
    if (others > 0.0005) part.append(restRow("all others", others));
    return part;
  }

  candidate(lane, token, step, [id, piece, raw, final, fell]) {
    const chosen = id === step.chosen;
    const row = button("row candidate" + (fell ? " fell" : "") + (chosen ? " is-chosen" : ""), "", "");
    row.dataset.id = id;
    const saysEnd = isEnd(piece) && !this.acts.showsSpecials();
    const name = el("span", saysEnd ? "piece of-page" : "piece");
    if (saysEnd) name.append("the end");
    else writePiece(name, piece, true, composedBetween(this.around.before, piece, chosen ? this.around.after : []));
    row.append(name, bars(raw, final), el("span", "num raw", percent(raw)), el("span", "num final", fell ? reasonOf(fell) : percent(final)));
    if (chosen) row.setAttribute("aria-current", "true");
    const why = fell === "mask" ? "The grammar does not allow this token here" : this.acts.refusal(lane);
    row.title = chosen ? "This one was chosen" : why || "Run again from here with this token instead";
    row.disabled = chosen || Boolean(why);
    row.addEventListener("click", () => {
      this.acts.go(lane, token.position, id, piece);
      this.hide();
    });
    return row;
  }
}

/** What a replaced token was sampled from, what the processors did, what the grammar allowed, and what overlays say. */
function behind(state, token, step, mask) {
  const stages = step && step.top.length ? stagesPart(state.record.header, step, mask) : null;
  const said = token.sequence === 0 ? state.said.get(token.position) : null;
  return [...(token.round && token.origin === "redraw" ? leftoverPart(token.round) : []), ...[stages, mask && maskPart(mask), said && saidPart(said)].filter(Boolean)];
}

/** The parts of the network that overlays name at a token, each once. */
export function partsNamed(state, token) {
  const said = (token.sequence === 0 && state.said.get(token.position)) || [];
  return [...new Set(said.flatMap(([, , parts]) => parts))];
}

/** The probability of candidates without a row each. */
function restRow(name, raw) {
  const row = el("div", "row rest");
  row.append(el("span", "piece", name), bars(raw, null), el("span", "num", percent(raw)), el("span", "num", ""));
  return row;
}

/** What overlays, or the detector of a watermark, say of a token. */
function saidPart(said) {
  const list = el("dl", "facts said");
  for (const [name, words] of said) {
    const pair = el("div");
    pair.append(el("dt", "", name), el("dd", "", words));
    list.append(pair);
  }
  return list;
}

function whyNoRow(header, token, fill) {
  if (fill) return `Filled at ${sayFill(fill)}.`;
  if (token.origin === "forced") return `It ${sayForced(header, token.position)}`;
  return "No probabilities were recorded for this token.";
}

function facts(token, step) {
  const list = el("dl", "facts");
  const add = (name, value, help) => {
    const pair = el("div");
    pair.title = help || "";
    pair.append(el("dt", "", name), el("dd", "", value));
    list.append(pair);
  };
  if (step) {
    add("entropy", fixed(step.entropy, 2), "Of the model's distribution, in nats.");
    add("after processors", fixed(processedEntropy(step), 2), "Entropy of the distribution after masks and processors, in nats. Sampling draws from it; greedy decoding takes its most probable token.");
  }
  if (isNumber(token.logprob)) { // a forced token has none
    add("log-probability", fixed(token.logprob, 2), "Of the chosen token under the model, in nats.");
    add("probability", percent(Math.exp(token.logprob)), "The same as a probability.");
  }
  if (isNumber(token.seconds)) add("took", `${(token.seconds * 1000).toFixed(token.seconds < 0.1 ? 1 : 0)} ms`, COLOURS.latency.help);
  if (token.pass) add("after forward", sayForward(token), "The target's last forward before this token was committed; the prefill is not counted.");
  return list;
}

function sayForward({ forward, pass }) {
  const rows = count(pass.tokens, "row");
  return forward ? `${forward} (${pass.phase.replace("_", " ")}, ${rows})` : `prefill (${rows})`;
}

/** How a round produced this token: the test it passed, or the draft token it replaces. */
function draftPart(token, step) {
  const { round, node } = token;
  const part = el("div", "guess");
  if (node !== null) {
    const test = round.tests.get(node);
    part.append(el("p", "", `Drafted by ${nameOf(round.draft.source)} in round ${round.draft.round + 1}.`));
    if (test && !isCertain(test)) part.append(testLine(test), ...afterRejection(test));
    else part.append(el("p", "aside", [test && "It is the target's own choice.", sayOffer(round.draft, node)].filter(Boolean).join(" ")));
    return part;
  }
  if (token.origin === "redraw") {
    const rejected = round.rejectedNodes();
    const isResampled = round.replacedBy === "residual";
    if (!rejected.length) part.append(el("p", "", "The target's own token."));
    else part.append(isResampled ? el("p", "", "Resampled because the target rejected:") : choiceLine(token, step, rejected));
    if (isResampled) for (const other of rejected) part.append(testLine(round.tests.get(other), round.draft.pieces[other]));
  } else if (token.origin === "bonus") {
    part.append(el("p", "", `Every draft token on the path of round ${round.draft.round + 1} was accepted; this is the bonus token.`));
  }
  return part;
}

/** What the drafter said of a token; nothing where it drafts without probabilities, as by lookup. */
function sayOffer({ drawn, q }, node) {
  return drawn === "deterministic" && q[node] === 1 ? "" : `The drafter gave it q = ${fixed(q[node], 3)}.`;
}

/** A token that its own test rejected stands all the same where it was drawn in place of the rejected ones. */
function afterRejection({ kept }) {
  return kept ? [] : [el("p", "aside", "Its test rejected it. Then it was drawn from the residual, and stands.")];
}

/** "The target chose first (26 %); the draft said smallest (8 %)", with the target's own probabilities. */
function choiceLine({ id, piece, round }, step, rejected) {
  const under = (token) => step && step.top.find(([candidate]) => candidate === token);
  const share = (token) => (under(token) ? ` (${percent(under(token)[2])})` : "");
  const line = el("p", "", `The target ${round.replacedBy === "choice" ? "chose" : "sampled"} `);
  line.append(quotedPiece(piece), `${share(id)}; the draft said `);
  rejected.forEach((node, i) => line.append(i ? ", " : "", quotedPiece(round.draft.pieces[node]), share(round.draft.tokens[node])));
  line.append(".");
  return line;
}

function quotedPiece(piece) {
  const name = el("span", "piece");
  writePiece(name, piece, true);
  return name;
}

function testLine(test, piece) {
  const line = el("p", "test " + (test.kept ? "kept" : "refused"));
  if (piece !== undefined) {
    const name = el("span", "piece");
    writePiece(name, piece, true);
    line.append(name);
  }
  line.append(el("span", "verdict", test.kept ? "accepted" : "rejected"));
  for (const [name, value] of testNumbers(test)) {
    const pair = el("span", "pair", `${TEST_NUMBERS[name]} `);
    pair.append(el("b", "", fixed(value, 3)));
    line.append(pair);
  }
  return line;
}

/** The top tokens as a server reports them: probabilities of the model, without processors. */
function reportedPart(top) {
  const part = el("div", "leftover");
  part.append(el("p", "", "Top tokens, as the server reports them:"));
  for (const [piece, logprob] of top) {
    const row = el("div", "row");
    const name = el("span", "piece");
    writePiece(name, piece, true);
    row.append(name, bars(Math.exp(logprob), null), el("span", "num raw", percent(Math.exp(logprob))), el("span", "num", fixed(logprob, 2)));
    part.append(row);
  }
  return part;
}

function maskPart(mask) {
  const share = mask.vocabulary ? ` of ${mask.vocabulary}` : "";
  return el("p", "aside", `The grammar allowed ${mask.allowed}${share} tokens here and masked ${percent(mask.banned)} of the probability.`);
}
