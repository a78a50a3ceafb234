// What the header of a lane says, in words: its title, its parts, its models.

import { count } from "../components/numbers.js";
import { namedPart, namesOf, shortened } from "./lane_names.js";

export const SCORE = "score"; // the strategy of a lane that only scores a given text

/** The names of the lanes of a run: [{name, short}]. */
export function namesOfRun(headers) {
  return namesOf(headers.map((header) => ({
    title: header.title || header.strategy,
    parts: header.parts.map(namedPart),
    own: [`seed ${header.seed}`],
    fork: forkOf(header),
  })));
}

/** Where a lane was forked; if that was not recorded, how many tokens it was given. */
function forkOf(header) {
  if (!header.forced.length || header.strategy === SCORE) return [];
  return [header.forked_at >= 0 ? `forked at token ${header.forked_at + 1}` : `begins with ${count(header.forced.length, "given token")}`];
}

/** The setting of a lane on one line: parts and knobs, then the models; the seed if it differs between lanes. */
export function describe(header, all) {
  const parts = header.parts.filter((part) => part.name !== header.strategy || Object.keys(part.knobs || {}).length);
  const model = [shortName(header.model), header.quantization !== "none" ? header.quantization : header.dtype].filter(Boolean).join(" ");
  const draft = header.draft ? [`draft ${shortName(header.draft)}`] : [];
  const context = header.context ? [`context “${shortened(header.context)}”`] : [];
  const names = toolNames(header.tools);
  const tools = names.length ? [`tools ${shortened(names.join(", "))}`] : [];
  const memory = header.memory ? ["uses memory from earlier runs"] : [];
  const seed = all.some((other) => other.seed !== header.seed) ? [`seed ${header.seed}`] : [];
  return [...parts.map(describePart), ...seed, ...tools, ...context, ...memory, model, ...draft].filter(Boolean).join(" · ");
}

/** The names of the tools that a chat template describes, from their JSON. */
function toolNames(json) {
  try {
    return JSON.parse(json || "[]").map((tool) => (tool.function || tool).name).filter((name) => typeof name === "string");
  } catch (reason) { return []; } // a trace file holds any text
}

/** A local folder is shown by its last path component, also that of an adapter. */
export function shortName(model) {
  return model.split(" + ").map((part) => (/^([/~.]|[A-Za-z]:)/.test(part) ? part.split(/[/]/).filter(Boolean).pop() : part)).join(" + ");
}

function describePart(part) {
  const knobs = Object.entries(part.knobs || {}).map(([name, value]) => `${name} ${shortened(value)}`);
  const name = part.kind === "weights" ? namedWeights(String(part.name)) : String(part.name).replaceAll("_", " ");
  return knobs.length ? `${name} (${knobs.join(", ")})` : name;
}

/** Weights of a lane's own, adapters by the last component of their paths. */
function namedWeights(name) {
  return name.split(" + ").map((part) => (part.startsWith("adapter:") ? `adapter ${part.slice(8).split("/").filter(Boolean).pop()}` : part)).join(" + ");
}

export function nameOf(strategy) {
  return strategy ? strategy.replaceAll("_", " ") : "the drafter";
}

/** Whether a header names a part of one of these kinds. */
export function hasPart(header, ...kinds) {
  return header.parts.some((part) => kinds.includes(part.kind));
}

/** What a forced token was, where nothing was chosen. */
export function sayForced({ forced, strategy }, position) {
  if (position >= forced.length) return "was the only token the grammar allowed: no forward was needed.";
  return strategy === SCORE ? "was given: this text is only scored." : "was given: the text begins with it.";
}
