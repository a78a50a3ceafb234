// Guided lessons: a list, and a panel with the steps of one lesson. A step points at a part of the page, asks for a prediction, sets the
// page up and runs it, and takes the answer from the visitor's own run. Until the prediction is made the results on the page are covered.
// All text enters the page as textContent.

import { element, trigger } from "component";
import { LESSONS } from "python";
import { button, el, setText } from "../components/elements.js";
import { isReload } from "../components/reload.js";
import { Asked, PREDICT, verdict } from "./asked.js";
import { keyOf, LastRun } from "./last_run.js";
import { keepPlace, nameInAddress, readPlace } from "./lesson_place.js";
import { heading, paragraph } from "./lesson_text.js";
import { calm, Pointer } from "./pointer.js";

const SKIMMED = 250; // ms on a step until its prompt and lanes are shown
const { lessons, shown } = LESSONS;

class Lessons {
  constructor(root) {
    this.opener = button("lessons-open", "Lessons", "Guided lessons, a few minutes each", () => this.toggle());
    this.opener.setAttribute("aria-expanded", "false");
    this.panel = el("section", "lesson-panel");
    this.panel.setAttribute("role", "dialog");
    this.panel.hidden = true;
    root.append(this.opener, this.panel);
    this.pointer = new Pointer();
    this.last = new LastRun();
    this.asked = new Map(); // by question
    this.lesson = null;
    this.at = 0;
    document.addEventListener("run-shown", ({ detail }) => this.hear(detail));
    document.addEventListener("keydown", (event) => this.escape(event), true);
    this.follow(new URLSearchParams(location.search).get("lesson"));
  }

  get step() {
    return this.lesson.steps[this.at];
  }

  /** The step's name, as a class knows its question. */
  get name() {
    return `${this.lesson.name} ${this.at}`;
  }

  // Open and close

  toggle() {
    if (this.panel.hidden) this.list();
    else this.close();
  }

  /** Open the lesson named in the address. */
  follow(name) {
    if (name === null) return;
    const found = lessons.find((lesson) => lesson.name === name);
    if (found) this.begin(found, 0, isReload() ? keyOf(found.steps[0].settings) : ""); // a reload keeps what was chosen
    else this.list(`There is no lesson “${name}”: choose one of these.`);
  }

  open() {
    this.panel.hidden = false;
    this.opener.setAttribute("aria-expanded", "true");
    document.body.classList.add("in-lesson");
  }

  close() {
    this.panel.hidden = true;
    this.lesson = null;
    nameInAddress(null);
    this.cover(false);
    this.pointer.show("", this.panel);
    this.opener.setAttribute("aria-expanded", "false");
    document.body.classList.remove("in-lesson");
    this.opener.focus({ preventScroll: true });
  }

  /** Close on Escape, unless a dialog above the lesson or a field outside it handles the key. */
  escape(event) {
    if (event.key !== "Escape" || this.panel.hidden) return;
    const others = [...document.querySelectorAll("[role=dialog]:not([hidden]), .editor .menu")].some((node) => node !== this.panel);
    const typed = event.target.closest?.("input, textarea, select") && !this.panel.contains(event.target);
    if (!others && !typed) this.close();
  }

  /** `prepared`: the key of the settings that the page has; without it they are set up, for the page may have been changed. */
  begin(lesson, at, prepared = "") {
    this.lesson = lesson;
    this.prepared = prepared;
    this.open();
    this.goTo(at);
  }

  goTo(at) {
    this.at = at;
    keepPlace(this.lesson.name, at);
    nameInAddress(this.lesson.name);
    document.dispatchEvent(new CustomEvent("lesson-step", { detail: { lesson: this.lesson.name, step: at } })); // for a class that follows
    this.prepare();
    this.drawStep();
    this.goToPlace();
    this.pointer.show(shown[this.step.show], this.panel);
    this.heading.focus({ preventScroll: true });
    this.panel.scrollTop = 0;
  }

  // Runs

  /** Show the prompt and the lanes of a step before its prediction, unless the page has them already. */
  prepare() {
    const key = keyOf(this.step.settings);
    if (key === this.prepared) return;
    this.prepared = key;
    const step = { lesson: this.lesson.name, step: this.at };
    clearTimeout(this.preparing); // of steps that are skimmed only the last is set up: Gradio may drop an event during another
    this.preparing = setTimeout(() => trigger("prepare", step), SKIMMED);
  }

  setUp() {
    clearTimeout(this.preparing);
    this.prepared = keyOf(this.step.settings);
    this.last.expect(this.step.settings);
    trigger("set_up", { lesson: this.lesson.name, step: this.at });
    this.drawState();
  }

