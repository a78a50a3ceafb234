// The view as a whole: frames come in, at most one paint per animation frame, user actions go out.

import "../components/serif.js";
import { element, props, trigger, watch } from "component";
import { SKELETON } from "python";
import { button, el, option, prefersStillness, setText } from "../components/elements.js";
import { Menu } from "../components/menu.js";
import { count } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { Card } from "../lane/card.js";
import { COLOURS, drawScale, drawUnderlines } from "../lane/colour.js";
import { LaneCard } from "../lane/lane.js";
import { namesOfRun, SCORE } from "../run/headers.js";
import { Places } from "../run/places.js";
import { plainLane } from "../run/plain.js";
import { Readings } from "../run/readings.js";
import { LARGEST_FILE, readTrace, Trace } from "../run/trace.js";
import { Inspector } from "../stage/inspector.js";
import { askWhichToReplace } from "../stage/replacing.js";
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
import { sayAbsent } from "../views/panel.js";
import { RoundsPanel } from "../views/rounds.js";
import { TreePanel } from "../views/tree.js";
import { VisitTree } from "../visit/history.js";
import { inBase64, isReload, keepAtOnce, keepRun } from "../visit/keeping.js";
import { pictureButtons } from "../visit/picture.js";
import { saveRun } from "../visit/saving.js";
import { Visit } from "../visit/visit.js";
import { PlayerBar } from "./bar.js";
import { showKeys } from "./keys.js";
import { Lag } from "./lag.js";
import { listenToControls, listenToFiles, listenToKeys, listenToTokens, onDocument, watchPage } from "./listening.js";
import { ALIGNMENTS, Player, SPEEDS } from "./player.js";
import { goToPosition, positionOf, readPosition } from "./position.js";
import { Streams } from "./streams.js";

