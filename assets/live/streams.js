// The frames of a run by a stream of their own, server-sent events: for each message of Gradio, the browser goes through all components of
// the page. Gradio brings frames until the first one has come by the stream, and the last one in any case; a stream that fails is replaced
// by the whole run, which Gradio brings.

const PATIENCE = 5000; // ms that a stream may be disconnected, or behind Gradio
const ONE_TAB = "decoding-playground.streams"; // over HTTP/1.1 the tabs of a browser share six connections, of which Gradio takes two each

class Streams {
  /** `take` takes the frames. */
  constructor(take) {
    this.take = take;
    this.open = new Map(); // by run
    this.release = null; // gives up the lock that only one tab has
  }

  /** Open the stream of a run, unless another tab has one or may have one. */
  async follow(run) {
    const release = this.release || (await locked(ONE_TAB));
    this.release ||= release;
    if (!this.release) return;
    const source = new EventSource(`./frames/${run}`);
    const stream = { source, heard: false, late: null };
    this.open.set(run, stream);
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

  /** Do without the stream; if frames came by it, Gradio has to bring those that are missing. */
  lose(run) {
    const { heard } = this.open.get(run);
    this.close(run);
    if (heard) trigger("missed", { run });
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
