// The text of a lane, one span for each token. Spans are only added at the end and taken from the end. A long text stands in
// stretches that end with a line, so that its next token lays out the last stretch alone: with a line break, or in a paragraph that
// grows long, where a line ends by itself.

const STRETCH = 60; // tokens after which a stretch ends with its line

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
    this.stretches = []; // {node, tokens, from, cut}: where its spans stand, the index of the first, and whether it goes on in the middle of a paragraph
    this.openStretch();
    this.stretches[0].node.prepend(this.prompt);
    this.ghostKey = "";
    this.stuck = true; // keep the newest token in sight until the reader scrolls up
    this.node.addEventListener("scroll", () => {
      this.stuck = this.node.scrollTop + this.node.clientHeight >= this.node.scrollHeight - 24;
    }, { passive: true });
    this.node.addEventListener("copy", (event) => this.copy(event));
    new ResizeObserver(() => this.fit()).observe(this.body);
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

  openStretch(from = this.spans.length, cut = false) {
    const [node, tokens] = [el("div", "stretch"), el("span", "tokens")];
    tokens.append(...this.spans.slice(from));
    node.append(tokens, this.ghosts);
    this.body.append(node);
    this.stretches.push({ node, tokens, from, cut });
  }

  get lastStretch() {
    return this.stretches[this.stretches.length - 1];
  }

  /** The stretch the next token belongs to. */
  stretchToFill() {
    const lineEnds = this.shown.length && this.shown[this.shown.length - 1].piece.endsWith("\n");
    if (lineEnds && this.spans.length - this.lastStretch.from >= STRETCH) this.openStretch();
    return this.lastStretch;
  }

  /** Cut a paragraph that has grown long where lines begin, and far enough from its end that no token to come moves those lines. */
  cutLong() {
    const { from } = this.lastStretch;
    if (this.spans.length - from < 2 * STRETCH) return;
    for (const at of this.lineStarts(from + STRETCH, this.spans.length - STRETCH)) this.openStretch(at, true);
  }

  /** Tokens that begin a line, one for each stretch. A blank that vanishes at the end of a line is no part of that line. */
  lineStarts(from, to) {
    const edge = this.lastStretch.node.getBoundingClientRect().left + 0.5;
    const starts = [];
    for (let i = from; i <= to; i++) {
      const seen = [...this.spans[i].getClientRects()].find((box) => box.width > 0);
      if (!seen || seen.left > edge) continue;
      starts.push(i);
      i += STRETCH;
    }
    return starts;
  }

  /** Put a stretch back to the one whose paragraph it goes on with. */
  join(at) {
    const [{ node, tokens }] = this.stretches.splice(at, 1);
    this.stretches[at - 1].tokens.append(...tokens.childNodes);
    node.remove();
    this.lastStretch.node.append(this.ghosts);
  }

  /** Lines of another width, or of other letters, end elsewhere. */
  fit() {
    const [before, size] = [this.size, `${this.body.clientWidth} ${getComputedStyle(this.body).fontSize}`];
    this.size = size;
    if (!before || before === size) return;
    for (let at = this.stretches.length - 1; at > 0; at--) if (this.stretches[at].cut) this.join(at);
  }

  /** Where a paragraph is cut is nothing to a reader: what is copied is the text as it was written. */
  copy(event) {
    const chosen = getSelection();
    if (!this.body.contains(chosen.anchorNode) || !this.body.contains(chosen.focusNode)) return;
    event.clipboardData.setData("text/plain", chosen.getRangeAt(0).cloneContents().textContent);
    event.preventDefault();
  }

  /** Only the first `left` tokens stay. What is taken may have held a line where it is, so a cut before it is undone. */
  takeBack(left) {
    if (left === this.spans.length) return;
    this.node.classList.remove("full");
    for (const span of this.spans.splice(left)) span.remove();
    this.shown.length = left;
    while (this.stretches.length > 1 && this.lastStretch.from >= left) this.stretches.pop().node.remove();
    if (this.lastStretch.cut) this.join(this.stretches.length - 1);
    this.lastStretch.node.append(this.ghosts);
  }

  add(token, i) {
    const host = this.stretchToFill().tokens;
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
