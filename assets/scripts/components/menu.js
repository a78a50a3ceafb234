// Menus that a button opens.

import { boxOf, zoomOf } from "./elements.js";

/** A button that opens a menu; a choice, Escape or a click elsewhere closes it. */
export class Menu {
  constructor(node) {
    this.node = node;
    this.opener = node.querySelector("button");
    this.box = node.querySelector("[role=dialog]");
    this.opener.addEventListener("click", () => this.show(this.box.hidden));
    this.box.addEventListener("click", ({ target }) => target.closest("button") && this.show(false));
    node.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !node.contains(relatedTarget) && this.show(false));
  }

  show(open) {
    this.box.hidden = !open;
    this.opener.setAttribute("aria-expanded", String(open));
    if (open) this.box.classList.toggle("above", boxOf(this.opener).bottom + this.box.offsetHeight + 12 > innerHeight / zoomOf(this.box));
    if (open) this.box.querySelector("button, select").focus();
  }

  get isOpen() {
    return !this.box.hidden;
  }

  close() {
    this.show(false);
    this.opener.focus();
  }
}
