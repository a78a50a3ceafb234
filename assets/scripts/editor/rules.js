// The catalogue of strategies, and which parts go together in a lane: the rules of playground/contract/lane_config.py that are needed
// while a lane is edited. Without a document; tests/test_page_logic.py compares them with the others on every pair.

import { STRATEGIES } from "python";

export const byName = new Map(STRATEGIES.map((s) => [s.name, s]));
export const MAIN = ["decoder", "canvas_decoder", "preset"];
const SINGLE = ["constraint", "cache_policy", "compute_policy"];
const POLICIES = ["cache_policy", "compute_policy"];
export const words = (name) => name.replaceAll("_", " ");

/** The part in a slot of a lane, with its knobs. */
export function filling(lane, slot) {
  const held = lane.extras.find(([name]) => byName.get(name)?.kind === slot.kind);
  return held || [slot.default, {}];
}

/** Whether an overlay, for which the whole model reads the text, meets a policy with which a part of it runs. */
const apart = (kind, other) => kind === "overlay" && POLICIES.includes(other);

/** Whether a part can be added to a lane: its decoder accepts it, and its slot is free. */
export function fits(main, candidate, lane) {
  const names = lane.extras.map(([name]) => name);
  if (!main.takes.includes(candidate.name) || names.includes(candidate.name)) return false;
  const kinds = names.map((name) => byName.get(name)?.kind);
  if (kinds.some((kind) => apart(kind, candidate.kind) || apart(candidate.kind, kind))) return false;
  return !SINGLE.includes(candidate.kind) || !kinds.includes(candidate.kind);
}

/** The part in the lane's slot of a kind, or undefined if there is no such slot. */
export function partIn(lane, main, kind) {
  const slot = main.slots.find((one) => one.kind === kind);
  return slot && byName.get(filling(lane, slot)[0]);
}

/** Whether a verifier is not exact for how a drafter draws its tokens. */
function mismatch(verifier, drafter) {
  return Boolean(drafter?.drawn) && !verifier.exact_for.includes(drafter.drawn);
}

/** Why a verifier is not exact in this lane, or an empty text. */
function inexact(verifier, drafter, lane) {
  if (mismatch(verifier, drafter)) return `Not exact for the draft tokens of ${drafter.name}, which are ${words(drafter.drawn)}.`;
  const drawing = verifier.greedy_only && lane.extras.find(([name]) => byName.get(name)?.draws);
  return drawing ? `Exact only without sampling: remove ${drawing[0]} first.` : "";
}

/** Why a part does not suit a lane, as {reason, barred}: a drafter can still be chosen and then replaces the verifier. */
export function objection(part, lane, main) {
  const verifier = partIn(lane, main, "verifier");
  if (part.kind === "verifier") return { reason: inexact(part, partIn(lane, main, "drafter"), lane), barred: true };
  if (part.kind === "drafter" && verifier && mismatch(verifier, part)) {
    return { reason: `${verifier.name} is not exact for its ${words(part.drawn)} draft tokens and will be replaced.`, barred: false };
  }
  if (part.draws && verifier?.greedy_only) {
    return { reason: `${verifier.name} is exact only without sampling: choose another verifier first.`, barred: true };
  }
  return { reason: "", barred: false };
}

/** After a change of strategy or drafter: drop parts without a slot, and choose an exact verifier. */
export function settle(lane) {
  const main = byName.get(lane.strategy);
  if (!main) return;
  const takes = (part) => main.slots.some((slot) => slot.takes.includes(part.name));
  const kept = [];
  for (const [name, knobs] of lane.extras) {
    const part = byName.get(name);
    if (part && (takes(part) || fits(main, part, { extras: kept }))) kept.push([name, knobs]);
  }
  lane.extras = kept;
  for (const slot of main.slots) {
    const held = byName.get(filling(lane, slot)[0]);
    if (!held || objection(held, lane, main).barred && objection(held, lane, main).reason) replace(lane, slot, main);
  }
}

/** Replace the part of a slot by its default, or by the first one without an objection. */
function replace(lane, slot, main) {
  const other = [slot.default, ...slot.takes].find((name) => !objection(byName.get(name), lane, main).reason);
  if (other) fill(lane, slot, other);
}

export function fill(lane, slot, name) {
  lane.extras = lane.extras.filter(([held]) => byName.get(held)?.kind !== slot.kind);
  lane.extras.push([name, {}]);
}
