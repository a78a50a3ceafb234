// The token that is pointed at or held: it is marked in every lane, and has a card.

export class Selection {
  constructor(app) {
    this.app = app;
    this.begin();
  }

  /** Another run is shown. */
  begin() {
    this.marked = { lane: -1, position: null };
    this.selected = null; // the token held last, for a link
  }

  /** The selected position in one lane, or null if its text does not reach it. A selected token selects its position in every lane. */
  markOf(lane) {
    const { position } = this.marked;
    return position !== null && this.app.cards[lane].text.spans[position] ? position : null;
  }

  /** The held position in one lane, or null if no token is held or its text does not reach it. */
  heldOf(lane) {
    const { pinned, token } = this.app.card;
    return pinned && this.app.cards[lane].text.spans[token.position] ? token.position : null;
  }

  mark(lane, position) {
    if (this.marked.lane === lane && this.marked.position === position) return;
    this.marked = { lane, position };
    for (const card of this.app.cards) card.text.mark(position, card.order === lane);
    this.app.bar.point(this.app.player, this.app.trace.lanes[lane], position);
    this.app.schedule();
  }

  /** Back to the token of the pinned card, or to none. */
  unmark() {
    const { pinned, token, lane } = this.app.card;
    this.mark(pinned ? lane : -1, pinned ? token.position : null);
  }

  /** Scroll to a token and pin its card. */
  reveal(lane, position) {
    const card = this.app.cards[lane];
    const span = position === null ? null : card.text.spans[position];
    if (!span) return;
    card.text.thinking.open(position);
    span.scrollIntoView({ block: "nearest" });
    this.showCard(span, true);
  }

  showCard(span, pinned) {
    const card = this.app.cards.find((one) => one.text.node.contains(span));
    const token = card && card.text.shown[Number(span.dataset.i)];
    if (!token) return;
    this.mark(card.order, Number(span.dataset.i));
    if (pinned) this.selected = { lane: card.order, position: Number(span.dataset.i) }; // for a link, also when the card is closed
    this.app.card.show(span, card.order, card.state, token, pinned);
    if (pinned) this.app.inspector.hold(card.order);
    this.app.schedule(); // a pinned card shows its round in the views, also when its token is already marked
    if (pinned || this.isAtRest) for (const other of this.app.cards) if (other !== card) other.text.bringInSight(Number(span.dataset.i));
  }

  /** Whether the texts stand still, so that pointing at one may scroll the others. */
  get isAtRest() {
    return this.app.trace.over && !this.app.player.playing;
  }

  unpin() {
    this.app.card.hide();
    this.mark(-1, null);
    this.app.schedule();
  }
}
