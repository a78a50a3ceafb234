// A sweep: one number of a lane, over a range, spread over lanes that are the same in everything else.
// Comes before editor.js and shares its scope.
const SWEEP = { least: 2, usual: 3 };
const SEED = { name: "seed", type: "int", default: 0, min: 0, max: null, help: "Which draws a lane makes." };

/** The numbers of a lane that can be swept: knobs of its strategy and of its parts, and its seed. */
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

/** Evenly spaced from one end to the other, rounded to what the knob takes; fewer where rounding makes some the same. */
function spacing(knob, from, to, number) {
  const even = Array.from({ length: number }, (_, i) => from + ((to - from) * i) / (number - 1));
  return [...new Set(even.map((value) => (knob.type === "int" ? Math.round(value) : Number(value.toPrecision(4)))))];
}

/** A range to begin with: the knob's own where it has one, else a few steps up from where it stands. */
function rangeOf({ knob, now }) {
  if (knob === SEED) return [now, now + SWEEP.usual - 1];
  return [knob.min ?? now, knob.max ?? (now || 1) * 4];
}

/** Why these values cannot be spread, or an empty text. */
function sweepTrouble(knob, values) {
  if (values.some((value) => !Number.isFinite(value))) return "Write a number at either end of the range.";
  if (values.length < SWEEP.least) return "Both ends are the same: there is nothing to sweep.";
  if (values.some((value) => (knob.min !== null && value < knob.min) || (knob.max !== null && value > knob.max))) {
    return `It must be ${[["at least", knob.min], ["at most", knob.max]].filter(([, end]) => end !== null).map((pair) => pair.join(" ")).join(" and ")}.`;
  }
  return "";
}

/** Which lanes stay beside the copies of lane i: the first ones that there is room for. */
function staying(i, copies) {
  return lanes.map((_, j) => j).filter((j) => j !== i).slice(0, most - copies);
}

function spread(i, { write }, values) {
  const copies = values.map((value) => {
    const copy = fresh(JSON.parse(JSON.stringify(lanes[i])));
    write(copy, value);
    return copy;
  });
  const stay = staying(i, copies.length);
  lanes = lanes.flatMap((lane, j) => (j === i ? copies : stay.includes(j) ? [lane] : []));
  change();
  focusOn(stay.filter((j) => j < i).length, ".strategy");
}

/** What the sweep is about to do, in words. */
function sweepPlan(i, values) {
  const stay = staying(i, values.length);
  const going = lanes.map((_, j) => j).filter((j) => j !== i && !stay.includes(j)).map((j) => j + 1);
  const room = going.length ? ` Lane${going.length > 1 ? "s" : ""} ${going.join(" and ")} make${going.length > 1 ? "" : "s"} room.` : "";
  return `${values.join(", ")}: one lane each.${room}`;
}

function numbersOfValues() {
  const numbers = Array.from({ length: most - SWEEP.least + 1 }, (_, at) => at + SWEEP.least);
  return numbers.map((number) => h("option", { value: number, selected: number === SWEEP.usual }, `${number} values`));
}

/** The fields of a sweep of lane i, what they amount to in words, and the button that does it. */
class SweepForm {
  constructor(lane, i) {
    this.i = i;
    this.targets = sweepable(lane);
    const tell = () => this.tell();
    const names = this.targets.map(({ label }, at) => h("option", { value: at }, label));
    this.which = h("select", { "aria-label": "What to sweep", onchange: () => this.begin() }, ...names);
    [this.from, this.to] = ["From", "To"].map((label) => h("input", { type: "number", step: "any", "aria-label": label, oninput: tell }));
    this.number = h("select", { "aria-label": "Number of values", onchange: tell }, ...numbersOfValues());
    this.plan = h("p", { class: "help", "aria-live": "polite" });
    this.go = h("button", { type: "button", class: "sweep-go", onclick: () => spread(i, this.target, this.values) }, "Spread over lanes");
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
    this.tell();
  }

  tell() {
    const trouble = sweepTrouble(this.target.knob, this.values);
    this.go.disabled = Boolean(trouble);
    this.plan.textContent = trouble || sweepPlan(this.i, this.values);
  }

  draw() {
    const range = h("span", { class: "range" }, this.from, "to", this.to);
    return h("details", { class: "sweep", ontoggle: () => this.tell() }, h("summary", {}, "Sweep a number over lanes"),
      h("div", { class: "sweep-row" }, this.which, range, this.number), this.plan, this.go);
  }
}
