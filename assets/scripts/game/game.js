// The guessing game: settings, text, options, probabilities and score. Teams, choices and costs stay in the browser; the rules are in
// rules.js.

import { element, props, server, watch } from "component";
import { button, el, option, setText } from "../components/elements.js";
import { count, fixed, percent } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { Choices, HIGHEST, MOST_TEAMS, OPTIONS } from "./choices.js";
import { bitsOf, ELSE, LEAST, Match } from "./rules.js";
import { hardestRounds, scoreTable } from "./scores.js";
import { badge, explanation, isElsewhere, isLinked, keyed, pieceNode, RECORDED, spoken } from "./words.js";

// --- the page

class Board {
  constructor(root) {
    this.root = root;
    this.choices = new Choices();
    this.match = null;
    this.team = 0; // the team that chooses next
    this.setup = el("div", "setup");
    this.stage = el("div", "stage");
    this.stage.tabIndex = -1; // takes the focus when the focused element is redrawn
    this.stage.append(el("p", "where", "The game begins with the first token of the text."));
    this.root.replaceChildren(this.stage, this.setup);
    document.addEventListener("keydown", (event) => this.root.isConnected && this.press(event));
    this.drawSetup();
  }

  take(value) {
    if (!value) return;
    const frame = JSON.parse(value);
    if (frame.game === RECORDED && isLinked()) return; // the text of the link follows
    if (!this.match || this.match.name !== frame.game) this.begin(new Match(frame));
    else this.match.take(frame);
    if (this.match.waits) this.next();
    else if (this.match.round) this.sayWhere();
  }

  begin(match) {
    this.match = match;
    this.next();
    this.drawSetup();
    if (match.name === RECORDED) return; // it is there when the page opens
    const { top } = this.stage.getBoundingClientRect();
    if (top < 0 || top > innerHeight / 2) this.stage.scrollIntoView({ block: "start" });
    this.stage.focus({ preventScroll: true });
  }

  // User actions

  next() {
    this.team = 0;
    this.match.next(this.choices.bound, this.choices.options, this.choices.teams);
    this.draw();
  }

  choose(option) {
    const { round } = this.match;
    if (round.isOpen) return;
    round.picks[this.team] = option;
    const left = round.picks.indexOf(null);
    if (left >= 0) this.team = left;
    this.mark();
  }

  reveal() {
    if (!this.match.round.isWhole) return this.mark();
    this.match.open();
    this.drawSetup();
    this.draw();
  }

  again() {
    this.match.restart();
    this.next();
    this.drawSetup();
  }

  finish() {
    this.match.finish();
    this.draw();
  }

  press(event) {
    if (!this.match || this.match.isFinished || !this.match.round || isElsewhere(event)) return;
    const { round } = this.match;
    const option = /^[1-6]$/.test(event.key) && !round.isOpen ? round.options[Number(event.key) - 1] : null;
    const goesOn = round.isOpen && ["Enter", "ArrowRight"].includes(event.key);
    const reveals = event.key === "Enter" && !round.isOpen && round.isWhole;
    if (!option && !goesOn && !reveals) return;
    event.preventDefault();
    if (option) this.choose(option);
    else if (goesOn) this.next();
    else this.reveal();
  }

  /** Find the first token of a word: among the recorded candidates, otherwise on the server. */
  async type(word) {
    const { match } = this;
    const { round } = match;
    const typed = word.trim();
    if (!typed) return this.say("Type a word first, or choose one of the options.");
    const noted = round.token.top.find(({ piece }) => piece.trim() === typed);
    const found = noted || (await this.ask(typed));
    if (match !== this.match || round !== match.round || round.isOpen) return;
    if (found.refused) return this.say(found.refused);
    const option = round.typedOption(found);
    this.choose(option);
    this.drawRows();
    const whole = option.piece.trim() === typed;
    this.say(whole ? `“${typed}” is chosen.` : `“${typed}” begins with the token “${pieceLabel(option.piece)}”, which is chosen.`);
  }

  async ask(word) {
    const past = this.match.tokens.slice(0, this.match.position);
    const last = past.length ? past[past.length - 1].piece : this.match.opening[this.match.opening.length - 1];
    this.say("Looking up its probability…");
    try {
      return await server.probability({ ids: [...this.match.ids, ...past.map(({ id }) => id)], word, spaced: /\s$/.test(last) });
    } catch (reason) {
      return { refused: "The server did not answer: try again, or choose one of the options." };
    }
  }

  // Drawing

  drawSetup() {
    const begun = Boolean(this.match && this.match.played.length);
    const options = this.menu("Options per round", OPTIONS, this.choices.options, (number) => {
      this.choices.options = number; // takes effect in the next round
    });
    this.setup.replaceChildren(this.teamFields(begun), options, this.roundFields());
  }

  teamFields(begun) {
    const group = el("div", "field");
    const numbers = Array.from({ length: MOST_TEAMS }, (_, i) => i + 1);
    const menu = this.menu("Teams", numbers, this.choices.teams, (value) => this.setTeams(value));
    menu.querySelector("select").disabled = begun;
    if (begun) menu.title = "Teams cannot change after the first round";
    group.append(menu, ...this.choices.shownNames.map((name, i) => this.nameField(name, i)));
    return group;
  }

