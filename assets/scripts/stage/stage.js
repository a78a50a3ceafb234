// What is drawn, against what is chosen on the page: a run of the chosen lanes continues their cards in the editor; an earlier run says so,
// and its lanes lose their colours, which now belong to the lanes of the editor.

import { boxOf, setAttribute, setText, zoomOf } from "../components/elements.js";
import { playground } from "../components/playground.js";
import { ownSeats, seatsOf, waitingCard, waitingTab } from "./seats.js";

const NARROWEST = 230; // px of a lane below its card in the editor
const LEAST_STAGE = 400; // px of its height
const LEAST_LARGE = 270; // the same in large type
const LOWEST_STAGE = 300; // px: what is unfolded above a stage does not shrink it further
const BELOW_STAGE = 92; // px for the player below it
const LOW = 520; // px of a window that is too low for the sentence above the prompt
export const PHONE = 640; // px of a window in which the lanes are stacked
const COLUMN = "main.contain > .column"; // of the page: Gradio scopes styles to it, and those of the body would lose to these
const READ = ["prompt", "mode", "system", "tools", "context", "form", "before"]; // and the lanes
const LONGEST_QUOTE = 60; // characters of a prompt
const LOOK_HERE = "Lane 2 writes the text of lane 1 in fewer forwards: a small model drafted the underlined words.";

export class Stage {
  constructor(app) {
    this.app = app;
    this.made = new WeakMap(); // by trace: the settings it was started with
    this.hues = new WeakMap(); // by trace: the hue of each lane, which it has in the editor
    this.seats = []; // for each lane on the stage its order in the run, -1 if it waits for Run
    document.addEventListener("settings-chosen", () => this.update());
    addEventListener("scroll", () => { if (this.isBeside) this.placeDrawer(); }, { passive: true });
    const sizes = new ResizeObserver(() => this.update());
    for (const node of [app.root, app.root.closest(".stage"), document.body]) if (node) sizes.observe(node); // a note above it moves it
    const editor = document.querySelector("#editor");
    if (editor) new MutationObserver(() => this.update()).observe(editor, { childList: true, subtree: true }); // a card was opened or complains
    new MutationObserver(() => this.update()).observe(document.body, { attributes: true, attributeFilter: ["class"] }); // large type, a lesson
    const narrow = matchMedia(`(max-width: ${PHONE}px)`);
    const unfold = () => {
      app.root.querySelector(".key").open = !narrow.matches || app.isCalm; // only a phone with all views has the fold of the legend
    };
    narrow.addEventListener("change", unfold);
    unfold();
  }

  get chosen() {
    return playground.settingsNow?.() || {};
  }

  /** A run of this page has begun. */
  begin(trace) {
    if (!trace.recorded && this.chosen.lanes) this.made.set(trace, { look: lookOf(this.chosen), lanes: lanesOf(this.chosen) });
    if (!trace.recorded && innerWidth <= PHONE && !this.app.isCalm) this.app.lanes.scrollIntoView({ block: "start" });
  }

  get isStale() {
    const { trace } = this.app;
    if (!this.chosen.lanes || !trace.lanes.length || trace.fromFile) return false;
    const made = this.made.get(trace);
    const isOther = made ? made.look !== lookOf(this.chosen) || !areAmong(made.lanes, lanesOf(this.chosen)) : !isLike(trace, this.chosen);
    return isOther || (!this.app.isCalm && this.chosen.lanes.length !== trace.lanes.length); // a row of cards is above all views
  }

  /** Whether the run is of exactly what is chosen. */
  get isOfChosen() {
    return !this.isStale && !this.seats.includes(-1);
  }

  get chosenHues() {
    return document.querySelector("#editor .editor")?.dataset.hues?.split(",") || [];
  }

  /** The seats of the chosen lanes; null if the stage has none for them: they are of another run, or one of its lanes is a server's. */
  get seatsOfChosen() {
    const { app, chosen } = this;
    const { lanes, fromFile } = app.trace;
    if (!app.isCalm || fromFile || !chosen.lanes || lanes.some(({ header }) => header.remote)) return null;
    const seats = seatsOf(lanes, this.hues.get(app.trace) || null, chosen.lanes, this.chosenHues);
    return seats.some((order) => order >= 0) ? seats : null;
  }

  seatOf(order) {
    return this.seats.indexOf(order);
  }

