// Puts the parts together: frames in, one paint for each animation frame, the person's acts out.

const VIEW_SETTINGS = "decoding-playground.view"; // the only thing kept in the browser: how to look, never what was seen
const PANEL_PAUSE = 80; // ms between two drawings of the views under the lanes

class App {
  constructor(root) {
    this.root = root;
    root.querySelector(".live").innerHTML = SKELETON; // the project's own file; whatever comes later goes in as text
    this.trace = new Trace();
    this.player = new Player(this.trace);
    this.cards = [];
    this.chosen = 0;
    this.marked = { lane: -1, position: null };
    this.asked = null; // "hold" or "resume" on its way to the server
    this.stepping = false;
    this.settings = readSettings();
    this.player.speed = this.settings.speed;
    this.theme = "";
    this.find();
    this.card = new Card(root.querySelector(".live"), { refusal: () => this.forkRefusal(), go: (...where) => this.fork(...where) });
    this.fill();
    this.listen();
    this.schedule();
  }

  find() {
    for (const name of ["live", "lanes", "views", "chooser", "message", "key", "scrub", "marks", "clock", "follow", "speed", "mode", "metric", "scale", "origins", "file", "welcome", "drop"]) {
      this[name] = this.root.querySelector("." + name);
    }
    this.bar = this.root.querySelector(".player");
    this.playButton = this.root.querySelector("[data-do=play]");
  }

  fill() {
    for (const speed of SPEEDS) this.speed.append(option(speed, speed === "live" ? "as it runs" : speed + "×"));
    for (const [name, { label }] of Object.entries(COLOURS)) this.metric.append(option(name, label));
    this.speed.value = this.settings.speed;
    this.metric.value = this.settings.metric;
    this.panels = [new EntropyPanel(), new TreePanel(), new RoundsPanel(), new CachePanel(), new MaskPanel(), new FiguresPanel()];
    this.views.append(...this.panels.map((panel) => panel.node));
    this.drawLegend();
  }

  // Frames

  /** A frame from Python: a JSON string, or the same as an object. */
  take(value) {
    if (!value) return;
    const frame = typeof value === "string" ? JSON.parse(value) : value;
    if (!frame || !frame.run) return;
    const outcome = this.trace.take(frame);
    if (outcome === "new") this.start();
    if (outcome === "gap" && frame.run === this.trace.run) trigger("missed", { run: frame.run, have: this.trace.version });
    if (this.trace.state === "running" && this.asked === "resume") this.asked = null;
    if (this.trace.state === "held" && this.asked === "hold") this.asked = null;
    if (this.stepping && outcome === "more" && !this.player.atEnd) {
      this.stepping = false;
      this.player.forward();
    }
    this.schedule();
  }

  start() {
    this.asked = null;
    this.stepping = false;
    this.card.hide();
    this.player.restart();
    const titles = distinctTitles(this.trace.lanes.map((record) => record.header));
    this.cards = this.trace.lanes.map((record, order) => new LaneCard(record, order, this, titles[order]));
    this.lanes.replaceChildren(...this.cards.map((card) => card.node));
    this.lanes.dataset.count = this.cards.length;
    this.chosen = Math.max(0, Math.min(this.chosen, this.cards.length - 1));
    this.marked = { lane: -1, position: null };
    this.drawChooser();
    for (const part of [this.bar, this.key, this.views]) part.hidden = false;
    this.chooser.hidden = this.cards.length < 2;
    this.welcome.hidden = true;
    this.live.dataset.state = "filled";
    this.live.dataset.run = this.trace.run;
    this.say("");
    if (this.trace.recorded && matchMedia("(prefers-reduced-motion: reduce)").matches) this.showEnd();
  }

  showEnd() {
    this.player.pause();
    this.player.toHead();
  }

  openFile(file) {
    if (!file) return;
    if (file.size > LARGEST_FILE) return this.say("This file is larger than 200 MB: open a smaller trace.", true);
    file.text().then((text) => {
      const frame = readTrace(text);
      this.trace.take(frame);
      this.trace.fromFile = true;
      this.start();
      this.say(`Opened ${file.name}: ${count(frame.headers.length, "lane")}, ${count(frame.events.length, "event")}.`);
      this.schedule();
    }).catch((reason) => this.say(reason.message || "This file cannot be read.", true));
  }

