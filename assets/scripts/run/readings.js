// Readings: named numbers that a lesson takes from the events of one or two lanes of a finished run.

import { DASH, fixed, isNumber, percent } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";
import { measure, ratio, STRIP, whole } from "./metrics.js";
import { LaneState } from "./model.js";

const UNSURE = 1; // nats above which a choice counts as open
const SURE = 0.1; // nats below which it counts as certain
const REPEATED_RUN = 4; // length in tokens of a repeated n-gram

/** A finished run, its events applied once. Lanes are counted from 1, as on the page. */
export class Readings {
  constructor(trace) {
    this.headers = trace.lanes.map((record) => record.header);
    this.states = trace.lanes.map(wholeState);
  }

  /** `value` is null if the reading is undefined for this run; `complete` says whether the lanes ended without being stopped. */
  read(name, lanes) {
    const reading = READINGS[name];
    const asked = lanes.map((lane) => this.states[lane - 1]);
    if (!asked.every((state) => state && state.done && state.done.reason !== "stopped")) return { value: null, complete: false, said: "" };
    const value = reading.of(...asked);
    const places = lanes.length > 1 ? `lanes ${lanes.join(" and ")}` : `lane ${lanes[0]}`;
    const beside = reading.beside && value !== null ? ` (${reading.beside(value, ...asked)})` : "";
    const written = `${value === null && reading.none ? reading.none : reading.write(value)}${beside}`;
    return { value, complete: true, label: reading.label, written, said: `${reading.label}, ${places}: ${written}` };
  }

  /** The index of the event that ends a place of a lane's run; null if the run has no such place. */
  place(name, lane) {
    const round = PLACES[name](this.states[lane - 1]);
    return round ? round.lastEvent : null;
  }
}

function wholeState(record) {
  const state = new LaneState(record);
  state.goTo(record.events.length);
  return state;
}

/** The steps of the text: one for each token whose row was recorded. */
function stepsOf(state) {
  return state.shown.tokens.map((_, i) => state.shown.steps.get(i)).filter(Boolean);
}

function share(items, test) {
  return ratio(items.filter(test).length, items.length);
}

function mean(numbers) {
  return ratio(numbers.reduce((sum, one) => sum + one, 0), numbers.length);
}

function highest(numbers) {
  return numbers.length ? Math.max(...numbers) : null;
}

/** Whether the chosen token was not the most likely one. */
function isRival({ top, chosen }) {
  return top[0][0] !== chosen;
}

/** The token whose row had the highest entropy, counted from 1. */
function mostOpen(state) {
  const steps = stepsOf(state);
  const peak = steps.reduce((best, step) => (step.entropy > best.entropy ? step : best), steps[0]);
  return peak ? peak.position + 1 : null;
}

/** Share of the text's n-grams that occurred earlier in it. */
function repeated({ shown }) {
  const ids = shown.tokens.map((token) => token.id);
  const runs = ids.slice(REPEATED_RUN - 1).map((_, i) => ids.slice(i, i + REPEATED_RUN).join(" "));
  return share(runs, (run, i) => runs.indexOf(run) < i);
}

/** Number of tokens that occurred earlier in the text. */
function repeatedTokens({ shown }) {
  return shown.tokens.length - new Set(shown.tokens.map((token) => token.id)).size;
}

/** The first token, counted from 1, at which two texts differ; null if they are equal. Compares ids. */
function partingPlace(one, other) {
  const [a, b] = [one.shown.tokens, other.shown.tokens];
  const at = Array.from({ length: Math.max(a.length, b.length) }, (_, i) => i).find((i) => !a[i] || !b[i] || a[i].id !== b[i].id);
  return at === undefined ? null : at + 1;
}

function wordAt(state, place) {
  const token = state.shown.tokens[place - 1];
  return token ? `“${pieceLabel(token.piece)}”` : "the end";
}

