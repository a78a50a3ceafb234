// What a lane is made of: its settings, and the weights of its own.

import { PROMISES } from "python";
import { byName } from "./rules.js";
import { phraseOf } from "./weights.js";

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const uncapital = (text) => (/^[A-Z]{2}/.test(text) ? text : text.charAt(0).toLowerCase() + text.slice(1));

/** A lossless lane is compared with plain decoding under the same additions, whose text may differ from that without them. */
export function qualified(name, names, { strategy, extras = [], weights }) {
  const [label] = PROMISES[name] || [];
  if (!label?.startsWith("same ")) return label;
  const greedy = name === "greedy_identical";
  if (greedy && strategy === "greedy") return ""; // it is greedy decoding
  const has = (kind) => extras.some(([extra]) => byName.get(extra)?.kind === kind);
  const own = [["cache", names.includes("budget_respected") || has("cache_policy")], ["compute policy", has("compute_policy")], ["weights", weights],
    ["constraint", greedy && has("constraint")], ["processors", greedy && has("sampler")]];
  const named = own.filter(([, added]) => added).map(([addition]) => addition);
  return named.length ? `${label} with its ${named.join(" and ")}` : label;
}

/** The knob of a name in a lane, with the values it is set in. */
export function knobOf(lane, name) {
  const parts = [[lane.strategy, lane.knobs], ...lane.extras];
  const found = parts.map(([part, knobs]) => ({ knob: byName.get(part)?.knobs.find((one) => one.name === name), knobs }));
  return found.findLast(({ knob, knobs }) => knob && name in knobs) || found.findLast(({ knob }) => knob);
}

export const isCount = (value) => Number.isInteger(value) && value >= 0;

/** A lane of its own with the settings of another, or of what came from outside. */
export function fresh({ strategy, knobs = {}, extras = [], forced = [], seed, weights, forked_at: forkedAt }) {
  return {
    strategy, knobs: { ...knobs }, extras: extras.map(([name, set]) => [name, { ...set }]), forced: [...forced],
    ...(isCount(seed) ? { seed } : {}), ...(typeof weights === "string" && phraseOf(weights) ? { weights } : {}),
    ...(isCount(forkedAt) ? { forked_at: forkedAt } : {}),
  };
}