  /** A run has been shown to its end; it may or may not be the one this step needs. */
  hear(run) {
    this.last.take(run);
    if (!this.lesson) return;
    if (this.last.of(this.step.settings)) this.compare();
    this.drawState();
  }

  /** Compare the run with a prediction made before it. */
  compare() {
    const asked = this.askedHere();
    if (asked && (asked.guess !== null || asked.waived)) asked.revealed = true;
    this.goToPlace();
    this.pointer.openView(shown[this.step.show]);
    this.pointer.bringSoon(shown[this.step.show], this.panel);
  }

  /** Show the step's lane in the views, and its place of the run in the player. */
  goToPlace() {
    const { lane, at, settings } = this.step;
    if (lane) document.querySelector(`.live .chooser .tab[data-lane="${lane - 1}"]`)?.click();
    const run = at && this.last.of(settings);
    const event = run ? run.place(at, lane) : null;
    if (event !== null) document.dispatchEvent(new CustomEvent("go-to-event", { detail: { lane: lane - 1, event } }));
  }

  reveal() {
    this.askedHere().revealed = true;
    this.drawState();
  }

  /** Go on without a prediction. */
  waive() {
    this.askedHere().waived = true;
    if (this.last.of(this.step.settings)) this.reveal();
    else this.setUp();
  }

  /** Cover the results on the page, which may answer the question. */
  cover(isCovered) {
    document.body.classList.toggle("lesson-covers", isCovered);
  }

  askedHere() {
    const { question } = this.step;
    if (question && !this.asked.has(question)) this.asked.set(question, new Asked(question));
    return this.asked.get(question) || null;
  }

  // Drawing

  list(complaint = "") {
    this.lesson = null;
    nameInAddress(null);
    this.cover(false);
    this.pointer.show("", this.panel);
    this.open();
    this.panel.setAttribute("aria-label", "Lessons");
    this.heading = heading("Lessons");
    const trouble = el("p", "lesson-trouble", complaint);
    trouble.setAttribute("role", "alert");
    trouble.hidden = !complaint;
    const rows = el("ol", "lesson-list");
    rows.append(...lessons.map((lesson) => this.row(lesson)));
    this.panel.replaceChildren(this.head(this.heading), trouble, rows);
    this.heading.focus({ preventScroll: true });
  }

  row(lesson) {
    const place = readPlace();
    const at = place.lesson === lesson.name && place.step < lesson.steps.length ? place.step : 0;
    const open = button("", "", "", () => this.begin(lesson, at));
    const time = at ? `continue at step ${at + 1}` : `${lesson.minutes} min`;
    open.append(el("b", "", lesson.title), el("span", "lesson-time", time), el("span", "lesson-about", lesson.about));
    const item = el("li");
    item.append(open);
    return item;
  }

  head(...parts) {
    const close = button("lesson-close", "×", "Close (Escape)", () => this.close());
    close.setAttribute("aria-label", "Close the lessons");
    const head = el("div", "lesson-head");
    head.append(...parts, close);
    return head;
  }

  drawStep() {
    const { lesson, step, at } = this;
    this.panel.setAttribute("aria-label", `Lesson: ${lesson.title}`);
    const back = button("lesson-all", lesson.title, "All lessons", () => this.list());
    this.heading = heading(step.heading);
    this.heading.setAttribute("aria-description", `Step ${at + 1} of ${lesson.steps.length}`);
    this.form = step.question ? this.drawQuestion(this.askedHere()) : el("div");
    this.result = el("div", "lesson-result");
    this.result.setAttribute("aria-live", "polite");
    this.acts = el("div", "lesson-acts");
    this.memo = el("div", "lesson-remember");
    const remember = el("h4", "", "Remember");
    remember.setAttribute("aria-level", 3);
    this.memo.append(remember, paragraph(lesson.remember));
    this.panel.replaceChildren(this.head(back), this.dots(), this.heading, ...step.paragraphs.map(paragraph), this.form, this.result, this.acts, this.memo, this.way());
    this.drawState();
  }

  dots() {
    const dots = el("ol", "lesson-dots");
    dots.setAttribute("aria-label", "Steps");
    this.lesson.steps.forEach((step, i) => {
      const dot = button("", "", step.heading, () => this.goTo(i));
      dot.setAttribute("aria-label", `Step ${i + 1}: ${step.heading}`);
      if (i === this.at) dot.setAttribute("aria-current", "step");
      const item = el("li");
      item.append(dot);
      dots.append(item);
    });
    return dots;
  }

  get isLast() {
    return this.at === this.lesson.steps.length - 1;
  }

