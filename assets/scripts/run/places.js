// Interesting places of a run: the largest entropies, rejections, side branches that were accepted, masks that removed more than half of the
// probability, switches, and evictions. A button and the key N visit them in the order of time, over all lanes.

import { count, fixed, percent } from "../components/numbers.js";
import { pieceLabel } from "../components/pieces.js";

const BANNED = 0.5; // share of the probability

export class Places {
  constructor(trace) {
    this.trace = trace;
    this.all = [];
    this.foundAt = -1;
    this.visited = null;
  }

  /** The next place, or with `by` = -1 the one before, around the ends of the run; null if there is none. A place is {lane, event,
      position, says, number, of}: the event to show last, the token it is about, a sentence, and its number among all places. */
  next(cursors, by) {
    this.find();
    if (!this.all.length) return null;
    const at = (this.from(cursors, by) + this.all.length) % this.all.length;
    this.visited = nameOfPlace(this.all[at]);
    return { ...this.all[at], number: at + 1, of: this.all.length };
  }

  /** From the place visited last if it is still shown, otherwise from the player's position. */
  from(cursors, by) {
    const last = this.all.findIndex((place) => nameOfPlace(place) === this.visited);
    if (last >= 0 && cursors[this.all[last].lane] === this.all[last].event + 1) return last + by;
    const ahead = this.all.findIndex(({ lane, event }) => event >= cursors[lane]);
    if (by < 0) return (ahead < 0 ? this.all.length : ahead) - 1;
    return Math.max(0, ahead);
  }

  find() {
    if (this.foundAt === this.trace.version) return;
    this.foundAt = this.trace.version;
    this.all = this.trace.lanes.flatMap(interestingPlaces).sort((a, b) => a.at - b.at || a.lane - b.lane || a.event - b.event);
  }
}

function nameOfPlace({ lane, event, says }) {
  return `${lane}/${event}/${says}`;
}

function interestingPlaces(record) {
  const finder = new PlaceFinder();
  for (const event of record.events) finder[event.kind]?.(event);
  const found = finder.highest ? [...finder.found, finder.highest] : finder.found;
  return found.map((place) => ({ ...place, lane: record.order }));
}

/** Reads the events of one lane in order. What is about a token becomes a place when the token is committed, which shows it. */
class PlaceFinder {
  constructor() {
    this.found = [];
    this.highest = null;
    this.entropies = new Map(); // by token, as `tokenName`
    this.waiting = []; // {token, says}
    this.drafts = new Map(); // by sequence
    this.judged = new Map(); // by sequence: [{offset, says}], tokens counted from the next commit
    this.evicting = new Set(); // streams whose last update evicted slots
    this.newest = 0; // position of the last committed token
  }

  step({ sequence, position, entropy }) {
    this.entropies.set(tokenName(sequence, position), entropy);
  }

  mask({ sequence, position, banned, favourites }) {
    if (banned <= BANNED) return;
    const first = favourites.length ? `, among it “${pieceLabel(favourites[0][1])}”` : "";
    this.waiting.push({ token: tokenName(sequence, position), says: `the mask removed ${percent(banned)} of the probability${first}` });
  }

  switch({ sequence, position, to, why }) {
    this.waiting.push({ token: tokenName(sequence, position), says: `switch to ${to}${why ? `: ${why}` : ""}` });
  }

  draft(event) {
    this.drafts.set(event.sequence, event);
  }

  verdict(event) {
    const draft = this.drafts.get(event.sequence);
    if (draft && draft.round === event.round) this.judged.set(event.sequence, [...sideBranches(draft, event), ...rejections(draft, event)]);
  }

  commit(event) {
    const { sequence, position, ids } = event;
    for (const { offset, says } of this.judged.get(sequence) || []) if (offset < ids.length) this.add(event, position + offset, says);
    this.judged.delete(sequence);
    for (let i = 0; i < ids.length; i++) this.settle(event, position + i);
    this.newest = position + ids.length - 1;
  }

  settle(event, position) {
    const token = tokenName(event.sequence, position);
    for (const { says } of this.waiting.filter((one) => one.token === token)) this.add(event, position, says);
    this.waiting = this.waiting.filter((one) => one.token !== token);
    const entropy = this.entropies.get(token);
    if (entropy > (this.highest ? this.highest.entropy : 0)) {
      this.highest = { ...placeAt(event, position, `the largest entropy of this lane, ${fixed(entropy, 2)} nats`), entropy };
    }
  }

  /** The first of consecutive updates that evict: a window would otherwise make every token a place. */
  cache(event) {
    const { stream, evicted } = event;
    if (evicted && !this.evicting.has(stream)) this.add(event, this.newest, `the ${stream === "target" ? "" : `${stream} `}cache starts to evict: ${count(evicted, "slot")} freed`);
    if (evicted) this.evicting.add(stream);
    else this.evicting.delete(stream);
  }

  add(event, position, says) {
    this.found.push(placeAt(event, position, says));
  }
}

function placeAt({ at, index }, position, says) {
  return { at, event: index, position, says };
}

function tokenName(sequence, position) {
  return `${sequence}/${position}`;
}

/** Accepted draft tokens that are not the first child of their parent. */
function sideBranches({ parents, pieces }, { kept }) {
  const offset = kept.findIndex((node) => parents.indexOf(parents[node]) !== node);
  return offset < 0 ? [] : [{ offset, says: `a side branch of the draft tree was accepted, “${pieceLabel(pieces[kept[offset]] ?? "")}”` }];
}

/** The rejected draft token after the accepted path, and what replaced it. */
function rejections({ parents, pieces }, { kept, tests, origin, piece }) {
  const last = kept.length ? kept[kept.length - 1] : -1;
  const rejected = tests.find(([node, , , , passed]) => !passed && parents[node] === last);
  if (!rejected || origin !== "redraw") return [];
  return [{ offset: kept.length, says: `the target rejected “${pieceLabel(pieces[rejected[0]] ?? "")}” and continued with “${pieceLabel(piece)}”` }];
}
