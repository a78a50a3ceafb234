// Event listeners: the controls, the pointer over tokens, keys, dropped files, and changes of the page itself.

import { fixed } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { ORIGINS } from "../lane/colour.js";

const PRESSED = "button, summary, a, label"; // activated by the space bar
const TYPED = "input, textarea, select, [contenteditable]"; // use every key
const SLIDES = new Set(["ArrowLeft", "ArrowRight", "Home", "End"]); // used by the slider

export function listenToControls(app) {
  app.root.addEventListener("click", (event) => {
    const doing = event.target.closest("[data-do]");
    if (doing) app.act(doing.dataset.do);
  });
  app.scrub.addEventListener("input", () => {
    app.playback.seek(Number(app.scrub.value));
    app.schedule();
  });
  app.speed.addEventListener("change", () => {
    app.settings.speed = app.speed.value;
    app.player.setSpeed(app.speed.value);
    app.keep();
  });
  app.mode.addEventListener("change", () => {
    app.settings.align = app.mode.value;
    app.player.setMode(app.mode.value);
    app.keep();
  });
  const numbers = app.root.querySelector(".all-numbers");
  numbers.addEventListener("change", () => app.showNumbers(numbers.checked));
  for (const channel of [app.metric, app.underline]) {
    channel.addEventListener("change", () => {
      app.drawLegend();
      app.keep();
    });
  }
  app.rivals.addEventListener("change", () => {
    app.selection.unpin();
    app.keep();
  });
  app.file.addEventListener("change", () => {
    app.files.open(app.file.files[0]);
    app.file.value = "";
  });
}

export function listenToTokens(app) {
  const tokenAt = (event) => event.target.closest && event.target.closest(".lane .tokens > .t");
  app.lanes.addEventListener("pointerover", (event) => {
    const span = event.pointerType !== "touch" && tokenAt(event);
    if (span) app.selection.showCard(span, false);
  });
  app.lanes.addEventListener("pointerout", (event) => {
    if (!tokenAt(event)) return;
    if (app.card.pinned) return app.selection.unmark();
    app.card.leave();
    app.selection.mark(-1, null);
  });
  app.lanes.addEventListener("click", (event) => {
    const span = tokenAt(event);
    if (span && !String(getSelection())) app.selection.showCard(span, true);
  });
  onDocument(app, "click", ({ target }) => { if (target.closest?.("#stop")) app.playback.stop(); });
  onDocument(app, "go-to-event", ({ detail }) => app.seekEvent(detail.lane, detail.event)); // sent by lessons
  onDocument(app, "pointerdown", (event) => {
    const keeps = [app.card.node, ...(app.live.dataset.views === "all" ? [] : [app.inspector.node])];
    if (app.card.pinned && !tokenAt(event) && !keeps.some((node) => node.contains(event.target))) app.selection.unpin();
  });
}

export function listenToKeys(app) {
  onDocument(app, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !app.cards.length) return;
    if (event.key === "Escape") return app.closeTop();
    const text = event.target.closest && event.target.closest(".lane .text");
    if (text && walk(app, event, text)) return event.preventDefault();
    if (!belongsToPlayer(app, event)) return;
    const act = { " ": "play", ArrowLeft: "back", ArrowRight: "forward", Home: "start", End: "end", n: "place", N: "placeBefore", o: "switchOff", "?": "keys" }[event.key];
    if (act) app.act(act);
    else if (/^[1-4]$/.test(event.key)) app.choose(Number(event.key) - 1);
    else return;
    event.preventDefault();
  });
}

/** Keys belong to the player unless the focused element uses them. */
function belongsToPlayer(app, { key, target }) {
  if (target === app.scrub) return !SLIDES.has(key);
  if (!target.closest || target.closest(TYPED) || target.closest("dialog")) return false;
  if (target.closest("[role]") && !app.root.contains(target)) return false;
  return key !== " " || !target.closest(PRESSED);
}

/** Inside a text, arrows move from token to token and Enter pins the card. */
function walk(app, event, text) {
  const card = app.cards.find((one) => one.text.node === text);
  const at = app.selection.markOf(card.order);
  const spans = card.text.spans;
  if (event.key === "Enter" && at !== null) app.selection.showCard(spans[at], true);
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") return walkAcross(app, card, at, event.key === "ArrowUp" ? -1 : 1);
  else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && spans.length) {
    const next = at === null ? spans.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1);
    stepTo(app, card, next);
  } else return false;
  return true;
}

/** Up and down lead to the token at the same position in the lane before or after. Says whether there is one. */
function walkAcross(app, card, at, by) {
  const other = app.cards[card.order + by];
  if (at === null || !other?.text.spans.length) return false;
  app.choose(other.order);
  stepTo(app, other, at);
  return true;
}

function stepTo(app, card, i) {
  const { spans } = card.text;
  const span = spans[Math.max(0, Math.min(spans.length - 1, i))];
  card.text.thinking.open(Number(span.dataset.i));
  span.setAttribute("aria-label", describeToken(card, Number(span.dataset.i)));
  app.card.pinned = false;
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block: "nearest" });
  app.selection.showCard(span, false);
}

function describeToken(card, i) {
  const token = card.text.shown[i];
  const step = card.state.sequence(token.sequence).steps.get(token.position);
  const entropy = step ? `, entropy ${fixed(step.entropy, 2)} nats` : "";
  return `token ${i + 1}, ${pieceLabel(token.piece)}, ${ORIGINS[token.origin] ? ORIGINS[token.origin].label : token.origin}${entropy}`;
}

/** A file may be dropped anywhere on the page; outside the view the browser would navigate to it. */
export function listenToFiles(app) {
  const carriesFile = (event) => !event.defaultPrevented && event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  onDocument(app, "dragover", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    app.live.classList.add("dropping");
  });
  onDocument(app, "dragleave", (event) => {
    if (!event.relatedTarget) app.live.classList.remove("dropping"); // it left the window
  });
  onDocument(app, "drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    app.live.classList.remove("dropping");
    app.files.open(event.dataTransfer.files[0]);
  });
}

/** Redraw when the width or the theme of the page changes; skip panels that are out of sight. */
export function watchPage(app) {
  const frame = app.root.closest(".gradio-container");
  if (frame) frame.style.overflow = "clip"; // clips like "hidden", and lets the player stick to the window
  const sizes = new ResizeObserver((changed) => {
    for (const { target, contentRect } of changed) app.panels.find((panel) => panel.body === target).width = Math.floor(contentRect.width);
    app.schedule();
  });
  for (const panel of app.panels) sizes.observe(panel.body);
  new MutationObserver(() => app.retheme()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  const watcher = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) app.panels.find((panel) => panel.node === target).inSight = isIntersecting;
    app.schedule();
  }, { rootMargin: "200px" });
  for (const panel of app.panels) watcher.observe(panel.node);
  app.retheme();
}

/** Listen on the whole document while the view is part of it. */
export function onDocument(app, name, act) {
  const listener = (event) => {
    if (app.root.isConnected) act(event);
    else document.removeEventListener(name, listener);
  };
  document.addEventListener(name, listener);
}
