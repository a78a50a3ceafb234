// A question of a lesson: the prediction, and what the visitor's run answers.

import { fixed, isNumber } from "../components/numbers.js";

export const PREDICT = "Make a prediction first. Until then the results on the page are covered.";

/** A question, the visitor's prediction, and the answer of a run. */
export class Asked {
  constructor(question) {
    this.question = question;
    this.guess = null; // the prediction: index of a choice, or a number
    this.waived = false; // the visitor does not want to predict
    this.revealed = false;
  }

  /** Whether a prediction is due before a run may be seen. */
  get isDue() {
    return this.question.is_prediction && this.guess === null && !this.waived && !this.revealed;
  }

  /** {value, complete, said}: the answer as a number, and its readings as text. */
  answer(run) {
    const read = this.question.readings.map(([name, lanes]) => run.read(name, lanes));
    const complete = read.every((one) => one.complete);
    const values = read.map((one) => one.value);
    const said = read.map((one) => one.said).join("; ");
    if (read.length === 1) return { value: values[0], complete, said };
    const value = values.every(isNumber) ? combined(this.question.sign, ...values) : null;
    return { value, complete, said: isNumber(value) ? inWords(this.question, read) : said };
  }

  /** Index of the choice that holds for a value, -1 if none does. */
  holding(value) {
    return this.question.choices.findIndex(([, kind, limit]) => {
      if (value === null || kind === "none") return value === null && kind === "none";
      return kind === "otherwise" || (kind === "below" ? value < limit : value <= limit);
    });
  }
}

/** Two readings compared: "forwards: 11 in lane 2 instead of 61 in lane 1". */
function inWords({ readings }, [first, second]) {
  if (first.label !== second.label) return `${first.said}; ${second.said}`;
  const [one, other] = readings.map(([, lanes]) => (lanes.length > 1 ? `lanes ${lanes.join(" and ")}` : `lane ${lanes[0]}`));
  const isCount = [first, second].every(({ written }) => /^\d+$/.test(written)) && first.value > 1;
  return `${isCount ? `${first.written} ${first.label}` : `${first.label}: ${first.written}`} in ${one} instead of ${second.written} in ${other}`;
}

function combined(sign, first, second) {
  if (sign === "-") return first - second;
  return second ? first / second : null;
}

export function verdict(asked, value) {
  const { choices, guess, is_prediction: isPrediction } = asked.question;
  const noun = isPrediction ? "prediction" : "answer";
  if (asked.guess === null) return isPrediction ? "You made no prediction." : "";
  if (guess) return value === null ? `Your ${noun}: ${asked.guess}; the run has no such number.` : `Your ${noun}: ${asked.guess}, ${distance(asked.guess, value)}.`;
  const right = asked.holding(value);
  if (right < 0) return "None of the choices holds for this run.";
  return asked.guess === right ? `Your ${noun} is right.` : `Your ${noun}: “${choices[asked.guess][0]}”; the run: “${choices[right][0]}”.`;
}

function distance(guess, value) {
  const off = Math.abs(guess - value);
  return off < 0.005 ? "exactly right" : `off by ${fixed(off, Number.isInteger(off) ? 0 : 2)}`;
}
