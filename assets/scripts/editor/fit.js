// Which strategies the chosen model can run.

import { props } from "component";
import { DENOISERS, STRATEGIES } from "python";
import { byAdvice } from "./advice.js";
import { MAIN } from "./rules.js";

/** Why the chosen model cannot run a decoder, or an empty text. */
export function unfit(main) {
  if (!MAIN.includes(main.kind)) return "";
  const { attention } = props;
  if (attention === null || attention === undefined) return ""; // it is known once the model is loaded
  if (main.kind !== "canvas_decoder") return attention ? "Continues text, and the chosen model fills masked positions: choose another target, in the settings." : "";
  const wanted = `choose ${DENOISERS[main.attention[0]]} as the target, in the settings.`;
  if (!attention) return `Fills masked positions, and the chosen model continues text: ${wanted}`;
  return main.attention.includes(attention) ? "" : `Does not run on the chosen model: ${wanted}`;
}

/** Why the chosen models cannot run a strategy, or an empty text. */
export function misfit(part) {
  return unfit(part) || (part.needs.includes("draft") && props.drafted === false ? "Needs a draft model." : "");
}

export function mainStrategies() {
  return byAdvice(STRATEGIES.filter((s) => MAIN.includes(s.kind)), misfit);
}
