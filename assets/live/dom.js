// DOM helpers. Text is always inserted as text, never as HTML: prompts and tokens are untrusted.

const SVG = "http://www.w3.org/2000/svg";
const DASH = "–"; // shown for a number that is undefined

function el(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== "") node.textContent = text;
  return node;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== "") node.textContent = text;
  return node;
}

function button(className, text, title, act) {
  const node = el("button", className, text);
  node.type = "button";
  if (title) node.title = title;
  if (act) node.addEventListener("click", act);
  return node;
}

/** How much larger than its style says a node is drawn: large type is a CSS zoom. Boxes and pointers are measured in the window. */
function zoomOf(node) {
  return node.currentCSSZoom ?? 1;
}

/** A box of the window, by default the node's own, in the lengths of the node's style. */
function boxOf(node, box = node.getBoundingClientRect()) {
  const zoom = zoomOf(node);
  return Object.fromEntries(["left", "top", "right", "bottom", "width", "height"].map((side) => [side, box[side] / zoom]));
}

/** Where a pointer is in a node, in the lengths of the node's style. */
function pointIn(node, { clientX, clientY }) {
  const { left, top } = node.getBoundingClientRect();
  const zoom = zoomOf(node);
  return { x: (clientX - left) / zoom, y: (clientY - top) / zoom };
}

/** Write only on a change: touching the DOM costs more than comparing. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function isText(value) {
  return typeof value === "string";
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function fixed(value, digits) {
  if (!isNumber(value)) return DASH;
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

function percent(value) {
  if (!isNumber(value)) return DASH;
  const hundred = value * 100;
  if (hundred === 0 || hundred >= 99.95) return Math.round(hundred) + " %";
  if (hundred > 0 && hundred < 0.1) return "<0.1 %";
  return hundred.toFixed(hundred < 10 || hundred > 99 ? 1 : 0) + " %";
}

function seconds(value) {
  if (!isNumber(value)) return DASH;
  return value < 10 ? value.toFixed(2) + " s" : value.toFixed(1) + " s";
}

function bytes(value) {
  if (!value) return DASH;
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(3, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return scaled.toFixed(power && scaled < 100 ? 1 : 0) + " " + units[power];
}

function count(number, one, many = one + "s") {
  return number + " " + (number === 1 ? one : many);
}

/** Parts of a piece that are not readable: incomplete UTF-8 bytes, line ends, tabs, control characters. */
const UNREADABLE = /<0x([0-9A-F]{2})>|\r\n|\n|\r|\t|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const SPECIAL = /^(<[|｜][^<>|｜\s]{1,40}[|｜]>|<\/?(s|pad|eos|bos|unk|mask|start_of_turn|end_of_turn)>|<unused \d+>|\[(END|EOS|BOS|SEP|CLS|PAD|UNK|MASK)\])$/;
const GLYPHS = { "\n": "↵", "\r": "␍", "\r\n": "↵", "\t": "⇥" };

/** Fill `node` with a token's piece: line ends as a sign and a break, bytes and special tokens as chips, the rest as text.
    A single blank is shown as a dot; a label has no line breaks. `characters`: what its bytes are, as `composed` finds them. */
function writePiece(node, piece, isLabel = false, characters = []) {
  if (piece === " ") {
    node.append(el("span", "blank", piece));
    return;
  }
  if (SPECIAL.test(piece)) {
    node.append(el("span", "chip", piece));
    return;
  }
  let [from, bytes] = [0, 0];
  for (const match of piece.matchAll(UNREADABLE)) {
    writePlain(node, piece.slice(from, match.index));
    const said = match[1] ? characters[bytes++] : undefined;
    if (isText(said)) node.append(composedByte(match[1], said));
    else writeUnreadable(node, match, isLabel);
    from = match.index + match[0].length;
  }
  writePlain(node, piece.slice(from));
  if (piece === "") node.append(glyph("∅"));
}

/** Plain text; consecutive blanks are shown as dots, so that they can be counted. */
function writePlain(node, text) {
  for (const run of text.split(/( {2,})/)) {
    if (run === "") continue;
    if (run.trim() !== "" || run.length === 1) node.append(run);
    else for (const blank of run) node.append(el("span", "blank", blank));
  }
}

function writeUnreadable(node, match, isLabel) {
  const [text, byte] = match;
  if (byte) node.append(el("span", "chip byte", byte));
  else if (text in GLYPHS) node.append(glyph(GLYPHS[text]), isLabel ? "" : text);
  else node.append(el("span", "chip byte", "U+" + text.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")));
}

/** A sign that is visible and not copied to the clipboard. */
function glyph(sign) {
  const node = el("span", "glyph");
  node.dataset.sign = sign;
  return node;
}

/** A piece as one line of plain text, for labels in drawings and names for screen readers. */
function pieceLabel(piece, longest = 24) {
  const flat = piece.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥").replace(/ /g, piece.trim() === "" ? "·" : " ");
  const shown = flat.replace(UNREADABLE, (text, byte) => (byte ? text : "�"));
  return shown.length > longest ? shown.slice(0, longest - 1) + "…" : shown || "∅";
}

/** The current value of a CSS colour, for painting on a canvas. */
function colourOf(node, name) {
  return getComputedStyle(node).getPropertyValue(name).trim();
}

/** First index whose value is greater than `limit`, in a sorted array. */
function upperBound(length, valueAt, limit) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}
