// The controls of knobs, one for each type.

import { el } from "../components/elements.js";
import { capital } from "./lane_config.js";
import { words } from "./rules.js";

export function control(knob, value, id, change) {
  const label = el("label", { for: id }, capital(words(knob.name)));
  if (knob.type === "bool") {
    return [el("span", "row check", el("input", { id, type: "checkbox", checked: Boolean(value), onchange: (e) => change(e.target.checked) }), label)];
  }
  if (knob.choices.length) {
    const options = knob.choices.map((choice) => el("option", { value: choice, selected: choice === value }, words(choice)));
    return [el("span", "row", label, el("select", { id, onchange: (e) => change(e.target.value) }, ...options))];
  }
  if (knob.type === "str") return [label, typed(knob, value, id, change)];
  return numeric(knob, value, id, change, label);
}

function typed(knob, value, id, change) {
  if (!knob.multiline) return withValue(el("input", { id, type: "text", spellcheck: "false", oninput: (e) => change(e.target.value) }), value);
  return withValue(el("textarea", { id, rows: 5, spellcheck: "false", oninput: (e) => change(e.target.value) }), value);
}

export function withValue(node, value) { node.value = value; return node; }

function numeric(knob, value, id, change, label) {
  const step = knob.step ?? (knob.type === "int" ? 1 : (knob.max - knob.min) / 100 || "any");
  const read = (text) => (text === "" || Number.isNaN(Number(text)) ? text : Number(text));
  const box = withValue(el("input", { id, type: "number", step: knob.type === "int" ? 1 : "any", inputmode: "decimal" }), value);
  const head = el("span", "row", label, box);
  if (knob.min === null || knob.max === null) {
    box.addEventListener("input", () => change(read(box.value)));
    return [head];
  }
  const range = el("input", { type: "range", min: knob.min, max: knob.max, step, "aria-label": words(knob.name), tabindex: "-1" });
  range.value = value;
  const fillUp = () => range.style.setProperty("--at", `${(100 * (range.value - knob.min)) / (knob.max - knob.min || 1)}%`);
  fillUp();
  range.addEventListener("input", () => { box.value = Number(Number(range.value).toPrecision(6)); fillUp(); change(read(box.value)); });
  box.addEventListener("input", () => { range.value = box.value; fillUp(); change(read(box.value)); });
  return [head, range];
}
