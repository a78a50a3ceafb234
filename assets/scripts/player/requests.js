// What a lane, or a token of it, is asked of the server: to stop, to be forked, to be looked into.

import { props, trigger } from "component";
import { prefersStillness } from "../components/elements.js";
import { pieceLabel } from "../components/pieces.js";
import { partsNamed } from "../lane/card.js";
import { SCORE } from "../run/headers.js";
import { askWhichToReplace } from "../stage/replacing.js";
import { inBase64 } from "../visit/keeping.js";

const FILE_ALONE = "This trace is from a file and has no model: press Run first";
const LEFT_BEHIND = "The server no longer has this run, and its settings were not kept: press Run first";
const TOO_LONG = "This run is too long to be sent back to the server: press Run first.";
const MOST_SENT = 1_800_000; // characters of a run that the server no longer has; less than a public page takes
const NOTHING_NAMED = "No overlay names a part of the network here: add one to the lane, such as features of a sparse autoencoder, run it and hold a word.";
const ONLY_PRESENTER = "Only the presenter of this class can run or ask a model";

export class Requests {
  constructor(app) {
    this.app = app;
  }

  stopLane(lane) {
    trigger("stop_lane", { lane });
  }

  forkRefusal(lane) {
    if (props.follows) return ONLY_PRESENTER;
    if (this.app.trace.lanes[lane].header.canvas) return "A canvas is not filled from left to right, so it cannot be forked";
    if (this.app.trace.fromFile) return FILE_ALONE;
    if (this.isGone && !this.app.trace.settings) return LEFT_BEHIND;
    if (this.app.trace.lanes[lane].header.remote) return "A server generated this text, so it cannot be continued here";
    if (this.app.trace.lanes[lane].header.strategy === SCORE) return "This text was scored, not generated: press Run to generate one";
    return this.app.ranHere || this.app.trace.restored ? "" : "A recording has no model: press Run first";
  }

  fork(lane, position, token, piece) {
    this.branch(lane, position, { token }, `Running lane ${lane + 1} again with “${pieceLabel(piece)}” as token ${position + 1}.`);
  }

  /** Fork with the user's own words. */
  write(lane, position, words) {
    this.branch(lane, position, { words }, `Running lane ${lane + 1} again with “${words}” from token ${position + 1} on.`);
  }

  branch(lane, position, taken, news) {
    this.runBeside(lane, "fork", { ...this.placeOf(lane, position), ...taken }, news);
  }

  /** Run a copy of a lane without a part of the network. */
  switchOff(lane, part) {
    const { run, lanes } = this.app.trace;
    this.runBeside(lane, "copy", { run, lane: lanes[lane].header.lane, part }, `Running a copy of lane ${lane + 1} with ${part} off.`);
  }

  /** The same for the first part that an overlay names at the held or marked token of the chosen lane. */
  switchOffNamed() {
    const { chosen, cards, selection } = this.app;
    const at = selection.heldOf(chosen) ?? selection.markOf(chosen);
    const [part] = at === null ? [] : partsNamed(cards[chosen].state, cards[chosen].text.shown[at]);
    const why = this.forkRefusal(chosen) && `${this.forkRefusal(chosen)}.`;
    if (!part || why) return this.app.say(part ? why : NOTHING_NAMED);
    this.app.card.hide();
    this.switchOff(chosen, part);
  }

  /** Ask the server for a fork or copy of a lane beside it; the other lanes stay. */
  runBeside(lane, word, asked, news) {
    askWhichToReplace(this.app, lane, word, (replaced) => {
      this.app.say(news);
      this.app.forkedFrom = asked.run;
      this.send({ ...asked, ...(replaced === undefined ? {} : { instead_of: replaced }) }, (sent) => trigger("fork", sent));
    });
  }

  /** Whether the server no longer has the shown run. */
  get isGone() {
    return this.app.trace.left && !this.app.visit.isOnServer(this.app.trace);
  }

  /** Request something about the shown run, with the run itself if the server no longer has it. */
  async send(what, act) {
    if (!this.isGone) return act(what);
    const kept = await inBase64(this.app.trace);
    if (kept.length > MOST_SENT) return this.app.say(TOO_LONG, true);
    act({ ...what, settings: this.app.trace.settings, kept });
  }

  placeOf(lane, position) {
    return { run: this.app.trace.run, lane: this.app.trace.lanes[lane].header.lane, sequence: this.app.cards[lane].text.shown[position].sequence, position };
  }

  tokenOf(lane, { sequence, position, id }) {
    return { run: this.app.trace.run, lane: this.app.trace.lanes[lane].header.lane, sequence, position, token: id };
  }

  lookRefusal(lane) {
    if (props.follows) return ONLY_PRESENTER;
    if (this.app.trace.lanes[lane].header.remote) return "The layers of a server's model cannot be looked into";
    if (this.app.trace.lanes[lane].header.canvas) return "The denoiser of this canvas has no layers to look into";
    if (this.app.trace.fromFile) return FILE_ALONE;
    if (this.isGone && !this.app.trace.settings) return LEFT_BEHIND;
    return this.app.trace.recorded ? "A recording has no model: press Run first" : "";
  }

  /** Request the logit lens and the attention before a token. */
  look(lane, token) {
    this.app.say(`Looking inside at token ${token.position + 1} of lane ${lane + 1}.`);
    this.send(this.tokenOf(lane, token), (sent) => trigger("look", sent));
  }

  /** Request the effect of each word of the prompt on a token. */
  attribute(lane, token) {
    this.app.say(`Leaving out each word of the prompt in turn, for token ${token.position + 1} of lane ${lane + 1}.`);
    this.send(this.tokenOf(lane, token), (sent) => trigger("attribute", sent));
  }

  /** Show an answer to one of these in its panel, or say why there is none. */
  take({ run, refused, inside, attributed }) {
    const { trace, inspector, inside: lens, attribution } = this.app;
    if (run !== trace.run) return;
    this.app.say(refused || "", Boolean(refused));
    const [panel, found] = inside ? [lens, inside] : [attribution, attributed];
    if (!found) return;
    panel.show(found);
    inspector.open(panel);
    panel.node.scrollIntoView({ block: "nearest", behavior: prefersStillness() ? "auto" : "smooth" });
  }
}