  /** Whether the lanes continue their cards in the editor. An open card is long, and then they do not; beside the views it is a drawer, and
      its lane keeps a head of its own. */
  get isFused() {
    const { app } = this;
    const count = app.cards.length;
    if (app.inspector.printing) return false; // paper has no editor
    if (this.isBeside) return this.seatsOfChosen !== null;
    return !this.isStale && !app.root.closest(".stage")?.querySelector(".lane-card.open") && count > 0 && !app.trace.fromFile && count === this.chosen.lanes?.length
      && innerWidth > PHONE && app.root.clientWidth >= count * NARROWEST;
  }

  update() {
    const { app } = this;
    if (!app.root.isConnected) return;
    const stale = this.isStale;
    app.viewMenu.hold(app.isCalm);
    this.isBeside = app.inspector.arrange();
    setAttribute(app.live, "data-calm", app.isCalm);
    if (this.wasCalm !== app.isCalm) app.drawChooser();
    this.wasCalm = app.isCalm;
    const needsRoom = ["projector", "in-lesson"].some((name) => document.body.classList.contains(name));
    const untitled = app.cards.length > 2 || needsRoom || innerHeight <= LOW; // without the sentence above the prompt
    const looks = { untitled, calm: app.isCalm, beside: Boolean(this.isBeside), phone: app.live.dataset.views === "phone" };
    for (const node of [document.body, document.querySelector(COLUMN)]) for (const name in looks) node?.classList.toggle(name, looks[name]);
    setAttribute(app.live, "data-stale", stale);
    this.giveHues(stale);
    this.seat();
    setAttribute(app.live, "data-fused", this.isFused);
    const stage = app.root.closest(".stage");
    if (stage) {
      setAttribute(stage, "data-fused", this.isFused);
      setAttribute(stage, "data-beside", Boolean(this.isBeside));
      setAttribute(stage, "data-phone", app.live.dataset.views === "phone");
    }
    const { checked } = app.inspector.prompts;
    app.lanes.classList.toggle("with-prompts", !stage || app.trace.fromFile || checked); // no box has the prompt of a saved run
    app.lanes.classList.toggle("with-specials", checked);
    this.stopAtChosen();
    this.caption(stale);
    if (app.live.dataset.views !== "all") this.measure(stage);
  }

  /** Beside the views, of the lanes only the chosen one is a stop of the Tab key: the keys 1 to 4 choose another. */
  stopAtChosen() {
    for (const card of document.querySelectorAll("#editor .lane-card")) {
      const isPassed = this.isBeside && !card.classList.contains("open") && Number(card.dataset.lane) !== this.seatOf(this.app.chosen);
      card.querySelector(".edit").tabIndex = isPassed ? -1 : 0;
    }
  }

  /** Put the lanes of the run where their cards in the editor are, and an empty card where a lane waits for Run. */
  seat() {
    const { app } = this;
    const titles = [...document.querySelectorAll("#editor .lane-title")].map((node) => node.dataset.short);
    const seats = this.seatsOfChosen || ownSeats(app.trace.lanes);
    const look = [app.trace.run, seats, seats.includes(-1) && [titles, this.chosenHues]].join("/");
    if (look === this.seatsLook) return;
    Object.assign(this, { seats, titles, seatsLook: look });
    for (const card of app.cards) {
      card.node.hidden = this.seatOf(card.order) < 0;
      card.node.style.order = this.seatOf(card.order);
    }
    for (const node of app.lanes.querySelectorAll(".waiting")) node.remove();
    app.lanes.append(...this.waiting.map((seat) => waitingCard(seat, this.chosenHues[seat])));
    app.lanes.dataset.count = seats.length;
    app.lanes.style.setProperty("--count", seats.length);
    app.chooser.hidden = seats.length < 2;
    if (app.cards[app.chosen]?.node.hidden) app.choose(seats.find((order) => order >= 0));
    else app.drawChooser();
    if (this.waiting.length) app.inspector.bringSeat(this.waiting.at(-1));
  }

  /** The seats of the lanes that wait for Run. */
  get waiting() {
    return [...this.seats.keys()].filter((seat) => this.seats[seat] < 0);
  }

  waitingTabs() {
    const open = (lane) => {
      if (this.isBeside) document.dispatchEvent(new CustomEvent("open-lane", { detail: { lane, about: "" } }));
      else this.app.inspector.bringSeat(lane);
    };
    return this.waiting.map((seat) => waitingTab(seat, this.chosenHues[seat], this.titles[seat], () => open(seat)));
  }

