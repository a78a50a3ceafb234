// What is drawn, against what is chosen on the page: a run of the chosen lanes continues their cards in the editor; an earlier run says so,
// and its lanes lose their colours, which now belong to the lanes of the editor.

const NARROWEST = 230; // px of a lane below its card in the editor
const PHONE = 640; // px of a window in which the lanes are stacked
const READ = ["prompt", "mode", "system", "tools", "context", "form", "before", "lanes"];
const LOOK_HERE = "Lane 2 writes the text of lane 1 in fewer forwards: a small model drafted the underlined tokens. Lane 3 samples, and parts where the model is unsure.";

class Stage {
  constructor(app) {
    this.app = app;
    this.made = new WeakMap(); // by trace: the settings it was started with
    document.addEventListener("settings-chosen", () => this.update());
    const sizes = new ResizeObserver(() => this.update());
    for (const node of [app.root, app.root.closest(".stage")]) if (node) sizes.observe(node);
    const narrow = matchMedia(`(max-width: ${PHONE}px)`);
    const unfold = () => {
      app.root.querySelector(".key").open = !narrow.matches; // only a phone has the fold of the legend
    };
    narrow.addEventListener("change", unfold);
    unfold();
  }

  get chosen() {
    return window.settingsNow?.() || {};
  }

  /** A run of this page has begun. */
  begin(trace) {
    if (!trace.recorded && this.chosen.lanes) this.made.set(trace, lookOf(this.chosen));
    if (!trace.recorded && innerWidth <= PHONE) this.app.lanes.scrollIntoView({ block: "start" });
  }

  get isStale() {
    const { trace } = this.app;
    if (!this.chosen.lanes || !trace.lanes.length || trace.fromFile) return false;
    const made = this.made.get(trace);
    return made ? made !== lookOf(this.chosen) : !isLike(trace, this.chosen);
  }

  /** Whether the lanes continue their cards in the editor. An open card is long, and then they do not. */
  get isFused() {
    const { app } = this;
    const count = app.cards.length;
    return !this.isStale && !app.root.closest(".stage")?.querySelector(".lane-card.open") && count > 0 && !app.trace.fromFile && count === this.chosen.lanes?.length
      && innerWidth > PHONE && app.root.clientWidth >= count * NARROWEST;
  }

  update() {
    const { app } = this;
    if (!app.root.isConnected) return;
    const stale = this.isStale;
    setAttribute(app.live, "data-stale", stale);
    setAttribute(app.live, "data-fused", this.isFused);
    const stage = app.root.closest(".stage");
    if (stage) setAttribute(stage, "data-fused", this.isFused);
    this.caption(stale);
  }

  caption(stale) {
    const { app } = this;
    const example = app.trace.recorded && !app.trace.fromFile && !app.ranHere;
    const node = app.root.querySelector(".caption");
    node.hidden = !stale && !example;
    setText(node.querySelector(".caption-title"), example ? "Example run, recorded." : "An earlier run:");
    const changed = "the prompt or the lanes have changed since.";
    setText(node.querySelector(".caption-text"), !stale ? LOOK_HERE : example ? `Not of what is chosen above: ${changed}` : changed);
    node.querySelector(".run-here").hidden = stale || !example;
  }
}

function lookOf(settings) {
  return JSON.stringify(READ.map((name) => settings[name]));
}

/** Whether a run without known settings, such as a recording, may be one of these. */
function isLike(trace, { prompt, lanes }) {
  return trace.lanes.length === lanes.length
    && trace.lanes.every(({ header }, i) => header.strategy === lanes[i].strategy && header.prompt.trim() === prompt.trim());
}