  setTeams(number) {
    this.choices.teams = number;
    if (this.match && this.match.round) Object.assign(this.match.round, { picks: Array.from({ length: number }, () => null) });
    this.team = 0;
    this.drawSetup();
    this.setup.querySelector("select").focus();
    if (this.match) this.draw();
  }

  nameField(name, i) {
    const field = el("input", "name");
    Object.assign(field, { type: "text", value: name, maxLength: 24, spellcheck: false, autocomplete: "off" });
    field.dataset.team = i;
    field.setAttribute("aria-label", `Name of team ${i + 1}`);
    field.addEventListener("change", () => {
      this.choices.names[i] = field.value.trim() || `Team ${i + 1}`;
      if (this.match) this.draw();
    });
    return field;
  }

  menu(label, values, chosen, change) {
    const field = el("label", "menu", label);
    const select = el("select");
    for (const value of values) select.append(el("option", { value, selected: value === chosen }, String(value)));
    select.addEventListener("change", () => {
      change(Number(select.value));
      this.choices.keep();
    });
    field.append(select);
    return field;
  }

  roundFields() {
    const field = el("label", "menu", "Play ");
    const select = el("select", "which");
    select.append(option("", "every token"), option("above", "only tokens with entropy above"));
    select.value = this.choices.isPicky ? "above" : "";
    const bound = el("input", "bound");
    Object.assign(bound, { type: "number", min: 0, max: HIGHEST, step: 0.5, value: this.choices.above, hidden: !this.choices.isPicky });
    bound.setAttribute("aria-label", "Lowest entropy, in bits");
    const unit = el("span", "unit", "bits");
    unit.hidden = bound.hidden;
    const change = () => {
      this.choices.isPicky = select.value === "above";
      this.choices.above = Math.min(HIGHEST, Math.max(0, Number(bound.value) || 0));
      bound.hidden = unit.hidden = !this.choices.isPicky;
      this.choices.keep();
      this.skipQuiet();
    };
    for (const control of [select, bound]) control.addEventListener("change", change);
    field.append(select, bound, unit);
    return field;
  }

  /** Skip the current round if it is below the bound and no team has chosen. */
  skipQuiet() {
    const round = this.match && this.match.round;
    if (round && !round.isOpen && !round.picks.some(Boolean) && round.token.entropy <= this.choices.bound) this.next();
  }

  draw() {
    const hadFocus = this.stage.contains(document.activeElement);
    if (this.match.isFinished) this.drawSummary();
    else this.drawPlay();
    const text = this.stage.querySelector(".text");
    text.scrollTop = text.scrollHeight;
    if (hadFocus) this.stage.focus({ preventScroll: true });
  }

  drawPlay() {
    this.where = el("p", "where");
    this.where.setAttribute("role", "status");
    this.stage.replaceChildren(this.text(), this.where);
    if (this.match.round) this.drawRound();
    this.sayWhere();
  }

  /** The text so far, with a gap for the next token. */
  text() {
    const { match } = this;
    const node = el("p", "text");
    node.tabIndex = 0;
    node.setAttribute("aria-label", "The text so far");
    const opening = el("span", match.asked ? "opening asked" : "opening");
    for (const piece of match.opening) writePiece(opening, piece);
    node.append(opening);
    for (const token of match.tokens.slice(0, this.knownUpTo())) node.append(pieceNode(token.piece));
    if (match.round && match.round.isOpen) node.append(pieceNode(match.round.token.piece, "came"));
    else if (!match.isFinished) node.append(el("span", "gap", "?"));
    return node;
  }

  /** Number of visible tokens, without the one of an open round. */
  knownUpTo() {
    const { round, position, tokens } = this.match;
    if (round) return position;
    return this.match.isFinished && !this.match.played.length ? 0 : Math.min(position + 1, tokens.length);
  }

  drawRound() {
    this.rows = el("ol", "options");
    this.aside = el("div", "aside");
    this.said = el("p", "said");
    this.said.setAttribute("role", "status");
    this.stage.append(this.rows, this.aside, this.said, this.buttons());
    this.drawRows();
    if (this.match.round.isOpen) this.drawProbabilities();
    else this.aside.append(this.typing());
  }

  drawRows() {
    const { round } = this.match;
    this.rows.replaceChildren(...round.all.map((option, i) => this.row(option, i)));
    this.rows.classList.toggle("is-open", round.isOpen);
    this.rows.style.setProperty("--teams", this.choices.teams);
    this.mark();
  }

  row(option, i) {
    const { round } = this.match;
    const line = el("li");
    const node = button("option", "", "", () => this.choose(option));
    const key = round.typed.includes(option) ? "…" : String(i + 1);
    const piece = option.id === null ? el("span", "else", ELSE) : pieceNode(option.piece, "token");
    node.append(el("kbd", "", key), piece, el("span", "picks"));
    node.option = option;
    if (round.isOpen) this.open(node, option);
    line.append(node);
    return line;
  }

