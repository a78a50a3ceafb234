// Comparison of the chosen lane with another: where their texts diverge, how close the decision was, and a word diff.
// While a lane is running, the texts are compared up to the shorter one.

import { button, el, option, setText } from "../components/elements.js";
import { DASH, count, fixed, isNumber, percent } from "../components/numbers.js";
import { writePiece } from "../components/pieces.js";
import { REASONS } from "../lane/lane.js";
import { measuredKL, otherCandidates, restOf } from "../lane/parting.js";
import { bars } from "../lane/probabilities.js";
import { hasPart } from "../run/headers.js";
import { isOver } from "../run/model.js";
import { diffWords } from "../run/words.js";
import { Panel } from "./panel.js";

const MOST_OTHERS = 5; // candidates beside the two tokens that were chosen
const PATIENT = 24; // while lanes run, the word diff is repeated when a text has grown by 1/24

export class DifferencePanel extends Panel {
  constructor() {
    super({ name: "difference", title: "Difference", kinds: [], wide: true });
    this.against = el("select", "against");
    this.against.setAttribute("aria-label", "Lane to compare with");
    const label = el("label", "which", "against ");
    label.append(this.against);
    this.tools.append(label);
    this.against.addEventListener("change", () => this.app.schedule());
  }

  has() {
    return true;
  }

  /** This panel is hidden unless there are two lanes. */
  update(app) {
    this.app = app;
    this.node.hidden = app.cards.length < 2;
    if (this.node.hidden) return;
    this.offer(app.cards[app.chosen], app.cards);
    this.other = app.cards[Number(this.against.value)];
    super.update(app);
  }

  /** Offer every lane except the chosen one; the default is the first of them. */
  offer(card, cards) {
    const orders = cards.map((one) => one.order).filter((order) => order !== card.order);
    if (this.offered === orders.join()) return;
    const before = this.against.value;
    this.against.replaceChildren(...orders.map((order) => option(order, `lane ${order + 1}`)));
    if (orders.includes(Number(before)) && before !== "") this.against.value = before;
    this.offered = orders.join();
  }

  look(card, app) {
    const pace = ({ state }) => (app.player.playing && !isOver(state) ? grain(state.shown.tokens.length) : state.version);
    return `${this.other.order}/${pace(card)}/${pace(this.other)}`;
  }

  draw(card) {
    const pair = new Pair(card, this.other);
    setText(this.readout, pair.sentence());
    this.body.replaceChildren(...[this.parting(pair), ...this.words(pair)].filter(Boolean));
  }

  /** The position where the texts diverge: the distributions of both lanes, first of all the two tokens that they chose. */
  parting(pair) {
    if (!pair.parted) return null;
    const table = el("table", "parting");
    const head = el("tr");
    head.append(...["", ...pair.recording.map((of) => `p in ${pair.names[of]}`)].map((text) => el("th", "", text)));
    const others = otherCandidates(pair.steps, pair.tokens.map(({ id }) => id), MOST_OTHERS);
    table.append(head, ...[0, 1].map((side) => this.candidateRow(pair, side)), ...this.otherRows(pair, others));
    const part = el("div", "", table);
    part.append(...pair.sayRows().map((sentence) => el("p", "parting-words", sentence)));
    return part;
  }

  candidateRow(pair, side) {
    const row = el("tr");
    const name = el("th");
    const token = button("quiet piece", "", `Show this token in ${pair.names[side]}`, () => this.app.selection.reveal(pair.cards[side].order, pair.index));
    writePiece(token, pair.tokens[side].piece, true);
    name.append(token, ` ${pair.names[side]}`);
    row.append(name, ...pair.recording.map((of) => shareCell(pair, of, pair.probability(of, side), pair.sayProbability(of, side))));
    return row;
  }

  /** The other candidates, and all tokens that have no row, where both lanes recorded theirs. */
  otherRows(pair, others) {
    if (!pair.steps.every(Boolean)) return [];
    const rows = others.map(({ piece, shares }) => {
      const row = el("tr", "other");
      const name = el("th", "piece");
      writePiece(name, piece, true);
      row.append(name, ...pair.recording.map((of) => shareCell(pair, of, shares[of], isNumber(shares[of]) ? percent(shares[of]) : DASH)));
      return row;
    });
    const left = pair.recording.map((of) => restOf([0, 1].map((side) => pair.probability(of, side)).concat(others.map(({ shares }) => shares[of]))));
    const rest = el("tr", "other rest");
    rest.append(el("th", "", "all others"), ...pair.recording.map((of, i) => shareCell(pair, of, left[i], percent(left[i]))));
    return [...rows, rest];
  }

  words(pair) {
    const stretches = pair.compared && diffWords(...pair.texts());
    if (!stretches || !stretches.length) return [];
    const text = el("p", "word-diff");
    text.tabIndex = 0;
    text.append(...stretches.map(({ kind, text: words }) => el({ same: "span", mine: "ins", theirs: "del" }[kind], kind, words)));
    const key = el("p", "chart-key");
    key.append(el("ins", "mine", `only in ${pair.names[0]}`), el("del", "theirs", `only in ${pair.names[1]}`));
    return stretches.some(({ kind }) => kind !== "same") ? [text, key] : [text];
  }
}

/** A probability in a lane as a bar in its colour, and in words. */
function shareCell(pair, of, share, words) {
  const cell = el("td", "num");
  cell.dataset.lane = pair.cards[of].order;
  cell.append(bars(share, null), el("span", "", words));
  return cell;
}