const VIEW_SETTINGS = "decoding-playground.view"; // the only data stored in the browser: view settings, never content
const RIVALS = ["3", "5", "all"]; // candidates the card of a token shows
const UNDERLINES = new Map([...Object.entries(COLOURS).map(([name, { label }]) => [name, label]), ["none", "none"]]);
const FILE_ALONE = "This trace is from a file and has no model: press Run first";
const LEFT_BEHIND = "The server no longer has this run, and its settings were not kept: press Run first";
const TOO_LONG = "This run is too long to be sent back to the server: press Run first.";
const MOST_SENT = 1_800_000; // characters of a run that the server no longer has; less than a public page takes
const ONLY_PRESENTER = "Only the presenter of this class can run or ask a model";
const PANEL_PAUSE = 80; // ms between two drawings of the views under the lanes
const UNSEEN_PAUSE = 500; // ms of rest after which the views out of sight are drawn, too
const NEXT_FRAME = 60; // ms until the next frame has probably arrived: views and texts are then laid out and painted together
const PAINT_REST = 1.5; // pause after a paint of the texts, in multiples of its duration: the model may run on the same processor
const VIEWS_REST = 4; // pause of the views, in multiples of the duration of theirs: texts go first, and do not wait for it

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
    this.marked = { lane: -1, position: null };
    this.awaited = null; // the run that is shown, or that will be shown once it is unpacked
    this.asked = null; // "hold" or "resume", sent to the server and not yet confirmed
    this.linked = isReload() ? null : readPosition(new URLSearchParams(location.search).get("at")); // where the run of a link is shown
    this.forkedFrom = null; // name of the run that was last asked for a fork
    this.stepping = false;
    this.frame = this.resting = null; // the pending animation frame, or the timer of a pause before it
    // earliest times of the next paints during playback: a long text must not keep the page busy
    this.paintsAgain = this.panelsAgain = 0;
    this.panelsAt = -PANEL_PAUSE; // when the views were painted last
    this.settings = readSettings();
    Object.assign(this.player, { speed: this.settings.speed, mode: this.settings.align });
    this.theme = "";
    this.find();
    this.card = new Card(root.querySelector(".live"), {
      refusal: (lane) => this.forkRefusal(lane),
      go: (...where) => this.fork(...where),
      write: (...where) => this.write(...where),
      lookRefusal: (lane) => this.lookRefusal(lane),
      look: (...where) => this.look(...where),
      attribute: (...where) => this.attribute(...where),
      holds: () => this.live.dataset.views !== "all",
      isBrief: () => this.isCalm,
      rivals: () => (this.rivals.value === "all" ? Infinity : Number(this.rivals.value)),
    });
    this.fill();
    this.moreNumbers = false; // whether the lanes show all their numbers
    this.inspector = new Inspector(this);
    this.stage = new Stage(this);
    onDocument(this, "show-run", ({ detail }) => { if (this.visit.find(detail)) this.bringBack(this.visit.find(detail)); });
    for (const listen of [listenToControls, listenToTokens, listenToKeys, listenToFiles, watchPage]) listen(this);
    addEventListener("pagehide", () => keepAtOnce(this.visit.newest));
    window.livePosition = () => (this.stage.isOfChosen ? positionOf(this) : "");
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
      "rivals", "scale", "origins", "file", "welcome"];
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
    if ("inside" in frame) return this.showInside(frame);
    if ("attributed" in frame) return this.showAttribution(frame);
    if (!this.streams.leaves(frame, this.homeOf(frame).nextFrame)) this.receive(frame);
  }

  /** Take a frame of a run, from Gradio or from the run's stream. */
  receive(frame) {
    const trace = this.homeOf(frame);
    const [before, shown] = [trace.insertions, trace === this.trace ? this.player.shown : null];
    const outcome = trace.take(frame);
    if (shown && trace.insertions > before) this.player.showUpTo(shown);
    this.ranHere ||= !frame.recorded;
    if (outcome === "new") this.begin(trace);
    if (outcome === "new" && frame.streamed) this.streams.follow(frame.run);
    if (frame.oldest_at && outcome !== "old") this.keepUp(frame.oldest_at, outcome === "new");
    if (outcome === "gap" && !trace.fromFile) trigger("missed", { run: frame.run });
    if (trace !== this.trace) return;
    if (frame.machine) this.bar.showMachine(frame.machine);
    this.follow(outcome);
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

  /** The shown run has new events. */
  follow(outcome) {
    if (this.trace.state === "running" && this.asked === "resume") this.asked = null;
    if (this.trace.state === "held" && this.asked === "hold") this.asked = null;
    if (this.stepping && outcome === "more" && !this.player.atEnd) {
      this.stepping = false;
      this.player.forward();
    }
    this.schedule();
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
    if (trace.over || trace.state === "held") this.showEnd();
    this.schedule();
  }

  start() {
    this.asked = null;
    this.stepping = this.viewsAlone = false;
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
    this.numbersLook = "";
    for (const card of this.cards) card.plain = plainLane(card, this.cards);
    this.lanes.replaceChildren(...this.cards.map((card) => card.node));
    this.marked = { lane: -1, position: null };
    this.selected = null;
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
    if (this.trace.recorded && prefersStillness()) this.showEnd();
  }

  showNumbers(open) {
    this.moreNumbers = open;
    for (const card of this.cards) card.more.open = open;
  }

  showEnd() {
    this.player.pause();
    this.player.toHead();
  }

  openFile(file) {
    if (!file) return;
    if (file.size > LARGEST_FILE) return this.say("This file is larger than 200 MB: open a smaller trace.", true);
    file.text().then((text) => this.show(file.name, readTrace(text))).catch((reason) => this.say(whyNotOpened(reason), true));
  }

  show(name, frame) {
    const [before, trace] = [this.trace, new Trace()];
    trace.take(frame);
    try {
      this.begin(trace);
    } catch (reason) {
      this.visit.forget(trace);
      if (before.run) this.returnTo(before);
      throw reason;
    }
    this.say(`Opened ${name}: ${count(frame.headers.length, "lane")}, ${count(frame.events.length, "event")}.`);
    document.dispatchEvent(new CustomEvent("trace-opened", { detail: () => inBase64(trace) })); // for a class
    this.schedule();
  }

  // User actions

  act(name) {
    const acts = {
      play: () => this.playOrPause(),
      back: () => this.stepBack(),
      forward: () => this.stepForward(),
      place: () => this.visitPlace(1),
      placeBefore: () => this.visitPlace(-1),
      follow: () => this.followLive(),
      start: () => this.goToStart(),
      end: () => this.goToEnd(),
      export: () => saveRun(this.trace, "trace"),
      csv: () => saveRun(this.trace, "csv"),
      page: () => saveRun(this.trace, "page"),
      open: () => this.file.click(),
      keys: () => showKeys(this.keys),
      run: () => document.querySelector("#run")?.click(),
      runs: () => this.inspector.showRuns(),
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

  /** Whether the shown run is on the server and can be held and resumed. */
  get running() {
    return !this.trace.over && !this.trace.fromFile && this.trace.lanes.length > 0;
  }

  get held() {
    return this.asked === "hold" || (this.trace.state === "held" && this.asked !== "resume");
  }

  playOrPause() {
    if (this.player.playing) {
      this.pause();
      return;
    }
    this.resume();
    this.player.play();
  }

  pause() {
    this.player.pause();
    if (!this.running || this.held) return;
    this.asked = "hold";
    trigger("hold", {});
  }

  resume() {
    this.stepping = false;
    if (!this.running || !this.held) return;
    this.asked = "resume";
    trigger("resume", {});
  }

  stepBack() {
    this.stepping = false;
    this.pause();
    this.player.back();
  }

  stepForward() {
    this.pause();
    if (this.player.forward() || !this.running) return;
    this.stepping = true;
    trigger("step", {});
  }

  goToStart() {
    this.stepping = false;
    this.pause();
    this.player.toStart();
  }

  goToEnd() {
    if (this.running) this.followLive();
    else this.showEnd();
  }

  followLive() {
    this.resume();
    this.speed.value = "live";
    this.player.follow();
  }

  /** Go to the next interesting place, or the one before, and say what is there. */
  visitPlace(by) {
    const place = this.places.next(this.player.cursors, by);
    if (!place) return this.bar.sayPlace("No interesting place so far: no entropy, rejection, mask, switch or eviction was recorded.");
    const { lane, event, position, says, number, of } = place;
    this.unpin();
    this.choose(lane);
    this.seekEvent(lane, event);
    this.paint(performance.now()); // the token must be on screen to be selected
    this.mark(lane, position);
    for (const card of this.cards) card.text.bringInSight(position);
    this.bar.sayPlace(`${number} of ${of} · lane ${lane + 1}, token ${position + 1}: ${says}`);
  }

  stopLane(lane) {
    trigger("stop_lane", { lane });
  }

  forkRefusal(lane) {
    if (props.follows) return ONLY_PRESENTER;
    if (this.trace.lanes[lane].header.canvas) return "A canvas is not filled from left to right, so it cannot be forked";
    if (this.trace.fromFile) return FILE_ALONE;
    if (this.isGone && !this.trace.settings) return LEFT_BEHIND;
    if (this.trace.lanes[lane].header.remote) return "A server generated this text, so it cannot be continued here";
    if (this.trace.lanes[lane].header.strategy === SCORE) return "This text was scored, not generated: press Run to generate one";
    return this.ranHere || this.trace.restored ? "" : "A recording has no model: press Run first";
  }

  fork(lane, position, token, piece) {
    this.branch(lane, position, { token }, `Running lane ${lane + 1} again with “${pieceLabel(piece)}” as token ${position + 1}.`);
  }

  /** Fork with the user's own words. */
  write(lane, position, words) {
    this.branch(lane, position, { words }, `Running lane ${lane + 1} again with “${words}” from token ${position + 1} on.`);
  }

  /** Ask the server for a fork beside its lane; the other lanes stay. */
  branch(lane, position, taken, news) {
    const place = this.placeOf(lane, position);
    askWhichToReplace(this, lane, (replaced) => {
      this.say(news);
      this.forkedFrom = place.run;
      const where = { ...place, ...taken, ...(replaced === undefined ? {} : { instead_of: replaced }) };
      this.send(where, (sent) => trigger("fork", sent));
    });
  }

  /** Whether the server no longer has the shown run. */
  get isGone() {
    return this.trace.left && !this.visit.isOnServer(this.trace);
  }

  /** Request something about the shown run, with the run itself if the server no longer has it. */
  async send(what, act) {
    if (!this.isGone) return act(what);
    const kept = await inBase64(this.trace);
    if (kept.length > MOST_SENT) return this.say(TOO_LONG, true);
    act({ ...what, settings: this.trace.settings, kept });
  }

  placeOf(lane, position) {
    return { run: this.trace.run, lane: this.trace.lanes[lane].header.lane, sequence: this.cards[lane].text.shown[position].sequence, position };
  }

  tokenOf(lane, { sequence, position, id }) {
    return { run: this.trace.run, lane: this.trace.lanes[lane].header.lane, sequence, position, token: id };
  }

  lookRefusal(lane) {
    if (props.follows) return ONLY_PRESENTER;
    if (this.trace.lanes[lane].header.remote) return "The layers of a server's model cannot be looked into";
    if (this.trace.lanes[lane].header.canvas) return "The denoiser of this canvas has no layers to look into";
    if (this.trace.fromFile) return FILE_ALONE;
    if (this.isGone && !this.trace.settings) return LEFT_BEHIND;
    return this.trace.recorded ? "A recording has no model: press Run first" : "";
  }

  /** Request the logit lens and the attention before a token. */
  look(lane, token) {
    this.say(`Looking inside at token ${token.position + 1} of lane ${lane + 1}.`);
    this.send(this.tokenOf(lane, token), (sent) => trigger("look", sent));
  }

  showInside({ run, inside, refused }) {
    if (run !== this.trace.run) return;
    this.say(refused || "", Boolean(refused));
    if (!inside) return;
    this.inside.show(inside);
    this.inspector.open(this.inside);
    this.inside.node.scrollIntoView({ block: "nearest", behavior: prefersStillness() ? "auto" : "smooth" });
  }

  /** Request the effect of each word of the prompt on a token. */
  attribute(lane, token) {
    this.say(`Leaving out each word of the prompt in turn, for token ${token.position + 1} of lane ${lane + 1}.`);
    this.send(this.tokenOf(lane, token), (sent) => trigger("attribute", sent));
  }

  showAttribution({ run, attributed, refused }) {
    if (run !== this.trace.run) return;
    this.say(refused || "", Boolean(refused));
    if (!attributed) return;
    this.attribution.show(attributed);
    this.inspector.open(this.attribution);
    this.attribution.node.scrollIntoView({ block: "nearest", behavior: prefersStillness() ? "auto" : "smooth" });
  }

  choose(order) {
    if (order >= this.cards.length) return;
    this.chosen = order;
    this.drawChooser();
    this.inspector.bringLane(order);
    this.schedule();
  }

  seekEvent(lane, index) {
    this.stepping = false;
    this.pause();
    this.player.seekEvent(lane, index);
    this.schedule();
  }

  // Highlighted tokens

  /** The selected position in one lane, or null if its text does not reach it. A selected token selects its position in every lane. */
  markOf(lane) {
    const { position } = this.marked;
    return position !== null && this.cards[lane].text.spans[position] ? position : null;
  }

  /** The held position in one lane, or null if no token is held or its text does not reach it. */
  heldOf(lane) {
    const { pinned, token } = this.card;
    return pinned && this.cards[lane].text.spans[token.position] ? token.position : null;
  }

  mark(lane, position) {
    if (this.marked.lane === lane && this.marked.position === position) return;
    this.marked = { lane, position };
    for (const card of this.cards) card.text.mark(position, card.order === lane);
    this.bar.point(this.player, this.trace.lanes[lane], position);
    this.schedule();
  }

  /** Back to the token of the pinned card, or to none. */
  unmark() {
    const { pinned, token, lane } = this.card;
    this.mark(pinned ? lane : -1, pinned ? token.position : null);
  }

  /** Scroll to a token and pin its card. */
  reveal(lane, position) {
    const card = this.cards[lane];
    const span = position === null ? null : card.text.spans[position];
    if (!span) return;
    span.scrollIntoView({ block: "nearest" });
    this.showCard(span, true);
  }

  showCard(span, pinned) {
    const card = this.cards.find((one) => one.text.node.contains(span));
    const token = card && card.text.shown[Number(span.dataset.i)];
    if (!token) return;
    this.mark(card.order, Number(span.dataset.i));
    if (pinned) this.selected = { lane: card.order, position: Number(span.dataset.i) }; // for a link, also when the card is closed
    this.card.show(span, card.order, card.state, token, pinned);
    if (pinned) this.inspector.hold(card.order);
    this.schedule(); // a pinned card shows its round in the views, also when its token is already marked
    if (pinned) for (const other of this.cards) if (other !== card) other.text.bringInSight(Number(span.dataset.i));
  }

  /** Close the topmost overlay. */
  closeTop() {
    const menu = [this.saving, this.viewMenu].find(({ isOpen }) => isOpen);
    if (menu) menu.close();
    else if (this.inspector.visit.classList.contains("is-open")) this.inspector.showRuns(false);
    else if (!this.card.node.hidden || this.card.pinned) this.unpin();
  }

  unpin() {
    this.card.hide();
    this.mark(-1, null);
    this.schedule();
  }

  // Painting

  retheme() {
    this.theme = document.body.classList.contains("dark") ? "dark" : "light";
    if (this.cards.length && this.player.atEnd) this.keepEndsInSight(); // large type is taller
    this.schedule();
  }

  /** Paint in the next animation frame; during playback, after a pause. */
  schedule() {
    this.grown = true; // what there is to draw, perhaps while a frame for the views is due
    const rest = this.player.playing ? this.paintsAgain - performance.now() : 0;
    if (this.frame || (this.resting && rest > 0)) return;
    clearTimeout(this.resting);
    this.resting = rest > 1000 / 60 ? setTimeout(() => this.paintNext(), rest) : null;
    if (!this.resting) this.paintNext();
  }

  paintNext() {
    this.resting = null;
    this.frame = requestAnimationFrame((now) => {
      this.frame = null;
      this.paint(now);
      const ended = performance.now();
      if (this.panelsAt === now) this.panelsAgain = ended + VIEWS_REST * (ended - now);
      else this.paintsAgain = ended + PAINT_REST * (ended - now);
    });
  }

  paint(now) {
    if (!this.cards.length || !this.root.isConnected) return;
    if (this.viewsAlone) {
      this.drawPanels(now);
      return this.grown ? this.schedule() : undefined;
    }
    const more = this.player.tick(now);
    this.bar.draw(this.player, this.trace, this.chosen);
    const atHead = this.player.atEnd;
    const changed = this.cards.map((card, i) => card.draw(this.player.cursors[i], this.channels, atHead));
    if (changed.some(Boolean)) {
      for (const card of this.cards) card.text.cutLong();
      if (this.player.playing || atHead) this.keepEndsInSight();
      if (!this.card.node.hidden && !this.card.anchor.isConnected) this.card.hide();
    }
    this.drawPanels(now, changed.some(Boolean));
    if (atHead && this.trace.over) this.announceEnd();
    if (more && !this.player.following) this.schedule(); // a followed run has nothing to draw until new events arrive
  }

  /** All texts are measured before the first is scrolled: each scrolling would make the next measurement lay out the page again. */
  keepEndsInSight() {
    const overflowing = this.cards.filter(({ text }) => text.overflows);
    for (const { text } of overflowing) text.toEnd();
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

  /** During playback, a frame that draws texts leaves the views to the next one: together they would take too long. */
  drawPanels(now, textsDrawn = false) {
    clearTimeout(this.later);
    const wait = this.player.playing ? Math.max(PANEL_PAUSE + this.panelsAt, this.panelsAgain) - now : 0;
    if (wait > 0) {
      this.later = setTimeout(() => this.schedule(), wait + NEXT_FRAME);
      return;
    }
    this.viewsAlone = textsDrawn && this.player.playing;
    if (this.viewsAlone) {
      this.schedule();
      this.grown = false;
      return;
    }
    this.panelsAt = now;
    this.drawNumbers();
    this.inspector.update();
    for (const panel of this.panels) panel.update(this);
    setText(this.absent, sayAbsent(this.panels, this.cards));
    clearTimeout(this.unseen);
    if (!this.player.playing) this.unseen = setTimeout(() => this.panels.forEach((panel) => panel.updateUnseen(this)), UNSEEN_PAUSE);
  }

  /** The numbers of the lanes, at the pace of the views: digits that change faster cannot be read, and delay the text. */
  drawNumbers() {
    const look = `${this.trace.run}/${this.cards.map(({ state }) => state.version)}`;
    if (look === this.numbersLook) return;
    this.numbersLook = look;
    for (const card of this.cards) card.drawNumbers(this.cards);
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
    try {
      const [metric, underline, rivals] = [this.metric, this.underline, this.rivals].map((select) => select.value);
      localStorage.setItem(VIEW_SETTINGS, JSON.stringify({ metric, underline, rivals, pace: this.settings.speed, align: this.settings.align, views: this.settings.views }));
    } catch (reason) { /* without storage the settings last for this visit only */ }
    this.schedule();
  }
}

function whyNotOpened(reason) {
  if (reason instanceof DOMException) return "This could not be read: choose a single trace file, not a folder.";
  const broken = reason instanceof TypeError || reason instanceof RangeError;
  return broken ? "This trace cannot be shown: some of its events are malformed." : reason.message;
}

/** How the lanes of a run are aligned; a server does not report its forwards. */
function alignedBy(menu, wanted, { lanes }) {
  const isUnknown = lanes.some(({ header }) => header.remote);
  menu.querySelector("[value=forwards]").disabled = isUnknown;
  return isUnknown && wanted === "forwards" ? "time" : wanted;
}

function readSettings() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(VIEW_SETTINGS)) || {};
  } catch (reason) { /* missing or malformed: use the defaults */ }
  return {
    metric: stored.metric in COLOURS ? stored.metric : "entropy",
    underline: UNDERLINES.has(stored.underline) ? stored.underline : "origin",
    rivals: RIVALS.includes(stored.rivals) ? stored.rivals : "all",
    views: stored.views === "all" ? "all" : "one", // beside the lanes one at a time, or all below them
    align: ALIGNMENTS.includes(stored.align) ? stored.align : "forwards",
    speed: SPEEDS.includes(stored.pace) ? stored.pace : prefersStillness() ? "live" : "reading",
  };
}

const app = new App(element);
watch("value", () => app.take(props.value));
app.take(props.value);