  /** Show the probability of an option. */
  open(node, option) {
    const { round } = this.match;
    const probability = Math.max(LEAST, option.p);
    const bar = el("span", "bar");
    bar.append(el("i"));
    bar.firstChild.style.width = `${100 * probability}%`;
    const number = el("span", "probability", percent(probability));
    number.dataset.p = option.p;
    const bits = el("span", "bits", `${fixed(bitsOf(option.p), 2)} bits`);
    node.append(bar, number, bits);
    node.classList.toggle("is-right", round.isRight(option));
    node.disabled = true;
  }

  /** Mark each option with the teams that chose it. */
  mark() {
    const { round } = this.match;
    for (const node of this.rows.querySelectorAll(".option")) {
      const teams = this.choices.shownNames.map((name, i) => ({ name, i })).filter(({ i }) => round.picks[i] === node.option);
      node.querySelector(".picks").replaceChildren(...teams.map(({ i, name }) => badge(i, name)));
      node.classList.toggle("is-picked", teams.length > 0);
      node.setAttribute("aria-label", spoken(node, teams, round));
    }
    this.sayWhere();
  }

  typing() {
    const form = el("form", "typing");
    const field = el("input", "word");
    Object.assign(field, { type: "text", maxLength: 40, spellcheck: false, autocomplete: "off", placeholder: "or type a word" });
    field.setAttribute("aria-label", "Your own word");
    const send = el("button", "quiet", "Choose");
    send.type = "submit";
    form.append(field, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.type(field.value);
      field.value = "";
      field.blur(); // so that keys go to the game again
    });
    return form;
  }

  /** The result of a round: entropy, explanation and score. */
  drawProbabilities() {
    const { token } = this.match.round;
    const entropy = el("p", "entropy");
    entropy.dataset.bits = token.entropy;
    const unsure = `, as for ${fixed(2 ** token.entropy, 1)} equally likely tokens. `;
    entropy.append("Entropy of this step: ", el("b", "", `${fixed(token.entropy, 2)} bits`), unsure);
    const isShown = this.match.round.all.some(({ id }) => id === token.id);
    if (!isShown) entropy.append("The token was “", pieceNode(token.piece, "token"), `”, probability ${percent(token.p)}.`);
    this.aside.replaceChildren(entropy, explanation(), scoreTable(this.match, this.choices.shownNames));
  }

  buttons() {
    const { round } = this.match;
    const line = el("div", "acts");
    const go = round.isOpen ? keyed("Enter", "Next", () => this.next()) : keyed("Enter", "Show probabilities", () => this.reveal());
    line.append(go);
    if (!round.isOpen) line.append(button("quiet", "Skip", "Show this token without scoring it", () => this.next()));
    line.append(button("quiet end", "End the game", "", () => this.finish()));
    return line;
  }

  sayWhere() {
    if (!this.where || this.match.isFinished) return;
    const { match } = this;
    if (match.waits) return setText(this.where, "The model is generating the next token…");
    const place = `Token ${match.position + 1} of ${match.tokens.length}${match.over ? "" : " so far"}`;
    setText(this.where, `${place} · ${this.toDo()}`);
    const go = this.stage.querySelector(".acts .go");
    if (go) go.disabled = !match.round.isOpen && !match.round.isWhole;
  }

  toDo() {
    const { round } = this.match;
    if (round.isOpen) return "probabilities shown";
    if (round.isWhole) return "all have chosen: show the probabilities";
    return this.choices.teams > 1 ? `${this.choices.names[this.team]} chooses` : "choose the next token";
  }

  say(sentence) {
    setText(this.said, sentence);
  }

  drawSummary() {
    const { match } = this;
    const parts = [el("h3", "", match.played.length ? `After ${count(match.played.length, "round")}` : "No round was played"), this.text()];
    if (match.played.length) parts.push(scoreTable(this.match, this.choices.shownNames), explanation(), el("h3", "", "Hardest tokens"), hardestRounds(match, this.choices.shownNames));
    else parts.push(el("p", "entropy", this.whyNone()));
    this.stage.replaceChildren(...parts, this.ways());
    this.drawSetup();
  }

  whyNone() {
    const highest = Math.max(0, ...this.match.tokens.map(({ entropy }) => entropy));
    if (!this.choices.isPicky || highest > this.choices.bound) return "The game ended before the first round.";
    const found = `No token of this text has an entropy above ${this.choices.above} bits; the highest is ${fixed(highest, 2)}`;
    return `${found}. Lower the bound, or play every token.`;
  }

  ways() {
    const line = el("div", "acts");
    const again = button("go", "Play again", "Play the same text again", () => this.again());
    const lanes = el("a", "quiet", "Open this run in the playground");
    lanes.href = this.match.lanes;
    line.append(again, lanes);
    return line;
  }
}

const board = new Board(element.querySelector(".game"));
watch("value", () => board.take(props.value));
board.take(props.value);
