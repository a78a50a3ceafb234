// The branches of this visit as a tree: every run that is kept, each fork below the run it left. A press brings a run back.

class VisitTree {
  constructor(node, bringBack) {
    this.node = node;
    this.bringBack = bringBack;
  }

  /** It is there once there is something to go back to. */
  draw(visit, shown) {
    this.node.hidden = visit.runs.length < 2;
    if (this.node.hidden) return;
    const head = el("div", "visit-head");
    head.append(el("h3", "", "Branches of this visit"), el("p", "visit-note", sayKept(visit)));
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
    entry.append(el("span", "visit-number", `Run ${run.number}`), el("span", "visit-what", run.said));
    return entry;
  }
}

function sayKept({ runs, events }) {
  const most = MOST_EVENTS.toLocaleString("en").replaceAll(",", " ");
  return `${count(runs.length, "run")}, ${count(events, "event")}, in the memory of this tab only; beyond ${MOST_RUNS} runs or ${most} events the oldest go`;
}

function sayFork({ lane, position, instead, taken, into }) {
  const piece = taken === null ? "another token" : `“${pieceLabel(taken)}”`;
  const place = into === lane ? "in its place" : `as lane ${into + 1}`;
  return `lane ${lane + 1} left at token ${position + 1}: ${piece} instead of “${pieceLabel(instead)}”, ${place}`;
}

function sayRun(trace) {
  const headers = trace.lanes.map(({ header }) => header);
  const opened = trace.fromFile ? "opened: " : "";
  return `${opened}${distinctTitles(headers).join(" · ")}, “${pieceLabel(headers[0].prompt, 48)}”`;
}
