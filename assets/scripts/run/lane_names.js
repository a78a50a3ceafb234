// The names of lanes, in the editor and on the stage. What differs from other lanes comes first: parts, or their knobs.

const NAMED = ["constraint", "cache_policy", "compute_policy"]; // kinds that change a lane more than its decoder does
const MERE = "Temperature"; // stands before other samplers, so that a greedy lane draws: it is said last

/** For each lane {title, parts: [{title, kind, knobs: {name: value}}], own: [text], fork: [text]} its name, and a short one for a tab. */
export function namesOf(lanes) {
  const traits = lanes.map(({ parts, own }) => [...titlesOf(parts), ...parts.flatMap(knobTraits), ...own]);
  return lanes.map(({ title, fork = [] }, i) => {
    const namesakes = traits.filter((_, j) => j !== i && lanes[j].title === title);
    const added = lanes[i].parts.filter(({ kind }) => NAMED.includes(kind)).map((part) => part.title);
    const differing = differences(traits[i], namesakes);
    const telling = upperFirst((differing.length ? differing : added).join(", "));
    const short = upperFirst([telling, ...fork].filter(Boolean).join(", "));
    return { name: [telling ? `${telling} · ${title}` : title, ...fork].join(", "), short: short || title };
  });
}

/** How a part is named in a lane. One that switches parts of the network is named by these: "feature 17 off". */
export function namedPart({ name, title, kind, knobs }) {
  if (name !== "switch_part" || !knobs?.parts) return { title: title || name.replaceAll("_", " "), kind, knobs };
  return { title: shortened(`${knobs.parts} ${knobs.state || "off"}`), kind, knobs: {} };
}

function titlesOf(parts) {
  return parts.map(({ title }) => title).sort((a, b) => (a === MERE) - (b === MERE));
}

/** At most two of the traits, those shared with the fewest other lanes first. */
function differences(traits, others, most = 2) {
  const sharing = (trait) => others.filter((other) => other.includes(trait));
  const [best] = [...traits].sort((a, b) => sharing(a).length - sharing(b).length);
  if (!most || best === undefined || sharing(best).length === others.length) return [];
  return [best, ...differences(traits, sharing(best), most - 1)];
}

function knobTraits({ knobs }) {
  return Object.entries(knobs || {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${shortened(value)}`);
}

function upperFirst(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A value on a line, cut after 24 characters. */
export function shortened(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 24 ? `${text.slice(0, 23)}…` : text;
}
