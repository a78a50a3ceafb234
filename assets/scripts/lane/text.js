// The text of a lane, one span per token. Spans are only appended and removed at the end. A long text is split into stretches
// that end where a line ends (at a line break, or in a long paragraph where a line wraps), so that a new token only lays out
// the last stretch.

import { composed, composingFrom, isInside } from "../components/composed.js";
import { boxOf, button, el, setText } from "../components/elements.js";
import { fixed, isNumber, isText, percent } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { thinkingParts } from "../components/thinking.js";
import { LEVELS, ORIGINS, tokenClass } from "./colour.js";
import { ThinkingFold } from "./thinking_fold.js";

const FAR = 1e7; // pixels; more than any text is high, so that its height need not be known
const STRETCH = 60; // tokens after which a stretch ends at the next line end

const INDENTED = /\n[ \t]{2,}|^[ \t]{3,}$/; // a text with such lines is code

export class TextView {
  constructor(lane) {
    this.lane = lane;
    this.node = el("div", "text");
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "group");
    this.node.setAttribute("aria-label", `Text of lane ${lane + 1}: arrow keys move between tokens, Enter pins one`);
    this.body = el("div", "body");
    this.prompt = el("span", "prompt");
    this.ghosts = el("span", "ghosts");
    this.thinking = new ThinkingFold(() => this.draw(...this.drawn));
    this.node.append(this.body);
    this.shown = []; // token objects, in step with the spans
    this.spans = [];
    this.stretches = []; // {node, tokens, from, cut}: its elements, the index of its first span, whether it starts within a paragraph
    this.openStretch();
    this.stretches[0].node.prepend(this.prompt);
    this.ghostKey = "";
    this.stuck = true; // follow the newest token until the reader scrolls up
    this.node.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.node.addEventListener("copy", (event) => this.copy(event));
    new ResizeObserver(() => this.fit()).observe(this.body);
    new ResizeObserver(() => { if (this.overflows) this.toEnd(); }).observe(this.node); // a lower box has the newest token in sight, too
  }

  /** A line that the upper edge cuts fades there, so that it does not look broken. */
  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.node;
    this.stuck = scrollTop + clientHeight >= scrollHeight - 24;
    this.node.classList.toggle("goes-on-above", scrollTop > 2);
  }

  /** The prompt; a long one is folded to its last words. */
  setPrompt(header) {
    const pieces = header.prompt_pieces.length ? header.prompt_pieces : [header.prompt];
    this.promptEnd = pieces[pieces.length - 1];
    this.prompt.replaceChildren();
    const folded = pieces.length > 60;
    const early = el("span", "early");
    const characters = composed(pieces);
    pieces.forEach((piece, i) => {
      const host = folded && i < pieces.length - 30 ? early : this.prompt;
      const span = el("span", "p");
      span.dataset.prompt = i;
      writePiece(span, piece, false, characters[i]);
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
    this.drawn = [sequence, state, channels];
    const { tokens, steps } = sequence;
    let same = Math.min(this.shown.length, tokens.length);
    while (same > 0 && this.shown[same - 1] !== tokens[same - 1]) same -= 1;
    this.truncate(same);
    for (let i = same; i < tokens.length; i++) this.add(tokens[i], i);
    this.thinking.take(thinkingParts(state.record.header, tokens), this.spans);
    const { canvas } = state;
    this.body.classList.toggle("is-canvas", canvas.size > 0);
    tokens.forEach((token, i) => (canvas.filled.has(i) ? this.paintFilled(i, canvas.filled.get(i)) : this.paint(i, token, steps.get(i) || null, channels, state.marks.get(i))));
    if (canvas.size && !tokens.length) this.drawCanvas(canvas);
    else this.drawGhosts(state.pendingRound(sequence.id), sequence.withdrawn);
  }

  openStretch(from = this.spans.length, to = from) {
    const [node, tokens] = [el("div", "stretch"), el("span", "tokens")];
    tokens.append(...this.spans.slice(from, to));
    node.append(tokens, this.ghosts);
    this.body.append(node);
    this.stretches.push({ node, tokens, from, cut: to > from });
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

  /** Split a long paragraph at line starts, far enough from its end that later tokens cannot move these lines. */
  cutLong() {
    const { from } = this.lastStretch;
    if (this.spans.length - from < 2 * STRETCH) return;
    const starts = this.lineStarts(from + STRETCH, this.spans.length - STRETCH);
    starts.forEach((at, i) => this.openStretch(at, starts[i + 1] ?? this.spans.length));
  }

  /** Tokens that begin a line, one per stretch. A blank that collapses at a line end has no width and is skipped. */
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

  /** Merge a stretch into the previous one. */
  join(at) {
    const [{ node, tokens }] = this.stretches.splice(at, 1);
    this.stretches[at - 1].tokens.append(...tokens.childNodes);
    node.remove();
    this.lastStretch.node.append(this.ghosts);
  }

  /** Lines wrap elsewhere at another width or font size: undo the splits within paragraphs. */
  fit() {
    const [before, size] = [this.size, `${this.body.clientWidth} ${getComputedStyle(this.body).fontSize}`];
    this.size = size;
    if (!before || before === size) return;
    for (let at = this.stretches.length - 1; at > 0; at--) if (this.stretches[at].cut) this.join(at);
  }

  /** Copy the text as it was generated, without line breaks from the splits. */
  copy(event) {
    const chosen = getSelection();
    if (!this.body.contains(chosen.anchorNode) || !this.body.contains(chosen.focusNode)) return;
    event.clipboardData.setData("text/plain", chosen.getRangeAt(0).cloneContents().textContent);
    event.preventDefault();
  }

  /** Remove all but the first `left` tokens. The line before them may wrap anew, so a split at the end is undone. */
  truncate(left) {
    if (left === this.spans.length) return;
    this.node.classList.remove("full");
    for (const span of this.spans.splice(left)) span.remove();
    this.shown.length = left;
    while (this.stretches.length > 1 && this.lastStretch.from >= left) this.stretches.pop().node.remove();
    if (this.lastStretch.cut) this.join(this.stretches.length - 1);
    this.lastStretch.node.append(this.ghosts);
    this.tear(left);
  }

  add(token, i) {
    const host = this.stretchToFill().tokens;
    const span = el("span", "t");
    span.dataset.i = i;
    span.tabIndex = -1;
    span.isSoft = /^ \S+$/.test(token.piece) && /\S$/.test(i ? this.shown[i - 1].piece : this.promptEnd);
    if (INDENTED.test(token.piece)) this.body.classList.add("is-code");
    this.shown.push(token);
    this.spans.push(span);
    this.write(composingFrom(this.shown, i));
    host.append(span);
  }

  /** Write the tokens from one on: the last one may have completed a character that began there. What they were known to be stays. */
  write(from) {
    const found = composed(this.shown.slice(from).map(({ piece }) => piece));
    let begun = from;
    found.forEach((said, i) => {
      const span = this.spans[from + i];
      const characters = said.map((one, k) => one ?? span.characters?.[k] ?? null);
      if (isInside(characters[0])) this.spans[begun].until = from + i; // the last token of its character
      if (characters.some((one) => isText(one) && !isInside(one))) begun = from + i;
      if (JSON.stringify(characters) === JSON.stringify(span.characters)) return;
      span.characters = characters;
      span.replaceChildren();
      writePiece(span, this.shown[from + i].piece, false, characters);
    });
  }

  /** A character that has lost its last bytes is shown as those that are left. */
  tear(left) {
    const at = this.spans.findLastIndex(({ until }) => until >= left);
    if (at < 0) return;
    for (const span of this.spans.slice(at)) span.characters = span.until = undefined;
    this.write(composingFrom(this.shown, at));
  }

  /** Colour one token if its step, its mark or the channels have changed. */
  paint(i, token, step, channels, mark) {
    const span = this.spans[i];
    const thinks = this.thinking.lookOf(i);
    if (span.step === step && span.channels === channels && span.mark === mark && span.thinks === thinks) return;
    Object.assign(span, { step, channels, mark, thinks });
    span.className = tokenClass(token, step, channels, mark) + thinks + (span.isSoft ? " soft" : "") + (span === this.marked ? ` ${this.markedAs}` : "");
  }

  /** A filled position keeps its colour from the canvas, independent of the chosen colour scale. */
  paintFilled(i, fill) {
    const span = this.spans[i];
    if (span.fill === fill) return;
    span.fill = fill;
    dressCell(span, fill);
  }

  /** Draft tokens of an open round: faint until verified, then accepted or struck out. Tokens that were rolled back are struck out
      until others take their place. */
  drawGhosts(round, withdrawn) {
    const key = `${round ? `${round.number}/${round.verdict ? 1 : 0}` : ""}/${withdrawn.length}`;
    if (key === this.ghostKey) return;
    this.ghostKey = key;
    this.ghosts.replaceChildren(...withdrawn.map(rolledBack));
    if (!round) return;
    const path = round.mainPath();
    const characters = composed(path.map((node) => round.draft.pieces[node] ?? ""));
    path.forEach((node, i) => this.ghosts.append(ghost(round, node, characters[i])));
    for (const node of round.rejectedNodes()) this.ghosts.append(ghost(round, node));
    if (round.hasNext) this.ghosts.append(nextToken(round.verdict));
    const more = round.draft.tokens.length - path.length;
    if (!round.verdict && more > 0) this.ghosts.append(el("span", "more", `+${more} in branches`));
  }

  /** A canvas that is still being filled, shown in place of the text. */
  drawCanvas(canvas) {
    const key = `canvas ${canvas.steps.length}/${canvas.size}`;
    if (key === this.ghostKey) return;
    this.ghostKey = key;
    this.ghosts.replaceChildren(...canvasCells(canvas));
  }

  /** Highlight one token, from a chart or a card: the selected one itself, or the one at its position in another lane. */
  mark(i, isItself) {
    if (this.marked) this.marked.classList.remove("chosen", "level");
    this.marked = i === null ? null : this.spans[i] || null;
    this.markedAs = isItself ? "chosen" : "level";
    if (this.marked) this.marked.classList.add(this.markedAs);
  }

  /** Scroll the text, not the page, to a token. */
  bringInSight(i) {
    const [span, { node }] = [this.thinking.over(i) || this.spans[i], this];
    if (!span) return;
    const [inner, outer] = [boxOf(span), boxOf(node)];
    if (inner.top < outer.top) node.scrollTop -= outer.top - inner.top + 8;
    else if (inner.bottom > outer.bottom) node.scrollTop += inner.bottom - outer.bottom + 8;
  }

  /** Whether the text is longer than its box, and its reader follows the newest token. */
  get overflows() {
    const { node } = this;
    return this.stuck && node.scrollHeight > node.clientHeight;
  }

  /** A text that fills its box gets a fixed height, so that new tokens do not lay out the rest of the page. */
  toEnd() {
    this.node.scrollTop = FAR;
    this.node.classList.add("full");
  }
}

/** All positions in order: filled ones with their token, masked ones as empty boxes; those of the last step are framed. */
function canvasCells(canvas) {
  return Array.from({ length: canvas.size }, (_, position) => {
    const fill = canvas.filled.get(position);
    const cell = el("span", "cell open");
    cell.dataset.position = position;
    const struck = canvas.before.get(position);
    if (struck?.until === canvas.steps.length) cell.append(takenBack(struck));
    if (!fill) return cell;
    writePiece(cell, fill.piece, true);
    dressCell(cell, fill);
    cell.classList.toggle("fresh", fill.step === canvas.steps.length);
    return cell;
  });
}

/** The token that this step took back, struck out where its successor or the mask stands. */
function takenBack({ piece, until }) {
  const old = el("s", "was");
  old.title = `taken back in step ${until}`;
  writePiece(old, piece, true);
  return old;
}

/** Colour a cell by confidence and label it with the step that filled it; one that changed its mind is marked. */
function dressCell(cell, fill) {
  cell.className = `t cell ${confidenceClass(fill.confidence)}${fill.was === null ? "" : " revised"}`;
  cell.dataset.step = fill.step;
  cell.title = sayFill(fill);
}

export function confidenceClass(confidence) {
  return isNumber(confidence) ? "h" + Math.round(LEVELS * (1 - Math.max(0, Math.min(1, confidence)))) : "unknown";
}

export function sayFill({ position, step, confidence, entropy, was }) {
  const confident = isNumber(confidence) ? `, confidence ${percent(confidence)}` : "";
  const open = isNumber(entropy) ? `, entropy ${fixed(entropy, 2)} nats` : "";
  const instead = isText(was) ? `, before it held “${pieceLabel(was.trim() || was)}”` : "";
  return `position ${position + 1}, filled in step ${step}${confident}${open}${instead}`;
}

function ghost(round, node, characters = []) {
  const span = el("span", "g " + round.nodeState(node));
  span.title = { pending: "draft token", kept: "accepted", passed: "passed, off the path", refused: "rejected", untested: "not tested" }[round.nodeState(node)];
  writePiece(span, round.draft.pieces[node] ?? "", true, characters);
  return span;
}

function rolledBack({ piece }) {
  const span = el("span", "g refused");
  span.title = "rolled back";
  writePiece(span, piece, true);
  return span;
}

function nextToken(verdict) {
  const span = el("span", "g next o-" + verdict.origin);
  span.title = ORIGINS[verdict.origin] ? ORIGINS[verdict.origin].label : "";
  writePiece(span, verdict.piece, true);
  return span;
}
