// The inspector beside the lanes of a wide page, or over the foot of a phone: one view at a time, with a row of tabs. What happens in the
// chosen lane decides which view that is, until the visitor presses a tab. Other narrow pages and a printed one have all views below the
// lanes.

import { button, prefersStillness, setAttribute, setText, zoomOf } from "../components/elements.js";
import { hasPart } from "../run/headers.js";
import { sayMoment } from "../views/choice.js";
import { PHONE } from "./stage.js";

const ROOM_BESIDE = 1040; // px of the live view: those of a window of 1100 px
const ROOM_IN_LESSON = 800; // px in the size of the type: a lesson stands beside both, and the views are narrower
const SWIPE_REST = 120; // ms without scrolling after which a swipe has ended
const OWN_HEADS = ["inside", "attribution", "canvas", "branches", "figures"]; // views without a tab where a run has nothing for them
const TABS = { // in this order
  inside: "Inside", attribution: "Attribution", canvas: "Canvas", choice: "Choice", branches: "Sequences", tree: "Tree", entropy: "Entropy",
  rounds: "Accepted", cache: "KV cache", mask: "Mask", cost: "Cost", figures: "Method", difference: "Difference",
};

export class Inspector {
  constructor(app) {
    this.app = app;
    for (const name of ["scene", "inspector", "caption", "visit"]) this[name] = app.root.querySelector("." + name);
    this.node = this.inspector;
    this.row = this.node.querySelector(".view-tabs");
    this.moment = this.node.querySelector(".moment");
    [this.runs, this.chooserRow, this.handle] = [".runs", ".chooser-row", ".sheet-handle"].map((part) => this.node.querySelector(part));
    app.lanes.addEventListener("scroll", () => this.swiped(), { passive: true });
    this.node.querySelector(".edit-lane").hidden = !document.querySelector("#editor"); // who follows a class has none
    this.pressed = null; // the view whose tab was pressed
    this.tabs = new Map(Object.keys(TABS).map((name) => [name, this.tab(name)]));
    this.row.append(...this.tabs.values());
    this.row.addEventListener("keydown", (event) => this.walk(event));
    this.all = button("quiet all-views", "All views", "Show all views below the lanes, or one beside them", () => this.turn());
    app.root.querySelector(".key-row").append(this.all);
    this.prompts = app.root.querySelector(".prompts");
    this.prompts.addEventListener("change", () => {
      app.stage.update();
      app.schedule(); // they are among the candidates, too
    });
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  tab(name) {
    const tab = button("view-tab", TABS[name], "", () => this.open(this.app.panels.find((panel) => panel.name === name)));
    tab.setAttribute("role", "tab");
    tab.dataset.view = name;
    return tab;
  }

  /** Runs of this visit take the place of the views, until one is chosen. */
  showRuns(isOpen = !this.visit.classList.contains("is-open")) {
    this.visit.classList.toggle("is-open", isOpen);
    setAttribute(this.runs, "aria-expanded", isOpen);
    if (isOpen) this.visit.querySelector("button")?.focus();
  }

  /** Another run is shown. */
  begin() {
    this.showRuns(false);
    this.swiped(); // a lane that waited for Run is in sight
    if (OWN_HEADS.includes(this.pressed)) this.pressed = null;
    this.row.hidden = false;
  }

  open(panel) {
    this.pressed = panel.name;
    this.app.schedule();
  }

  turn() {
    this.app.settings.views = this.app.settings.views === "one" ? "all" : "one";
    this.app.keep();
    this.app.stage.update();
  }

  /** On paper there is no tab to press. */
  print(begins) {
    this.printing = begins;
    this.app.stage.update();
    if (!begins) return this.app.schedule();
    for (const panel of this.app.panels) {
      panel.width = panel.body.clientWidth;
      panel.updateUnseen(this.app);
    }
  }

  /** Whether special tokens are shown: where all views are, or where they were asked for. */
  get showsSpecials() {
    return this.prompts.checked || this.app.live.dataset.views === "all";
  }

  /** "one" view beside the lanes, on a "phone" one over its foot, or "all" of them below the player. */
  get layout() {
    const { app } = this;
    if (app.settings.views !== "one" || !app.cards.length || this.printing) return "all";
    const inLesson = document.body.classList.contains("in-lesson");
    if (innerWidth <= PHONE) return inLesson ? "all" : "phone"; // the lesson has the foot of a phone
    const isNarrow = inLesson ? app.root.clientWidth < ROOM_IN_LESSON : app.root.clientWidth * zoomOf(app.root) < ROOM_BESIDE;
    return isNarrow ? "all" : "one";
  }

  /** Put the views where the layout has them. Returns whether that is beside the lanes. */
  arrange() {
    const { app, node, layout } = this;
    const beside = layout === "one";
    if (app.live.dataset.views === layout) return beside;
    app.live.dataset.views = layout;
    setText(this.all, layout === "all" ? "One view" : "All views");
    if (layout === "phone") this.scene.before(this.chooserRow);
    else this.node.prepend(this.chooserRow);
    if (beside) this.scene.append(node, this.visit);
    else (app.isCalm ? app.bar.node : app.key).after(this.visit, node); // a calm page has the legend in its menu
    if (layout === "all") this.scene.before(this.caption);
    else node.append(this.caption);
    this.update();
    return beside;
  }

  /** Show all about the held word, which is of this lane. */
  hold(order) {
    if (this.app.live.dataset.views === "all") return;
    this.pressed = "choice";
    if (order !== this.app.chosen) this.app.choose(order);
    if (this.app.live.dataset.views === "phone") this.raise(true);
  }

  /** The sheet of a phone, up or down. */
  raise(isUp = !this.node.classList.contains("is-up")) {
    this.node.classList.toggle("is-up", isUp);
    setAttribute(this.handle, "aria-expanded", isUp);
  }

  /** On a phone one lane at a time is in sight: swiping chooses it, and choosing it brings it there. */
  bringLane(order) {
    if (this.laneInSight() !== order) this.bringSeat(this.app.stage.seatOf(order));
  }

  bringSeat(seat) {
    const { lanes, live } = this.app;
    if (live.dataset.views === "phone") lanes.scrollTo({ left: seat * lanes.clientWidth, behavior: prefersStillness() ? "auto" : "smooth" });
  }

  /** Its order in the run, -1 for one that waits for Run. */
  laneInSight() {
    const { lanes, stage } = this.app;
    return stage.seats[Math.round(lanes.scrollLeft / Math.max(1, lanes.clientWidth))] ?? -1;
  }

  swiped() {
    clearTimeout(this.swiping);
    this.swiping = setTimeout(() => {
      const order = this.laneInSight();
      if (this.app.live.dataset.views === "phone" && order >= 0 && order !== this.app.chosen) this.app.choose(order);
    }, SWIPE_REST);
  }

  /** The view to show: that of the pressed tab if the run has it, otherwise the one that shows what happens in the chosen lane. */
  get chosen() {
    const { app } = this;
    const there = (name) => app.panels.find((panel) => panel.name === name && panel.isThere(app));
    const card = app.cards[app.chosen];
    return [this.pressed, telling(card, app), "choice", "entropy", "cost"].map(there).find(Boolean);
  }

  update() {
    const { app } = this;
    if (app.live.dataset.views === "all") return;
    const chosen = this.chosen;
    for (const panel of app.panels) {
      const there = panel.isThere(app);
      const tab = this.tabs.get(panel.name);
      panel.node.classList.toggle("is-open", panel === chosen);
      tab.disabled = !there;
      tab.hidden = !there && OWN_HEADS.includes(panel.name);
      setAttribute(tab, "aria-selected", panel === chosen);
      tab.tabIndex = panel === chosen ? 0 : -1;
    }
    this.runs.hidden = app.visit.runs.length < 2;
    setText(this.runs, `Runs ${app.visit.runs.length}`);
  }

  /** The moment in words: the same moment as in the view, which may rest while the text goes on. */
  say() {
    const { app } = this;
    if (app.live.dataset.views === "all" || this.chosen?.isBehind) return;
    const said = sayMoment(app.cards[app.chosen], app);
    setText(this.moment, said);
    this.moment.hidden = !said;
  }

  /** Arrow keys go from tab to tab; the keys of the player rest meanwhile. */
  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const open = [...this.tabs.values()].filter((tab) => !tab.disabled && !tab.hidden);
    const next = open[(open.indexOf(document.activeElement) + by + open.length) % open.length];
    next.focus();
    next.click();
  }
}

/** The name of the view that shows what is particular about a lane. */
function telling(card, app) {
  const suits = (name) => app.panels.find((panel) => panel.name === name).suits(card);
  const first = ["canvas", "tree", "branches", "mask"].find(suits);
  return first || (hasPart(card.record.header, "cache_policy") && suits("cache") ? "cache" : "choice");
}
