// From events to what a lane looks like: its text, rounds, cache and costs after the first `cursor` events.
// Going forward applies events one by one; going back starts over, which is quick and cannot leave anything behind.

class LaneState {
  constructor(record) {
    this.record = record;
    this.born = new Map(); // token objects by the index of their commit: the same object every time, so that drawing can compare
    this.reset();
  }

  reset() {
    this.cursor = 0;
    this.clock = 0;
    this.version = (this.version || 0) + 1;
    this.sequences = new Map([[0, new Sequence(0, null)]]);
    this.family = []; // every branch that was ever born, in order, also those whose number was given away again
    this.rounds = [];
    this.forwards = [];
    this.costs = new Costs();
    this.ledger = new Ledger(!this.record.header.canvas);
    this.caches = new Map(); // by stream, every Cache event so far
    this.switches = [];
    this.notes = [];
    this.figures = new Map(); // by name: {shape, parts}
    this.canvas = new Canvas(this.record.header.canvas);
    this.judged = null; // how right the text is, where the answer is known
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

  /** The sequence whose text is shown: 0 is the text of the lane. While branches grow beyond it, the one of them with the best score. */
  get shown() {
    const own = this.sequence(0);
    const beyond = this.living.filter((sequence) => sequence.tokens.length > own.tokens.length);
    return beyond.reduce((best, one) => ((one.score ?? -Infinity) > (best.score ?? -Infinity) ? one : best), beyond[0] || own);
  }

  /** Branches that may still become the text. */
  get living() {
    return this.family.filter((sequence) => sequence.alive && !sequence.leftBehind);
  }

  /** Branches come into being at once, each as a copy of what its parent is before any of them. */
  bear(event) {
    const others = event.born.filter(([id, parent]) => id !== parent); // one that is born from itself just goes on
    const children = others.map(([id, parent]) => new Sequence(id, this.sequence(parent)));
    for (const child of children) {
      const namesake = this.sequences.get(child.id);
      if (namesake) namesake.alive = false;
      this.sequences.set(child.id, child);
      this.family.push(child);
    }
  }

  /** What grew on a branch is the text now, and the branches beside it are left behind. */
  adopt(sequence, source, tokens) {
    sequence.inherit(source, tokens);
    for (const other of this.living) other.leftBehind = other !== source;
    source.becameText = true;
  }

  /** The round that is being guessed or was last judged, for one sequence. */
  openRound(sequence) {
    for (let i = this.rounds.length - 1; i >= 0; i--) {
      if (this.rounds[i].sequence === sequence) return this.rounds[i];
    }
    return null;
  }

  /** Guesses after the text that are not settled yet, or null. */
  pendingRound(sequence) {
    const round = this.openRound(sequence);
    return round && !round.settled ? round : null;
  }

  lastCache(stream) {
    const all = this.caches.get(stream);
    return all ? all[all.length - 1] : null;
  }
}

/** Positions that are filled in any order: which token each one got, how sure the model was of it, and in which step. */
class Canvas {
  constructor(size) {
    this.size = size; // 0 where the text grows from left to right
    this.steps = [];
    this.filled = new Map(); // by position
  }

  fill(event) {
    this.steps.push(event);
    event.positions.forEach((position, i) => {
      const fill = { position, piece: event.pieces[i] ?? "", confidence: event.confidences[i] ?? null, step: this.steps.length, event: event.index };
      this.filled.set(position, fill);
      this.size = Math.max(this.size, position + 1);
    });
  }
}

class Sequence {
  constructor(id, parent) {
    this.id = id;
    this.parent = parent;
    this.tokens = parent ? parent.tokens.slice() : [];
    this.steps = new Map(parent ? parent.steps : []); // by position: what the model thought
    this.masks = new Map(parent ? parent.masks : []); // by position: what the grammar allowed
    this.bornAt = this.tokens.length;
    this.alive = true;
    this.ended = false; // a complete text; it may stay alive and wait for the others
    this.becameText = false;
    this.leftBehind = false; // another one became the text while it was alive
    this.score = null;
    this.halfLetter = []; // bytes that wait for the rest of their letter
    this.grewAt = parent ? parent.grewAt : 0; // seconds on the lane's clock
  }

  /** What was noted about tokens while they grew on another sequence is noted here too. */
  inherit(source, tokens) {
    for (const { position } of tokens) {
      for (const name of ["steps", "masks"]) {
        if (source[name].has(position)) this[name].set(position, source[name].get(position));
      }
    }
  }

