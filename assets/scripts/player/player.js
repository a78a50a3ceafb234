// The player of live and recorded runs. It decides how many events of each lane are shown and never queries the server.
//
// All events have one order: by the lanes' clocks, by token count, or by forwards of the target, the clock of a memory-bound GPU. The
// player's place is a number of events in that order. While it follows a live run, all events are shown and no order is needed.

import { upperBound } from "../components/numbers.js";
import { forwardKey } from "../run/course.js";
import { LENGTHENS } from "../run/trace.js";

export const ALIGNMENTS = ["time", "tokens", "forwards"];
export const SPEEDS = ["reading", "live", "0.02", "0.05", "0.1", "0.25", "0.5", "1", "2", "4"];
const READING = 15; // tokens per second of the slowest lane, which an eye can follow
const READING_FORWARDS = 4; // forwards per second: what was drafted and what became of it can be seen
const STOPS = new Set(["draft", "verdict", "commit", "rollback", "fill", "branches", "done", "failed"]);
const BESIDE = new Set(["step", "mask", "commit"]);
const TRAILERS = new Set(["cache", "note", "figure", "done", "failed", "branches", "switch"]); // shown together with the event before them

export class Player {
  constructor(trace) {
    this.trace = trace;
    this.mode = "time";
    this.speed = "reading";
    this.restart();
  }

  /** At the start of a run: follow a live one, play a recorded one. */
  restart() {
    this.place = 0;
    this.clock = 0;
    this.order = [];
    this.orderedAt = -1;
    this.cursors = this.trace.lanes.map(() => 0);
    this.playing = true;
    this.following = this.follows();
    this.lastTick = null;
  }

  /** How far the player's clock goes in a second of playback: seconds of the run or, aligned by forwards, forwards. At reading speed the
      slowest lane writes READING tokens per second, unless it is slower by itself; all lanes keep their proportions. */
  pace() {
    const byForwards = this.mode === "forwards";
    const own = byForwards ? this.forwardRate() : 1;
    if (this.speed === "reading") return byForwards ? Math.min(own, READING_FORWARDS) : Math.min(1, READING / this.slowest());
    return this.speed === "live" ? own : own * Number(this.speed);
  }

  /** Tokens per second of the slowest lane that has written any; 0 before the first. */
  slowest() {
    const rates = this.trace.lanes.filter(({ tokens, end }) => tokens > 0 && end > 0).map(({ tokens, end }) => tokens / end);
    return rates.length ? Math.min(...rates) : 0;
  }

  /** Forwards per second of the lane that takes longest for one. */
  forwardRate() {
    const rates = this.trace.lanes.filter(({ forwards, end }) => forwards.length > 0 && end > 0).map(({ forwards, end }) => forwards.length / end);
    return rates.length ? Math.min(...rates) : READING_FORWARDS;
  }

  /** Whether playing shows whatever has arrived: a live run, no faster than the chosen speed. */
  follows() {
    if (this.trace.over || !["live", "reading"].includes(this.speed)) return false;
    return this.pace() === (this.mode === "forwards" ? this.forwardRate() : 1);
  }

  /** Advance by the time since the last tick. Returns whether there is more to play. */
  tick(now) {
    const passed = this.lastTick === null ? 0 : Math.min(0.25, (now - this.lastTick) / 1000);
    this.lastTick = now;
    if (!this.playing) return false;
    if (this.following && !this.trace.over) this.following = this.follows();
    if (this.following) {
      this.toHead();
      if (this.trace.over) this.playing = this.following = false;
      return this.playing;
    }
    this.sort();
    this.clock += passed * this.pace();
    const head = this.head();
    let place = this.place;
    while (place < head && this.order[place].due <= this.clock) place += 1;
    this.move(place);
    if (place >= head && head > 0) this.clock = Math.min(this.clock, this.order[head - 1].due);
    if (place >= head) this.following = this.follows(); // caught up
    if (place >= this.order.length && this.trace.over) this.playing = false;
    return this.playing;
  }

  play() {
    if (this.atEnd && this.trace.over) this.toStart();
    this.following = this.follows();
    this.playing = true;
    this.lastTick = null;
  }

  pause() {
    this.playing = this.following = false;
  }

  /** Show what arrives as it arrives. */
  follow() {
    this.speed = "live";
    this.following = this.playing = !this.trace.over;
    this.toHead();
  }

  setMode(mode) {
    this.mode = mode;
    this.orderedAt = -1;
    if (!this.following) this.sort();
  }

  setSpeed(speed) {
    this.speed = speed;
    this.following = this.playing && this.follows();
    this.sort();
    this.clock = this.due(this.place);
  }

  /** One step forward: to the next draft, verdict or commit. Returns whether there was one. */
  forward() {
    this.pause();
    this.sort();
    if (this.place >= this.order.length) return false;
    this.land(this.mode === "time" ? this.nextStop(this.place) : this.afterKey(Math.floor(this.order[this.place].key)));
    return true;
  }

  back() {
    this.pause();
    this.sort();
    if (this.place === 0) return false;
    if (this.mode !== "time") {
      this.land(this.afterKey(Math.floor(this.order[this.place - 1].key) - 1));
    } else {
      let place = this.place - 1;
      while (place > 0 && !this.order[place - 1].stop) place -= 1;
      this.land(place);
    }
    return true;
  }

