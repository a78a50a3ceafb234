// The small parts of the game's page, and what they say.

import { button, el } from "../components/elements.js";
import { fixed, percent } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { bitsOf, LEAST } from "./rules.js";

export const RECORDED = "recorded"; // name of the game that the page opens with

/** Whether the address asks for a text of its own. */
export function isLinked() {
  return new URLSearchParams(location.search).has("s");
}

/** Whether a key belongs to a field, a menu, another button or a browser shortcut. */
export function isElsewhere({ target, key, ctrlKey, metaKey, altKey }) {
  if (ctrlKey || metaKey || altKey) return true;
  if (target.closest("input, textarea, select, [contenteditable], [role=listbox]")) return true;
  return key === "Enter" && Boolean(target.closest("button:not(.option), a"));
}

export function pieceNode(piece, className = "") {
  const node = el("span", className ? `piece ${className}` : "piece");
  writePiece(node, piece);
  return node;
}

export function badge(team, name) {
  const node = el("span", "badge", String(team + 1));
  node.dataset.team = team;
  if (name) node.title = name;
  return node;
}

/** The accessible name of an option. */
export function spoken(node, teams, round) {
  const chosen = teams.length ? `, chosen by ${teams.map(({ name }) => name).join(", ")}` : "";
  const probability = round.isOpen ? `, ${percent(Math.max(LEAST, node.option.p))}${round.isRight(node.option) ? ", right" : ""}` : "";
  return `${node.querySelector("kbd").textContent}: ${pieceLabel(node.option.piece)}${probability}${chosen}`;
}

export function keyed(key, text, act) {
  const node = button("go", text + " ", "", act);
  node.append(el("kbd", "", key));
  return node;
}

export function explanation() {
  const costs = `1/2 costs 1 bit, 1/4 2, 1/8 3; one in a million or less, ${fixed(bitsOf(0), 2)}`;
  return el("p", "meaning", `A choice costs −log₂ of its probability: ${costs}. The lowest total wins.`);
}
