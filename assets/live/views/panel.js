// What the views under the lanes share: a titled panel that is there where the lane's header or events call for it, says what
// will fill it until something does, and draws only when something changed and it can be seen.

const REST = 16; // times as long as a drawing took

class Panel {
  /** `kinds` of events fill it; `expects` says of a header that they will come; `empty` stands there until they do. */
  constructor({ name, title, kinds, empty = "", expects = () => false, wide = false }) {
    Object.assign(this, { name, title, kinds, expects, wide });
    this.missed = Boolean(empty); // whether a reader may look for it in every lane, and is told where it is not there
    this.node = el("section", `panel panel-${name}${wide ? " wide" : ""}`);
    this.node.setAttribute("aria-label", title);
    this.heading = el("h3", "", title);
    this.readout = el("p", "readout");
    this.tools = el("div", "tools");
    this.head = el("div", "panel-head");
    this.head.append(this.heading, this.readout, this.tools);
    this.body = el("div", "panel-body");
    this.vacancy = el("p", "vacancy", empty);
    this.node.append(this.head, this.vacancy, this.body);
    this.inSight = true;
    this.restsUntil = 0;
    this.width = 0;
    this.drawn = "";
  }

  /** Whether the lane has anything for this view, now or later in its trace. */
  has(card) {
    return this.kinds.some((kind) => card.record.kinds.has(kind));
  }

  update(card, app) {
    const has = this.has(card);
    if (this.node.classList.contains("empty") === has || this.drawn === "") {
      this.node.classList.toggle("empty", !has);
      this.vacancy.hidden = has;
      this.body.hidden = this.tools.hidden = this.readout.hidden = !has;
    }
    this.node.hidden = !has && (card.record.over || !this.expects(card.record.header));
    if (!has) {
      this.drawn = "empty";
      return;
    }
    this.width ||= this.body.clientWidth; // later the observer of the page keeps it
    if (!this.inSight || !this.width) return;
    const look = `${card.order}/${app.trace.run}/${this.width}/${app.theme}/${this.look(card, app)}`;
    if (look === this.drawn || this.rests(app)) return;
    this.drawn = look;
    const start = performance.now();
    this.drawSafely(card, app);
    this.tellKind();
    this.restsUntil = performance.now() + REST * (performance.now() - start);
  }

  /** While the player plays, a view rests after each drawing, the longer the more it took: a long run must not hold up its text. */
  rests(app) {
    const left = app.player.playing ? this.restsUntil - performance.now() : 0;
    if (left <= 0) return false;
    clearTimeout(this.later);
    this.later = setTimeout(() => app.schedule(), left);
    return true;
  }

  /** A trace from a file may contradict itself; then this view says so and the others go on. */
  drawSafely(card, app) {
    try {
      this.draw(card, app);
    } catch (reason) {
      console.error(reason);
      setText(this.readout, "The events of this lane contradict each other here, so this view cannot be drawn.");
    }
  }

  /** Without a drawing there is nothing to save, and what is painted as pixels can only be saved as pixels. */
  tellKind() {
    const painted = this.body.querySelector("canvas.heat");
    this.node.classList.toggle("is-painted", Boolean(painted));
    this.node.classList.toggle("is-drawn", Boolean(painted || this.body.querySelector('svg[role="img"]')));
  }

  /** What the drawing depends on beside lane, width and theme. */
  look(card) {
    return card.state.version;
  }
}

/** One line for all views that a lane does not have. */
function sayAbsent(panels) {
  const names = panels.filter((panel) => panel.missed && panel.node.hidden).map(({ title }) => title.replace(/^[A-Z](?=[a-z])/, (letter) => letter.toLowerCase()));
  return names.length ? `Not in this lane: ${names.join(", ")}.` : "";
}

/** Whether a header names a part of one of these kinds. */
function hasPart(header, ...kinds) {
  return header.parts.some((part) => kinds.includes(part.kind));
}

/** A drawing surface in page pixels. */
function surface(width, height, label) {
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  drawing.append(svg("title", {}, label));
  return drawing;
}

/** A canvas that is sharp on any screen; draws in page pixels. */
function sharpCanvas(canvas, width, height) {
  const ratio = Math.max(2, window.devicePixelRatio || 1); // two at least, for a picture that is saved of it
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/** Last token position a chart has room for: all that is known of a lane that ended, else the next round number. */
function roomFor(record) {
  const known = Math.max(record.tokens, 1);
  if (record.over) return known;
  const limit = record.header.max_new_tokens || Infinity;
  return Math.max(known, Math.min(limit, Math.max(32, 2 ** Math.ceil(Math.log2(known + 1)))));
}

/** Round values for an axis from 0 to `top`. */
function ticks(top, wanted = 4) {
  const step = tickStep(top / wanted);
  const values = [];
  for (let value = 0; value <= top * 1.001; value += step) values.push(Number(value.toPrecision(6)));
  return values;
}

/** The next round number: 1, 2 or 5 with any number of zeros. */
function tickStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
}

/** Lets a pointer, or the arrow keys, walk over token positions of a chart. */
function walkPositions(drawing, positionAt, app, card) {
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    app.mark(card.order, positionAt(event.clientX - box.left));
  });
  drawing.addEventListener("pointerleave", () => app.mark(card.order, null));
  drawing.addEventListener("click", (event) => {
    const box = drawing.getBoundingClientRect();
    app.reveal(card.order, positionAt(event.clientX - box.left));
  });
}
