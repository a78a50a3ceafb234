// Where the lanes of the shown run stand: a lane keeps its hue, and with it its text, when others are added, moved or removed in the editor.
// A lane that was not part of the run has an empty card until it runs.

import { button, el } from "../components/elements.js";

/** For each chosen lane the order of its lane in the run, -1 if it was not part of it. `hues` of the run's lanes: null if they are not known. */
export function seatsOf(lanes, hues, chosen, chosenHues) {
  const left = new Set(lanes.keys());
  return chosen.map(({ strategy }, seat) => {
    const isSame = (order) => lanes[order].header.strategy === strategy && (hues ? hues[order] === chosenHues[seat] : order === seat);
    const order = [...left].find(isSame) ?? -1;
    left.delete(order);
    return order;
  });
}

/** The seats of a run all of whose lanes are shown, in their own order. */
export function ownSeats(lanes) {
  return [...lanes.keys()];
}

export function waitingCard(seat, hue) {
  const node = el("article", "lane waiting");
  node.style.order = seat;
  node.style.setProperty("--lane", `var(--pg-lane-${hue})`);
  node.setAttribute("aria-label", `Lane ${seat + 1}, not run yet`);
  node.append(el("p", "vacancy", "Press Run: this lane has not run yet."));
  return node;
}

/** Its tab in the row of lanes. */
export function waitingTab(seat, hue, title, act) {
  const tab = button("tab", "", "This lane has not run yet", act);
  tab.style.order = seat;
  tab.style.setProperty("--lane", `var(--pg-lane-${hue})`);
  tab.setAttribute("aria-pressed", "false");
  tab.tabIndex = -1;
  tab.append(el("span", "number", String(seat + 1)), el("span", "title", title));
  return tab;
}