/** The current state of two lanes. */
class Pair {
  constructor(card, other) {
    this.cards = [card, other];
    this.names = this.cards.map(({ order }) => `lane ${order + 1}`);
    this.sequences = this.cards.map(({ state }) => state.shown);
    this.over = this.cards.every(({ state }) => isOver(state));
    this.lengths = this.sequences.map(({ tokens }) => tokens.length);
    this.compared = Math.min(...this.lengths);
    const [mine, theirs] = this.sequences.map(({ tokens }) => tokens);
    const found = this.shareVocabulary() ? mine.findIndex((token, i) => i < this.compared && token.id !== theirs[i].id) : -1;
    this.parted = found >= 0;
    this.index = this.parted ? found : this.compared;
    this.tokens = this.sequences.map(({ tokens }) => tokens[this.index]);
    this.steps = this.sequences.map(({ steps }) => steps.get(this.index));
  }

  /** Whether token ids mean the same in both. */
  shareVocabulary() {
    const [a, b] = this.cards.map(({ record }) => record.header);
    return !a.remote && !b.remote && a.model === b.model && a.vocabulary === b.vocabulary;
  }

  /** Probability under lane `of` of the token that lane `side` chose, or null if it was not recorded. Steps record the top
      candidates; the commit records the lane's own token. */
  probability(of, side) {
    const { logprob } = this.tokens[side];
    if (of === side && isNumber(logprob)) return Math.exp(logprob);
    const step = this.sequences[of].steps.get(this.index);
    const candidate = step && step.top.find(([id]) => id === this.tokens[side].id);
    return candidate ? candidate[2] : null;
  }

  /** The lanes that recorded probabilities where the texts diverge. */
  get recording() {
    return [0, 1].filter((of) => [0, 1].some((side) => this.probability(of, side) !== null));
  }

  sayProbability(of, side) {
    const probability = this.probability(of, side);
    if (probability !== null) return percent(probability);
    return `not among the ${this.sequences[of].steps.get(this.index)?.top.length || 0} recorded`;
  }

  /** What the two distributions are, and how far the one of changed weights is from that of the loaded ones if that was measured. */
  sayRows() {
    const changed = [0, 1].filter((of) => hasPart(this.cards[of].record.header, "weights"));
    const here = this.recording.length === 2 ? ["Both lanes have read the same text up to here. After it each reads its own, and their distributions no longer answer the same question."] : [];
    return [...here, ...changed.map((of) => this.sayKL(of))];
  }

  sayKL(of) {
    const kl = measuredKL(this.cards[of].state.figures.values(), this.index);
    if (kl !== null) return `KL(loaded weights || ${this.names[of]}) of this token: ${fixed(kl, 3)} nats, measured over the full vocabulary. Its curve over the text of ${this.names[of]} is below the entropy.`;
    const recorded = count(this.steps[of]?.top.length || 0, "candidate");
    return `KL to the loaded weights was not measured: it needs the full vocabulary, and ${recorded} of ${this.names[of]} are recorded. The overlay “KL to the loaded weights” measures it.`;
  }

  /** Why a lane has no probabilities where the texts diverge. */
  sayMissing() {
    const missing = [0, 1].filter((of) => !this.recording.includes(of));
    return missing.map((of) => `; ${this.names[of]} ${this.tokens[of].origin === "forced" ? "was forced there" : "recorded no probabilities there"}`).join("");
  }

  /** Difference of the two tokens' log-probabilities in the first lane that recorded both, or null. */
  margin() {
    const shown = [0, 1].map((of) => [this.probability(of, 0), this.probability(of, 1)]).find(([mine, theirs]) => mine && theirs);
    return shown ? Math.log(shown[0] / shown[1]) : null;
  }

  /** The compared texts: whole texts once both lanes have ended, before that up to the shorter one. */
  texts() {
    return this.sequences.map(({ tokens }) => readable(this.over ? tokens : tokens.slice(0, this.compared)));
  }

  sentence() {
    const [mine, theirs] = this.names;
    if (!this.compared) return `Nothing to compare: ${this.lengths[0] ? theirs : mine} has no text yet.`;
    if (!this.shareVocabulary()) return "Different models: only the words can be compared.";
    if (this.parted) return `The texts diverge at token ${this.index + 1}${this.distance()}.`;
    if (!this.over) return `Same text so far, ${count(this.compared, "token")}.`;
    if (this.lengths[0] === this.lengths[1]) return `Same text, ${count(this.compared, "token")}.`;
    const shorter = this.lengths[0] < this.lengths[1] ? 0 : 1;
    const { done } = this.cards[shorter].state;
    return `Same text for ${count(this.compared, "token")}; there ${this.names[shorter]} ${done ? REASONS[done.reason] || "ended" : "failed"}.`;
  }

  distance() {
    const margin = this.margin();
    const missing = this.sayMissing();
    if (margin !== null) return `, logit difference ${fixed(Math.abs(margin), 2)}${missing}`;
    return missing || "; neither lane recorded both candidates";
  }
}

/** A length rounded down to steps that grow with it, so that long texts are compared less often. */
function grain(length) {
  const step = Math.max(1, Math.floor(length / PATIENT));
  return Math.floor(length / step) * step;
}

/** The text of tokens, bytes joined to the characters they encode. */
function readable(tokens) {
  return tokens.map(({ piece, letter }) => letter || piece.replace(/<0x[0-9A-F]{2}>/g, "")).join("");
}