  /** What was thought about the positions that are taken back goes with them. */
  takeBack(number) {
    this.tokens.splice(Math.max(0, this.tokens.length - number));
    this.halfLetter = [];
    for (const known of [this.steps, this.masks]) {
      for (const position of [...known.keys()]) if (position >= this.tokens.length) known.delete(position);
    }
  }
}

/** One round of guessing: the draft, the verdict once it is known, and which committed tokens came of it. */
class Round {
  constructor(draft, number) {
    this.draft = draft;
    this.number = number; // place in the lane, from 1
    this.sequence = draft.sequence;
    this.verdict = null;
    this.lastEvent = draft.index; // the player goes here to show the round as it ended
    this.settled = false;
    this.tests = new Map(); // by node
  }

  judge(verdict) {
    this.verdict = verdict;
    this.lastEvent = verdict.index;
    verdict.tests.forEach(([node, p, q, draw, kept], order) => this.tests.set(node, { node, p, q, draw, kept, order }));
    this.kept = new Set(verdict.kept);
  }

  /** A commit wrote what stands; what the text still lacks was cut off by an end or a limit. */
  settle(commit) {
    this.lastEvent = commit.index;
    this.settled = true;
  }

  /** Whether a token follows the kept path; none does where the path ends the text. */
  get hasNext() {
    return Boolean(this.verdict) && this.verdict.token >= 0;
  }

  /** "kept" (on the path that stands), "passed" (its test alone was passed), "refused", "untested", or "pending" before the verdict. */
  nodeState(node) {
    if (!this.verdict) return "pending";
    if (this.kept.has(node)) return "kept";
    if (!this.tests.has(node)) return "untested";
    return this.tests.get(node).kept ? "passed" : "refused";
  }

  /** Nodes to show in the running text: the kept path once it is known, before that the first guess at every fork. */
  mainPath() {
    if (this.verdict) return this.verdict.kept;
    const path = [];
    let node = -1;
    while ((node = this.draft.parents.indexOf(node)) !== -1) {
      if (path.includes(node)) break;
      path.push(node);
    }
    return path;
  }

  refusedNodes() {
    return [...this.tests.keys()].filter((node) => this.nodeState(node) === "refused");
  }

  /** The guess that became the i-th token of the commit, or null. Ids must agree; nothing is matched by its text. */
  guessBehind(i, id) {
    const node = this.verdict.kept[i];
    return node !== undefined && this.draft.tokens[node] === id ? node : null;
  }
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
    sequence.grewAt = event.at;
    sequence.halfLetter = tokens.length ? tokens[tokens.length - 1].waiting : sequence.halfLetter;
    if (round && round.verdict) round.settle(event);
    const source = sourceOf(state, event);
    if (source) state.adopt(sequence, source, tokens);
    sequence.leftBehind = false;
    state.costs.commit();
  },

  rollback(state, event) {
    state.sequence(event.sequence).takeBack(event.count);
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
    state.bear(event);
    for (const id of event.dropped) state.sequence(id).alive = false;
    for (const id of event.ended) state.sequence(id).ended = true;
    for (const id in event.scores) state.sequence(Number(id)).score = event.scores[id];
  },

  fill(state, event) {
    state.canvas.fill(event);
  },

  figure(state, event) {
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

/** The tokens a commit adds. Made once for each commit, whatever way the player comes by again. */
function tokensOf(state, event, sequence, round) {
  if (!state.born.has(event.index)) state.born.set(event.index, makeTokens(state, event, sequence, round));
  return state.born.get(event.index);
}

function makeTokens(state, event, sequence, round) {
  let waiting = sequence.halfLetter;
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
        decoded: state.costs.passes > 0, // not read from the prefill row
        forward: state.costs.targetForwards, // how many target forwards had run when it was committed
        pass: lastTarget(state.forwards),
        seconds: Math.max(0, event.at - sequence.grewAt) / event.ids.length,
        round,
        node: round ? round.guessBehind(i, id) : null,
      }),
      letter: letters.text,
      waiting,
    };
  });
}

/** The sequence on which the tokens of a commit grew, where that is another one. */
function sourceOf(state, event) {
  return event.grown_on ? state.sequences.get(event.grown_on) || null : null;
}

/** How a token came about that grew on another sequence, or null where the two do not agree. */
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

/** Bytes of half letters add up over tokens; when they make a letter, the token that completes it shows it. */
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
