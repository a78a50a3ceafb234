// What is drawn, against what is chosen on the page: a run of the chosen lanes continues their cards in the editor; an earlier run says so,
// and its lanes lose their colours, which now belong to the lanes of the editor.

const NARROWEST = 230; // px of a lane below its card in the editor
const LEAST_STAGE = 400; // px of its height
const LEAST_LARGE = 330; // the same in large type
const LOWEST_STAGE = 300; // px: what is unfolded above a stage does not shrink it further
const BELOW_STAGE = 84; // px for the player below it
const PHONE = 640; // px of a window in which the lanes are stacked
const READ = ["prompt", "mode", "system", "tools", "context", "form", "before", "lanes"];
const LOOK_HERE = "Lane 2 writes the text of lane 1 in fewer forwards: a small model drafted the underlined words.";

class Stage {
  constructor(app) {
    this.app = app;
    this.made = new WeakMap(); // by trace: the settings it was started with
    document.addEventListener("settings-chosen", () => this.update());
    const sizes = new ResizeObserver(() => this.update());
    for (const node of [app.root, app.root.closest(".stage"), document.body]) if (node) sizes.observe(node); // a note above it moves it
    const editor = document.querySelector("#editor");
    if (editor) new MutationObserver(() => this.update()).observe(editor, { childList: true, subtree: true }); // a card was opened or complains
    new MutationObserver(() => this.update()).observe(document.body, { attributes: true, attributeFilter: ["class"] }); // large type, a lesson
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

  /** Whether the lanes continue their cards in the editor. An open card is long, and then they do not; beside the views it is a drawer, and
      its lane keeps a head of its own. */
  get isFused() {
    const { app } = this;
    const count = app.cards.length;
    if (this.isBeside) return !app.trace.fromFile && count > 0 && haveStrategies(app.trace, this.chosen.lanes || []);
    return !this.isStale && !app.root.closest(".stage")?.querySelector(".lane-card.open") && count > 0 && !app.trace.fromFile && count === this.chosen.lanes?.length
      && innerWidth > PHONE && app.root.clientWidth >= count * NARROWEST;
  }

  update() {
    const { app } = this;
    if (!app.root.isConnected) return;
    const stale = this.isStale;
    this.isBeside = app.inspector.arrange();
    document.body.classList.toggle("many-lanes", app.cards.length > 2);
    setAttribute(app.live, "data-stale", stale);
    setAttribute(app.live, "data-fused", this.isFused);
    const stage = app.root.closest(".stage");
    if (stage) {
      setAttribute(stage, "data-fused", this.isFused);
      setAttribute(stage, "data-beside", Boolean(this.isBeside));
    }
    app.lanes.classList.toggle("with-prompts", !stage || stale || app.trace.fromFile || app.inspector.prompts.checked);
    this.caption(stale);
    if (this.isBeside) this.measure(stage);
  }

  /** Fit lanes and views between what is above them and the player, and the cards of the editor onto the lanes. */
  measure(stage) {
    const { app } = this;
    const zoom = zoomOf(app.live);
    const top = Math.round(app.live.getBoundingClientRect().top + scrollY) / zoom;
    const height = `max(${zoom > 1 ? LEAST_LARGE : LEAST_STAGE}px, calc(100vh / ${zoom} - ${Math.min(top, LOWEST_STAGE)}px - ${BELOW_STAGE}px))`;
    for (const node of [app.live, stage]) node?.style.setProperty("--stage-height", height);
    if (!stage || !this.isFused) return;
    stage.style.setProperty("--lanes-top", `${boxOf(app.lanes).top - boxOf(stage).top}px`);
    for (const card of app.cards) {
      const head = stage.querySelector(`.lane-card[data-lane="${card.order}"]`);
      const open = Boolean(head?.classList.contains("open"));
      card.node.classList.toggle("own-head", open);
      if (head && !open) card.node.style.setProperty("--head", `${head.offsetHeight}px`);
    }
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

function haveStrategies({ lanes }, chosen) {
  return lanes.length === chosen.length && lanes.every(({ header }, i) => header.strategy === chosen[i].strategy);
}

/** Whether a run without known settings, such as a recording, may be one of these. */
function isLike(trace, { prompt, lanes }) {
  return haveStrategies(trace, lanes) && trace.lanes.every(({ header }) => header.prompt.trim() === prompt.trim());
}
