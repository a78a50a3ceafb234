// Elements of the page. Text is always inserted as text, never as HTML: prompts and tokens are untrusted.

export const SVG = "http://www.w3.org/2000/svg";

/** An element. `look`: its class, or its attributes: those that begin with "on" are listeners, one that is true has no value. Children are
    elements and texts. Attributes and children that are null, undefined or false are left out, and so are empty texts. */
export function el(tag, look = "", ...children) {
  const node = document.createElement(tag);
  if (typeof look !== "string") for (const [name, value] of Object.entries(look)) give(node, name, value);
  else if (look) node.className = look;
  node.append(...children.filter((child) => isGiven(child) && child !== ""));
  return node;
}

function give(node, name, value) {
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (isGiven(value)) node.setAttribute(name, value === true ? "" : value);
}

function isGiven(value) {
  return value !== null && value !== undefined && value !== false;
}

export function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== "") node.textContent = text;
  return node;
}

export function button(className, text, title, act) {
  const node = el("button", className, text);
  node.type = "button";
  if (title) node.title = title;
  if (act) node.addEventListener("click", act);
  return node;
}

/** How much larger than its style says a node is drawn: large type is a CSS zoom. Boxes and pointers are measured in the window. */
export function zoomOf(node) {
  return node.currentCSSZoom ?? 1;
}

/** A box of the window, by default the node's own, in the lengths of the node's style. */
export function boxOf(node, box = node.getBoundingClientRect()) {
  const zoom = zoomOf(node);
  return Object.fromEntries(["left", "top", "right", "bottom", "width", "height"].map((side) => [side, box[side] / zoom]));
}

/** Where a pointer is in a node, in the lengths of the node's style. */
export function pointIn(node, { clientX, clientY }) {
  const { left, top } = node.getBoundingClientRect();
  const zoom = zoomOf(node);
  return { x: (clientX - left) / zoom, y: (clientY - top) / zoom };
}

/** Write only on a change: touching the DOM costs more than comparing. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** The current value of a CSS colour, for painting on a canvas. */
export function colourOf(node, name) {
  return getComputedStyle(node).getPropertyValue(name).trim();
}

export function option(value, text) {
  const node = el("option", "", text);
  node.value = value;
  return node;
}

export function prefersStillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
