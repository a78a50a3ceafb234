// What a lane may have of its own beside its strategies: a seed, other weights of the target, and tokens that it begins with.

import { el } from "../components/elements.js";
import { withValue } from "./knobs.js";
import { capital, isCount } from "./lane_config.js";
import { icon } from "./marks.js";
import { partsOf, textOf, WEIGHTS } from "./weights.js";

/** A lane without its own seed uses the run's seed and shares its random numbers with the other lanes. */
export function seedRow(lane, changed) {
  const id = `seed-${Math.random().toString(36).slice(2, 9)}`;
  const own = (text) => { if (/^\d+$/.test(text)) lane.seed = Number(text); else delete lane.seed; changed(); };
  const typing = { type: "number", min: 0, step: 1, inputmode: "numeric", placeholder: "shared" };
  const box = withValue(el("input", { id, ...typing, oninput: (e) => own(e.target.value) }), lane.seed ?? "");
  return el("div", "knob own-seed", el("span", "row", el("label", { for: id }, "Own seed"), box),
    el("small", "help", "If empty, the lane uses the run's seed and the same random numbers as the other lanes."));
}

/** A lane may run the target with quantised or changed weights and an adapter, beside lanes with those of the run. */
export function weightsRow(lane, changed) {
  const id = `weights-${Math.random().toString(36).slice(2, 9)}`;
  const choose = (part) => {
    const name = textOf({ ...partsOf(lane.weights), ...part });
    if (name) lane.weights = name; else delete lane.weights;
    changed();
  };
  const { packed, adapter, changes } = partsOf(lane.weights);
  const options = ["", ...WEIGHTS].map((name) => el("option", { value: name, selected: name === packed }, name || "as in the run"));
  const typed = (name, placeholder, value) => withValue(el("input", { id: `${id}-${name}`, type: "text", placeholder, spellcheck: "false", autocomplete: "off",
    onchange: (e) => choose({ [name]: e.target.value.trim() }) }), value || "");
  return el("div", { class: "knob own-weights", "data-about": "weights" }, el("span", "row", el("label", { for: id }, "Weights"),
    el("select", { id, onchange: (e) => choose({ packed: e.target.value }) }, ...options)),
  el("span", "row", el("label", { for: `${id}-adapter` }, "Adapter"), typed("adapter", "folder or hub id", adapter)),
  el("span", "row", el("label", { for: `${id}-changes` }, "Changes"), typed("changes", "rtn:bits=4", changes)),
  el("small", "help", "Quantised weights of the target, a LoRA adapter on it, or other weights of its layers, in this lane only: what they change and what they cost."));
}

/** A fork begins with given tokens; null for a lane that does not. */
export function forcedChip(lane, changed) {
  if (!lane.forced.length) return null;
  const free = () => { lane.forced = []; delete lane.forked_at; changed(); };
  const given = `begins with ${lane.forced.length} given token${lane.forced.length > 1 ? "s" : ""}`;
  const forked = isCount(lane.forked_at);
  return el("span", { class: "forced", title: forked ? capital(given) : null }, forked ? `forked at token ${lane.forked_at + 1}` : given,
    el("button", { type: "button", class: "icon", "aria-label": "Remove the given tokens", title: "Remove the given tokens", onclick: free }, icon("cross")));
}