  save() {
    const blob = new Blob([this.trace.toLines()], { type: "application/x-ndjson" });
    const link = el("a");
    link.href = URL.createObjectURL(blob);
    link.download = `trace-${this.trace.run.replace(/[^\w-]+/g, "-")}.jsonl`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // What a person does

  act(name) {
    const acts = {
      play: () => this.playOrPause(),
      back: () => this.stepBack(),
      forward: () => this.stepForward(),
      follow: () => this.followLive(),
      export: () => this.save(),
      open: () => this.file.click(),
    };
    acts[name]();
    this.schedule();
  }

  /** Whether there is a run on the server that can be held and continued. */
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
    this.pause();
    this.player.back();
  }

  stepForward() {
    this.pause();
    if (this.player.forward() || !this.running) return;
    this.stepping = true;
    trigger("step", {});
  }

  followLive() {
    this.resume();
    this.player.follow();
  }

  stopLane(lane) {
    trigger("stop_lane", { lane });
  }

  forkRefusal() {
    if (this.trace.fromFile) return "A trace from a file has no model behind it to go on with";
    return "";
  }

  fork(lane, position, token, piece) {
    this.say(`Running lane ${lane + 1} again with “${pieceLabel(piece)}” as token ${position + 1}.`);
    trigger("fork", { lane: this.trace.lanes[lane].header.lane, position, token });
  }

  choose(order) {
    if (order >= this.cards.length) return;
    this.chosen = order;
    this.drawChooser();
    this.schedule();
  }

  seekEvent(lane, index) {
    if (!this.trace.recorded && this.running) this.pause();
    this.player.seekEvent(lane, index);
    this.schedule();
  }

  // Tokens that are looked at

  markOf(lane) {
    return this.marked.lane === lane ? this.marked.position : null;
  }

  mark(lane, position) {
    if (this.marked.lane === lane && this.marked.position === position) return;
    const before = this.cards[this.marked.lane];
    if (before) before.text.mark(null);
    this.marked = { lane, position };
    if (position !== null && this.cards[lane]) this.cards[lane].text.mark(position);
    this.schedule();
  }

