// The state of a lane after its first `cursor` events: text, rounds, caches and costs.
// Forward, events are applied one by one; backward, the state is rebuilt from the start, which is fast and leaves no residue.

import { Ledger } from "./ledger.js";
import { Costs } from "./metrics.js";
import { Round } from "./round.js";

export class LaneState {
  constructor(record) {
    this.record = record;
    this.tokensByCommit = new Map(); // token objects by the index of their commit event: identical on every replay, so that drawing can compare
    this.reset();
  }

  reset() {
    this.cursor = 0;
    this.clock = 0;
    this.version = (this.version || 0) + 1;
    this.sequences = new Map([[0, new Sequence(0, null)]]);
    this.family = []; // every branch so far, in order, also those whose id was reused
    this.rounds = [];
    this.forwards = [];
    this.costs = new Costs();
    this.ledger = new Ledger(!this.record.header.canvas);
    this.caches = new Map(); // by stream, every Cache event so far
    this.switches = [];
    this.notes = [];
    this.figures = new Map(); // by name: {shape, parts}
    this.marks = new Map(); // by position: what a watermark's detector or an overlay says of the token, 0 to 1
    this.said = new Map(); // by position: the same in words, as [name, words] each
    this.canvas = new Canvas(this.record.header.canvas);
    this.judged = null; // the verdict on the text, if the answer is known
    this.done = null;
    this.failed = null;
  }

  /** Show the first `cursor` events. Says whether anything changed. */
  goTo(cursor) {
    if (cursor === this.cursor) return false;
    if (cursor < this.cursor) this.reset();
    while (this.cursor < cursor) this.apply(this.record.events[this.cursor++]);
    this.version += 1;
    return true;
  }

  apply(event) {
    this.clock = event.at;
    const act = APPLY[event.kind];
    if (act) act(this, event);
    this.ledger.note(event);
  }

  sequence(id) {
    if (!this.sequences.has(id)) this.sequences.set(id, new Sequence(id, null));
    return this.sequences.get(id);
  }

  /** The sequence whose text is shown: 0, the text of the lane, or the branch with the best score among those longer than it. */
  get shown() {
    const own = this.sequence(0);
    const beyond = this.living.filter((sequence) => sequence.tokens.length > own.tokens.length);
    return beyond.reduce((best, one) => ((one.score ?? -Infinity) > (best.score ?? -Infinity) ? one : best), beyond[0] || own);
  }

  /** Branches that may still become the text. */
  get living() {
    return this.family.filter((sequence) => sequence.alive && !sequence.leftBehind);
  }

  /** Create the branches of one event, each a copy of its parent's state before the event. */
  addBranches(event) {
    const others = event.born.filter(([id, parent]) => id !== parent); // a branch of itself continues unchanged
    const children = others.map(([id, parent]) => new Sequence(id, this.sequence(parent)));
    for (const child of children) {
      const namesake = this.sequences.get(child.id);
      if (namesake) namesake.alive = false;
      this.sequences.set(child.id, child);
      this.family.push(child);
    }
  }

  /** A branch became the text; the other branches are no longer candidates. */
  adopt(sequence, source, tokens) {
    sequence.inherit(source, tokens);
    for (const other of this.living) other.leftBehind = other !== source;
    source.becameText = true;
  }

  /** The latest round of a sequence, drafted or verified. */
  openRound(sequence) {
    for (let i = this.rounds.length - 1; i >= 0; i--) {
      if (this.rounds[i].sequence === sequence) return this.rounds[i];
    }
    return null;
  }

  /** The round of a sequence that has not been committed yet, or null. */
  pendingRound(sequence) {
    const round = this.openRound(sequence);
    return round && !round.settled ? round : null;
  }

  lastCache(stream) {
    const all = this.caches.get(stream);
    return all ? all[all.length - 1] : null;
  }
}

/** Positions filled in any order: the token of each, its confidence, and the step that filled it. A step may also take tokens back. */
class Canvas {
  constructor(size) {
    this.size = size; // 0 where the text grows from left to right
    this.steps = [];
    this.filled = new Map(); // by position
    this.past = []; // what was taken back, each with the step that did, in order
    this.before = new Map(); // by position: the last of them
  }

