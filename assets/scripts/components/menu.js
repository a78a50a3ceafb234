// Menus that a button opens.

import { boxOf, zoomOf } from "./elements.js";

const BY = { ArrowDown: 1, ArrowUp: -1 };

/** A button that opens a menu; a choice, Escape or a click elsewhere closes it, and up and down lead from choice to choice. */
export class Menu {
  constructor(node, box = node.querySelector("[role=dialog]")) {
    this.node = node;
    this.opener = node.querySelector("button");
    this.box = box;
    this.opener.addEventListener("click", () => this.show(this.box.hidden));
    this.box.addEventListener("click", ({ target }) => target.closest("button") && this.show(false));
    this.box.addEventListener("keydown", (event) => this.walk(event));
    this.away = ({ target }) => { if (!node.contains(target)) this.show(false); };
    node.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !node.contains(relatedTarget) && this.show(false));
  }

  show(open) {
    this.box.hidden = !open;
    this.opener.setAttribute("aria-expanded", String(open));
    document[open ? "addEventListener" : "removeEventListener"]("pointerdown", this.away);
    if (open) this.box.classList.toggle("above", boxOf(this.opener).bottom + this.box.offsetHeight + 12 > innerHeight / zoomOf(this.box));
    if (open) this.box.querySelector("button, select").focus();
  }

  walk(event) {
    if (event.key === "Escape") this.close();
    else if (BY[event.key] && event.target.matches("button")) this.step(BY[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation(); // these keys mean something to the player, too
  }

  step(by) {
    const choices = [...this.box.querySelectorAll("button")].filter((one) => one.checkVisibility());
    choices[(choices.indexOf(document.activeElement) + by + choices.length) % choices.length].focus();
  }

  get isOpen() {
    return !this.box.hidden;
  }

  close() {
    this.show(false);
    this.opener.focus();
  }
}
