// Results of a survey: a table that can be sorted while it fills, and the questions with each strategy's score. Gradio runs this with
// `element`, `props`, `trigger` and `watch`. Texts of models and visitors enter the page through textContent only.

import { element, props, trigger, watch } from "component";
import { el } from "../components/elements.js";
import { download } from "../components/files.js";

const MARKS = { failed: ["!", "failed"], written: ["·", "not judged"], unasked: ["–", "not asked"] };

/** The name of a lane config, which may wrap between its parts. */
function breakable(name) {
  return name.split(/(?<=\+)/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
}

/** The mark of a score and its meaning. */
function markOf(score) {
  if (score === null) return ["", "not answered yet"];
  if (typeof score === "string") return MARKS[score];
  if (score === 1) return ["✓", "right"];
  return score === 0 ? ["✗", "wrong"] : [score.toFixed(2), "partly right, or in some rounds"];
}

/** The cell of a score. */
function markCell(score) {
  const [mark, meaning] = markOf(score);
  return el("td", { class: `mark ${score === null ? "" : lookOf(score)}`, title: meaning, "aria-label": meaning }, mark);
}

const lookOf = (score) => (typeof score === "string" ? score : score === 1 ? "right" : score === 0 ? "wrong" : "part");

class ResultsTable {
  constructor(root) {
    this.root = root;
    this.data = null;
    this.sorting = { column: -1, down: true };
    this.chosen = -1; // number of the question whose answers are open
    this.unfolded = new Set(); // keys of the folds that are open
  }

  take(text) {
    const data = text ? JSON.parse(text) : null;
    if (data?.saved) return saveFile(data.saved);
    this.data = data;
    if (!this.data) this.chosen = -1;
    this.draw();
  }

  /** Redraw everything; focus and scroll positions are restored. */
  draw() {
    const focused = this.root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const places = [...this.root.querySelectorAll(".scroll")].map(({ scrollLeft, scrollTop }) => [scrollLeft, scrollTop]);
    this.root.replaceChildren(...(this.data ? this.parts() : []));
    this.root.querySelectorAll(".scroll").forEach((node, i) => { if (places[i]) [node.scrollLeft, node.scrollTop] = places[i]; });
    if (focused) [...this.root.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused)?.focus({ preventScroll: true });
  }

  parts() {
    const notes = this.data.notes.map((note) => el("p", "note", note));
    return [this.scroll("Results", this.table()), ...notes, el("div", "below", this.save("csv", "Save answers as CSV"), this.save("json", "Save all as JSON")),
      this.legend(), this.questions()];
  }

  scroll(name, table) {
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
  }

  // ---- the table

  table() {
    const bodies = this.data.sections.map((section) => this.body(section));
    return el("table", "", el("thead", "", el("tr", "", ...this.data.columns.map((column, i) => this.heading(column, i)))), ...bodies);
  }

  heading({ name, about }, i) {
    const mine = this.sorting.column === i;
    const sorted = mine ? (this.sorting.down ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", "aria-sort": sorted }, el("button", { type: "button", title: about, "data-key": `column-${i}`, onclick: () => this.sort(i) }, name));
  }

  /** Cycle through descending, ascending and the original order. */
  sort(i) {
    const { column, down } = this.sorting;
    if (column !== i) this.sorting = { column: i, down: true };
    else this.sorting = down ? { column: i, down: false } : { column: -1, down: true };
    this.draw();
  }

  body({ task, title, rows }) {
    const head = el("tr", "task", el("th", { scope: "rowgroup", colspan: this.data.columns.length }, el("span", "", title)));
    return el("tbody", { "data-task": task }, head, ...this.sorted(rows).map((row) => this.row(row)));
  }

  /** Rows without a value come last in either order. */
  sorted(rows) {
    const { column, down } = this.sorting;
    if (column < 0) return rows;
    const valueOf = (row) => row.cells[column].value;
    const known = rows.filter((row) => valueOf(row) !== null);
    const order = (a, b) => (valueOf(a) < valueOf(b) ? -1 : valueOf(a) > valueOf(b) ? 1 : 0);
    return [...known.sort((a, b) => (down ? order(b, a) : order(a, b))), ...rows.filter((row) => valueOf(row) === null)];
  }

  row({ entrant, failure, remark, cells: [name, ...others] }) {
    const wrong = [failure && el("p", "failure", failure), remark && el("p", "note", remark)];
    const head = el("th", { scope: "row" }, el("span", { class: "entrant", "data-entrant": entrant }, el("span", "", ...breakable(name.text))), ...wrong);
    return el("tr", { "data-row": entrant }, head, ...others.map((cell) => el("td", "", cell.text)));
  }

  // ---- below the table

  legend() {
    const terms = this.data.columns.flatMap(({ name, about }) => [el("dt", "", name), el("dd", "", about)]);
    return this.fold("legend", "Columns", el("dl", "", ...terms));
  }

  save(form, label) {
    return el("button", { type: "button", "data-key": form, onclick: () => trigger("save", { form }) }, label);
  }

  questions() {
    const { entrants, asked } = this.data;
    const names = entrants.map((name, i) => el("th", { scope: "col" }, el("span", { class: "entrant only", "data-entrant": i, title: name }, String(i + 1))));
    const head = el("tr", "", el("th", { scope: "col" }, "question"), el("th", { scope: "col" }, "kind"), ...names);
    const table = el("table", "", el("thead", "", head), el("tbody", "", ...asked.map((question) => this.question(question))));
    return this.fold("asked", "Questions and answers", this.key(), this.scroll("Questions", table));
  }

  /** A fold that stays open when everything is redrawn. */
  fold(key, title, ...children) {
    const fold = el("details", key, el("summary", { "data-key": key }, title), ...children);
    fold.open = this.unfolded.has(key);
    fold.addEventListener("toggle", () => (fold.open ? this.unfolded.add(key) : this.unfolded.delete(key)));
    return fold;
  }

  /** The strategy behind each number. */
  key() {
    const names = this.data.entrants.map((name, i) => el("li", "", el("span", { class: "entrant only", "data-entrant": i }, String(i + 1)), el("span", "", name)));
    return el("ol", "key", ...names);
  }

  question({ number, task, prompt, marks }) {
    const open = el("button", { type: "button", "data-key": `question-${number}`, "aria-pressed": String(number === this.chosen), onclick: () => this.show(number) },
      el("b", "", `${number + 1} `), el("span", "", prompt));
    return el("tr", "", el("th", { scope: "row" }, open), el("td", "", task), ...marks.map(markCell));
  }

  show(number) {
    this.chosen = number;
    for (const button of this.root.querySelectorAll(".asked tbody button")) button.setAttribute("aria-pressed", String(button.dataset.key === `question-${number}`));
    trigger("show", { number });
  }
}

function saveFile({ name, type, text }) {
  download(new Blob([text], { type }), name);
}

const results = new ResultsTable(element.querySelector(".results-table"));
watch("value", () => results.take(props.value));
