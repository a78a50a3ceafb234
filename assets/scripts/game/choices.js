// What is chosen for a game: teams, options and rounds, kept in the address.

import { isNumber } from "../components/numbers.js";

export const MOST_TEAMS = 4;
export const OPTIONS = [4, 5, 6]; // in a round, "something else" among them

export const HIGHEST = 20; // largest entropy bound, in bits

export class Choices {
  constructor() {
    const given = new URLSearchParams(location.hash.slice(1));
    const number = (name, fallback, low, high) => {
      const read = parseFloat(given.get(name));
      return isNumber(read) ? Math.min(high, Math.max(low, read)) : fallback;
    };
    this.teams = Math.round(number("teams", 1, 1, MOST_TEAMS));
    this.options = Math.round(number("options", 6, OPTIONS[0], OPTIONS[OPTIONS.length - 1]));
    this.isPicky = given.get("rounds") !== "every"; // whether tokens of low entropy are skipped
    this.above = number("above", 1, 0, HIGHEST);
    this.names = Array.from({ length: MOST_TEAMS }, (_, i) => `Team ${i + 1}`); // never in the address: they may be names of people
  }

  /** Tokens at or below this entropy, in bits, are skipped. */
  get bound() {
    return this.isPicky ? this.above : -1;
  }

  get shownNames() {
    return this.names.slice(0, this.teams);
  }

  keep() {
    const choices = { teams: this.teams, options: this.options, ...(this.isPicky ? { above: this.above } : { rounds: "every" }) };
    history.replaceState(null, "", "#" + new URLSearchParams(choices));
  }
}
