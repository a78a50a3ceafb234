// What the grammar allows before every token: how many tokens, how much probability it takes away, and what it kept the model from saying.

class MaskPanel extends Panel {
  constructor() {
    super({
      name: "mask", title: "Grammar mask", kinds: ["mask"], wide: true,
      empty: "Fills when a lane writes under a grammar: how many tokens each step allows, and what the model would have said instead.",
    });
  }

  look(card, app) {
    return `${card.state.version}/${app.markOf(card.order)}/${roomFor(card.record)}`;
  }

  draw(card, app) {
    const sequence = card.state.shown;
    const masks = [...sequence.masks.values()].filter((mask) => mask.position <= sequence.tokens.length).sort((a, b) => a.position - b.position);
    const marked = app.markOf(card.order);
    const chosen = maskFor(masks, marked) || masks[masks.length - 1] || null;
    setText(this.readout, chosen ? sayMask(chosen) : "no mask yet at this point");
    const columns = el("div", "mask-columns");
    columns.append(this.chart(card, app, masks, chosen, sequence), this.favourites(chosen, sequence, marked !== null));
    this.body.replaceChildren(columns);
  }

  chart(card, app, masks, chosen, sequence) {
    const host = el("div", "mask-chart");
    const width = Math.max(240, this.width > 720 ? this.width - 320 : this.width);
    const height = 190;
    const vocabulary = Math.max(10, card.record.header.vocabulary, ...masks.map((mask) => mask.vocabulary));
    const scale = new LogScale(width, height - 44, roomFor(card.record), vocabulary);
    const drawing = surface(width, height, `Tokens the grammar allowed before each of ${count(masks.length, "step")}`);
    drawing.append(...scale.axes());
    const bar = Math.max(1.5, Math.min(9, (scale.inner / scale.room) * 0.7));
    for (const mask of masks) drawing.append(...maskMarks(mask, scale, bar, mask === chosen));
    for (const run of forcedRuns(sequence.tokens)) drawing.append(forcedMark(run, scale, bar));
    const floor = height - 40;
    drawing.append(svg("text", { class: "tick", x: CHART.left - 6, y: floor + 20, "text-anchor": "end" }, "banned"));
    drawing.append(svg("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: floor + 32, y2: floor + 32 }));
    for (const mask of masks) drawing.append(bannedBar(mask, scale, bar, floor));
    walkPositions(drawing, (x) => scale.positionAt(x, Math.max(sequence.tokens.length, masks.length ? masks[masks.length - 1].position + 1 : 0)), app, card);
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-allowed", "allowed"), el("span", "key-forced", "forced run"), el("span", "key-accepting", "the text may end here"), el("span", "key-banned", "probability taken away"));
    host.append(drawing, legend);
    return host;
  }

  favourites(mask, sequence, marked) {
    const side = el("div", "favourites");
    if (!mask) return side;
    const token = sequence.tokens[mask.position];
    side.append(el("p", "favourites-title", `${marked ? "Before" : "Newest: before"} token ${mask.position + 1}${token ? ` “${pieceLabel(token.piece)}”` : ""}`));
    side.append(maskFacts(mask));
    if (mask.forced.length) side.append(el("p", "aside", `${count(mask.forced.length, "token")} written without asking the model.`));
    if (!mask.favourites.length) return side;
    side.append(el("p", "favourites-title", "What the model would rather have said"));
    for (const [, piece, raw] of mask.favourites) {
      const row = el("div", "row");
      const name = el("span", "piece");
      writePiece(name, piece, true);
      row.append(name, bars(raw, null), el("span", "num raw", percent(raw)));
      side.append(row);
    }
    return side;
  }
}

/** The mask that governed a position: its own, or the forced run that wrote it. */
function maskFor(masks, position) {
  if (position === null) return null;
  return masks.find((mask) => mask.position <= position && position < mask.position + Math.max(1, mask.forced.length)) || null;
}

function sayMask(mask) {
  return `${mask.allowed} of ${mask.vocabulary} tokens allowed, ${percent(mask.banned)} of the probability taken away`;
}

function maskFacts(mask) {
  const list = el("dl", "facts");
  const add = (name, value) => {
    const pair = el("div");
    pair.append(el("dt", "", name), el("dd", "", value));
    list.append(pair);
  };
  add("allowed", `${mask.allowed}`);
  add("banned", percent(mask.banned));
  add("may end", mask.accepting ? "yes" : "no");
  if (mask.state) add("state", mask.state.length > 40 ? mask.state.slice(0, 39) + "…" : mask.state);
  if (mask.seconds) add("mask took", `${fixed(mask.seconds * 1e6, 0)} µs`);
  return list;
}

/** Tokens on a logarithmic axis from 1 to the vocabulary. */
class LogScale extends Scale {
  constructor(width, height, room, top) {
    super(width, height, room, Math.log10(top));
  }

  allowed(number) {
    return this.y(Math.log10(Math.max(1, number)));
  }

  axes() {
    const parts = [];
    for (let power = 0; power <= this.top; power++) {
      const y = this.y(power);
      const label = power < 3 ? String(10 ** power) : `${10 ** (power - 3)}k`;
      parts.push(svg("line", { class: "grid", x1: CHART.left, x2: this.width - CHART.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: CHART.left - 6, y: y + 3.5, "text-anchor": "end" }, label));
    }
    parts.push(...this.positions(this.height - 6));
    return parts;
  }
}

function maskMarks(mask, scale, width, chosen) {
  const marks = [];
  const x = scale.x(mask.position);
  const y = scale.allowed(mask.allowed);
  if (chosen) marks.push(svg("line", { class: "cross", x1: x, x2: x, y1: CHART.top, y2: scale.height - CHART.bottom }));
  marks.push(svg("line", { class: "stem", x1: x, x2: x, y1: y, y2: scale.y(0) }));
  marks.push(svg("rect", { class: "allowed", x: x - width / 2, y: y - 2, width, height: 4, rx: 1.5, "data-position": mask.position, "data-allowed": mask.allowed }));
  if (mask.accepting) marks.push(svg("circle", { class: "accepting", cx: x, cy: Math.max(4, y - 8), r: 3 }));
  return marks;
}

/** Stretches of the text that the grammar wrote: [from, to) over token positions. */
function forcedRuns(tokens) {
  const runs = [];
  tokens.forEach((token, i) => {
    if (token.origin !== "forced") return;
    const last = runs[runs.length - 1];
    if (last && last.to === i) last.to += 1;
    else runs.push({ from: i, to: i + 1 });
  });
  return runs;
}

function forcedMark({ from, to }, scale, width) {
  const left = scale.x(from) - width / 2;
  const mark = svg("rect", { class: "forced-run", x: left, y: scale.y(0) - 4, width: scale.x(to - 1) + width / 2 - left, height: 8, rx: 2, "data-from": from, "data-to": to });
  mark.append(svg("title", {}, `${count(to - from, "token")} forced from token ${from + 1} on`));
  return mark;
}

function bannedBar(mask, scale, width, floor) {
  const height = 28 * Math.max(0, Math.min(1, mask.banned));
  return svg("rect", { class: "banned", x: scale.x(mask.position) - width / 2, y: floor + 32 - height, width, height });
}
