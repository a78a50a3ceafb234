// Traces that are opened from files.

import { count } from "../components/numbers.js";
import { LARGEST_FILE, readTrace, Trace } from "../run/trace.js";
import { inBase64 } from "../visit/keeping.js";

export class OpenedFiles {
  constructor(app) {
    this.app = app;
  }

  open(file) {
    if (!file) return;
    if (file.size > LARGEST_FILE) return this.app.say("This file is larger than 200 MB: open a smaller trace.", true);
    file.text().then((text) => this.show(file.name, readTrace(text))).catch((reason) => this.app.say(whyNotOpened(reason), true));
  }

  show(name, frame) {
    const [before, trace] = [this.app.trace, new Trace()];
    trace.take(frame);
    try {
      this.app.begin(trace);
    } catch (reason) {
      this.app.visit.forget(trace);
      if (before.run) this.app.returnTo(before);
      throw reason;
    }
    this.app.say(`Opened ${name}: ${count(frame.headers.length, "lane")}, ${count(frame.events.length, "event")}.`);
    document.dispatchEvent(new CustomEvent("trace-opened", { detail: () => inBase64(trace) })); // for a class
    this.app.schedule();
  }
}

function whyNotOpened(reason) {
  if (reason instanceof DOMException) return "This could not be read: choose a single trace file, not a folder.";
  const broken = reason instanceof TypeError || reason instanceof RangeError;
  return broken ? "This trace cannot be shown: some of its events are malformed." : reason.message;
}
