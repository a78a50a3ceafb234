// Where a lane's time went: every forward on the lane's clock, which model ran it, and how much of it was wasted.
//
// A lane's clock advances in turns: first its share of the forwards it waited for, then its own work until it waits again. So the
// forwards of a turn come first, one after the other, then the token masks; the remainder is everything else.

export const WORKERS = {
  target: { label: "target", help: "Forwards of the target model." },
  draft: { label: "draft", help: "Forwards that propose or write tokens in place of the target: of the draft model, or of the target's first layers." },
  beside: { label: "auxiliary", help: "Forwards of other streams the method uses, such as the same model without the context." },
  grammar: { label: "grammar", help: "Computing token masks." },
  rest: { label: "other", help: "Everything else on the lane's clock: sampling, verification, cache management, recording events." },
};
export const WORKER_OF_STREAM = { target: "target", draft: "draft", exit: "draft" };

export class Ledger {
  constructor(wastes) {
    this.wastes = wastes; // false for a canvas: every row of it is needed
    this.turns = [];
    this.totals = Object.fromEntries(Object.keys(WORKERS).map((name) => [name, { passes: 0, prefills: 0, rows: 0, seconds: 0, wasted: 0, wastedSeconds: 0 }]));
    this.open = []; // forwards of the target since the last commit
    this.rows = 0; // of the target, without prefill
    this.decoding = 0; // their seconds
    this.length = 0; // tokens of the lane's own text
    this.needed = 0; // rows the longest text so far needs: one for each token except the first
    this.wasted = 0;
  }

  note(event) {
    const turn = this.turnOf(event);
    if (event.kind === "forward") this.pass(turn, event);
    else if (event.kind === "mask") this.work(turn, "grammar", event);
    else if (event.kind === "commit") this.grow(event);
    else if (event.kind === "rollback" && !event.sequence) this.truncate(event);
    else if (event.kind === "done" || event.kind === "failed") this.settle(Math.max(0, this.length - 1));
  }

  grow({ sequence, position, ids }) {
    if (!sequence) this.length = position + ids.length;
    this.settle(Math.max(this.needed, position + ids.length - 1));
  }

  truncate({ count: removed }) {
    this.length -= removed;
    this.needed = Math.max(0, this.needed - removed);
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
    this.totals[work.worker][event.phase === "prefill" ? "prefills" : "passes"] += 1;
    this.totals[work.worker].rows += event.tokens;
    if (work.worker !== "target" || event.phase === "prefill") return;
    this.open.push(work);
    this.rows += event.tokens;
    this.decoding += event.seconds;
  }

  /** A forward that ran concurrently overlaps what the lane did meanwhile; it ends where its result was used. */
  work(turn, worker, event) {
    const from = turn.from + turn.used;
    const work = { worker, event, from: Math.max(0, from - (event.meanwhile || 0)), to: from + event.seconds, waste: 0 };
    turn.works.push(work);
    turn.used += event.seconds;
    this.totals[worker].seconds += event.seconds;
    this.totals.rest.seconds -= event.seconds;
    return work;
  }

  /** Close the open forwards: their rows beyond the `needed` ones are wasted. At the end of a lane there can be more wasted rows
      than the last forwards have, for instance after a rollback; these are counted but not assigned to a forward. */
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
