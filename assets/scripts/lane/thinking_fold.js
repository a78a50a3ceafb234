// The thinking parts of a lane's text: set apart from the answer, under a button that counts their tokens and folds them.

import { button, setAttribute } from "../components/elements.js";
import { count } from "../components/numbers.js";

const SHORT = 60; // tokens of a part that stays open unless its reader folds it

export class ThinkingFold {
  /** `redraw` shows the text again after a click. */
  constructor(redraw) {
    this.redraw = redraw;
    this.parts = [];
    this.owners = []; // by token of a part: its number
    this.toggles = [];
    this.chosen = null; // whether the reader wants them folded; null: long ones, once they have ended
  }

  /** Take the parts of the text that is drawn, whose spans exist. */
  take(parts, spans) {
    this.parts = parts;
    this.owners = [];
    parts.forEach(({ from, to }, number) => { for (let i = from; i < to; i++) this.owners[i] = number; });
    while (this.toggles.length > parts.length) this.toggles.pop().remove();
    while (this.toggles.length < parts.length) this.toggles.push(this.toggle(this.toggles.length));
    parts.forEach((part, number) => this.label(this.toggles[number], part, spans[part.from]));
  }

  toggle(number) {
    return button("thinking", "", "", () => {
      this.chosen = !this.isFolded(this.parts[number]);
      this.redraw();
    });
  }

  label(toggle, part, span) {
    if (toggle.nextSibling !== span) span.before(toggle);
    const folded = this.isFolded(part);
    const said = `${part.closed ? "Thinking" : "Thinking so far"}: ${count(part.to - part.from, "token")}`;
    setAttribute(toggle, "data-says", said); // the style sheet writes it, so that it is no part of a copied text
    setAttribute(toggle, "aria-label", `${said}, ${folded ? "show" : "fold"}`);
    setAttribute(toggle, "aria-expanded", !folded);
  }

  isFolded(part) {
    return this.chosen ?? (part.closed && part.to - part.from > SHORT);
  }

  /** The classes of a token. */
  lookOf(i) {
    if (this.owners[i] === undefined) return "";
    return this.isFolded(this.parts[this.owners[i]]) ? " thinks folded" : " thinks";
  }

  /** The button over a folded token; null for a token in sight. */
  over(i) {
    const owner = this.owners[i];
    return owner !== undefined && this.isFolded(this.parts[owner]) ? this.toggles[owner] : null;
  }

  /** Show a token that is folded. */
  open(i) {
    if (!this.over(i)) return;
    this.chosen = false;
    this.redraw();
  }
}
