// The pieces of tokens: as elements, in which every character can be seen, and as labels.

import { RIGHT_TO_LEFT, TO_LEFT } from "./composed.js";
import { el } from "./elements.js";
import { isText } from "./numbers.js";

/** Parts of a piece that are not readable: incomplete UTF-8 bytes, line ends, tabs, control characters. */
const UNREADABLE = /<0x([0-9A-F]{2})>|\r\n|\n|\r|\t|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const SPECIAL = /^(<[|｜][^<>|｜\s]{1,40}[|｜]>|<\/?(s|pad|eos|bos|unk|mask|start_of_turn|end_of_turn)>|<unused \d+>|\[(END|EOS|BOS|SEP|CLS|PAD|UNK|MASK)\])$/;
const ENDS = /end|eo[st]|^<\/s>$/i; // of special tokens, those that end a text
const GLYPHS = { "\n": "↵", "\r": "␍", "\r\n": "↵", "\t": "⇥" };

/** Fill `node` with a token's piece: line ends as a sign and a break, bytes and special tokens as chips, the rest as text.
    A single blank is shown as a dot; a label has no line breaks. `characters`: what its bytes are, as `composed` finds them. */
export function writePiece(node, piece, isLabel = false, characters = []) {
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
export function pieceLabel(piece, longest = 24) {
  const flat = piece.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥").replace(/ /g, piece.trim() === "" ? "·" : " ");
  const shown = flat.replace(UNREADABLE, (text, byte) => (byte ? text : "�"));
  return shown.length > longest ? shown.slice(0, longest - 1) + "…" : shown || "∅";
}

/** One byte of a character, under it. The byte is drawn, not copied; the box has the direction of its script. */
function composedByte(byte, said) {
  const node = el("span", "composed", said === TO_LEFT ? "" : said);
  node.dataset.byte = byte;
  const placed = el("span", said === TO_LEFT || RIGHT_TO_LEFT.test(said) ? "to-left" : "to-right");
  placed.append(node);
  return placed;
}

/** Whether a token ends the text, as far as its name says so. */
export function isEnd(piece) {
  return SPECIAL.test(piece) && ENDS.test(piece);
}
