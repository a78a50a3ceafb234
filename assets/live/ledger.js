// Where a lane's time went: every pass on the lane's clock, who computed it, and how much of it the text did not need.
//
// A lane's clock moves in turns: first its share of the forwards it waited for, then its own work until it waits again. So the
// passes of a turn stand one after the other at its beginning, the grammar's masks follow, and the rest is everything else.

const WORKERS = {
  target: { label: "target", help: "Passes of the target model." },
  draft: { label: "draft", help: "Passes that only guess or write in the target's place: of the draft model, or of the target's first layers." },
  beside: { label: "beside", help: "Passes of other streams the method reads, such as the same model without the context." },
  grammar: { label: "grammar", help: "Making masks of allowed tokens." },
  rest: { label: "other", help: "Everything else on the lane's clock: drawing tokens, judging guesses, caches, and noting what happened." },
};
const WORKER_OF_STREAM = { target: "target", draft: "draft", exit: "draft" };

class Ledger {
  constructor(wastes) {
    this.wastes = wastes; // whether rows can go to waste at all: a canvas has no rows that a text would need
    this.turns = [];
    this.totals = Object.fromEntries(Object.keys(WORKERS).map((name) => [name, { passes: 0, rows: 0, seconds: 0, wasted: 0, wastedSeconds: 0 }]));
    this.open = []; // passes of the target since the last commit
    this.rows = 0; // of the target, without its prompt
    this.decoding = 0; // seconds those took
    this.length = 0; // tokens of the lane's own text
    this.needed = 0; // rows the longest text so far needs: one for each token but the first
    this.wasted = 0;
  }

  note(event) {
    const turn = this.turnOf(event);
    if (event.kind === "forward") this.pass(turn, event);
    else if (event.kind === "mask") this.work(turn, "grammar", event);
    else if (event.kind === "commit") this.grow(event);
    else if (event.kind === "rollback" && !event.sequence) this.shrink(event);
    else if (event.kind === "done" || event.kind === "failed") this.settle(Math.max(0, this.length - 1));
  }

  grow({ sequence, position, ids }) {
    if (!sequence) this.length = position + ids.length;
    this.settle(Math.max(this.needed, position + ids.length - 1));
  }

  shrink({ count: taken }) {
    this.length -= taken;
    this.needed = Math.max(0, this.needed - taken);
  }

  turnOf({ at }) {
    const last = this.turns[this.turns.length - 1];
    if (last && last.to >= at) return last;
    const from = last ? last.to : 0;
    const turn = { from, to: at, used: 0, works: [] };
    this.turns.push(turn);
    this.totals.rest.seconds += at - from;
    return turn;
  }

  pass(turn, event) {
    const work = this.work(turn, WORKER_OF_STREAM[event.stream] || "beside", event);
    this.totals[work.worker].passes += 1;
    this.totals[work.worker].rows += event.tokens;
    if (work.worker !== "target" || event.phase === "prefill") return;
    this.open.push(work);
    this.rows += event.tokens;
    this.decoding += event.seconds;
  }

  /** A pass that was made aside reaches back over what the lane did meanwhile, and ends where it was taken in. */
  work(turn, worker, event) {
    const from = turn.from + turn.used;
    const work = { worker, event, from: Math.max(0, from - (event.meanwhile || 0)), to: from + event.seconds, waste: 0 };
    turn.works.push(work);
    turn.used += event.seconds;
    this.totals[worker].seconds += event.seconds;
    this.totals.rest.seconds -= event.seconds;
    return work;
  }

  /** The text has grown as far as it will on these passes: rows beyond those it needs were computed in vain. At the end of a lane
      that may be more than its last passes had, as when it comes back to a shorter text; that counts, but no pass shows it. */
  settle(needed) {
    this.needed = needed;
    const spare = this.wastes ? Math.max(0, this.rows - this.needed - this.wasted) : 0;
    const rows = this.open.reduce((sum, work) => sum + work.event.tokens, 0);
    const share = rows ? Math.min(1, spare / rows) : 0;
    for (const work of this.open) work.waste = share;
    const { target } = this.totals;
    target.wastedSeconds += share * this.open.reduce((sum, work) => sum + work.event.seconds, 0) + (spare - share * rows) * this.secondsPerRow();
    target.wasted = this.wasted += spare;
    this.open = [];
  }

  secondsPerRow() {
    return this.rows ? this.decoding / this.rows : 0;
  }
}
