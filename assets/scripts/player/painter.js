// At most one paint per animation frame; during playback texts and views take turns, and both leave time for the model.

import { setText } from "../components/elements.js";
import { sayAbsent } from "../views/panel.js";

const PANEL_PAUSE = 80; // ms between two drawings of the views under the lanes
const UNSEEN_PAUSE = 500; // ms of rest after which the views out of sight are drawn, too
const NEXT_FRAME = 60; // ms until the next frame has probably arrived: views and texts are then laid out and painted together
const PAINT_REST = 1.5; // pause after a paint of the texts, in multiples of its duration: the model may run on the same processor
const VIEWS_REST = 4; // pause of the views, in multiples of the duration of theirs: texts go first, and do not wait for it

export class Painter {
  constructor(app) {
    this.app = app;
    this.frame = this.resting = null; // the pending animation frame, or the timer of a pause before it
    // earliest times of the next paints during playback: a long text must not keep the page busy
    this.paintsAgain = this.panelsAgain = 0;
    this.panelsAt = -PANEL_PAUSE; // when the views were painted last
    this.begin();
  }

  /** Another run is shown. */
  begin() {
    this.viewsAlone = false;
    this.numbersLook = "";
  }

  /** Paint in the next animation frame; during playback, after a pause. */
  schedule() {
    this.grown = true; // what there is to draw, perhaps while a frame for the views is due
    const rest = this.app.player.playing ? this.paintsAgain - performance.now() : 0;
    if (this.frame || (this.resting && rest > 0)) return;
    clearTimeout(this.resting);
    this.resting = rest > 1000 / 60 ? setTimeout(() => this.paintNext(), rest) : null;
    if (!this.resting) this.paintNext();
  }

  paintNext() {
    this.resting = null;
    this.frame = requestAnimationFrame((now) => {
      this.frame = null;
      this.paint(now);
      const ended = performance.now();
      if (this.panelsAt === now) this.panelsAgain = ended + VIEWS_REST * (ended - now);
      else this.paintsAgain = ended + PAINT_REST * (ended - now);
    });
  }

  paint(now) {
    if (!this.app.cards.length || !this.app.root.isConnected) return;
    if (this.viewsAlone) {
      this.drawPanels(now);
      return this.grown ? this.schedule() : undefined;
    }
    const more = this.app.player.tick(now);
    this.app.bar.draw(this.app.player, this.app.trace, this.app.chosen);
    const atHead = this.app.player.atEnd;
    const changed = this.app.cards.map((card, i) => card.draw(this.app.player.cursors[i], this.app.channels, atHead));
    if (changed.some(Boolean)) {
      for (const card of this.app.cards) card.text.cutLong();
      if (this.app.player.playing || atHead) this.keepEndsInSight();
      if (!this.app.card.node.hidden && !this.app.card.anchor.isConnected) this.app.card.hide();
    }
    this.drawPanels(now, changed.some(Boolean));
    if (atHead && this.app.trace.over) this.app.announceEnd();
    if (more && !this.app.player.following) this.schedule(); // a followed run has nothing to draw until new events arrive
  }

  /** All texts are measured before the first is scrolled: each scrolling would make the next measurement lay out the page again. */
  keepEndsInSight() {
    const overflowing = this.app.cards.filter(({ text }) => text.overflows);
    for (const { text } of overflowing) text.toEnd();
  }

  /** During playback, a frame that draws texts leaves the views to the next one: together they would take too long. */
  drawPanels(now, textsDrawn = false) {
    clearTimeout(this.later);
    const wait = this.app.player.playing ? Math.max(PANEL_PAUSE + this.panelsAt, this.panelsAgain) - now : 0;
    if (wait > 0) {
      this.later = setTimeout(() => this.schedule(), wait + NEXT_FRAME);
      return;
    }
    this.viewsAlone = textsDrawn && this.app.player.playing;
    if (this.viewsAlone) {
      this.schedule();
      this.grown = false;
      return;
    }
    this.panelsAt = now;
    this.drawNumbers();
    this.app.inspector.update();
    for (const panel of this.app.panels) panel.update(this.app);
    this.app.inspector.say();
    setText(this.app.absent, sayAbsent(this.app.panels, this.app.cards));
    clearTimeout(this.unseen);
    if (!this.app.player.playing) this.unseen = setTimeout(() => this.app.panels.forEach((panel) => panel.updateUnseen(this.app)), UNSEEN_PAUSE);
  }

  /** The numbers of the lanes, at the pace of the views: digits that change faster cannot be read, and delay the text. */
  drawNumbers() {
    const look = `${this.app.trace.run}/${this.app.cards.map(({ state }) => state.version)}`;
    if (look === this.numbersLook) return;
    this.numbersLook = look;
    for (const card of this.app.cards) card.drawNumbers(this.app.cards);
  }
}
