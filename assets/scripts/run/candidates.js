// Which candidates of a token are shown, and what becomes of the probability of the others.

import { count, percent } from "../components/numbers.js";
import { isEnd, SPECIAL } from "../components/pieces.js";

/** The first candidates, and the chosen one at any rank. A special token that would be among them is left out unless it was chosen, ends
    the text or `withSpecials`; `specials` says how many were, and their probability together. `others` is that of all that is left. */
export function leading(step, most, withSpecials) {
  const shown = [];
  const specials = { count: 0, raw: 0 };
  for (const candidate of step.top) {
    const [id, piece, raw] = candidate;
    const isChosen = id === step.chosen;
    if (!isChosen && shown.length >= most) continue;
    if (isChosen || withSpecials || isEnd(piece) || !SPECIAL.test(piece)) shown.push(candidate);
    else Object.assign(specials, { count: specials.count + 1, raw: specials.raw + raw });
  }
  return { shown, specials, others: 1 - specials.raw - shown.reduce((sum, [, , raw]) => sum + raw, 0) };
}

/** "1 special token 12 %"; empty where none was left out. */
export function saySpecials({ count: number, raw }) {
  return number ? `${count(number, "special token")} ${percent(raw)}` : "";
}
