// The runs of this visit as a tree, each fork below its parent run. A click shows a run again.

import { button, el } from "../components/elements.js";
import { count } from "../components/numbers.js";
import { MOST_EVENTS, MOST_RUNS } from "./visit.js";

export class VisitTree {
  constructor(node, bringBack) {
    this.node = node;
    this.bringBack = bringBack;
  }

  /** Shown once there are two runs. */
  draw(visit, shown) {
    this.node.hidden = visit.runs.length < 2;
    if (this.node.hidden) return;
    const head = el("div", "visit-head");
    head.append(el("h3", "", "Runs of this visit"), el("p", "visit-note", sayMemory(visit)));
    this.node.replaceChildren(head, this.list(visit.runs, null, shown));
  }

  list(runs, parent, shown) {
    const list = el("ol");
    for (const run of runs.filter((one) => one.parent === parent)) {
      const item = el("li");
      item.append(this.entry(run, run.trace === shown));
      if (runs.some((one) => one.parent === run)) item.append(this.list(runs, run, shown));
      list.append(item);
    }
    return list;
  }

  entry(run, isShown) {
    const entry = button("visit-run", "", isShown ? "Shown now" : "Show this run again", () => this.bringBack(run));
    if (isShown) entry.setAttribute("aria-current", "true");
    entry.append(el("span", "visit-number", `Run ${run.number}`), el("span", "visit-what", run.trace.interrupted ? `${run.said}, interrupted` : run.said));
    return entry;
  }
}

function sayMemory({ runs, events }) {
  const most = MOST_EVENTS.toLocaleString("en").replaceAll(",", " ");
  return `${count(runs.length, "run")}, ${count(events, "event")}, in this tab only; beyond ${MOST_RUNS} runs or ${most} events the oldest are dropped`;
}
