// The frames of a run by a stream of their own, server-sent events: for each message of Gradio, the browser goes through all components of
// the page. Gradio brings the first frames, and the last one in any case; a stream that fails is replaced by the whole run, which Gradio
// brings.

import { trigger } from "component";

const PATIENCE = 8000; // ms that a stream may take to begin, be disconnected, or be behind Gradio
const ONE_TAB = "decoding-playground.streams"; // over HTTP/1.1 the tabs of a browser share six connections, of which Gradio takes two each

export class Streams {
  /** `take` takes the frames. */
  constructor(take) {
    this.take = take;
    this.open = new Map(); // by run
    this.release = null; // gives up the lock that only one tab has
    this.blocked = false; // whether a stream has brought nothing, as behind some proxies
  }

  /** Open the stream of a run, unless another tab has one or may have one. */
  async follow(run) {
    const release = this.blocked ? null : this.release || (await locked(ONE_TAB));
    this.release ||= release;
    if (!this.release) return trigger("missed", { run });
    const source = new EventSource(`./frames/${run}`);
    const stream = { source, heard: false, late: null };
    this.open.set(run, stream);
    this.wait(run);
    source.addEventListener("frame", ({ data }) => this.receive(run, JSON.parse(data)));
    source.addEventListener("open", () => this.inTime(stream));
    source.addEventListener("error", () => (source.readyState === EventSource.CLOSED ? this.lose(run) : this.wait(run)));
  }

  receive(run, frame) {
    const stream = this.open.get(run);
    this.inTime(stream);
    if (!stream.heard) trigger("heard", { run });
    stream.heard = true;
    if (frame.state === "done") this.close(run);
    this.take(frame);
  }

  /** Whether a frame from Gradio is to be left to the stream, which has not brought those before it yet. */
  leaves(frame, next) {
    if (!this.open.has(frame.run) || frame.headers || frame.n <= next) return false;
    this.wait(frame.run);
    return true;
  }

  wait(run) {
    this.open.get(run).late ??= setTimeout(() => this.lose(run), PATIENCE);
  }

  inTime(stream) {
    clearTimeout(stream.late);
    stream.late = null;
  }

  /** Do without the stream: Gradio brings the frames, first those that are missing. */
  lose(run) {
    this.blocked ||= !this.open.get(run).heard;
    this.close(run);
    trigger("missed", { run });
  }

  close(run) {
    const stream = this.open.get(run);
    this.inTime(stream);
    stream.source.close();
    this.open.delete(run);
    if (this.open.size) return;
    this.release();
    this.release = null;
  }
}

/** Take a lock; resolves to a function that gives it up, null if another tab has it or, as over plain HTTP, there are no locks. */
function locked(name) {
  return new Promise((resolve) => {
    const hold = (lock) => (lock ? new Promise((release) => resolve(release)) : resolve(null));
    if (navigator.locks) navigator.locks.request(name, { ifAvailable: true }, hold).catch(() => resolve(null));
    else resolve(null);
  });
}
