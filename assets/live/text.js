// The text of a lane, one span for each token. Spans are only added at the end and taken from the end. A long text stands in
// stretches that end with a line, so that its next token lays out the last stretch alone.

const STRETCH = 120; // tokens after which a stretch ends with its line

class TextView {
  constructor(lane) {
    this.lane = lane;
    this.node = el("div", "text");
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "group");
    this.node.setAttribute("aria-label", `Text of lane ${lane + 1}: arrow keys go from token to token, Enter shows one`);
    this.body = el("div", "body");
    this.prompt = el("span", "prompt");
    this.ghosts = el("span", "ghosts");
    this.node.append(this.body);
    this.shown = []; // token objects, in step with the spans
    this.spans = [];
    this.stretches = []; // {node, tokens, from}: where its spans stand, and the index of the first
    this.openStretch();
    this.stretches[0].node.prepend(this.prompt);
    this.ghostKey = "";
    this.stuck = true; // keep the newest token in sight until the reader scrolls up
    this.node.addEventListener("scroll", () => {
      this.stuck = this.node.scrollTop + this.node.clientHeight >= this.node.scrollHeight - 24;
    }, { passive: true });
  }

  /** The prompt, folded to its last words when it is long. */
  setPrompt(header) {
    const pieces = header.prompt_pieces.length ? header.prompt_pieces : [header.prompt];
    this.promptEnd = pieces[pieces.length - 1];
    this.prompt.replaceChildren();
    const folded = pieces.length > 60;
    const early = el("span", "early");
    pieces.forEach((piece, i) => {
      const host = folded && i < pieces.length - 30 ? early : this.prompt;
      const span = el("span", "p");
      span.dataset.prompt = i;
      writePiece(span, piece);
      host.append(span);
    });
    if (!folded) return;
    early.hidden = true;
    const toggle = button("unfold", "", "", () => {
      early.hidden = !early.hidden;
      name();
    });
    const name = () => {
      setText(toggle, early.hidden ? `… ${pieces.length - 30} tokens of prompt` : "fold the prompt");
      toggle.setAttribute("aria-expanded", String(!early.hidden));
    };
    name();
    this.prompt.prepend(toggle, early);
  }

  draw(sequence, state, channels) {
    const { tokens, steps } = sequence;
    let same = Math.min(this.shown.length, tokens.length);
    while (same > 0 && this.shown[same - 1] !== tokens[same - 1]) same -= 1;
    this.takeBack(same);
    for (let i = same; i < tokens.length; i++) this.add(tokens[i], i);
    const { canvas } = state;
    this.body.classList.toggle("is-canvas", canvas.size > 0);
    tokens.forEach((token, i) => (canvas.filled.has(i) ? this.paintFilled(i, canvas.filled.get(i)) : this.paint(i, token, steps.get(i) || null, channels)));
    if (canvas.size && !tokens.length) this.drawCanvas(canvas);
    else this.drawGhosts(state.pendingRound(sequence.id));
  }

  openStretch() {
    const [node, tokens] = [el("div", "stretch"), el("span", "tokens")];
    node.append(tokens, this.ghosts);
    this.body.append(node);
    this.stretches.push({ node, tokens, from: this.spans.length });
  }

  /** The stretch the next token belongs to. */
  lastStretch() {
    const last = this.stretches[this.stretches.length - 1];
    const lineEnds = this.shown.length && this.shown[this.shown.length - 1].piece.endsWith("\n");
    if (!lineEnds || this.spans.length - last.from < STRETCH) return last;
    this.openStretch();
    return this.stretches[this.stretches.length - 1];
  }

  /** Only the first `left` tokens stay. */
  takeBack(left) {
    if (left === this.spans.length) return;
    this.node.classList.remove("full");
    for (const span of this.spans.splice(left)) span.remove();
    this.shown.length = left;
    while (this.stretches.length > 1 && this.stretches[this.stretches.length - 1].from >= left) this.stretches.pop().node.remove();
    this.stretches[this.stretches.length - 1].node.append(this.ghosts);
  }

  add(token, i) {
    const host = this.lastStretch().tokens;
    const span = el("span", "t");
    span.dataset.i = i;
    span.tabIndex = -1;
    span.isSoft = /^ \S+$/.test(token.piece) && /\S$/.test(i ? this.shown[i - 1].piece : this.promptEnd);
    writePiece(span, token.piece);
    if (token.letter) span.append(el("span", "letter", token.letter));
    this.shown.push(token);
    this.spans.push(span);
    host.append(span);
  }

  /** Colour one token, if what its colour depends on has changed. */
  paint(i, token, step, channels) {
    const span = this.spans[i];
    if (span.step === step && span.channels === channels) return;
    span.step = step;
    span.channels = channels;
    span.className = tokenClass(token, step, channels) + (span.isSoft ? " soft" : "") + (span === this.marked ? " chosen" : "");
  }

  /** A token that was filled in keeps the look it had on the canvas, whatever the colour of other lanes means. */
  paintFilled(i, fill) {
    const span = this.spans[i];
    if (span.fill === fill) return;
    span.fill = fill;
    dressCell(span, fill);
  }

  /** Guesses that are not settled: faint before the verdict, then kept or struck out. */
  drawGhosts(round) {
    const key = round ? `${round.number}/${round.verdict ? 1 : 0}` : "";
    if (key === this.ghostKey) return;
    this.ghostKey = key;
    this.ghosts.replaceChildren();
    if (!round) return;
    const path = round.mainPath();
    for (const node of path) this.ghosts.append(ghost(round, node));
    for (const node of round.refusedNodes()) this.ghosts.append(ghost(round, node));
    if (round.hasNext) this.ghosts.append(nextToken(round.verdict));
    const more = round.draft.tokens.length - path.length;
    if (!round.verdict && more > 0) this.ghosts.append(el("span", "more", `+${more} in branches`));
  }

  /** A canvas that is still being filled stands where the text will be. */
  drawCanvas(canvas) {
    const key = `canvas ${canvas.steps.length}/${canvas.size}`;
    if (key === this.ghostKey) return;
    this.ghostKey = key;
    this.ghosts.replaceChildren(...canvasCells(canvas));
  }

  /** Mark one token, from a chart or a card. */
  mark(i) {
    if (this.marked) this.marked.classList.remove("chosen");
    this.marked = i === null ? null : this.spans[i];
    if (this.marked) this.marked.classList.add("chosen");
  }

  /** A text that has filled its box has a fixed height, so that its next tokens lay out nothing but this text. */
  keepEndInSight() {
    const { node } = this;
    if (!this.stuck || node.scrollHeight <= node.clientHeight) return;
    node.scrollTop = node.scrollHeight;
    node.classList.add("full");
  }
}

