// Lanes of a plain decoder and one part, which a menu of lanes finds by the name of the part.

import { STRATEGIES } from "python";
import { byName, fits, MAIN } from "./rules.js";

/** A lane for each part that is no decoder: the plainest decoder with it, "Greedy + JSON Schema". Shown once something is typed. */
export function lanesWithOnePart() {
  return STRATEGIES.filter((part) => !MAIN.includes(part.kind)).flatMap((part) => {
    const main = mainsFor(part).map((name) => byName.get(name)).find((one) => one && accepts(one, part));
    if (!main) return [];
    // Samplers that are knobs of `sample` join the processors of a greedy lane, where a temperature draws.
    const draws = part.kind === "sampler" && main.name === "greedy" && part.name !== "temperature" ? [["temperature", {}]] : [];
    const decoder = { greedy: part.kind === "sampler" ? "Sampling" : "Greedy", sample: "Sampling", speculative: "Speculative" }[main.name] || main.title;
    return [{ ...part, name: `with-${part.name}`, title: `${decoder} + ${part.title}`, names: [part.name, part.title], main, whenTyped: true,
      lane: { strategy: main.name, knobs: {}, extras: [...draws, [part.name, {}]] } }];
  });
}

function mainsFor(part) {
  const plainest = { sampler: "sample", drafter: "speculative", verifier: "speculative" }[part.kind];
  return [plainest, "greedy", ...STRATEGIES.filter(({ kind }) => MAIN.includes(kind)).map(({ name }) => name)];
}

const accepts = (main, part) => main.slots.some((slot) => slot.takes.includes(part.name)) || fits(main, part, { extras: [] });
