// Costs of a lane, from its events up to where the player is. Names and definitions are those of playground/trace/lane_metrics.py;
// null where a metric has no meaning.

/** What is counted while events are applied; the rest is read off the text when it is asked for. */
class Costs {
  constructor() {
    this.targetForwards = 0; // prefill included: how a token's card counts passes
    this.passes = 0; // target forwards without prefill
    this.rows = 0; // rows those computed
    this.atCommit = { passes: 0, rows: 0 }; // the same, as of the last commit
    this.draftPasses = 0;
    this.tested = 0;
    this.accepted = 0;
    this.depths = []; // by distance ahead, from 0: {tested, accepted}
    this.live = null; // most slots any KV head of the target holds
    this.livePeak = null;
    this.bytes = null;
    this.verdicts = 0;
    this.stood = 0; // guesses on kept paths
  }

  forward(event) {
    const decoding = event.phase !== "prefill";
    if (["draft", "exit"].includes(event.stream) && decoding) this.draftPasses += 1;
    if (event.stream !== "target") return;
    this.targetForwards += 1;
    if (!decoding) return;
    this.passes += 1;
    this.rows += event.tokens;
  }

  verdict(event, round) {
    this.verdicts += 1;
    this.stood += event.kept.length;
    for (const node of new Set(event.tests.map(([tested]) => tested))) { // one that was drawn twice may be tested twice
      const kept = event.kept.includes(node);
      const bin = (this.depths[depthOf(round.draft.parents, node)] ||= { tested: 0, accepted: 0 });
      bin.tested += 1;
      bin.accepted += kept;
      this.tested += 1;
      this.accepted += kept;
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

/** Every metric of a lane as it stands now, by the name it has in playground/trace/lane_metrics.py, of the text that is shown:
    while nothing of the lane's own text stands, that is its best branch or what its canvas holds. */
function measure(state) {
  const { costs, clock, canvas } = state;
  const { tokens, steps } = state.shown;
  const length = tokens.length || canvas.filled.size;
  const entropies = tokens.map((_, i) => steps.get(i)).filter(Boolean).map((step) => step.entropy);
  const rows = state.done || state.failed ? costs.rows : costs.atCommit.rows; // rows still on their way are not waste yet
  return {
    tokens: length,
    seconds: clock,
    tokens_per_second: ratio(length, clock),
    target_forwards: costs.passes,
    tokens_per_target_forward: ratio(tokens.filter((token) => token.decoded).length, costs.atCommit.passes),
    draft_forwards: costs.draftPasses,
    acceptance_rate: ratio(costs.accepted, costs.tested),
    mean_accepted: ratio(costs.stood, costs.verdicts),
    mean_entropy: ratio(entropies.reduce((sum, one) => sum + one, 0), entropies.length),
    kv_live: costs.live,
    kv_live_peak: costs.livePeak,
    kv_bytes: costs.bytes,
    wasted_tokens: canvas.size ? null : Math.max(0, rows - Math.max(0, tokens.length - 1)),
  };
}

function ratio(part, whole) {
  return whole ? part / whole : null;
}

function slots(runs) {
  return runs.reduce((sum, [from, to]) => sum + to - from, 0);
}

function mostSlots(cache) {
  return Math.max(0, ...cache.live.flat().map(slots));
}

/** Positions held, summed over layers: in each as many as its fullest head needs. */
function placesOf({ live, layers }) {
  const places = live.reduce((sum, heads) => sum + Math.max(0, ...heads.map(slots)), 0);
  return live.length === 1 ? places * layers : places;
}

function depthOf(parents, node) {
  let depth = 0;
  for (let at = parents[node]; at >= 0 && depth < parents.length; at = parents[at]) depth += 1;
  return depth;
}

function whole(value) {
  return isNumber(value) ? String(value) : DASH;
}

/** The strip under a lane. `guessing` marks what has a meaning only where something was guessed. */
const STRIP = [
  { name: "tokens", label: "tokens", help: "Tokens of the text so far.", write: whole },
  { name: "seconds", label: "time", help: "The lane's own clock: the time its own requests took; waiting for other lanes is left out.", write: seconds },
  { name: "tokens_per_second", label: "tokens/s", help: "Tokens over seconds, prefill included.", write: (v) => fixed(v, v < 99.5 ? 1 : 0) },
  { name: "target_forwards", label: "forwards", help: "Passes of the target model, prefill excluded.", write: whole },
  { name: "tokens_per_target_forward", label: "tokens per forward", help: "Tokens over passes of the target. The bonus counts; the prefill and the token read from it are left out of both. Plain decoding gives exactly 1.", write: (v) => fixed(v, 2) },
  { name: "draft_forwards", label: "draft forwards", help: "Passes that only guess: of the draft model, catching up included, or of the target's first layers; prefill excluded.", write: (v) => (v ? whole(v) : DASH) },
  { name: "acceptance_rate", label: "accepted", help: "Guesses on the path that stood, over guesses the verifier looked at.", write: percent },
  { name: "mean_accepted", label: "accepted a round", help: "Guesses that stood, per verdict; the token that follows them is not one.", write: (v) => fixed(v, 2) },
  { name: "wasted_tokens", label: "wasted rows", help: "Rows the target computed and the text did not need: refused guesses, dropped branches, tokens taken back.", write: whole },
  { name: "mean_entropy", label: "mean entropy", help: "Mean entropy, in nats, of the model's own rows that the tokens were chosen from.", write: (v) => fixed(v, 2) },
  { name: "kv_live", label: "KV live", help: "Positions the target's KV cache holds now: the most over layers and heads.", write: whole },
  { name: "kv_bytes", label: "KV memory", help: "Bytes the target's KV cache holds now.", write: bytes },
];
