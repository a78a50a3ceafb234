// Flow control. A browser that needs longer for a frame than the interval between frames falls behind: it then requests a longer
// interval (fewer, larger frames) until it has caught up, and shortens it again afterwards.

import { CLOCK, SLOWEST } from "python";

const LATE = 0.7; // seconds of avoidable delay beyond which the page is behind
const LOOKS = 10; // frames between two requests: they show the effect of the previous one
const EASE = 0.7; // factor by which the interval shrinks while the page keeps up

export class Lag {
  constructor() {
    this.restart();
  }

  restart() {
    this.beat = CLOCK; // seconds between two frames, as requested
    this.least = Infinity; // smallest delay seen: removes the offset between the clocks of server and browser
    this.taken = []; // arrival times of the latest frames
  }

  /** Note a frame that arrived `now` and whose oldest event is from `sent`, in seconds. Returns the new interval, null if it is unchanged. */
  take(sent, now) {
    this.least = Math.min(this.least, now - sent);
    this.taken.push(now);
    if (this.taken.length <= LOOKS) return null;
    const took = (now - this.taken.shift()) / LOOKS;
    const late = now - sent - this.least - (this.beat - CLOCK); // the oldest event of a frame has waited for a whole interval
    if (late < LATE / 2) return this.ask(EASE * this.beat);
    return late < LATE ? null : this.ask(took * (1 + 2 * late)); // works off the backlog in about half a second
  }

  ask(seconds) {
    const before = this.beat;
    this.beat = Math.max(CLOCK, Math.min(SLOWEST, seconds));
    if (this.beat === before) return null;
    this.taken = [];
    return this.beat;
  }
}
