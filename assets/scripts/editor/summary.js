// What a lane is called, and what its card says of it on one line.

import { el } from "../components/elements.js";
import { playground } from "../components/playground.js";
import { namedPart } from "../run/lane_names.js";
import { byName, filling, words } from "./rules.js";
import { phraseOf } from "./weights.js";

/** What a lane is known for: its decoder, or the part in the slot `known_by` where that is not the default. */
export function titleOf(lane) {
  const main = byName.get(lane.strategy);
  if (!main) return `${lane.strategy} (unknown)`;
  const telling = main.slots.find((slot) => slot.field === main.known_by);
  const part = telling && filling(lane, telling)[0];
  return part && part !== telling.default ? byName.get(part)?.title || words(part) : main.title || words(main.name);
}

/** All parts of a lane with their knobs: its decoder, the fillings of its slots, its toggles. */
function partsOf(lane) {
  const slots = byName.get(lane.strategy)?.slots || [];
  const toggles = lane.extras.filter(([name]) => !slots.some((slot) => slot.kind === byName.get(name)?.kind));
  return [[lane.strategy, lane.knobs], ...slots.map((slot) => filling(lane, slot)), ...toggles];
}

/** What a lane is named by, as the header of its run has it. */
export function factsOf(lane) {
  const parts = partsOf(lane).map(([name, knobs]) => namedPart({ ...partNamed(name), knobs: { ...defaultsOf(name), ...knobs } }));
  const weights = lane.weights ? [phraseOf(lane.weights)] : [];
  return { title: titleOf(lane), parts, own: [...weights, `seed ${lane.seed ?? playground.settingsNow?.().seed}`] };
}

function partNamed(name) {
  return { name, title: byName.get(name)?.title, kind: byName.get(name)?.kind };
}

function defaultsOf(name) {
  return Object.fromEntries((byName.get(name)?.knobs || []).map((knob) => [knob.name, knob.default]));
}

const shown = (value) => (typeof value === "string" && value.length > 24 ? `${value.slice(0, 23)}…` : String(value));

function phrase(name, knobs, isMain) {
  // Changed knobs; for an added part also its first numeric knob.
  const first = isMain ? null : byName.get(name)?.knobs.find((knob) => ["int", "float"].includes(knob.type));
  const named = { ...(first ? { [first.name]: first.default } : {}), ...knobs };
  const settings = Object.entries(named).map(([k, v]) => (k.length > 1 && !name.endsWith(k) ? `${words(k)} ${shown(v)}` : shown(v)));
  return settings.length ? `${name} ${settings.join(", ")}` : name;
}

function laneConfig(lane) {
  const own = [...(lane.weights ? [phraseOf(lane.weights)] : []), ...(lane.seed === undefined ? [] : [`seed ${lane.seed}`])];
  return [...partsOf(lane).map(([name, knobs], at) => phrase(name, knobs, at === 0)), ...own];
}

/** The lane config in words, without a name that its title says already. */
export function laneConfigNodes(lane) {
  const pieces = laneConfig(lane);
  const said = words(pieces[0]).toLowerCase() === titleOf(lane).toLowerCase();
  return pieces.slice(said ? 1 : 0).flatMap((piece, at) => (at ? [el("i", "", " · "), el("span", "", piece)] : [el("span", "", piece)]));
}