  /** A lane has the hue of its card in the editor. */
  giveHues(stale) {
    const { trace, live } = this.app;
    const chosen = this.chosenHues;
    if (chosen.length === trace.lanes.length && !stale && !trace.fromFile) this.hues.set(trace, chosen); // none was added between them
    const hues = this.hues.get(trace) || [];
    const asked = new URLSearchParams({ run: trace.run, ...(hues.length && { hues: hues.join() }) });
    setAttribute(this.app.studies, "href", `./studies?${asked}`);
    for (const i of [0, 1, 2, 3]) {
      if (hues[i]) live.style.setProperty(`--hue-${i}`, `var(--pg-lane-${hues[i]})`);
      else live.style.removeProperty(`--hue-${i}`);
    }
  }

  /** Fit lanes and views between what is above them and the player, and the cards of the editor onto the lanes. */
  measure(stage) {
    const { app } = this;
    const zoom = zoomOf(app.live);
    const top = Math.round(app.live.getBoundingClientRect().top + scrollY) / zoom;
    app.live.style.setProperty("--lanes-from", `${Math.round(app.lanes.getBoundingClientRect().top + scrollY)}px`);
    const height = `max(${zoom > 1 ? LEAST_LARGE : LEAST_STAGE}px, calc(100vh / ${zoom} - ${Math.min(top, LOWEST_STAGE)}px - ${BELOW_STAGE}px))`;
    for (const node of [app.live, stage]) node?.style.setProperty("--stage-height", height);
    this.placeDrawer();
    stage?.style.setProperty("--beside", `${boxOf(app.inspector.node).width}px`); // of an open card, too
    if (!stage || !this.isFused) return;
    stage.style.setProperty("--lanes-top", `${boxOf(app.lanes).top - boxOf(stage).top}px`);
    const headOf = (seat) => stage.querySelector(`.lane-card[data-lane="${seat}"]`);
    for (const node of app.lanes.querySelectorAll(".waiting")) node.style.setProperty("--head", `${headOf(node.style.order)?.offsetHeight || 0}px`);
    for (const card of app.cards) {
      const head = headOf(this.seatOf(card.order));
      const open = Boolean(head?.classList.contains("open"));
      card.node.classList.toggle("own-head", open);
      card.node.classList.toggle("complains", Boolean(head?.querySelector(".complaint")));
      if (head && !open) card.node.style.setProperty("--head", `${head.offsetHeight}px`);
    }
  }

  /** The drawer of the settings takes the place of the views, not of the text. */
  placeDrawer() {
    const drawer = document.querySelector("#drawer");
    const { left, top, width, height } = boxOf(this.app.inspector.node);
    for (const [side, length] of Object.entries({ left, top, width, height })) drawer?.style.setProperty(`--beside-${side}`, `${Math.round(length)}px`);
  }

  caption(stale) {
    const { app } = this;
    const example = app.trace.recorded && !app.trace.fromFile && !app.ranHere;
    const node = app.root.querySelector(".caption");
    node.hidden = !stale && !example;
    setText(node.querySelector(".caption-title"), example ? "Example run, recorded." : "An earlier run.");
    setText(node.querySelector(".caption-text"), stale ? sayChanged(app.trace, this.chosen) : LOOK_HERE);
    node.querySelector(".run-here").hidden = stale || !example;
  }
}

/** What has changed since a run: the lanes show the texts of its prompt, not the prompt itself. */
function sayChanged({ lanes: [{ header }] }, { prompt }) {
  const own = header.prompt.trim();
  if (own === prompt.trim()) return "The lanes or settings have changed since. Press Run for those above.";
  const quoted = own.length > LONGEST_QUOTE ? `${own.slice(0, LONGEST_QUOTE)}…` : own;
  return `Its prompt was “${quoted}”${/[.!?…]$/.test(quoted) ? "" : "."} Press Run for the prompt above.`;
}

function lookOf(settings) {
  return JSON.stringify(READ.map((name) => settings[name]));
}

function lanesOf({ lanes }) {
  return lanes.map((lane) => JSON.stringify(lane));
}

/** Whether all of these are among those, in the same order. */
function areAmong(these, those) {
  let from = 0;
  return these.every((one) => (from = those.indexOf(one, from) + 1) > 0);
}

/** Whether a run without known settings, such as a recording, may be one of these; a lane may have been added to it. */
function isLike(trace, { prompt, lanes }) {
  return trace.lanes.every(({ header }, i) => header.strategy === lanes[i]?.strategy && header.prompt.trim() === prompt.trim());
}
