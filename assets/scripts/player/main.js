// The view as a whole: frames come in, at most one paint per animation frame, user actions go out.

import "../components/serif.js";
import { element, props, trigger, watch } from "component";
import { SKELETON } from "python";
import { button, el, option, prefersStillness, setText } from "../components/elements.js";
import { Menu } from "../components/menu.js";
import { playground } from "../components/playground.js";
import { Card } from "../lane/card.js";
import { COLOURS, drawScale, drawUnderlines } from "../lane/colour.js";
import { LaneCard } from "../lane/lane.js";
import { namesOfRun } from "../run/headers.js";
import { Places } from "../run/places.js";
import { plainLane } from "../run/plain.js";
import { Readings } from "../run/readings.js";
import { Trace } from "../run/trace.js";
import { Inspector } from "../stage/inspector.js";
import { Stage } from "../stage/stage.js";
import { ViewMenu } from "../stage/view_menu.js";
import { AttributionPanel } from "../views/attribution.js";
import { BranchesPanel } from "../views/branches.js";
import { CachePanel } from "../views/cache/cache.js";
import { CanvasPanel } from "../views/canvas.js";
import { ChoicePanel } from "../views/choice.js";
import { CostPanel } from "../views/cost.js";
import { DifferencePanel } from "../views/difference.js";
import { EntropyPanel } from "../views/entropy.js";
import { FiguresPanel } from "../views/figures.js";
import { InsidePanel } from "../views/inside.js";
import { MaskPanel } from "../views/mask.js";
import { RoundsPanel } from "../views/rounds.js";
import { TreePanel } from "../views/tree.js";
import { VisitTree } from "../visit/history.js";
import { comesBack, keepAtOnce, keepRun } from "../visit/keeping.js";
import { pictureButtons, shownView } from "../visit/picture.js";
import { saveRun } from "../visit/saving.js";
import { Visit } from "../visit/visit.js";
import { PlayerBar } from "./bar.js";
import { showKeys } from "./keys.js";
import { Lag } from "./lag.js";
import { listenToControls, listenToFiles, listenToKeys, listenToTokens, onDocument, watchPage } from "./listening.js";
import { OpenedFiles } from "./opened_files.js";
import { Painter } from "./painter.js";
import { Playback } from "./playback.js";
import { Player, SPEEDS } from "./player.js";
import { goToPosition, positionOf, readPosition } from "./position.js";
import { Requests } from "./requests.js";
import { Selection } from "./selection.js";
import { Streams } from "./streams.js";
import { keepSettings, readSettings, RIVALS, UNDERLINES } from "./view_settings.js";

class App {
  constructor(root) {
    this.root = root;
    root.querySelector(".live").innerHTML = SKELETON; // the project's own file; everything else is inserted as text
    this.trace = new Trace();
    this.player = new Player(this.trace);
    this.visit = new Visit();
    this.lag = new Lag();
    this.streams = new Streams((frame) => this.receive(frame));
    this.cards = [];
    this.chosen = 0;
    this.awaited = null; // the run that is shown, or that will be shown once it is unpacked
    this.linked = comesBack() ? null : readPosition(new URLSearchParams(location.search).get("at")); // where the run of a link is shown
    this.forkedFrom = null; // name of the run that was last asked for a fork
    this.selection = new Selection(this);
    this.files = new OpenedFiles(this);
    this.requests = new Requests(this);
    this.playback = new Playback(this);
    this.painter = new Painter(this);
    this.settings = readSettings();
    Object.assign(this.player, { speed: this.settings.speed, mode: this.settings.align });
    this.theme = "";
    this.find();
    this.card = new Card(root.querySelector(".live"), {
      refusal: (lane) => this.requests.forkRefusal(lane),
      go: (...where) => this.requests.fork(...where),
      switchOff: (...what) => this.requests.switchOff(...what),
      write: (...where) => this.requests.write(...where),
      lookRefusal: (lane) => this.requests.lookRefusal(lane),
      look: (...where) => this.requests.look(...where),
      attribute: (...where) => this.requests.attribute(...where),
      holds: () => this.live.dataset.views !== "all",
      isBrief: () => this.isCalm,
      showsSpecials: () => this.inspector.showsSpecials,
      rivals: () => (this.rivals.value === "all" ? Infinity : Number(this.rivals.value)),
    });
    this.fill();
    this.moreNumbers = false; // whether the lanes show all their numbers
    this.inspector = new Inspector(this);
    this.stage = new Stage(this);
    onDocument(this, "show-run", ({ detail }) => { if (this.visit.find(detail)) this.bringBack(this.visit.find(detail)); });
    for (const listen of [listenToControls, listenToTokens, listenToKeys, listenToFiles, watchPage]) listen(this);
    addEventListener("pagehide", () => keepAtOnce(this.visit.newest));
    playground.livePosition = () => (this.stage.isOfChosen ? positionOf(this) : "");
    playground.shownView = () => shownView(this);
    this.schedule();
    if (this.visit.runs.length && !this.linked) setTimeout(() => this.showKept());
  }

