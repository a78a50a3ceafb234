// The menu of how runs are shown. A calm page keeps in it what is otherwise spread over player and legend; a page with all views has no menu.

import { Menu } from "../components/menu.js";

export class ViewMenu extends Menu {
  constructor(root) {
    super(root.querySelector(".view-menu"));
    [this.held, this.heldFiles] = [".held", ".held-files"].map((part) => this.box.querySelector(part));
    [this.speed, this.align, this.files, this.key, this.player] = [".pick.pace", ".pick.share", ".files", ".key", ".player"].map((part) => root.querySelector(part));
    this.acts = [".save", "[data-do=open]", ".studies", "[data-do=keys]"].map((part) => this.files.querySelector(part));
  }

  /** Take the controls into the menu, or put them back where all of them are seen. */
  hold(isCalm) {
    if (this.isHolding === isCalm) return;
    this.isHolding = isCalm;
    if (isCalm) {
      this.key.open = true;
      this.held.append(this.speed, this.align, this.key);
      this.heldFiles.append(...this.acts);
    } else {
      this.files.before(this.speed, this.align);
      this.files.prepend(...this.acts);
      this.player.after(this.key);
    }
  }
}
