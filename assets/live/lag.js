// Whether the page keeps up with a run. A browser that takes longer for a frame than lies between two shows older and older news:
// it says so, is sent fewer frames with more in each until it has caught up, and then asks for more again.

const LATE = 0.7; // seconds by which a frame is later than it had to be, before the page calls that behind
const LOOKS = 10; // frames between two things that are asked: the first of them show what came of the one before
const EASE = 0.7; // the part of a pause that is asked for next where the page keeps up with it

class Lag {
  constructor() {
    this.restart();
  }

  restart() {
    this.beat = CLOCK; // seconds that are to lie between two frames
    this.least = Infinity; // the clocks of server and browser may differ, so lateness is counted from here
    this.taken = []; // when the latest frames were taken
  }

  /** A frame was taken whose oldest event is of `told`, both in seconds. Gives what should lie between two from now on, null where that stays. */
  take(told, now) {
    this.least = Math.min(this.least, now - told);
    this.taken.push(now);
    if (this.taken.length <= LOOKS) return null;
    const took = (now - this.taken.shift()) / LOOKS;
    const late = now - told - this.least - (this.beat - CLOCK); // the oldest event of a frame has waited for a whole beat
    if (late < LATE / 2) return this.ask(EASE * this.beat);
    return late < LATE ? null : this.ask(took * (1 + 2 * late)); // what waits to be taken is made up for in about half a second
  }

  ask(seconds) {
    const before = this.beat;
    this.beat = Math.max(CLOCK, Math.min(SLOWEST, seconds));
    if (this.beat === before) return null;
    this.taken = [];
    return this.beat;
  }
}
