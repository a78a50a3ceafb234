// Attribution of one token to the words of the prompt, by leave-one-out. Shown on request, until another request or another run.

import { button, el, setText } from "../components/elements.js";
import { count, fixed } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { Panel } from "./panel.js";

const MOST_EFFECTS = 8; // words listed with their numbers
const FULL_BAR = 0.5; // nats that fill a bar, at least: a bar of nothing is empty

export class AttributionPanel extends Panel {
  constructor() {
    super({ name: "attribution", title: "Attribution to the prompt", kinds: [], wide: true });
    this.close = button("icon close", "×", "Close this attribution", () => this.show(null));
    this.close.setAttribute("aria-label", "Close this attribution");
    this.tools.append(this.close);
    this.text = el("p", "attributed");
    this.list = el("ol", "effects");
    this.note = el("p", "hover-line");
    this.body.append(this.text, this.list, this.note);
    this.show(null);
  }

  /** Show the server's answer, or nothing for null. */
  show(found) {
    this.found = found;
    this.seen = (this.seen || 0) + 1;
    this.node.hidden = !found;
  }

  update(card, app) {
    this.node.hidden = !this.found;
    if (this.found) super.update(card, app);
  }

  has() {
    return true;
  }

  isThere() {
    return Boolean(this.found);
  }

  look() {
    return String(this.seen);
  }

  draw() {
    const { lane, position, piece, effects, logprob, forwards } = this.found;
    const largest = Math.max(FULL_BAR, ...effects.map(({ effect }) => Math.abs(effect)));
    setText(this.heading, `Attribution to the prompt: lane ${lane + 1}, token ${position + 1} “${pieceLabel(piece)}”`);
    setText(this.readout, `Leave-one-out: ${count(forwards, "forward")} of the model; log-probability ${fixed(logprob, 2)} nats with the whole prompt.`);
    this.text.replaceChildren(...effects.flatMap((one, at) => [at && !/^\s/.test(one.text) ? " " : "", wordOf(one, largest)]));
    const strongest = [...effects].sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect)).slice(0, MOST_EFFECTS);
    this.list.replaceChildren(...strongest.map((one) => effectRow(one, largest)));
    setText(this.note, "Each word was removed in turn. The number says by how many nats the token became less (+) or more (−) probable without it. Numbers do not add up: of two words that say the same, neither may count.");
  }
}

function wordOf({ text, effect }, largest) {
  const word = el("span", `word ${effect < 0 ? "against" : "for"}`, text.trim() || "␣");
  word.style.setProperty("--share", `${Math.round(100 * Math.abs(effect) / largest)}%`);
  word.title = sayEffect(effect);
  return word;
}

function effectRow({ text, effect }, largest) {
  const row = el("li");
  const bar = el("i", effect < 0 ? "against" : "for");
  bar.style.width = `${100 * Math.abs(effect) / largest}%`;
  const track = el("span", "track");
  track.append(bar);
  row.append(el("span", "piece", pieceLabel(text.trim(), 40)), track, el("span", "num", signed(effect)));
  return row;
}

const signed = (effect) => (Math.abs(effect) < 0.005 ? "0.00" : `${effect < 0 ? "−" : "+"}${fixed(Math.abs(effect), 2)}`);

function sayEffect(effect) {
  return `${signed(effect)} nats: ${effect < 0 ? "the token would be more probable without it" : "the token would be less probable without it"}`;
}
