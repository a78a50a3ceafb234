// What the menus of the editor recommend: strategies to begin with, and lanes that teach most beside those that are there.

export const FIRST_STRATEGIES = ["greedy", "sample", "speculative", "beam_search", "self_consistency", "ead", "masked_diffusion"];
const BASELINE = "The baseline: always the most probable token.";
const DRAWN = "The same model, but each token is drawn with its probability.";
const COMPARED = [ // decoders to see beside greedy decoding and sampling
  ["speculative", "A small model drafts, this one verifies several tokens in one forward."],
  ["beam_search", "Keeps the four most probable prefixes instead of one."],
  ["self_consistency", "Samples several answers and takes a vote."],
  ["ead", "A small model writes where it is certain, without verification."],
];
const OTHER_DRAFTERS = [ // drafters that need no weights of their own first
  ["prompt_lookup", "Drafts by copying from the prompt: no second model."],
  ["rsd_s", "Drafts a tree instead of a chain, so that a sibling can replace a rejected token."],
  ["lookahead", "Drafts with the target itself, by guessing several positions in parallel."],
  ["suffix_decoding", "Drafts from texts that were generated before."],
  ["draft_model", "Drafts with the small model."],
];
const MOST_ADVICE = 4;

/** Lanes to add beside those that are there, the most instructive first: {title, why, lane}. `partOf` finds a part by name, `fills`
    says whether the model fills a canvas, and `drafted` whether there is a draft model. */
export function adviceBeside(lanes, { partOf, fills = false, drafted = true }) {
  if (fills) return lanes.length ? [] : [advice("masked_diffusion", "Fills masked positions, the most certain ones first.")];
  const speculates = lanes.some((lane) => lane.strategy === "speculative");
  const offers = [...baselines(lanes), ...lanes.flatMap((lane) => withoutToggles(lane, partOf))];
  const drafters = lanes.filter((lane) => lane.strategy === "speculative").flatMap((lane) => otherDrafters(lane, lanes, partOf));
  offers.push(...(speculates ? [...drafters, advice("sample", DRAWN)] : [advice("sample", DRAWN)]));
  const used = lanes.map((lane) => lane.strategy);
  offers.push(...COMPARED.filter(([name]) => !used.includes(name)).map(([name, why]) => advice(name, why)));
  const needsDraft = ({ lane }) => [lane.strategy, ...lane.extras.map(([name]) => name)].some((name) => partOf(name)?.needs?.includes("draft"));
  return distinct(offers).filter((one) => !isThere(one.lane, lanes) && (drafted || !needsDraft(one))).slice(0, MOST_ADVICE);
}

function advice(strategy, why, extras = [], title = "") {
  return { title, why, lane: { strategy, knobs: {}, extras, forced: [] } };
}

/** Plain greedy decoding first: every other lane is compared with it. */
function baselines(lanes) {
  return lanes.some((lane) => lane.strategy === "greedy" && !lane.extras.length) ? [] : [advice("greedy", BASELINE)];
}

/** The same lane without its samplers, constraint and policies, which shows what they change. */
function withoutToggles(lane, partOf) {
  const isSlot = ([name]) => ["drafter", "verifier"].includes(partOf(name)?.kind);
  const toggles = lane.extras.filter((pair) => !isSlot(pair));
  if (!toggles.length || partOf(lane.strategy)?.needs?.includes("constraint")) return [];
  const names = toggles.map(([name]) => partOf(name)?.title || name).join(", ");
  const plain = { ...lane, knobs: { ...lane.knobs }, extras: lane.extras.filter(isSlot).map(([name, knobs]) => [name, { ...knobs }]), forced: [] };
  return [{ title: `${partOf(lane.strategy)?.title || lane.strategy} without ${names}`, why: "The same lane without them: what they change, and what they cost.", lane: plain }];
}

/** A speculative lane with drafters that no lane uses yet; the editor chooses a verifier that is exact for them. */
function otherDrafters(lane, lanes, partOf) {
  const used = lanes.flatMap(({ extras }) => extras.map(([name]) => name));
  if (!used.some((name) => partOf(name)?.kind === "drafter")) used.push("draft_model"); // the default
  const rest = lane.extras.filter(([name]) => partOf(name)?.kind !== "drafter").map(([name, knobs]) => [name, { ...knobs }]);
  const free = OTHER_DRAFTERS.filter(([name]) => !used.includes(name)).slice(0, 2);
  return free.map(([name, why]) => advice("speculative", why, [[name, {}], ...rest], `Speculative decoding, ${partOf(name)?.title || name}`));
}

function isThere(lane, lanes) {
  const key = (one) => JSON.stringify([one.strategy, one.extras.map(([name]) => name).sort()]);
  return lanes.some((other) => key(other) === key(lane));
}

function distinct(offers) {
  const seen = [];
  return offers.filter(({ lane }) => !isThere(lane, seen) && seen.push(lane));
}

/** How well a part matches what is typed: 0 for its name, then the beginning of its name or title, its family, a part of its name; 4 for
    its description only. */
export function matchRank(part, text) {
  const typed = text.trim().toLowerCase();
  const [names, family] = [[part.name, part.name.replaceAll("_", " "), part.title, ...(part.names || [])].map((name) => name.toLowerCase()), part.family.replaceAll("_", " ").toLowerCase()];
  if (names.includes(typed)) return 0;
  if (names.some((name) => name.startsWith(typed))) return 1;
  if (family.startsWith(typed)) return 2;
  return names.some((name) => name.includes(typed)) ? 3 : 4;
}

/** The strategies of a menu: the recommended ones, then the others, those that the chosen model cannot run last. */
export function byAdvice(parts, misfit) {
  const order = (part) => (misfit(part) ? FIRST_STRATEGIES.length + 1 : FIRST_STRATEGIES.includes(part.name) ? FIRST_STRATEGIES.indexOf(part.name) : FIRST_STRATEGIES.length);
  return [...parts].sort((a, b) => order(a) - order(b));
}