  /** Bring a token into sight and pin its card. */
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
    this.card.show(span, card.order, card.state, token, pinned);
  }

  // Listening

  listen() {
    const { root } = this;
    root.addEventListener("click", (event) => {
      const doing = event.target.closest("[data-do]");
      if (doing) this.act(doing.dataset.do);
    });
    this.scrub.addEventListener("input", () => {
      if (!this.trace.recorded && this.running && this.player.following) this.player.following = false;
      this.player.seek(Number(this.scrub.value));
      this.schedule();
    });
    this.speed.addEventListener("change", () => {
      this.player.setSpeed(this.speed.value);
      this.keep();
    });
    this.mode.addEventListener("change", () => {
      this.player.setMode(this.mode.value);
      this.schedule();
    });
    this.metric.addEventListener("change", () => {
      this.drawLegend();
      this.keep();
    });
    this.file.addEventListener("change", () => {
      this.openFile(this.file.files[0]);
      this.file.value = "";
    });
    this.listenToTokens();
    this.listenToKeys();
    this.listenToFiles();
    this.watchPage();
  }

  listenToTokens() {
    const tokenAt = (event) => event.target.closest && event.target.closest(".lane .tokens > .t");
    this.lanes.addEventListener("pointerover", (event) => {
      const span = event.pointerType !== "touch" && tokenAt(event);
      if (span) this.showCard(span, false);
    });
    this.lanes.addEventListener("pointerout", (event) => {
      if (!tokenAt(event) || this.card.pinned) return;
      this.card.leave();
      this.mark(-1, null);
    });
    this.lanes.addEventListener("click", (event) => {
      const span = tokenAt(event);
      if (span && !String(getSelection())) this.showCard(span, true);
    });
    document.addEventListener("pointerdown", this.outside = (event) => {
      if (!this.root.isConnected) return document.removeEventListener("pointerdown", this.outside);
      if (this.card.pinned && !this.card.node.contains(event.target) && !tokenAt(event)) this.unpin();
    });
  }

  unpin() {
    this.card.hide();
    this.mark(-1, null);
  }

  listenToKeys() {
    document.addEventListener("keydown", this.keys = (event) => {
      if (!this.root.isConnected) return document.removeEventListener("keydown", this.keys);
      if (event.ctrlKey || event.metaKey || event.altKey || !this.cards.length) return;
      if (event.key === "Escape" && !this.card.node.hidden) return this.unpin();
      const text = event.target.closest && event.target.closest(".lane .text");
      if (text && this.walk(event, text)) return event.preventDefault();
      if (!this.owns(event)) return;
      const act = { " ": "play", ArrowLeft: "back", ArrowRight: "forward" }[event.key];
      if (act) this.act(act);
      else if (/^[1-4]$/.test(event.key)) this.choose(Number(event.key) - 1);
      else return;
      event.preventDefault();
    });
  }

  /** Keys belong to the player unless what has the focus has a use for them. */
  owns(event) {
    const wanted = event.key === " " ? "button, summary, a, label, input, textarea, select, [contenteditable], [role]:not(.live *)" : "input, textarea, select, [contenteditable], [role]:not(.live *)";
    return !event.target.closest || !event.target.closest(wanted);
  }

  /** Inside a text, arrows go from token to token and Enter pins the card. */
  walk(event, text) {
    const card = this.cards.find((one) => one.text.node === text);
    const at = this.markOf(card.order);
    const spans = card.text.spans;
    if (event.key === "Enter" && at !== null) this.showCard(spans[at], true);
    else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && spans.length) {
      const next = at === null ? spans.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1);
      const span = spans[Math.max(0, Math.min(spans.length - 1, next))];
      span.setAttribute("aria-label", describeToken(card, Number(span.dataset.i)));
      this.card.pinned = false;
      span.focus({ preventScroll: true });
      span.scrollIntoView({ block: "nearest" });
      this.showCard(span, false);
    } else return false;
    return true;
  }

  listenToFiles() {
    const carriesFile = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
    this.root.addEventListener("dragover", (event) => {
      if (!carriesFile(event)) return;
      event.preventDefault();
      this.live.classList.add("dropping");
    });
    this.root.addEventListener("dragleave", (event) => {
      if (!this.root.contains(event.relatedTarget)) this.live.classList.remove("dropping");
    });
    this.root.addEventListener("drop", (event) => {
      if (!carriesFile(event)) return;
      event.preventDefault();
      this.live.classList.remove("dropping");
      this.openFile(event.dataTransfer.files[0]);
    });
  }

  /** Draw again when the page changes its width or its theme; leave out panels that are out of sight. */
  watchPage() {
    const frame = this.root.closest(".gradio-container");
    if (frame) frame.style.overflow = "clip"; // cuts off like "hidden", and lets the player stick to the window
    const sizes = new ResizeObserver((changed) => {
      for (const { target, contentRect } of changed) this.panels.find((panel) => panel.body === target).width = Math.floor(contentRect.width);
      this.schedule();
    });
    for (const panel of this.panels) sizes.observe(panel.body);
    new MutationObserver(() => this.retheme()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    const watcher = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) this.panels.find((panel) => panel.node === target).inSight = isIntersecting;
      this.schedule();
    }, { rootMargin: "200px" });
    for (const panel of this.panels) watcher.observe(panel.node);
    this.retheme();
  }

  retheme() {
    this.theme = document.body.classList.contains("dark") ? "dark" : "light";
    this.schedule();
  }

  // Painting

  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame((now) => {
      this.scheduled = false;
      this.paint(now);
    });
  }

  paint(now) {
    if (!this.cards.length || !this.root.isConnected) return;
    const more = this.player.tick(now);
    this.drawPlayer();
    const atHead = this.player.atEnd;
    const changed = this.cards.map((card, i) => card.draw(this.player.cursors[i], this.metric.value, atHead));
    if (changed.some(Boolean)) {
      for (const card of this.cards) card.drawLikeness(this.cards[0]);
      if (this.player.playing) for (const card of this.cards) card.text.keepEndInSight();
      if (!this.card.node.hidden && !this.card.anchor.isConnected) this.card.hide();
    }
    this.drawPanels(now);
    if (more && !(this.player.following && !changed.some(Boolean))) this.schedule();
  }

  drawPanels(now) {
    const wait = this.player.playing ? PANEL_PAUSE - (now - (this.panelsAt || 0)) : 0;
    if (wait > 0) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.schedule(), wait);
      return;
    }
    this.panelsAt = now;
    for (const panel of this.panels) panel.update(this.cards[this.chosen], this);
  }

  drawPlayer() {
    const { player, trace } = this;
    const end = player.end();
    const value = player.value();
    this.playButton.classList.toggle("playing", player.playing);
    const label = player.playing ? "Pause" : "Play";
    if (this.playButton.getAttribute("aria-label") !== label) this.playButton.setAttribute("aria-label", label);
    this.scrub.max = end || 1;
    this.scrub.step = player.mode === "time" ? "any" : "1";
    if (document.activeElement !== this.scrub || player.playing) this.scrub.value = value;
    this.scrub.style.setProperty("--done", end ? (value / end) * 100 + "%" : "0%");
    const words = player.mode === "time" ? `${value.toFixed(2)} of ${end.toFixed(2)} s` : `${value} of ${count(end, "token")}`;
    setText(this.clock, words);
    this.scrub.setAttribute("aria-valuetext", words);
    this.follow.hidden = trace.over;
    this.follow.setAttribute("aria-pressed", String(player.following));
    this.follow.dataset.state = trace.state;
    setText(this.follow, trace.state === "held" && !player.following ? "Held" : "Live");
    this.drawMarks(end);
  }

  /** Where each lane came to its end, over the slider. */
  drawMarks(end) {
    const ends = this.trace.lanes.map((lane) => (lane.over ? (this.player.mode === "time" ? lane.end : lane.tokens) : null));
    const look = JSON.stringify([ends, end]);
    if (look === this.marksLook) return;
    this.marksLook = look;
    this.marks.replaceChildren();
    const places = new Map();
    ends.forEach((at, lane) => {
      if (at === null || !end) return;
      const key = Math.round((at / end) * 60);
      places.set(key, [...(places.get(key) || []), lane + 1]);
    });
    for (const [key, lanes] of places) {
      const mark = el("span", "", lanes.join(" "));
      mark.style.left = `calc(8px + (100% - 16px) * ${key / 60})`;
      this.marks.append(mark);
    }
  }

  drawChooser() {
    this.chooser.replaceChildren(...this.cards.map((card, order) => {
      const tab = button("tab", "", `Key ${order + 1}`, () => this.choose(order));
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", String(order === this.chosen));
      tab.dataset.lane = order;
      tab.append(el("span", "number", String(order + 1)), el("span", "title", card.title));
      card.node.classList.toggle("in-view", order === this.chosen);
      return tab;
    }));
  }

  drawLegend() {
    drawScale(this.scale, this.metric.value);
    drawOrigins(this.origins, this.metric.value);
    this.schedule();
  }

  say(text, trouble = false) {
    setText(this.message, text);
    this.message.hidden = !text;
    this.message.classList.toggle("is-trouble", trouble);
  }

  keep() {
    try {
      localStorage.setItem(VIEW_SETTINGS, JSON.stringify({ metric: this.metric.value, speed: this.speed.value }));
    } catch (reason) { /* a browser that keeps nothing still shows everything */ }
    this.schedule();
  }
}

function option(value, text) {
  const node = el("option", "", text);
  node.value = value;
  return node;
}

function readSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(VIEW_SETTINGS)) || {};
  } catch (reason) { /* nothing kept, or something else: the defaults hold */ }
  return {
    metric: kept.metric in COLOURS ? kept.metric : "entropy",
    speed: SPEEDS.includes(kept.speed) ? kept.speed : "live",
  };
}

function describeToken(card, i) {
  const token = card.text.shown[i];
  const step = card.state.sequence(token.sequence).steps.get(token.position);
  const entropy = step ? `, entropy ${fixed(step.entropy, 2)} nats` : "";
  return `token ${i + 1}, ${pieceLabel(token.piece)}, ${ORIGINS[token.origin] ? ORIGINS[token.origin].label : token.origin}${entropy}`;
}

const app = new App(element);
watch("value", () => app.take(props.value));
app.take(props.value);
