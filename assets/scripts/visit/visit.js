// The runs of this visit. Every run started or opened here stays in the memory of the tab, compressed while it is not shown; those
// that were started here also outlast a reload. A fork is listed below its parent run; it is recognised by its header, whose forced
// tokens begin with those of the parent.

import { pieceLabel } from "../components/pieces.js";
import { namesOfRun, SCORE } from "../run/headers.js";
import { LaneState } from "../run/model.js";
import { keptRuns } from "./keeping.js";

export const MOST_RUNS = 12;
export const MOST_EVENTS = 100_000; // of all runs together
const MOST_ON_SERVER = 4; // newest runs that the server keeps, so that they can be forked

export class Visit {
  constructor() {
    this.runs = keptRuns(); // in order of their start
    this.counted = Math.max(0, ...this.runs.map((run) => run.number));
  }

  /** Add a run at its start. The recording shown on arrival and replays of known runs are not added. `parent`: the run that it was
      asked for as a fork of. */
  add(trace, parent = null) {
    if (trace.recorded && !trace.fromFile) return;
    const newest = trace.fromFile ? null : this.newest;
    const before = trace.fromFile ? null : this.find(parent) || newest;
    const fork = before && forkFrom(before.trace, trace);
    this.runs.push({ trace, number: ++this.counted, parent: fork ? before : null, said: fork ? sayFork(fork) : sayRun(trace) });
    if (newest) newest.trace.leave(); // the server has one active run
    this.forgetOldest(trace);
  }

  find(name) {
    return this.runs.find(({ trace }) => trace.run === name) || null;
  }

  /** The run that the server can continue. */
  get newest() {
    return this.runs.findLast(({ trace }) => !trace.fromFile && !trace.left) || null;
  }

  /** Whether the server still has a run, active or ended. */
  isOnServer(trace) {
    return this.runs.filter((run) => !run.trace.fromFile && !run.trace.restored).slice(-MOST_ON_SERVER).some((run) => run.trace === trace);
  }

  get events() {
    return this.runs.reduce((sum, { trace }) => sum + trace.version, 0);
  }

  /** Drop the oldest runs beyond the limits, never the shown and the newest one. */
  forgetOldest(shown) {
    while (this.runs.length > MOST_RUNS || this.events > MOST_EVENTS) {
      const oldest = this.runs.find((run) => run.trace !== shown && run !== this.newest);
      if (!oldest) return;
      this.forget(oldest.trace);
    }
  }

  /** Compress the runs that are not shown, except the newest: the next run may be a fork of it. */
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

/** Where a run was forked from an earlier one, {lane, position, taken, instead, into, replaces}, with pieces from the earlier run; null if it was not. */
function forkFrom(earlier, trace) {
  for (const { header, order } of trace.lanes) {
    const { forced } = header;
    if (!forced.length || header.strategy === SCORE || earlier.lanes.some((lane) => String(lane.header.forced) === String(forced))) continue;
    const position = header.forked_at >= 0 ? header.forked_at : forced.length - 1;
    for (const lane of earlier.lanes.filter((one) => isLikely(one.header, header))) {
      const sequence = beginningWith(lane, forced.slice(0, position));
      const replaces = !trace.lanes.some(({ header: other }) => isLikely(other, lane.header) && String(other.forced) === String(lane.header.forced));
      if (sequence) return { lane: lane.order, into: order, replaces, ...parting(sequence, position, forced.slice(position)) };
    }
  }
  return null;
}

/** Whether one lane may be a fork of the other. */
function isLikely(one, other) {
  const plain = (header) => JSON.stringify([header.strategy, header.parts, header.model, header.seed, header.prompt_ids]);
  return plain(one) === plain(other);
}

/** A sequence of a lane that begins with these ids and continues; the lane's own text is preferred. */
function beginningWith(record, ids) {
  const state = new LaneState(record);
  state.goTo(record.events.length);
  const begins = ({ tokens }) => tokens.length > ids.length && ids.every((id, i) => tokens[i].id === id);
  return [...state.sequences.values()].sort((a, b) => a.id - b.id).find(begins) || null;
}

/** The change at a position: the piece that was there, and the one taken instead, null if it is not known or not a single token. */
function parting(sequence, position, taken) {
  const step = sequence.steps.get(position);
  const candidate = step && step.top.find(([id]) => id === taken[0]);
  return { position, instead: sequence.tokens[position].piece, taken: candidate && taken.length === 1 ? candidate[1] : null, length: taken.length };
}

function sayFork({ lane, position, instead, taken, length, into, replaces }) {
  const piece = taken !== null ? `“${pieceLabel(taken)}”` : length > 1 ? `${length} other tokens` : "another token";
  const place = replaces ? "replacing it" : `as lane ${into + 1}`;
  return `lane ${lane + 1} forked at token ${position + 1}: ${piece} instead of “${pieceLabel(instead)}”, ${place}`;
}

function sayRun(trace) {
  const headers = trace.lanes.map(({ header }) => header);
  const opened = trace.fromFile ? "opened: " : "";
  return `${opened}${namesOfRun(headers).map(({ name }) => name).join(" · ")}, “${pieceLabel(headers[0].prompt, 48)}”`;
}