  fill(event) {
    this.steps.push(event);
    for (const position in { ...event.replaced, ...event.remasked }) this.takeBack(Number(position));
    event.positions.forEach((position, i) => {
      const fill = { position, was: this.before.get(position)?.piece ?? null, piece: event.pieces[i] ?? "", confidence: event.confidences[i] ?? null, entropy: event.entropies?.[i] ?? null, step: this.steps.length, event: event.index };
      this.filled.set(position, fill);
      this.size = Math.max(this.size, position + 1);
    });
  }

  takeBack(position) {
    const old = this.filled.get(position);
    if (!old) return;
    const past = { ...old, until: this.steps.length };
    this.past.push(past);
    this.before.set(position, past);
    this.filled.delete(position);
  }
}

class Sequence {
  constructor(id, parent) {
    this.id = id;
    this.parent = parent;
    this.tokens = parent ? parent.tokens.slice() : [];
    this.steps = new Map(parent ? parent.steps : []); // Step events by position
    this.masks = new Map(parent ? parent.masks : []); // Mask events by position
    this.reported = new Map(); // by position, [piece, log-probability] of the top tokens as a server reports them
    this.bornAt = this.tokens.length;
    this.alive = true;
    this.ended = false; // a complete text; it may stay alive and wait for the others
    this.becameText = false;
    this.leftBehind = false; // another branch became the text
    this.score = null;
    this.sum = null; // the score before length normalisation, if it is normalised
    this.scoredAt = 0; // tokens when it got this score
    this.withdrawn = []; // tokens that were rolled back since the last commit
    this.pendingBytes = []; // bytes of an incomplete UTF-8 character
    this.grewAt = parent ? parent.grewAt : 0; // seconds on the lane's clock
  }

  rate(score, sum) {
    Object.assign(this, { score, sum, scoredAt: this.tokens.length });
  }

  /** Take over the steps and masks of tokens that were generated on another sequence. */
  inherit(source, tokens) {
    for (const { position } of tokens) {
      for (const name of ["steps", "masks"]) {
        if (source[name].has(position)) this[name].set(position, source[name].get(position));
      }
    }
  }

  /** Remove the last `number` tokens with their steps and masks. They stay in `withdrawn` until the next commit. */
  rollBack(number) {
    this.withdrawn = [...this.tokens.splice(Math.max(0, this.tokens.length - number)), ...this.withdrawn];
    this.pendingBytes = [];
    for (const known of [this.steps, this.masks]) {
      for (const position of [...known.keys()]) if (position >= this.tokens.length) known.delete(position);
    }
  }
}

/** A figure that colours tokens: the last one gives the colour, all give words, and the parts of the network that these name. */
function shade(state, { name, data }) {
  data.spans.forEach(([from, , label, value], i) => {
    state.marks.set(from, value);
    if (label) state.said.set(from, [...(state.said.get(from) || []).filter(([other]) => other !== name), [name, label, data.parts?.[i] || []]]);
  });
}