  /** After a reload: show the last run again, in place of the example. */
  showKept() {
    const run = this.visit.runs.at(-1);
    if (this.ranHere) return;
    this.bringBack(run).then(() => { if (run.trace.interrupted) this.say(`The page was loaded again during run ${run.number}: its text ends where it was interrupted. Press Run to run it again.`); });
  }

  find() {
    const parts = ["live", "lanes", "views", "chooser", "message", "key", "scrub", "speed", "mode", "metric", "underline",
      "rivals", "scale", "origins", "file", "welcome", "studies"];
    this.keys = this.root.querySelector("dialog.keys");
    for (const name of parts) {
      this[name] = this.root.querySelector("." + name);
    }
    this.bar = new PlayerBar(this.root);
    this.saving = new Menu(this.root.querySelector(".save"));
    this.viewMenu = new ViewMenu(this.root);
    this.branches = new VisitTree(this.root.querySelector(".visit"), (run) => this.bringBack(run));
  }

  fill() {
    for (const speed of SPEEDS) this.speed.append(option(speed, { reading: "reading speed", live: "real speed" }[speed] || speed + "×"));
    for (const [name, { label }] of Object.entries(COLOURS)) this.metric.append(option(name, label));
    for (const [name, label] of UNDERLINES) this.underline.append(option(name, label));
    this.underline.value = this.settings.underline;
    for (const number of RIVALS) this.rivals.append(option(number, number === "all" ? "all recorded" : number));
    this.rivals.value = this.settings.rivals;
    this.speed.value = this.settings.speed;
    this.mode.value = this.settings.align;
    this.metric.value = this.settings.metric;
    this.panels = [new ChoicePanel(), new CanvasPanel(), new BranchesPanel(), new DifferencePanel(), new EntropyPanel(), new TreePanel(), new RoundsPanel(), new CachePanel(), new MaskPanel(), new CostPanel(), new FiguresPanel()];
    this.inside = new InsidePanel();
    this.attribution = new AttributionPanel();
    this.panels.unshift(this.inside, this.attribution); // shown on request, so they come first
    for (const panel of this.panels) panel.tools.prepend(pictureButtons(panel, this));
    this.absent = el("p", "absent");
    this.views.append(...this.panels.map((panel) => panel.node), this.absent);
    this.drawLegend();
  }

  // Frames

  /** Take a frame from Python: a JSON string or an object. */
  take(value) {
    if (!value) return;
    const frame = typeof value === "string" ? JSON.parse(value) : value;
    if (!frame || !frame.run) return;
    if ("inside" in frame || "attributed" in frame) return this.requests.take(frame);
    if (!this.streams.leaves(frame, this.homeOf(frame).nextFrame)) this.receive(frame);
  }

  /** Take a frame of a run, from Gradio or from the run's stream. */
  receive(frame) {
    const trace = this.homeOf(frame);
    const outcome = trace.take(frame);
    this.ranHere ||= !frame.recorded;
    if (outcome === "new") this.begin(trace);
    if (outcome === "new" && frame.streamed) this.streams.follow(frame.run);
    if (frame.oldest_at && outcome !== "old") this.keepUp(frame.oldest_at, outcome === "new");
    if (outcome === "gap" && !trace.fromFile) trigger("missed", { run: frame.run });
    if (trace !== this.trace) return;
    if (frame.machine) this.bar.showMachine(frame.machine);
    this.playback.follow(outcome);
    this.schedule();
  }

  /** The trace a frame belongs to: that of a known run, a new one if the frame starts a run, otherwise the shown one. */
  homeOf(frame) {
    if (frame.run === this.trace.run) return this.trace;
    const known = this.visit.find(frame.run);
    if (known) return known.trace;
    return frame.headers && frame.headers.length ? new Trace() : this.trace;
  }