/** The verified rounds without the last one, which the end of the text may have cut short. */
function judged(state) {
  const rounds = state.rounds.filter((round) => round.verdict);
  return rounds.length > 1 ? rounds.slice(0, -1) : rounds;
}

/** Whether the accepted path takes a draft token that is not the first child of its parent. */
function leavesFirstBranch(round) {
  const { parents } = round.draft;
  return round.verdict.kept.some((node) => parents.indexOf(parents[node]) !== node);
}

/** Places of a run that a lesson may begin at: the round that ends there. */
const PLACES = { side_branch: (state) => judged(state).find(leavesFirstBranch) };

/** The tests of the siblings at the fork where the first side branch was accepted, the accepted one last. */
function forkTests(state) {
  const round = PLACES.side_branch(state);
  if (!round) return [];
  const { parents, pieces } = round.draft;
  const chosen = round.verdict.kept.find((node) => parents.indexOf(parents[node]) !== node);
  return [...round.tests.values()].filter(({ node }) => parents[node] === parents[chosen]).map((test) => ({ ...test, piece: pieces[test.node] }));
}

/** The test of one draft token in words: its numbers, and why it was accepted or rejected. */
function testWords({ piece, p, residual, q, among, chance, draw, kept }) {
  const [ours, theirs] = [p === null ? `r = ${fixed(residual, 3)}` : `p = ${fixed(p, 3)}`, among === null ? `q = ${fixed(q, 3)}` : `q′ = ${fixed(among, 3)}`];
  const bound = chance ?? Math.min(1, (p ?? residual) / (among ?? q));
  const test = isNumber(draw) ? `, u = ${fixed(draw, 3)} is ${kept ? "below" : "not below"} ${fixed(bound, 3)}` : "";
  return `“${pieceLabel(piece)}”: ${ours}, ${theirs}${test}, ${kept ? "accepted" : "rejected"}`;
}

/** What a watermark's detector says after the last token, in standard deviations; null without a watermark. */
function watermarkScore({ figures }) {
  const parts = figures.get("watermark")?.parts;
  return parts ? parts[parts.length - 1].series["z-score"] : null;
}

function lastNumber({ shown }) {
  const found = shown.tokens.map(({ piece }) => piece).join("").match(/\d+/g);
  return found ? Number(found.at(-1)) : null;
}

const HELD_OUT = "read right on held-out programs"; // the figure of a probe and its controls, the probe first

/** The scores of a probe and of its controls; null without a probe. */
function probeScores({ figures }) {
  const figure = [...figures.values()].find(({ name }) => name.startsWith(HELD_OUT));
  return figure ? figure.parts[figure.parts.length - 1].values : null;
}

function firstMask({ shown }) {
  const first = Math.min(...shown.masks.keys());
  return shown.masks.get(first) || null;
}

/** Log-probability of the text in nats; null if a token has no log-probability. */
function logProbability({ shown }) {
  const logs = shown.tokens.map((token) => token.logprob);
  if (!logs.length || !logs.every(isNumber)) return null;
  return Math.round(logs.reduce((sum, one) => sum + one, 0) * 1000) / 1000; // further digits depend on how rows were batched
}

const nats = (value) => (isNumber(value) ? `${fixed(value, Math.abs(value) < 0.1 ? 3 : 2)} nats` : DASH);

