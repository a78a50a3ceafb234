// The stages that the scores of one token went through, in order: masks and processors, what each was set to, and what it removed.

import { el } from "../components/elements.js";
import { fixed, percent } from "../components/numbers.js";
import { nameOf } from "../run/headers.js";

/** The entropy that belongs to the probabilities shown. Older traces gave the argmax of greedy lanes a processed probability of 1
    beside the entropy of the whole distribution. */
export function processedEntropy({ top, final_entropy: recorded }) {
  return top.some(([, , , final]) => final === 1) ? 0 : recorded;
}

const MIXING = new Set(["adacad", "caad", "cad", "cfg", "dexperts", "dola", "icd", "knn_lm", "lol", "scmoe"]); // samplers that act before the token mask

/** Rows of the stages at a token, or null where nothing changed the model's distribution. */
export function stagesPart(header, step, mask) {
  const rows = stageRows(header, step, mask);
  if (!rows.length) return null;
  const part = el("div", "stages");
  part.append(stageRow("", "Model's distribution", "", `${fixed(step.entropy, 2)} nats`));
  rows.forEach(({ name, settings, effect }, at) => part.append(stageRow(String(at + 1), name, settings, effect)));
  part.append(stageRow("", "After all stages", "", `${fixed(processedEntropy(step), 2)} nats`));
  return part;
}

function stageRows(header, step, mask) {
  const samplers = header.parts.filter((part) => part.kind === "sampler");
  const rows = samplers.map(({ name, knobs }) => ({ name: samplerName(name), settings: sayKnobs(knobs), effect: sayRemoved(step, name) }));
  const mixing = samplers.filter(({ name }) => MIXING.has(name)).length; // the mask comes after these
  if (mask) rows.splice(mixing, 0, { name: "Token mask", settings: `${mask.allowed} allowed`, effect: mask.banned ? `removed ${percent(mask.banned)}` : "" });
  return rows;
}

/** A sampler by its name: an abbreviation in capitals, words otherwise. */
function samplerName(name) {
  const words = nameOf(name);
  return words.length < 4 ? words.toUpperCase() : words.charAt(0).toUpperCase() + words.slice(1);
}

function sayKnobs(knobs = {}) {
  return Object.entries(knobs).map(([name, value]) => (name.length > 1 ? `${name.replaceAll("_", " ")} ${shortValue(value)}` : shortValue(value))).join(", ");
}

function shortValue(value) {
  const text = String(value);
  return text.length > 16 ? `${text.slice(0, 15)}…` : text;
}

/** What a sampler removed among the recorded candidates, as a share of the model's probability. */
function sayRemoved(step, name) {
  const fallen = step.top.filter(([, , , , fell]) => fell === name);
  if (!fallen.length) return "";
  return `removed ${fallen.length} of ${step.top.length} shown, ${percent(fallen.reduce((sum, [, , raw]) => sum + raw, 0))}`;
}

function stageRow(number, name, settings, effect) {
  const row = el("p", "stage-row");
  const what = el("span");
  what.append(el("span", "stage-name", name), " ", el("span", "stage-settings", settings));
  row.append(el("span", "stage-number", number), what, el("span", "stage-effect", effect));
  return row;
}