/** All positions in order: filled ones with their token, the others as blank boxes; what the last step filled is framed. */
function canvasCells(canvas) {
  return Array.from({ length: canvas.size }, (_, position) => {
    const fill = canvas.filled.get(position);
    const cell = el("span", "cell open");
    cell.dataset.position = position;
    if (!fill) return cell;
    writePiece(cell, fill.piece, true);
    dressCell(cell, fill);
    cell.classList.toggle("fresh", fill.step === canvas.steps.length);
    return cell;
  });
}

/** Coloured by how unsure the model was, with the number of the step that filled it. */
function dressCell(cell, fill) {
  cell.className = `t cell ${confidenceClass(fill.confidence)}`;
  cell.dataset.step = fill.step;
  cell.title = sayFill(fill);
}

function confidenceClass(confidence) {
  return isNumber(confidence) ? "h" + Math.round(LEVELS * (1 - Math.max(0, Math.min(1, confidence)))) : "unknown";
}

function sayFill({ position, step, confidence }) {
  const sure = isNumber(confidence) ? `, confidence ${percent(confidence)}` : "";
  return `position ${position + 1}, filled in step ${step}${sure}`;
}

function ghost(round, node) {
  const span = el("span", "g " + round.nodeState(node));
  span.title = { pending: "a guess", kept: "accepted", refused: "refused", untested: "not tested" }[round.nodeState(node)];
  writePiece(span, round.draft.pieces[node] ?? "", true);
  return span;
}

function nextToken(verdict) {
  const span = el("span", "g next o-" + verdict.origin);
  span.title = ORIGINS[verdict.origin] ? ORIGINS[verdict.origin].label : "";
  writePiece(span, verdict.piece, true);
  return span;
}
