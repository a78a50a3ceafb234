// What a KV cache holds after each of its events. An event lists what was evicted since the one before it, in the format that
// playground/trace/cache_contents.py describes; one with `live` lists the contents anew, as every event of an older trace does.

import { slots } from "./metrics.js";

/** Live ranges, by layer and head, after each event of one stream. */
export class CacheContents {
  constructor() {
    this.events = [];
    this.counts = [[0]]; // live positions after the last event
    this.places = []; // at most two events whose contents are known, one for the current drawing and one for the history
  }

  /** One more event. It gets the contents as `live` and `joined`, computed when they are read, and `most`, the largest number of
      live positions in any head. Returns the counts by layer and head. */
  add(event) {
    const last = this.events[this.events.length - 1];
    const listed = event.raw.live || [];
    const before = listed.length ? listed.map((heads) => heads.map(slots)) : this.counts.map((heads) => heads.map((held) => held + event.length - (last ? last.length : 0)));
    this.counts = event.dropped.length ? paired(before, evictionsOf(event), (held, gone) => held - gone.reduce((sum, each) => sum + each.to - each.from, 0)) : before;
    event.most = this.counts.reduce((most, heads) => Math.max(most, ...heads), 0);
    const number = this.events.push(event) - 1;
    Object.defineProperty(event, "live", { get: () => this.at(number) });
    if (event.dropped.length) Object.defineProperty(event, "joined", { get: () => mergesOf(event) });
    return this.counts;
  }

  /** The contents after an event. Later events are reached from the nearest known one before them. */
  at(number) {
    const before = this.places.filter((each) => each.number <= number);
    const place = before.reduce((best, each) => (each.number > best.number ? each : best), before[0]) || { number: -1, live: [[[]]] };
    this.places = [...this.places.filter((each) => each !== place), place].slice(-2);
    let from = number;
    while (from > place.number + 1 && !(this.events[from].raw.live || []).length) from -= 1;
    for (let i = from; i <= number && number > place.number; i++) place.live = this.after(i, place.live);
    place.number = number;
    return place.live;
  }

  after(number, live) {
    const event = this.events[number];
    const listed = event.raw.live || [];
    const start = number > 0 ? this.events[number - 1].length : 0;
    const held = listed.length ? listed : live.map((heads) => heads.map((runs) => extended(runs, start, event.length)));
    return event.dropped.length ? paired(held, evictionsOf(event), without) : held;
  }
}

/** Evictions of an event by layer and head: {from, to, into}, where `into` is null for tokens that were not merged. */
function evictionsOf(event) {
  return event.dropped.map((layer) => layer.split(",").map(readEvictions));
}

function readEvictions(text) {
  let end = 0;
  return [...text.matchAll(/([0-9a-z]+)(?:\+([0-9a-z]+))?(?:>([0-9a-z]+))?/g)].map(([, gap, more, into]) => {
    const from = end + parseInt(gap, 36);
    end = from + 1 + (more ? parseInt(more, 36) : 0);
    return { from, to: end, into: into === undefined ? null : parseInt(into, 36) };
  });
}

function mergesOf(event) {
  return evictionsOf(event).map((heads) => heads.map((gone) => gone.filter((each) => each.into !== null).map((each) => [each.from, each.into])));
}

/** Combines two listings by layer and head, where one entry may stand for all. */
function paired(first, second, combine) {
  const either = (a, b, act) => Array.from({ length: Math.max(a.length, b.length) }, (_, i) => act(a[i] ?? a[0], b[i] ?? b[0]));
  return either(first, second, (a, b) => either(a, b, combine));
}

function extended(runs, start, stop) {
  if (stop <= start) return runs;
  const last = runs[runs.length - 1];
  return last && last[1] === start ? [...runs.slice(0, -1), [last[0], stop]] : [...runs, [start, stop]];
}

/** Ranges without what was evicted; both are ascending. */
function without(runs, evictions) {
  const left = [];
  let first = 0;
  for (const run of runs) {
    let [from, to] = run;
    while (first < evictions.length && evictions[first].to <= from) first += 1;
    for (let i = first; i < evictions.length && evictions[i].from < to; i++) {
      if (evictions[i].from > from) left.push([from, evictions[i].from]);
      from = Math.max(from, evictions[i].to);
    }
    if (from < to) left.push(from === run[0] ? run : [from, to]);
  }
  return left;
}
