// Results of a survey: a table that can be sorted while it fills, and the questions with each strategy's score. Gradio runs this with
// `element`, `props`, `trigger` and `watch`. Texts of models and visitors enter the page through textContent only.

const MARKS = { failed: ["!", "failed"], written: ["·", "not judged"], unasked: ["–", "not asked"] };

function make(tag, { text, on = {}, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  for (const [name, hear] of Object.entries(on)) node.addEventListener(name, hear);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

/** The name of a recipe, which may wrap between its parts. */
function breakable(name) {
  return name.split(/(?<=\+)/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
}

/** The mark of a score and its meaning. */
function markOf(score) {
  if (score === null) return ["", "not answered yet"];
  if (typeof score === "string") return MARKS[score];
  if (score === 1) return ["✓", "right"];
  return score === 0 ? ["✗", "wrong"] : [score.toFixed(2), "partly right, or in some rounds"];
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
    const notes = this.data.notes.map((note) => make("p", { class: "note", text: note }));
    return [this.scroll("Results", this.table()), ...notes, make("div", { class: "below" }, this.save("csv", "Save answers as CSV"), this.save("json", "Save all as JSON")),
      this.legend(), this.questions()];
  }

  scroll(name, table) {
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
  }

  // ---- the table

  table() {
    const bodies = this.data.sections.map((section) => this.body(section));
    return make("table", {}, make("thead", {}, make("tr", {}, ...this.data.columns.map((column, i) => this.heading(column, i)))), ...bodies);
  }

  heading({ name, about }, i) {
    const mine = this.sorting.column === i;
    const sorted = mine ? (this.sorting.down ? "descending" : "ascending") : "none";
    return make("th", { scope: "col", "aria-sort": sorted }, make("button", { type: "button", text: name, title: about, "data-key": `column-${i}`, on: { click: () => this.sort(i) } }));
  }

  /** Cycle through descending, ascending and the original order. */
  sort(i) {
    const { column, down } = this.sorting;
    if (column !== i) this.sorting = { column: i, down: true };
    else this.sorting = down ? { column: i, down: false } : { column: -1, down: true };
    this.draw();
  }

  body({ task, title, rows }) {
    const head = make("tr", { class: "task" }, make("th", { scope: "rowgroup", colspan: this.data.columns.length }, make("span", { text: title })));
    return make("tbody", { "data-task": task }, head, ...this.sorted(rows).map((row) => this.row(row)));
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
    const wrong = [...(failure ? [make("p", { class: "failure", text: failure })] : []), ...(remark ? [make("p", { class: "note", text: remark })] : [])];
    const head = make("th", { scope: "row" }, make("span", { class: "entrant", "data-entrant": entrant }, make("span", {}, ...breakable(name.text))), ...wrong);
    return make("tr", { "data-row": entrant }, head, ...others.map((cell) => make("td", { text: cell.text })));
  }

  // ---- below the table

  legend() {
    const terms = this.data.columns.flatMap(({ name, about }) => [make("dt", { text: name }), make("dd", { text: about })]);
    return this.fold("legend", "Columns", make("dl", {}, ...terms));
  }

  save(form, label) {
    return make("button", { type: "button", text: label, "data-key": form, on: { click: () => trigger("save", { form }) } });
  }

  questions() {
    const { entrants, asked } = this.data;
    const names = entrants.map((name, i) => make("th", { scope: "col" }, make("span", { class: "entrant only", "data-entrant": i, title: name, text: String(i + 1) })));
    const head = make("tr", {}, make("th", { scope: "col", text: "question" }), make("th", { scope: "col", text: "kind" }), ...names);
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...asked.map((question) => this.question(question))));
    return this.fold("asked", "Questions and answers", this.key(), this.scroll("Questions", table));
  }

  /** A fold that stays open when everything is redrawn. */
  fold(key, title, ...children) {
    const fold = make("details", { class: key }, make("summary", { text: title, "data-key": key }), ...children);
    fold.open = this.unfolded.has(key);
    fold.addEventListener("toggle", () => (fold.open ? this.unfolded.add(key) : this.unfolded.delete(key)));
    return fold;
  }

  /** The strategy behind each number. */
  key() {
    const names = this.data.entrants.map((name, i) => make("li", {}, make("span", { class: "entrant only", "data-entrant": i, text: String(i + 1) }), make("span", { text: name })));
    return make("ol", { class: "key" }, ...names);
  }

  question({ number, task, prompt, marks }) {
    const open = make("button", { type: "button", "data-key": `question-${number}`, "aria-pressed": String(number === this.chosen), on: { click: () => this.show(number) } },
      make("b", { text: `${number + 1} ` }), make("span", { text: prompt }));
    const cells = marks.map((score) => make("td", { class: `mark ${score === null ? "" : lookOf(score)}`, text: markOf(score)[0], title: markOf(score)[1], "aria-label": markOf(score)[1] }));
    return make("tr", {}, make("th", { scope: "row" }, open), make("td", { text: task }), ...cells);
  }

  show(number) {
    this.chosen = number;
    for (const button of this.root.querySelectorAll(".asked tbody button")) button.setAttribute("aria-pressed", String(button.dataset.key === `question-${number}`));
    trigger("show", { number });
  }
}

function saveFile({ name, type, text }) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const results = new ResultsTable(element.querySelector(".results-table"));
watch("value", () => results.take(props.value));