/** The lane's metrics by their own names, and readings of its text, rounds, cache, masks and branches. */
export const READINGS = {
  ...Object.fromEntries(STRIP.map(({ name, label, write }) => [name, { label, write, of: (state) => measure(state)[name] }])),

  mean_entropy: { label: "mean entropy of the model", write: nats, of: (state) => measure(state).mean_entropy },
  highest_entropy_token: { label: "token with the highest entropy", write: whole, of: mostOpen, beside: (place, state) => wordAt(state, place) },
  highest_entropy: { label: "highest entropy", write: nats, of: (state) => highest(stepsOf(state).map((step) => step.entropy)) },
  unsure_share: { label: `tokens with an entropy above ${UNSURE} nat`, write: percent, of: (state) => share(stepsOf(state), (step) => step.entropy > UNSURE) },
  sure_share: { label: `tokens with an entropy below ${SURE} nats`, write: percent, of: (state) => share(stepsOf(state), (step) => step.entropy < SURE) },
  final_entropy: { label: "mean entropy after processors", write: nats, of: (state) => mean(stepsOf(state).map((step) => step.final_entropy)) },
  off_top_share: { label: "tokens that were not the most likely", write: percent, of: (state) => share(stepsOf(state).filter(({ top }) => top.length), isRival) },
  repeated_share: { label: `${REPEATED_RUN}-grams that occurred earlier in the text`, write: percent, of: repeated },
  repeated_tokens: { label: "tokens that occurred earlier in the text", write: whole, of: repeatedTokens },
  log_probability: { label: "log-probability of the text", write: nats, of: logProbability },
  first_difference: {
    label: "first differing token", none: "none", write: whole, of: partingPlace, beside: (place, one, other) => `${wordAt(one, place)} and ${wordAt(other, place)}`,
  },

  last_number: { label: "last number of the text", write: whole, of: lastNumber },

  rounds: { label: "rounds", write: whole, of: (state) => state.rounds.filter((round) => round.verdict).length },
  guesses_per_round: {
    label: "draft tokens per round", write: (value) => fixed(value, 2), of: (state) => mean(judged(state).map((round) => round.draft.tokens.length)),
  },
  most_accepted: { label: "most draft tokens accepted in one round", write: whole, of: (state) => highest(judged(state).map((round) => round.accepted.size)) },
  untouched_share: { label: "rounds without a rejection", write: percent, of: (state) => share(judged(state), (round) => round.verdict.origin === "bonus") },
  side_share: { label: "rounds that accepted another branch than the first", write: percent, of: (state) => share(judged(state), leavesFirstBranch) },
  siblings_rejected: {
    label: "siblings rejected before the accepted one", write: whole, of: (state) => forkTests(state).filter(({ kept }) => !kept).length || null,
    beside: (value, state) => forkTests(state).map(testWords).join("; "),
  },

  flops: { label: "FLOPs of all forwards", write: (value) => (isNumber(value) ? `${fixed(value / 1e6, 0)} million` : DASH), of: (state) => measure(state).flops },
  kv_live_peak: { label: "most live positions in the cache", write: whole, of: (state) => measure(state).kv_live_peak },
  tokens_read: { label: "tokens processed by the target", write: whole, of: (state) => state.lastCache("target")?.length ?? null },

  first_allowed: { label: "tokens allowed by the first mask", write: whole, of: (state) => firstMask(state)?.allowed ?? null },
  forced_share: { label: "tokens that were forced", write: percent, of: (state) => share(state.shown.tokens, (token) => token.origin === "forced") },
  banned: { label: "mean probability masked", write: percent, of: (state) => mean([...state.shown.masks.values()].map((mask) => mask.banned)) },

  watermark_z: { label: "z-score of the watermark", write: (value) => fixed(value, 2), of: watermarkScore },

  probe_score: { label: "features read right on held-out programs", write: percent, of: (state) => probeScores(state)?.[0] ?? null },
  control_score: { label: "best control of the probe", write: percent, of: (state) => highest((probeScores(state) || []).slice(1)) },

  switches: { label: "switches between the models", write: whole, of: (state) => Math.max(0, state.switches.length - 1) },
  small_share: { label: "tokens written by the draft model", write: percent, of: (state) => share(stepsOf(state), (step) => step.stream === "draft") },

  sequences: { label: "sequences in all", write: whole, of: (state) => state.family.length },
  dropped: { label: "sequences dropped", write: whole, of: (state) => state.family.filter((sequence) => !sequence.alive).length },
};
