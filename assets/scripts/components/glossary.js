// The glossary of the page: an element with `data-term`, or one of LABELS, shows the definition of its term on hover, on focus and on
// tap. The tab key reaches the first element of every term. Escape closes the note.

import { GLOSSARY } from "python";
import { el } from "./elements.js";
import { playground } from "./playground.js";

const TERMS = new Map(GLOSSARY.flatMap(({ term, also, text }) => [term, ...also].map((form) => [form.toLowerCase(), { term, text }])));
const LABELS = ".live .panel h3, .live .strip dt, .live .headlines dt, .live .badge, .live .chart-key .key-node, .live .origins .t, .editor .promise, "
  + ".lesson-panel strong, .strategies .terms dt, .strategies .marks li, .strategies .kind";
const PRESSED = "button, a, summary, label, input, select, [role=tab], [role=option]"; // these have a click of their own
const WAIT = 180; // ms before a note is shown or hidden on hover
const GAP = 8; // pixels between the element, the note and the edge of the window

const note = el("div", { id: "glossary-note", class: "glossary-note", role: "tooltip", hidden: true });
let shownFor = null;
let held = false; // shown by focus or tap, so that leaving it with the pointer does not hide it
let timer = 0;

const normal = (text) => text.trim().toLowerCase().replace(/\s+/g, " ");
const termOf = (node) => node.dataset.term || node.textContent;
const titleOf = (node) => node.title || node.dataset.title || node.parentElement?.title || "";

/** {term, text} for an element, or null: the definition of its own term, else its title, else that of its text. */
function explain(node) {
  const entry = TERMS.get(normal(termOf(node))) || null;
  const title = titleOf(node);
  if (title && !node.dataset.term) return { term: node.textContent.trim(), text: title };
  return entry;
}

const nodeAt = (target) => {
  const node = target.closest?.(`[data-term], ${LABELS}`);
  return node && explain(node) ? node : null;
};

function show(node) {
  if (shownFor === node) return;
  hide();
  const { term, text } = explain(node);
  shownFor = node;
  quieten(node);
  note.replaceChildren(el("b", "", term), el("span", "", text));
  (document.querySelector(".gradio-container") || document.body).append(note);
  note.hidden = false;
  node.setAttribute("aria-describedby", note.id);
  node.classList.add("explained");
  place(node);
}

/** The browser's own tooltip would repeat the note. */
function quieten(node) {
  for (const one of [node, node.parentElement]) {
    if (!one?.title) continue;
    one.dataset.title = one.title;
    one.removeAttribute("title");
  }
}

function hide() {
  clearTimeout(timer);
  if (!shownFor) return;
  for (const one of [shownFor, shownFor.parentElement]) {
    if (!one?.dataset.title) continue;
    one.title = one.dataset.title;
    delete one.dataset.title;
  }
  shownFor.removeAttribute("aria-describedby");
  shownFor.classList.remove("explained");
  shownFor = null;
  held = false;
  note.hidden = true;
}

/** Below the element if there is room, otherwise above it, and inside the window. */
function place(node) {
  const zoom = note.currentCSSZoom ?? 1; // large type zooms the page, and boxes are measured in the window
  const [left, top, bottom] = ["left", "top", "bottom"].map((side) => node.getBoundingClientRect()[side] / zoom);
  const { offsetWidth: width, offsetHeight: height } = note;
  const below = bottom + GAP + height <= innerHeight / zoom;
  note.style.left = `${Math.max(GAP, Math.min(left, document.documentElement.clientWidth / zoom - width - GAP))}px`;
  note.style.top = `${below ? bottom + GAP : Math.max(GAP, top - GAP - height)}px`;
}

const soon = (act) => {
  clearTimeout(timer);
  timer = setTimeout(act, WAIT);
};

document.addEventListener("pointerover", ({ target, pointerType }) => {
  if (pointerType === "touch" || held) return;
  if (note.contains(target)) return clearTimeout(timer);
  const node = nodeAt(target);
  if (node) soon(() => node.isConnected && show(node));
  else if (shownFor) soon(hide);
  else clearTimeout(timer);
});

document.addEventListener("focusin", ({ target }) => {
  const node = target.matches?.(`[data-term], ${LABELS}`) && target.matches(":focus-visible") ? nodeAt(target) : null;
  if (node) { show(node); held = true; } else if (held) hide();
});

document.addEventListener("click", ({ target }) => {
  if (note.contains(target)) return;
  const node = target.closest(PRESSED) ? null : nodeAt(target);
  if (!node) return hide();
  if (shownFor === node && held) return hide();
  show(node);
  held = true;
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Tab") reach();
  if (event.key !== "Escape" || !shownFor) return;
  const wasHeld = held;
  hide();
  if (wasHeld) event.stopImmediatePropagation(); // the key closes one thing at a time
}, true);

addEventListener("scroll", () => shownFor && (shownFor.isConnected ? place(shownFor) : hide()), { passive: true, capture: true });

/** Let the tab key reach the first visible element of every term. Done when it is pressed: the views are redrawn all the time. */
function reach() {
  const seen = new Set();
  for (const node of document.querySelectorAll(`[data-term], ${LABELS}`)) {
    const term = normal(termOf(node));
    const isFirst = !seen.has(term) && node.checkVisibility?.({ visibilityProperty: true }) && !node.closest(PRESSED) && explain(node);
    if (isFirst) {
      seen.add(term);
      node.tabIndex = 0;
    } else if (node.dataset.reached) node.removeAttribute("tabindex");
    if (isFirst) node.dataset.reached = "true";
  }
}

playground.glossary = { explains: (node) => Boolean(explain(node)), labels: LABELS };