const APPLY = {
  judged(state, event) {
    state.judged = event;
  },

  forward(state, event) {
    state.forwards.push(event);
    state.costs.forward(event);
  },

  step(state, event) {
    state.sequence(event.sequence).steps.set(event.position, event);
  },

  top_logprobs(state, event) {
    state.sequence(event.sequence).reported.set(event.position, event.top);
  },

  draft(state, event) {
    state.rounds.push(new Round(event, state.rounds.length + 1));
  },

  verdict(state, event) {
    const round = state.openRound(event.sequence);
    if (!round || round.verdict || round.draft.round !== event.round) return;
    round.judge(event);
    state.costs.verdict(event, round);
  },

  commit(state, event) {
    const sequence = state.sequence(event.sequence);
    const round = state.pendingRound(event.sequence);
    const tokens = tokensOf(state, event, sequence, round && round.verdict ? round : null);
    sequence.tokens.push(...tokens);
    sequence.withdrawn = [];
    sequence.grewAt = event.at;
    sequence.pendingBytes = tokens.length ? tokens[tokens.length - 1].waiting : sequence.pendingBytes;
    if (round && round.verdict) round.settle(event);
    const source = sourceOf(state, event);
    if (source) state.adopt(sequence, source, tokens);
    sequence.leftBehind = false;
    state.costs.commit();
  },

  rollback(state, event) {
    state.sequence(event.sequence).rollBack(event.count);
  },

  cache(state, event) {
    if (!state.caches.has(event.stream)) state.caches.set(event.stream, []);
    state.caches.get(event.stream).push(event);
    state.costs.cache(event);
  },

  mask(state, event) {
    state.sequence(event.sequence).masks.set(event.position, event);
  },

  switch(state, event) {
    state.switches.push(event);
  },

  branches(state, event) {
    state.addBranches(event);
    for (const id of event.dropped) state.sequence(id).alive = false;
    for (const id of event.ended) state.sequence(id).ended = true;
    for (const id in event.scores) state.sequence(Number(id)).rate(event.scores[id], event.sums[id] ?? null);
  },

  fill(state, event) {
    state.canvas.fill(event);
  },

  figure(state, event) {
    if (event.data.shades) shade(state, event);
    const known = state.figures.get(event.name);
    if (known && known.shape === event.shape) known.parts.push(event.data);
    else state.figures.set(event.name, { name: event.name, shape: event.shape, parts: [event.data] });
  },

  note(state, event) {
    state.notes.push({ text: event.text, position: state.sequence(event.sequence).tokens.length });
  },

  done(state, event) {
    state.done = event;
  },

  failed(state, event) {
    state.failed = event;
  },
};

/** The tokens a commit adds. Built once per commit and reused when the player passes it again. */
function tokensOf(state, event, sequence, round) {
  const known = state.tokensByCommit;
  if (!known.has(event.index)) known.set(event.index, makeTokens(state, event, sequence, round));
  return known.get(event.index);
}

function makeTokens(state, event, sequence, round) {
  let waiting = sequence.pendingBytes;
  const source = sourceOf(state, event);
  return event.ids.map((id, i) => {
    const piece = event.pieces[i] ?? "";
    const letters = readBytes(waiting, piece);
    waiting = letters.waiting;
    return {
      id,
      piece,
      position: event.position + i,
      logprob: event.logprobs[i] ?? null,
      origin: event.origins[i] || "sampled",
      sequence: event.sequence,
      ...(grownToken(source, event.position + i, id) || {
        commit: event.index,
        decoded: state.costs.passes > 0, // false for the token of the prefill
        forward: state.costs.passes, // target forwards until its commit, prefill excluded
        pass: lastTarget(state.forwards),
        seconds: Math.max(0, event.at - sequence.grewAt) / event.ids.length,
        round,
        node: round ? round.nodeBehind(i, id) : null,
      }),
      letter: letters.text,
      waiting,
    };
  });
}

/** The sequence on which the tokens of a commit were generated, if it is another one. */
function sourceOf(state, event) {
  return event.grown_on ? state.sequences.get(event.grown_on) || null : null;
}

/** The origin of a token that was generated on another sequence, or null if the ids differ. */
function grownToken(source, position, id) {
  const token = source && source.tokens[position];
  if (!token || token.id !== id) return null;
  const { commit, decoded, forward, pass, seconds, round, node } = token;
  return { commit, decoded, forward, pass, seconds, round, node };
}

function lastTarget(forwards) {
  for (let i = forwards.length - 1; i >= 0; i--) {
    if (forwards[i].stream === "target") return forwards[i];
  }
  return null;
}

/** Byte pieces accumulate over tokens; the token that completes a UTF-8 character shows it. */
function readBytes(waiting, piece) {
  const inPiece = [...piece.matchAll(/<0x([0-9A-F]{2})>/g)].map((match) => parseInt(match[1], 16));
  if (!inPiece.length) return { text: "", waiting: [] };
  const all = [...waiting, ...inPiece].slice(-4);
  try {
    return { text: new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(all)), waiting: [] };
  } catch (reason) {
    return { text: "", waiting: all };
  }
}

export function isOver(state) {
  return Boolean(state.done || state.failed);
}
