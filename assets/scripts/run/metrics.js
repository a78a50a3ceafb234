// Costs of a lane, from its events up to the player's position. Names and definitions are those of playground/trace/lane_metrics.py;
// an undefined metric is null.

import { bytes, count, DASH, fixed, isNumber, percent, seconds } from "../components/numbers.js";
import { thinkingCounts } from "../components/thinking.js";

/** Counters updated as events are applied; the other metrics are computed from the text on demand. */
export class Costs {
  constructor() {
    this.passes = 0; // target forwards without prefill: the number of forwards everywhere on the page
    this.rows = 0; // their rows
    this.atCommit = { passes: 0, rows: 0 }; // both at the last commit
    this.draftPasses = 0;
    this.flops = 0; // of all forwards of all streams, prefill included
    this.tested = 0;
    this.accepted = 0;
    this.depths = []; // by depth in the draft, from 0: {tested, accepted}
    this.live = null; // most live slots of any KV head of the target
    this.livePeak = null;
    this.bytes = null;
    this.verdicts = 0;
    this.onPath = 0; // draft tokens on accepted paths
  }

  forward(event) {
    const decoding = event.phase !== "prefill";
    this.flops += event.flops;
    if (["draft", "exit", "resumed"].includes(event.stream) && decoding) this.draftPasses += 1;
    if (event.stream !== "target" || !decoding) return;
    this.passes += 1;
    this.rows += event.tokens;
  }

  verdict(event, round) {
    this.verdicts += 1;
    this.onPath += event.kept.length;
    for (const node of new Set(event.tests.map(([tested]) => tested))) { // a token drawn twice may be tested twice
      const accepted = event.kept.includes(node);
      const bin = (this.depths[depthOf(round.draft.parents, node)] ||= { tested: 0, accepted: 0 });
      bin.tested += 1;
      bin.accepted += accepted;
      this.tested += 1;
      this.accepted += accepted;
    }
  }

  commit() {
    this.atCommit = { passes: this.passes, rows: this.rows };
  }

  cache(event) {
    if (event.stream !== "target") return;
    this.live = mostSlots(event);
    this.livePeak = Math.max(this.livePeak || 0, this.live);
    this.bytes = event.bytes;
  }
}

/** All metrics of the text that is shown, by their names in playground/trace/lane_metrics.py. Before the lane has a text of its
    own, that is its best branch or the filled positions of its canvas. */
export function measure(state) {
  const { costs, clock, canvas } = state;
  const { tokens, steps } = state.shown;
  const length = tokens.length || canvas.filled.size;
  const entropies = tokens.map((_, i) => steps.get(i)).filter(Boolean).map((step) => step.entropy);
  const rows = state.done || state.failed ? costs.rows : costs.atCommit.rows; // rows of an open round are not wasted yet
  const { thinking, answer } = thinkingCounts(state.record.header, tokens);
  const unknown = Boolean(state.record.header.remote); // a server does not report its forwards
  return {
    tokens: length,
    thinking_tokens: thinking,
    answer_tokens: answer,
    seconds: clock,
    tokens_per_second: ratio(length, clock),
    target_forwards: unknown ? null : costs.passes,
    tokens_per_target_forward: ratio(tokensByForward(state).counted, costs.atCommit.passes),
    draft_forwards: unknown ? null : costs.draftPasses,
    flops: unknown ? null : costs.flops,
    acceptance_rate: ratio(costs.accepted, costs.tested),
    mean_accepted: ratio(costs.onPath, costs.verdicts),
    mean_entropy: ratio(entropies.reduce((sum, one) => sum + one, 0), entropies.length),
    kv_live: costs.live,
    kv_live_peak: costs.livePeak,
    kv_bytes: costs.bytes,
    wasted_tokens: canvas.size || unknown ? null : Math.max(0, rows - Math.max(0, tokens.length - 1)),
  };
}