  /** Request another interval between frames if this page cannot keep up, or can again. */
  keepUp(sent, begins) {
    if (begins) this.lag.restart();
    const beat = this.lag.take(sent, Date.now() / 1000);
    if (beat !== null) trigger("pace", { beat });
  }

  begin(trace) {
    this.visit.add(trace, this.forkedFrom);
    this.forkedFrom = null;
    this.turnTo(trace);
    this.stage.begin(trace);
    this.stage.update();
    if (!trace.recorded && !trace.fromFile) document.dispatchEvent(new CustomEvent("run-begun", { detail: trace.run }));
  }

  /** Show another run, from its beginning. */
  turnTo(trace) {
    this.trace = this.player.trace = this.awaited = trace;
    this.start();
    this.branches.draw(this.visit, trace);
    this.studies.hidden = !this.visit.isOnServer(trace);
    this.visit.packAllBut((one) => one === this.trace || one === this.awaited);
  }

  async bringBack({ trace, number }) {
    if (trace === this.trace) return;
    this.awaited = trace;
    await trace.unpack();
    if (this.awaited !== trace || trace === this.trace) return;
    this.returnTo(trace);
    this.say(`Showing run ${number} again.`);
  }

  /** Show an earlier run at its end; a run that still grows is followed. */
  returnTo(trace) {
    this.turnTo(trace);
    if (trace.over || trace.state === "held") this.playback.showEnd();
    this.schedule();
  }

  start() {
    this.playback.begin();
    this.painter.begin();
    this.places = new Places(this.trace);
    this.bar.sayPlace("");
    this.bar.showMachine(null);
    this.card.hide();
    this.inside.show(null);
    this.attribution.show(null);
    this.player.speed = this.speed.value = this.settings.speed; // after a run that was followed at real speed
    this.player.mode = this.mode.value = alignedBy(this.mode, this.settings.align, this.trace);
    this.player.restart();
    this.chosen = Math.max(0, Math.min(this.chosen, this.trace.lanes.length - 1));
    this.bar.draw(this.player, this.trace, this.chosen); // at once: the slider must not keep the range of the previous run
    const names = namesOfRun(this.trace.lanes.map((record) => record.header));
    this.cards = this.trace.lanes.map((record, order) => new LaneCard(record, order, this, names[order]));
    for (const card of this.cards) card.plain = plainLane(card, this.cards);
    this.lanes.replaceChildren(...this.cards.map((card) => card.node));
    this.selection.begin();
    this.inspector.begin();
    this.drawChooser();
    for (const part of [this.bar.node, this.key, this.views]) part.hidden = false;
    this.welcome.hidden = true;
    this.live.dataset.state = "filled";
    this.live.dataset.run = this.trace.run;
    this.live.dataset.recorded = this.trace.recorded;
    this.stage.seatsLook = ""; // the cards are new
    this.stage.update();
    this.say("");
    if (this.trace.recorded && prefersStillness()) this.playback.showEnd();
  }

  showNumbers(open) {
    this.moreNumbers = open;
    for (const card of this.cards) card.more.open = open;
  }

  // User actions

  act(name) {
    const acts = {
      play: () => this.playback.playOrPause(),
      back: () => this.playback.stepBack(),
      forward: () => this.playback.stepForward(),
      place: () => this.visitPlace(1),
      placeBefore: () => this.visitPlace(-1),
      follow: () => this.playback.followLive(),
      start: () => this.playback.goToStart(),
      end: () => this.playback.goToEnd(),
      export: () => saveRun(this.trace, "trace"),
      csv: () => saveRun(this.trace, "csv"),
      page: () => saveRun(this.trace, "page"),
      open: () => this.file.click(),
      keys: () => showKeys(this.keys),
      run: () => document.querySelector("#run")?.click(),
      runs: () => this.inspector.showRuns(),
      switchOff: () => this.requests.switchOffNamed(),
      sheet: () => this.inspector.raise(),
      edit: () => document.dispatchEvent(new CustomEvent("open-lane", { detail: { lane: this.stage.seatOf(this.chosen), about: "" } })),
    };
    acts[name]();
    this.schedule();
  }

  /** Whether one view is shown at a time and what is seldom needed is in menus. */
  get isCalm() {
    return this.settings.views === "one" && this.cards.length > 0;
  }