  /** To a value of the slider: seconds, tokens or forwards. */
  seek(value) {
    this.following = false;
    this.sort();
    this.land(this.afterKey(value));
  }

  /** To the position right after one event of one lane. */
  seekEvent(lane, index) {
    this.pause();
    this.sort();
    const place = this.order.findIndex((entry) => entry.lane === lane && entry.index === index);
    if (place >= 0) this.land(place + 1);
  }

  toStart() {
    this.following = false;
    this.sort();
    this.land(0);
  }

  toHead() {
    if (this.mode === "time" && this.following) {
      this.cursors = this.trace.lanes.map((lane) => lane.events.length);
      this.clock = this.end();
      this.place = this.cursors.reduce((sum, n) => sum + n, 0);
      return;
    }
    this.sort();
    this.land(this.head());
  }

  get atEnd() {
    return this.place >= this.trace.version;
  }

  /** The player's position as a value of the slider. */
  value() {
    return Math.max(0, ...this.cursors.map((cursor, lane) => (cursor ? this.measure(this.trace.lanes[lane], cursor) : 0)));
  }

  /** What a lane's first `cursor` events come to: seconds, tokens or forwards. */
  measure(lane, cursor) {
    if (this.mode === "tokens") return tokensAt(lane, cursor);
    return lane.events[cursor - 1][this.mode === "time" ? "at" : "forwards"];
  }

  /** The end of a lane so far, as a value of the slider. */
  endOf(lane) {
    return { time: lane.end, tokens: lane.tokens, forwards: lane.forwards.length }[this.mode];
  }

  end() {
    return Math.max(0, ...this.trace.lanes.map((lane) => this.endOf(lane)));
  }

  // The order of events

  /** How far a live run may be shown: by token count or forwards, lanes wait for the slowest one that is running. */
  head() {
    if (this.mode === "time" || this.trace.over) return this.order.length;
    const running = this.trace.lanes.filter((lane) => !lane.over);
    return running.length ? this.afterKey(Math.min(...running.map((lane) => this.endOf(lane)))) : this.order.length;
  }

  sort() {
    if (this.orderedAt === this.trace.version) return;
    const entries = this.trace.lanes.flatMap((lane, order) => entriesOf(lane, order, this.mode));
    entries.sort((a, b) => a.key - b.key || a.lane - b.lane || a.index - b.index);
    let due = 0;
    for (const entry of entries) entry.due = due = Math.max(due, this.mode === "forwards" ? entry.key : entry.at);
    this.order = entries;
    this.orderedAt = this.trace.version;
    // Keep what is shown: the place is right after the last event on screen.
    let place = entries.length;
    while (place > 0 && entries[place - 1].index >= this.cursors[entries[place - 1].lane]) place -= 1;
    this.move(place);
  }

  land(place) {
    this.move(place);
    this.clock = this.due(place);
    this.lastTick = null;
  }

  move(place) {
    const cursors = this.trace.lanes.map(() => 0);
    for (let i = 0; i < place; i++) cursors[this.order[i].lane] = this.order[i].index + 1;
    this.cursors = cursors;
    this.place = place;
  }

  due(place) {
    return place > 0 && this.order.length ? this.order[Math.min(place, this.order.length) - 1].due : 0;
  }

  /** The place after all events up to a key; those between two forwards belong to the first of them. */
  afterKey(key) {
    return upperBound(this.order.length, (i) => (this.mode === "forwards" ? Math.floor(this.order[i].key) : this.order[i].key), key);
  }

  nextStop(place) {
    let next = place + 1;
    while (next < this.order.length && !this.order[next - 1].stop) next += 1;
    return next;
  }
}

function tokensAt(lane, cursor) {
  for (let i = cursor - 1; i >= 0; i--) {
    if (LENGTHENS.has(lane.events[i].kind)) return lane.events[i].key;
  }
  return 0;
}

/** Whether a commit of one branch and the next event, of another branch, belong to one step of the player. */
function goesOnBeside(event, next) {
  return event.kind === "commit" && event.sequence > 0 && next.sequence > 0 && next.sequence !== event.sequence && BESIDE.has(next.kind);
}

function entriesOf(lane, order, mode) {
  const keyOf = { time: ({ at }) => at, tokens: ({ key }) => key, forwards: (event) => forwardKey(lane, event) }[mode];
  return lane.events.map((event, index) => ({
    lane: order,
    index,
    key: keyOf(event),
    at: event.at,
    stop: isStop(lane.events, index),
  }));
}

/** A step of the player ends with a draft, verdict or commit and its trailing events, such as the cache after a commit.
    Branches that grow side by side share one step. */
function isStop(events, index) {
  const next = events[index + 1];
  if (next && (TRAILERS.has(next.kind) || goesOnBeside(events[index], next))) return false;
  for (let i = index; i >= 0; i--) {
    if (STOPS.has(events[i].kind)) return true;
    if (!TRAILERS.has(events[i].kind)) return false;
  }
  return false;
}
