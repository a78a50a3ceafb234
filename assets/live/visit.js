// The runs of this visit. Every run that was started or opened here stays in the memory of the tab, packed while it is not looked at,
// and one that began as a fork hangs below the run it left. That it did is read off its header, whose forced tokens are those of the other run and one more.

const MOST_RUNS = 12;
const MOST_EVENTS = 100_000; // of all runs together

class Visit {
  constructor() {
    this.runs = []; // in the order they began
    this.counted = 0;
  }

  /** Keep a run from its beginning. A recording that greets, or a run that is only told again, is none of the visitor's. */
  add(trace) {
    if (trace.recorded && !trace.fromFile) return;
    const before = trace.fromFile ? null : this.newest;
    const fork = before && forkFrom(before.trace, trace);
    this.runs.push({ trace, number: ++this.counted, parent: fork ? before : null, said: fork ? sayFork(fork) : sayRun(trace) });
    if (before) before.trace.leave(); // one run at a time grows on the server
    this.forgetOldest(trace);
  }

  find(name) {
    return this.runs.find(({ trace }) => trace.run === name) || null;
  }

  /** The run that the server can still go on from. */
  get newest() {
    return this.runs.findLast(({ trace }) => !trace.fromFile && !trace.left) || null;
  }

  get events() {
    return this.runs.reduce((sum, { trace }) => sum + trace.version, 0);
  }

  /** The oldest go first; what is shown stays, and so does the newest. */
  forgetOldest(shown) {
    while (this.runs.length > MOST_RUNS || this.events > MOST_EVENTS) {
      const oldest = this.runs.find((run) => run.trace !== shown && run !== this.newest);
      if (!oldest) return;
      this.forget(oldest.trace);
    }
  }

  /** Put away what nobody looks at. The newest stays: the next run may be a fork of it. */
  packAllBut(isShown) {
    for (const run of this.runs) {
      const isUnwanted = () => !isShown(run.trace) && run !== this.newest;
      if (isUnwanted()) run.trace.pack(isUnwanted);
    }
  }

  forget(trace) {
    const gone = this.find(trace.run);
    this.runs = this.runs.filter((run) => run !== gone);
    for (const run of this.runs) if (run.parent === gone) run.parent = null;
  }
}

/** Where a run left another: {lane, position, taken, instead, into}, the pieces being those of the other run's row; null where it did not. */
function forkFrom(earlier, trace) {
  for (const { header, order } of trace.lanes) {
    const { forced } = header;
    if (!forced.length || header.strategy === SCORE || earlier.lanes.some((lane) => String(lane.header.forced) === String(forced))) continue;
    for (const lane of earlier.lanes.filter((one) => isLikely(one.header, header))) {
      const sequence = beginningWith(lane, forced.slice(0, -1));
      if (sequence) return { lane: lane.order, into: order, ...parting(sequence, forced.length - 1, forced[forced.length - 1]) };
    }
  }
  return null;
}

/** Whether one lane may be a copy of the other that begins with other tokens. */
function isLikely(one, other) {
  const plain = (header) => JSON.stringify([header.strategy, header.parts, header.model, header.seed, header.prompt_ids]);
  return plain(one) === plain(other);
}

/** A sequence of a lane that begins with these ids and goes on, the lane's own text before all others. */
function beginningWith(record, ids) {
  const state = new LaneState(record);
  state.goTo(record.events.length);
  const begins = ({ tokens }) => tokens.length > ids.length && ids.every((id, i) => tokens[i].id === id);
  return [...state.sequences.values()].sort((a, b) => a.id - b.id).find(begins) || null;
}

function parting(sequence, position, token) {
  const step = sequence.steps.get(position);
  const candidate = step && step.top.find(([id]) => id === token);
  return { position, instead: sequence.tokens[position].piece, taken: candidate ? candidate[1] : null };
}
