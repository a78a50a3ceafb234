// Injected before the page's own scripts; records what the browser does in `window.noted` for measure_page.py.
//
// A frame arrives when the live view parses it. Its tokens are on screen when its last token is in the DOM after an animation
// frame was painted: a message posted in the frame arrives after painting.

(() => {
  const noted = (window.noted = { begin, scrub });
  const waiting = [];
  const bodies = new Map(); // by lane

  /** Discard the records so far. */
  function begin() {
    Object.assign(noted, { frames: [], latencies: [], shown: [], tasks: [], shifts: [], ticks: [] });
    waiting.length = 0;
  }

  begin();
  watch("longtask", ({ startTime, duration }) => noted.tasks.push([startTime, duration]));
  watch("layout-shift", ({ value, hadRecentInput }) => noted.shifts.push(hadRecentInput ? 0 : value));

  function watch(type, note) {
    new PerformanceObserver((list) => list.getEntries().forEach(note)).observe({ type, buffered: true });
  }

  const { parse } = JSON;
  JSON.parse = (...given) => {
    const value = parse(...given);
    if (value && value.run && value.oldest_at) arrive(value);
    return value;
  };

  function arrive({ oldest_at: oldest, events }) {
    noted.frames.push(performance.now());
    const ends = new Map(); // by lane: the position of its last token in this frame
    for (const { kind, lane, sequence, position, ids } of events) {
      if (kind === "commit" && !sequence) ends.set(lane, (position || 0) + ids.length - 1);
    }
    if (ends.size) waiting.push({ sent: oldest * 1000, ends });
  }

  /** Whether every lane shows its last token. */
  function isShown({ ends }) {
    return [...ends].every(([lane, last]) => {
      const stretches = bodyOf(lane)?.querySelectorAll(":scope > .stretch > .tokens");
      const span = stretches?.length ? stretches[stretches.length - 1].lastElementChild : null;
      return span && Number(span.dataset.i) >= last;
    });
  }

  /** The node with the text of a lane. A search through all tokens of the page in every frame would slow the page down. */
  function bodyOf(lane) {
    if (!bodies.get(lane)?.isConnected) bodies.set(lane, document.querySelector(`.lane[data-lane="${lane}"] .body`));
    return bodies.get(lane);
  }

  const painted = new MessageChannel();
  painted.port1.onmessage = () => {
    while (waiting.length && isShown(waiting[0])) {
      noted.shown.push(Date.now());
      noted.latencies.push(Date.now() - waiting.shift().sent);
    }
  };

  requestAnimationFrame(function tick(now) {
    noted.ticks.push(now);
    if (waiting.length) painted.port2.postMessage(null);
    requestAnimationFrame(tick);
  });

  /** Move the slider back and forth, one position per animation frame; resolves to the times of the frames, in ms. */
  function scrub(seconds) {
    const slider = document.querySelector(".live .scrub");
    const times = [];
    return new Promise((resolve) => {
      requestAnimationFrame(function step(now) {
        times.push(now);
        const passed = (now - times[0]) / 1000;
        slider.value = slider.max * Math.abs(1 - (passed % 2)); // from end to start and back in two seconds
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        if (passed < seconds) requestAnimationFrame(step);
        else resolve(times);
      });
    });
  }
})();
