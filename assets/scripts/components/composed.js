// Characters whose bytes are spread over tokens, as of a script that a vocabulary has no letters for: the character is shown above its
// bytes, at the token that begins it. Bytes of no whole character stay as they are.

import { isText } from "./numbers.js";

const BYTE = /<0x([0-9A-F]{2})>/g;
export const LONGEST_CHARACTER = 4; // bytes of UTF-8
const UTF_8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
export const TO_LEFT = "\u200f"; // the right-to-left mark
export const RIGHT_TO_LEFT = /\p{Script=Arabic}|\p{Script=Hebrew}|\p{Script=Syriac}|\p{Script=Thaana}|\p{Script=Nko}/u;

/** For each piece what its bytes are, in order: the character that begins there, "" inside of one (TO_LEFT in a script that runs to the
    left), null for a byte of none. */
export function composed(pieces) {
  const found = pieces.map(() => []);
  let run = []; // neighbouring bytes: {piece, byte}
  const flush = () => {
    for (const { piece, character } of charactersOf(run)) found[piece].push(character);
    run = [];
  };
  pieces.forEach((piece, i) => {
    let from = 0;
    for (const match of piece.matchAll(BYTE)) {
      if (match.index > from) flush();
      run.push({ piece: i, byte: parseInt(match[1], 16) });
      from = match.index + match[0].length;
    }
    if (from < piece.length) flush();
  });
  flush();
  return found;
}

/** The bytes of a run, each with its character as above. */
function charactersOf(run) {
  const said = run.map(({ piece }) => ({ piece, character: null }));
  for (let at = 0; at < run.length; ) {
    const length = lengthFrom(run[at].byte);
    const character = length && decoded(run.slice(at, at + length), length);
    const inside = RIGHT_TO_LEFT.test(character) ? TO_LEFT : "";
    if (character) for (let i = at; i < at + length; i++) said[i].character = i === at ? character : inside;
    at += character ? length : 1;
  }
  return said;
}

/** Bytes of the character that a byte begins; 0 if it begins none. */
function lengthFrom(byte) {
  return byte >= 0xf0 && byte < 0xf8 ? 4 : byte >= 0xe0 && byte < 0xf0 ? 3 : byte >= 0xc2 && byte < 0xe0 ? 2 : 0;
}

function decoded(bytes, length) {
  if (bytes.length < length) return null;
  try {
    return UTF_8.decode(new Uint8Array(bytes.map(({ byte }) => byte)));
  } catch {
    return null;
  }
}

/** First index of the tokens that the bytes at the end of the last one may share a character with. */
export function composingFrom(tokens, last) {
  let from = last;
  while (from > 0 && last - from < LONGEST_CHARACTER - 1 && /<0x[0-9A-F]{2}>$/.test(tokens[from - 1].piece)) from -= 1;
  return from;
}

/** Whether a byte is inside of a character. */
export function isInside(said) {
  return said === "" || said === TO_LEFT;
}

/** What the bytes of one piece are between its neighbours, as above; of a character that began before it, its first byte here has it. */
export function composedBetween(before, piece, after = []) {
  const found = composed([...before, piece, ...after]);
  const own = found[before.length];
  if (!isInside(own[0])) return own;
  const begun = found.slice(0, before.length).flat().findLast((one) => isText(one) && !isInside(one));
  return [begun, ...own.slice(1)];
}

/** A piece as text for a sentence: the characters that its bytes begin or end. */
export function saidBetween(before, piece, after = []) {
  const said = composedBetween(before, piece, after);
  let at = 0;
  return piece.replace(BYTE, (byte) => {
    const one = said[at++] ?? byte;
    return isInside(one) ? "" : one;
  });
}

/** The same for a label, with the bytes behind the characters. */
export function labelBetween(before, piece, after = []) {
  const said = composedBetween(before, piece, after);
  const bytes = [...piece.matchAll(BYTE)].map(([, byte]) => byte).filter((_, i) => isText(said[i]));
  return [saidBetween(before, piece, after), ...bytes].join(" ");
}

/** The pieces around a position that may share a character with it. */
export function piecesAround(tokens, at) {
  const pieces = (from, to) => tokens.slice(Math.max(0, from), to).map(({ piece }) => piece);
  return { before: pieces(at - LONGEST_CHARACTER + 1, at), after: pieces(at + 1, at + LONGEST_CHARACTER) };
}
