// The rules of the guessing game: rounds over the tokens of one run, which comes from the server as it grows, and the points made in
// them. All that is said of the model is in that run.

const LEAST = 1e-6; // odds come with six digits: what rounds to nothing counts as this
const HARDEST = 5; // tokens that the summary names
const ELSE = "something else";

/** How surprising an option is: half the odds cost one bit more. */
function bitsOf(p) {
  return -Math.log2(Math.max(p, LEAST));
}

/** A number that follows from three others and looks like chance. */
function scrambled(seed, position, id) {
  let mixed = seed ^ Math.imul(position + 1, 0x9e3779b1) ^ Math.imul(id + 1, 0x85ebca6b);
  for (let i = 0; i < 2; i++) mixed = Math.imul(mixed ^ (mixed >>> 16), 0x45d9f3b);
  return (mixed ^ (mixed >>> 16)) >>> 0;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** One token to be guessed: what there is to choose from, and what each team chose. */
class Round {
  constructor(token, position, seed, count, teams) {
    this.token = token;
    this.position = position;
    const order = ({ id }) => scrambled(seed, position, id);
    const likeliest = token.top.slice(0, count - 1).sort((a, b) => order(a) - order(b));
    this.options = [...likeliest, { id: null, piece: ELSE, p: 1 - sum(likeliest.map(({ p }) => p)) }];
    this.typed = []; // options that were typed, beside those on offer
    this.picks = Array.from({ length: teams }, () => null);
    this.isOpen = false; // whether the odds are laid open
  }

  get all() {
    return [...this.options, ...this.typed];
  }

  get isWhole() {
    return this.picks.every((pick) => pick !== null);
  }

  /** Whether an option is what came; "something else" is, where none of the others on offer came. */
  isRight(option) {
    if (option.id !== null) return option.id === this.token.id;
    return this.options.every(({ id }) => id !== this.token.id);
  }

  /** What a blind guess at the options on offer costs on average. */
  get blind() {
    return sum(this.options.map(({ p }) => bitsOf(p))) / this.options.length;
  }

  /** The option for a typed token: one that is there already, or a new one. */
  typedOption(candidate) {
    const known = this.all.find(({ id }) => id === candidate.id);
    if (!known) this.typed.push(candidate);
    return known || candidate;
  }
}

/** The rounds of one text and the points made in them. */
class Match {
  constructor(frame) {
    this.name = frame.game;
    this.take(frame);
    this.restart();
  }

  take(frame) {
    const { seed, over, lanes, opening, asked, ids, tokens } = frame;
    Object.assign(this, { seed, over, lanes, opening, asked, ids, tokens });
  }

  restart() {
    this.position = -1; // of the token that is guessed, or was last
    this.round = null;
    this.played = []; // rounds whose odds were laid open
    this.isFinished = false;
    this.waits = false; // for the model to write on
  }

  /** Go on to the next token above a bound of entropy in bits; without one, wait for the model or finish. */
  next(above, count, teams) {
    let position = this.round || this.waits ? this.position + 1 : Math.max(0, this.position);
    while (position < this.tokens.length && this.tokens[position].entropy <= above) position += 1;
    const token = this.tokens[position];
    this.waits = !token && !this.over;
    this.isFinished = !token && this.over;
    this.position = token ? position : this.tokens.length - 1;
    this.round = token ? new Round(token, position, this.seed, count, teams) : null;
  }

  open() {
    this.round.isOpen = true;
    this.played.push(this.round);
  }

  finish() {
    this.isFinished = true;
    this.waits = false;
  }

  /** Rows of the score: each team, the model as it would draw, and a blind guess; points are bits, the fewer the better. */
  scores(names) {
    const right = (i) => this.played.filter((round) => round.isRight(round.picks[i])).length;
    const teams = names.map((name, i) => ({ name, team: i, bits: this.played.map(({ picks }) => bitsOf(picks[i].p)), right: right(i) }));
    const model = { name: "The model, drawing by its odds", bits: this.played.map(({ token }) => token.entropy) };
    const blind = { name: "A blind guess at the options", bits: this.played.map((round) => round.blind) };
    return [...teams, model, blind].map((row) => ({ ...row, last: row.bits[row.bits.length - 1], total: sum(row.bits) }));
  }

  /** The tokens that surprised the model most, among those played. */
  get hardest() {
    return [...this.played].sort((a, b) => a.token.p - b.token.p).slice(0, HARDEST);
  }
}