/** The parts of the tokens per forward: all tokens and how they came about, and the forwards that are counted. */
function tokensByForward({ shown, costs }) {
  const before = shown.tokens.filter((token) => !token.decoded);
  const forced = (tokens) => tokens.filter(({ origin }) => origin === "forced").length;
  return {
    all: shown.tokens.length,
    counted: shown.tokens.length - before.length,
    forced: forced(shown.tokens) - forced(before), // of the counted ones
    prefill: before.length - forced(before),
    forcedBefore: forced(before),
    forwards: costs.atCommit.passes,
  };
}

/** Which tokens and forwards the tokens per forward divide, in words; empty before the first forward. */
function sayTokensByForward(state) {
  const { all, counted, forced, prefill, forcedBefore, forwards } = tokensByForward(state);
  if (!forwards || !counted) return "";
  const apart = [prefill && `${prefill} from the prefill`, forcedBefore && `${forcedBefore} forced before the first forward`].filter(Boolean);
  const without = forced ? `, ${forced} of them forced without one` : "";
  return `${counted} of ${count(all, "token")} by ${count(forwards, "forward")}${without}${apart.length ? `; ${apart.join(", ")}` : ""}`;
}

export function ratio(part, whole) {
  return whole ? part / whole : null;
}

export function slots(runs) {
  return runs.reduce((sum, [from, to]) => sum + to - from, 0);
}

export function mostSlots(cache) {
  return cache.most;
}

/** Bytes of the slots: the cache without the states of recurrent layers, which hold no positions. */
export function slotMemory({ bytes, state_bytes: states = 0 }) {
  return bytes - states;
}

/** Live positions, summed over layers; a layer counts as its fullest head. `counts`: live slots by layer and head. */
export function placesOf(counts, layers) {
  const places = counts.reduce((sum, heads) => sum + Math.max(0, ...heads), 0);
  return counts.length === 1 ? places * layers : places;
}

function depthOf(parents, node) {
  let depth = 0;
  for (let at = parents[node]; at >= 0 && depth < parents.length; at = parents[at]) depth += 1;
  return depth;
}

export function whole(value) {
  return isNumber(value) ? String(value) : DASH;
}

/** The strip of metrics under a lane. */
export const STRIP = [
  { name: "tokens", label: "tokens", help: "Tokens of the text so far.", write: whole },
  { name: "thinking_tokens", label: "tokens of thinking", help: "Tokens of the text's thinking parts, their tags included.", write: whole },
  { name: "answer_tokens", label: "tokens of the answer", help: "Tokens of the text outside its thinking parts.", write: whole },
  { name: "seconds", label: "time", help: "The lane's clock: the time of its own requests, without waiting for other lanes.", write: seconds },
  { name: "tokens_per_second", label: "tokens/s", help: "Tokens per second, prefill included.", write: (v) => fixed(v, v < 99.5 ? 1 : 0) },
  { name: "target_forwards", label: "forwards", help: "Forwards of the target model, prefill excluded.", write: whole },
  { name: "tokens_per_target_forward", label: "tokens per forward", help: "Tokens per forward of the target, bonus tokens included; the prefill and its token are excluded. Plain decoding gives exactly 1.", write: (v) => fixed(v, 2), detail: sayTokensByForward },
  { name: "draft_forwards", label: "draft forwards", help: "Forwards that only propose tokens, prefill excluded: of the draft model, catching up included, of the target's first layers, or of rows that enter at a later layer.", write: (v) => (v ? whole(v) : DASH) },
  { name: "acceptance_rate", label: "accepted", help: "Accepted draft tokens, as a share of the tested ones.", write: percent },
  { name: "mean_accepted", label: "accepted per round", help: "Accepted draft tokens per round, without the token that follows them.", write: (v) => fixed(v, 2) },
  { name: "wasted_tokens", label: "wasted rows", help: "Target rows the text did not need: rejected draft tokens, dropped branches, rolled back tokens.", write: whole },
  { name: "mean_entropy", label: "mean entropy", help: "Mean entropy of the model's distribution over the tokens of the text, in nats.", write: (v) => fixed(v, 2) },
  { name: "kv_live", label: "KV live", help: "Live positions in the target's KV cache: the maximum over layers and heads.", write: whole },
  { name: "kv_bytes", label: "KV memory", help: "Size of the target's KV cache.", write: bytes },
];
