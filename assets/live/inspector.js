// The inspector beside the lanes of a wide page: one view at a time, with a row of tabs. What happens in the chosen lane decides which view
// that is, until the visitor presses a tab. A narrow page and a printed one have all views below the lanes.

const ROOM_BESIDE = 1040; // px of the live view: those of a window of 1100 px
const ROOM_IN_LESSON = 800; // px in the size of the type: a lesson stands beside both, and the views are narrower
const OWN_HEADS = ["inside", "attribution", "canvas", "branches", "figures"]; // views without a tab where a run has nothing for them
const TABS = { // in this order
  inside: "Inside", attribution: "Attribution", canvas: "Canvas", choice: "Choice", branches: "Sequences", tree: "Tree", entropy: "Entropy",
  rounds: "Accepted", cache: "KV cache", mask: "Mask", cost: "Cost", figures: "Method", difference: "Difference",
};

class Inspector {
  constructor(app) {
    this.app = app;
    for (const name of ["scene", "inspector", "caption", "visit"]) this[name] = app.root.querySelector("." + name);
    this.node = this.inspector;
    this.row = this.node.querySelector(".view-tabs");
    this.moment = this.node.querySelector(".moment");
    this.pressed = null; // the view whose tab was pressed
    this.tabs = new Map(Object.keys(TABS).map((name) => [name, this.tab(name)]));
    this.row.append(...this.tabs.values());
    this.row.addEventListener("keydown", (event) => this.walk(event));
    this.all = button("quiet all-views", "All views", "Show all views below the lanes, or one beside them", () => this.turn());
    app.root.querySelector(".key-row").append(this.all);
    this.prompts = app.root.querySelector(".prompts");
    this.prompts.addEventListener("change", () => app.stage.update());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  tab(name) {
    const tab = button("view-tab", TABS[name], "", () => this.open(this.app.panels.find((panel) => panel.name === name)));
    tab.setAttribute("role", "tab");
    tab.dataset.view = name;
    return tab;
  }

  /** Another run is shown. */
  begin() {
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
    this.arrange();
    if (!begins) return this.app.schedule();
    for (const panel of this.app.panels) {
      panel.width = panel.body.clientWidth;
      panel.updateUnseen(this.app);
    }
  }

  get isBeside() {
    const { app } = this;
    const inLesson = document.body.classList.contains("in-lesson");
    const isNarrow = inLesson ? app.root.clientWidth < ROOM_IN_LESSON : app.root.clientWidth * zoomOf(app.root) < ROOM_BESIDE;
    return app.settings.views === "one" && app.cards.length > 0 && !isNarrow && !this.printing;
  }

  /** Put the views beside the lanes or below the player. */
  arrange() {
    const beside = this.isBeside;
    const { app, node } = this;
    if (app.live.dataset.views === (beside ? "one" : "all")) return beside;
    app.live.dataset.views = beside ? "one" : "all";
    setText(this.all, beside ? "All views" : "One view");
    if (beside) {
      this.scene.append(node);
      node.append(this.caption);
    } else {
      this.visit.after(node);
      this.scene.before(this.caption);
    }
    this.update();
    return beside;
  }

  /** The view to show: that of the pressed tab if the run has it, otherwise the one that shows what happens in the chosen lane. */
  get chosen() {
    const { app } = this;
    const there = (name) => app.panels.find((panel) => panel.name === name && panel.isThere(app));
    const card = app.cards[app.chosen];
    return there(this.pressed) || app.panels.find(({ name }) => name === telling(card, app)) || there("choice") || there("entropy") || there("cost");
  }

  update() {
    const { app } = this;
    if (app.live.dataset.views !== "one") return;
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