  way() {
    const [first, last] = [this.at === 0, this.isLast];
    const back = button("", "Back", "", () => this.goTo(this.at - 1));
    const next = button("", last ? "All lessons" : "Next", "", () => (last ? this.finish() : this.goTo(this.at + 1)));
    back.disabled = first;
    const way = el("div", "lesson-way");
    way.append(back, el("span", "", `${this.at + 1} of ${this.lesson.steps.length}`), next);
    return way;
  }

  /** Opened again, the lesson asks anew: another class may follow. */
  finish() {
    keepPlace(this.lesson.name, 0);
    for (const { question } of this.lesson.steps) this.asked.delete(question);
    this.list();
  }

  drawQuestion(asked) {
    const field = el("fieldset", "lesson-question");
    field.dataset.question = this.name; // a class's votes are drawn here
    field.append(el("legend", "", asked.question.text));
    if (asked.question.guess) field.append(this.numberField(asked));
    else field.append(...asked.question.choices.map((choice, i) => this.choice(asked, choice, i)));
    return field;
  }

  choice(asked, [text], i) {
    const radio = el("input");
    Object.assign(radio, { type: "radio", name: "lesson-choice", checked: asked.guess === i });
    radio.addEventListener("change", () => this.take(asked, i));
    const label = el("label");
    label.append(radio, el("span", "", text), el("em", "verdict"));
    return label;
  }

  numberField(asked) {
    const field = el("input");
    Object.assign(field, { type: "number", value: asked.guess ?? "" });
    field.addEventListener("input", () => this.take(asked, field.value === "" ? null : Number(field.value)));
    const label = el("label");
    label.append(el("span", "", asked.question.guess), field);
    return label;
  }

  take(asked, guess) {
    asked.guess = guess;
    this.drawState();
  }

  /** Draw what depends on the prediction and the run: the buttons, and the answer once it is revealed. */
  drawState() {
    const run = this.last.of(this.step.settings);
    const asked = this.askedHere();
    const answer = run && asked && asked.revealed ? asked.answer(run) : null;
    this.cover(Boolean(asked?.question.is_prediction && !asked.revealed && !asked.waived && !this.last.isRunning(this.step.settings)));
    this.memo.hidden = !this.isLast || Boolean(asked && !answer);
    const focused = this.acts.contains(document.activeElement) || this.form.contains(document.activeElement);
    this.drawVerdicts(asked, answer);
    this.drawActs(run, asked, answer);
    this.result.replaceChildren(...this.outcome(asked, answer));
    if (answer) this.result.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" });
    if (focused && document.activeElement === document.body) (this.acts.querySelector("button") || this.heading).focus({ preventScroll: true });
  }

  drawActs(run, asked, answer) {
    if (asked?.isDue) return this.acts.replaceChildren(el("p", "lesson-wait", PREDICT), button("", "Go on without a prediction", "", () => this.waive()));
    const running = this.last.isRunning(this.step.settings);
    const show = button("primary", "Show the answer", "", () => this.reveal());
    const setUp = button(run ? "" : "primary", run ? "Run again" : "Set up and run", "Fill in the page for this step and press Run", () => this.setUp());
    const wait = el("p", "lesson-wait", running ? "Running; the answer follows when the run has been shown to its end." : "");
    this.acts.replaceChildren(...(run && asked && !answer ? [show] : []), setUp, wait);
  }

  drawVerdicts(asked, answer) {
    for (const [i, label] of [...this.form.querySelectorAll("label")].entries()) {
      label.querySelector("input").disabled = Boolean(answer && answer.complete) || this.last.isRunning(this.step.settings);
      const mark = label.querySelector(".verdict");
      if (!mark) continue;
      const isTrue = Boolean(answer && answer.complete) && asked.holding(answer.value) === i;
      label.classList.toggle("is-true", isTrue);
      const words = [isTrue ? "the run" : "", answer && asked.guess === i ? "you" : ""].filter(Boolean).join(", ");
      setText(mark, words);
    }
  }

  outcome(asked, answer) {
    if (!answer) return [];
    if (!answer.complete) return [el("p", "", "A lane was stopped or failed: run it again.")];
    this.tellClass(asked, answer);
    const lines = [el("p", "lesson-said", `Your run: ${answer.said}.`), el("p", "lesson-verdict", verdict(asked, answer.value))];
    if (asked.question.because) lines.push(paragraph(asked.question.because));
    return lines;
  }

  /** For a class that follows: what the run answers. */
  tellClass(asked, { value, said }) {
    const holding = asked.question.choices.length ? asked.holding(value) : -1;
    const detail = { id: this.name, choice: holding < 0 ? null : holding, value, said };
    document.dispatchEvent(new CustomEvent("lesson-answer", { detail }));
  }
}

new Lessons(element.querySelector(".lessons"));