  /** Go to the next interesting place, or the one before, and say what is there. */
  visitPlace(by) {
    const place = this.places.next(this.player.cursors, by);
    if (!place) return this.bar.sayPlace("No interesting place so far: no entropy, rejection, mask, switch or eviction was recorded.");
    const { lane, event, position, says, number, of } = place;
    this.selection.unpin();
    this.choose(lane);
    this.seekEvent(lane, event);
    this.painter.paint(performance.now()); // the token must be on screen to be selected
    this.selection.mark(lane, position);
    for (const card of this.cards) card.text.bringInSight(position);
    this.bar.sayPlace(`${number} of ${of} · lane ${lane + 1}, token ${position + 1}: ${says}`);
  }

  choose(order) {
    if (order >= this.cards.length) return;
    this.chosen = order;
    this.drawChooser();
    this.inspector.bringLane(order);
    this.schedule();
  }

  seekEvent(lane, index) {
    this.playback.seekEvent(lane, index);
    this.schedule();
  }

  /** Close the topmost overlay. */
  closeTop() {
    const menu = [this.saving, this.viewMenu].find(({ isOpen }) => isOpen);
    if (menu) menu.close();
    else if (this.inspector.visit.classList.contains("is-open")) this.inspector.showRuns(false);
    else if (!this.card.node.hidden || this.card.pinned) this.selection.unpin();
  }

  // Painting

  schedule() {
    this.painter.schedule();
  }

  retheme() {
    this.theme = document.body.classList.contains("dark") ? "dark" : "light";
    if (this.cards.length && this.player.atEnd) this.painter.keepEndsInSight(); // large type is taller
    this.schedule();
  }

  /** A run started here is shown to its end: keep it and notify the page, once its last tokens are on screen. */
  announceEnd() {
    const { trace } = this;
    if (!this.ranHere || trace.fromFile || this.announced === trace.run) return;
    this.announced = trace.run;
    if (this.linked) goToPosition(this, this.linked);
    this.linked = null;
    setTimeout(() => {
      const run = this.visit.find(trace.run);
      if (run && !trace.recorded) keepRun(run);
      document.dispatchEvent(new CustomEvent("run-shown", { detail: new Readings(trace) })); // for lessons
    });
  }

  drawChooser() {
    const tabs = this.cards.map((card, order) => {
      const seat = this.stage?.seats.length ? this.stage.seatOf(order) : order;
      const tab = button("tab", "", `${card.title} (key ${order + 1})`, () => this.choose(order));
      tab.setAttribute("aria-pressed", String(order === this.chosen));
      tab.dataset.lane = order;
      if (this.isCalm) tab.tabIndex = -1; // keys 1 to 4 choose a lane, too
      tab.hidden = seat < 0;
      tab.style.order = seat;
      tab.append(el("span", "number", String(seat + 1)), el("span", "title", card.short));
      card.node.classList.toggle("in-view", order === this.chosen);
      card.text.node.tabIndex = this.isCalm && order !== this.chosen ? -1 : 0; // arrow keys lead to the others
      return tab;
    });
    this.chooser.replaceChildren(...tabs, ...(this.stage?.waitingTabs() || []));
    this.bar.leaveToKeys(this.isCalm);
    this.stage?.stopAtChosen();
  }

  /** The quantities shown by colour and underline. */
  get channels() {
    return `${this.metric.value}/${this.underline.value}`;
  }

  drawLegend() {
    drawScale(this.scale, this.metric.value);
    drawUnderlines(this.origins, this.metric.value, this.underline.value);
    this.schedule();
  }

  say(text, trouble = false) {
    setText(this.message, text);
    this.message.hidden = !text;
    this.message.classList.toggle("is-trouble", trouble);
  }

  keep() {
    const [metric, underline, rivals] = [this.metric, this.underline, this.rivals].map((select) => select.value);
    keepSettings({ ...this.settings, metric, underline, rivals });
    this.schedule();
  }
}

/** How the lanes of a run are aligned; a server does not report its forwards. */
function alignedBy(menu, wanted, { lanes }) {
  const isUnknown = lanes.some(({ header }) => header.remote);
  menu.querySelector("[value=forwards]").disabled = isUnknown;
  return isUnknown && wanted === "forwards" ? "time" : wanted;
}

const app = new App(element);
watch("value", () => app.take(props.value));
app.take(props.value);
