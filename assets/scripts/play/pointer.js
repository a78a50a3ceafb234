// Points at a part of the page.

import { el } from "../components/elements.js";
import { playground } from "../components/playground.js";

const ROOM = 12; // pixels between the target and the edge of the window
const LOOKS = 6; // checks whether the target has moved
const PAUSE = 250; // ms between two checks

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Outlines a part of the page by a CSS rule, which also applies to elements added later. */
export class Pointer {
  constructor() {
    this.rule = el("style");
    document.head.append(this.rule);
    for (const hand of ["wheel", "touchmove", "pointerdown", "keydown"]) document.addEventListener(hand, () => this.cancel(), { capture: true, passive: true });
  }

  show(selector, panel) {
    if (selector && document.querySelector(selector)?.closest("#drawer")) playground.showDrawer(true);
    this.rule.textContent = selector ? `${selector} { outline: 2px solid var(--pg-accent); outline-offset: 4px; border-radius: 8px; }` : "";
    if (selector) this.bringSoon(selector, panel);
    else this.cancel();
    this.openView(selector);
  }

  /** Where one view at a time stands beside the lanes, open the one that is pointed at, once the run has something for it. */
  openView(selector) {
    const [, view] = /\.panel-(\w+)/.exec(selector) || [];
    if (view) document.querySelector(`.live .view-tab[data-view="${view}"]:not(:disabled)`)?.click();
  }

  /** Scroll repeatedly for a while: the view draws lazily, which moves what is below. */
  bringSoon(selector, panel) {
    let left = LOOKS;
    const look = () => {
      this.bring(selector, panel);
      if (--left) this.next = setTimeout(look, PAUSE);
    };
    this.cancel();
    this.next = setTimeout(look, PAUSE / 4);
  }

  /** Stop scrolling: any user action takes precedence. */
  cancel() {
    clearTimeout(this.next);
  }

  /** Scroll as little as possible to show the target beside the panel, or its top if it is too tall. */
  bring(selector, panel) {
    const target = [...document.querySelectorAll(selector)].find((node) => node.offsetParent !== null);
    if (!target) return;
    const box = target.getBoundingClientRect();
    const top = this.roof(target);
    const floor = this.floor(panel);
    if (box.top >= top && box.bottom <= floor) return;
    scrollTo({ top: scrollY + box.top - top, behavior: calm() ? "auto" : "smooth" });
  }

  /** Top edge of the visible area: the player sticks to the top of the window, over the view. */
  roof(target) {
    const player = document.querySelector(".live .player");
    const sticks = player && getComputedStyle(player).position === "sticky" && target.closest(".live") && !player.contains(target);
    return sticks ? player.getBoundingClientRect().height + ROOM : ROOM;
  }

  /** Bottom edge of the visible area: a panel at the bottom of the window hides what is behind it, one at the side does not. */
  floor(panel) {
    const box = panel.getBoundingClientRect();
    return (box.top > innerHeight / 4 ? box.top : innerHeight) - ROOM;
  }
}
