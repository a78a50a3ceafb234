// Probabilities of candidates as bars, and why one has none.

import { el } from "../components/elements.js";
import { isNumber, percent } from "../components/numbers.js";
import { writePiece } from "../components/pieces.js";

/** Two bars on one scale from 0 to 1: the model's probability, and the probability after masks and processors. */
export function bars(raw, final) {
  const node = el("span", "bars");
  for (const [name, value] of [["raw", raw], ["final", final]]) {
    if (!isNumber(value)) continue;
    const bar = el("i", name);
    bar.style.width = Math.max(0, Math.min(1, value)) * 100 + "%";
    node.append(bar);
  }
  return node;
}

export function reasonOf(fell) {
  return { mask: "banned", top_k: "top-k", top_p: "top-p", min_p: "min-p" }[fell] || String(fell).replaceAll("_", " ");
}

/** What a replaced token was sampled from, by where it comes from; nothing was sampled of a choice. */
const LEFTOVER = { residual: "Residual distribution:", sample: "The target's distribution, which it was sampled from:" };

export function leftoverPart({ verdict, replacedBy }) {
  if (!verdict.leftover.length || !LEFTOVER[replacedBy]) return [];
  const part = el("div", "leftover");
  part.append(el("p", "", LEFTOVER[replacedBy]));
  for (const [, piece, raw, final] of verdict.leftover.slice(0, 5)) {
    const row = el("div", "row");
    const name = el("span", "piece");
    writePiece(name, piece, true);
    row.append(name, bars(raw, final), el("span", "num raw", percent(raw)), el("span", "num final", percent(final)));
    part.append(row);
  }
  return [part];
}
