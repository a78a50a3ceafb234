// The rules of the guessing game: rounds over the tokens of one run, which arrives from the server as it grows, and their costs.

export const LEAST = 1e-6; // probabilities have six digits: zero counts as this
const HARDEST = 5; // tokens listed in the summary
export const ELSE = "something else";

/** Surprisal of an option in bits. */
export function bitsOf(p) {
  return -Math.log2(Math.max(p, LEAST));
}

/** A deterministic hash of three numbers. */
function scrambled(seed, position, id) {
  let mixed = seed ^ Math.imul(position + 1, 0x9e3779b1) ^ Math.imul(id + 1, 0x85ebca6b);
  for (let i = 0; i < 2; i++) mixed = Math.imul(mixed ^ (mixed >>> 16), 0x45d9f3b);
  return (mixed ^ (mixed >>> 16)) >>> 0;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** One token to be guessed: the options, and each team's choice. */
class Round {
  constructor(token, position, seed, count, teams) {
    this.token = token;
    this.position = position;
    const order = ({ id }) => scrambled(seed, position, id);
    const likeliest = token.top.slice(0, count - 1).sort((a, b) => order(a) - order(b));
    this.options = [...likeliest, { id: null, piece: ELSE, p: 1 - sum(likeliest.map(({ p }) => p)) }];
    this.typed = []; // typed options, in addition to the offered ones
    this.picks = Array.from({ length: teams }, () => null);
    this.isOpen = false; // whether the probabilities are shown
  }

  get all() {
    return [...this.options, ...this.typed];
  }

  get isWhole() {
    return this.picks.every((pick) => pick !== null);
  }

  /** Whether an option is the token; "something else" is right if none of the offered options is. */
  isRight(option) {
    if (option.id !== null) return option.id === this.token.id;
    return this.options.every(({ id }) => id !== this.token.id);
  }

  /** Mean cost of a uniform guess among the offered options, in bits. */
  get blind() {
    return sum(this.options.map(({ p }) => bitsOf(p))) / this.options.length;
  }

  /** The option for a typed token: an existing one, or a new one. */
  typedOption(candidate) {
    const known = this.all.find(({ id }) => id === candidate.id);
    if (!known) this.typed.push(candidate);
    return known || candidate;
  }
}

/** The rounds of one text and their costs. */
export class Match {
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
    this.position = -1; // of the current or last token
    this.round = null;
    this.played = []; // rounds whose probabilities were shown
    this.isFinished = false;
    this.waits = false; // for the model
  }

  /** Go to the next token with an entropy above a bound in bits; if there is none, wait for the model or finish. */
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

  /** Score of each team, of sampling from the model, and of a uniform guess; costs are in bits, lower is better. */
  scores(names) {
    const right = (i) => this.played.filter((round) => round.isRight(round.picks[i])).length;
    const teams = names.map((name, i) => ({ name, team: i, bits: this.played.map(({ picks }) => bitsOf(picks[i].p)), right: right(i) }));
    const model = { name: "Sampling from the model", bits: this.played.map(({ token }) => token.entropy) };
    const blind = { name: "Uniform guess among the options", bits: this.played.map((round) => round.blind) };
    return [...teams, model, blind].map((row) => ({ ...row, last: row.bits[row.bits.length - 1], total: sum(row.bits) }));
  }

  /** The played tokens with the lowest probability. */
  get hardest() {
    return [...this.played].sort((a, b) => a.token.p - b.token.p).slice(0, HARDEST);
  }
}
