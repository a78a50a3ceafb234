// A sweep: one number of a lane takes several values, each in a lane that is otherwise the same.

import { MOST_LANES } from "python";
import { el } from "../components/elements.js";
import { fresh } from "./lane_config.js";
import { byName, words } from "./rules.js";

const SWEEP = { least: 2, usual: 3 };
const SEED = { name: "seed", type: "int", default: 0, min: 0, max: null, help: "Seed of the lane's sampling." };

/** The numbers that can be swept: numeric knobs of the strategy and its parts, and the seed. */
function sweepable(lane) {
  const parts = [[lane.strategy, () => lane.knobs, (copy) => copy.knobs],
    ...lane.extras.map(([name]) => [name, () => knobsIn(lane, name), (copy) => knobsIn(copy, name)])];
  const knobs = parts.flatMap(([name, held, into]) => (byName.get(name)?.knobs || []).filter(isNumeric).map((knob) => ({
    knob, label: name === lane.strategy ? words(knob.name) : `${words(name)}: ${words(knob.name)}`,
    now: held()[knob.name] ?? knob.default, write: (copy, value) => { into(copy)[knob.name] = value; } })));
  return [...knobs, { knob: SEED, label: "seed", now: lane.seed ?? 0, write: (copy, value) => { copy.seed = value; } }];
}

function knobsIn(lane, name) {
  return lane.extras.find(([held]) => held === name)[1];
}

function isNumeric(knob) {
  return ["int", "float"].includes(knob.type) && !knob.choices.length;
}

/** Evenly spaced values, rounded to the knob's type, without duplicates. */
function spacing(knob, from, to, number) {
  const even = Array.from({ length: number }, (_, i) => from + ((to - from) * i) / (number - 1));
  return [...new Set(even.map((value) => (knob.type === "int" ? Math.round(value) : Number(value.toPrecision(4)))))];
}

/** The initial range: the knob's own if it has one, otherwise from the current value upwards. */
function rangeOf({ knob, now }) {
  if (knob === SEED) return [now, now + SWEEP.usual - 1];
  return [knob.min ?? now, knob.max ?? (now || 1) * 4];
}

/** Why these values cannot be swept, or an empty text. */
function sweepTrouble(knob, values) {
  if (values.some((value) => !Number.isFinite(value))) return "Enter a number at either end of the range.";
  if (values.length < SWEEP.least) return "Both ends are the same: choose different ones.";
  if (values.some((value) => (knob.min !== null && value < knob.min) || (knob.max !== null && value > knob.max))) {
    return `It must be ${[["at least", knob.min], ["at most", knob.max]].filter(([, end]) => end !== null).map((pair) => pair.join(" ")).join(" and ")}.`;
  }
  return "";
}

/** The other lanes that stay next to the copies of lane i: the first ones, as far as there is room. */
export function staying(lanes, i, copies) {
  return lanes.map((_, j) => j).filter((j) => j !== i).slice(0, MOST_LANES - copies);
}

/** A copy of a lane for each value of what is swept. */
function copiesOf(lane, { write }, values) {
  return values.map((value) => {
    const copy = fresh(JSON.parse(JSON.stringify(lane)));
    write(copy, value);
    return copy;
  });
}

/** A description of the planned lanes. */
function sweepPlan(lanes, i, values) {
  const stay = staying(lanes, i, values.length);
  const going = lanes.map((_, j) => j).filter((j) => j !== i && !stay.includes(j)).map((j) => j + 1);
  const removed = going.length ? ` Lane${going.length > 1 ? "s" : ""} ${going.join(" and ")} will be removed.` : "";
  return `${values.join(", ")}: one lane each.${removed}`;
}

function numbersOfValues() {
  const numbers = Array.from({ length: MOST_LANES - SWEEP.least + 1 }, (_, at) => at + SWEEP.least);
  return numbers.map((number) => el("option", { value: number, selected: number === SWEEP.usual }, `${number} values`));
}

/** The form of a sweep of lane i: fields, description, and the button that applies it. `spread(i, copies)` replaces the lane. */
export class SweepForm {
  constructor(lanes, i, spread) {
    Object.assign(this, { lanes, i, spread, targets: sweepable(lanes[i]) });
    const update = () => this.update();
    const names = this.targets.map(({ label }, at) => el("option", { value: at }, label));
    this.which = el("select", { "aria-label": "What to sweep", onchange: () => this.begin() }, ...names);
    [this.from, this.to] = ["From", "To"].map((label) => el("input", { type: "number", step: "any", "aria-label": label, oninput: update }));
    this.number = el("select", { "aria-label": "Number of values", onchange: update }, ...numbersOfValues());
    this.plan = el("p", { class: "help", "aria-live": "polite" });
    this.go = el("button", { type: "button", class: "sweep-go", onclick: () => this.apply() }, "Spread over lanes");
    this.begin();
  }

  get target() {
    return this.targets[this.which.value];
  }

  get values() {
    const [from, to] = [this.from, this.to].map(({ value }) => (value === "" ? NaN : Number(value)));
    return spacing(this.target.knob, from, to, Number(this.number.value));
  }

  begin() {
    [this.from.value, this.to.value] = rangeOf(this.target);
    this.update();
  }

  apply() {
    this.spread(this.i, copiesOf(this.lanes[this.i], this.target, this.values));
  }

  update() {
    const trouble = sweepTrouble(this.target.knob, this.values);
    this.go.disabled = Boolean(trouble);
    this.plan.textContent = trouble || sweepPlan(this.lanes, this.i, this.values);
  }

  draw() {
    const range = el("span", "range", this.from, "to", this.to);
    return el("details", { class: "sweep", ontoggle: () => this.update() }, el("summary", "", "Sweep a number over lanes"),
      el("div", "sweep-row", this.which, range, this.number), this.plan, this.go);
  }
}
