// The question which lane a fork or copy of one replaces, where no further lane has room.

import { button, el } from "../components/elements.js";

const MOST_LANES = 4;

const OF = { fork: "the lane that is forked", copy: "the lane that is copied" };

/** Ask, and call `act` with the number of the chosen lane; with undefined where there is room for one more. `word`: "fork" or "copy". */
export function askWhichToReplace(app, parent, word, act) {
  if (app.cards.length < MOST_LANES) return act(undefined);
  const dialog = el("dialog", "replacing");
  dialog.setAttribute("role", "dialog");
  dialog.setAttribute("aria-label", "Lane to replace");
  const close = () => dialog.close();
  const choices = app.cards.map((card, order) => laneChoice(card, order === parent ? OF[word] : "", () => { close(); act(app.trace.lanes[order].header.lane); }));
  dialog.append(el("h3", "", `Which lane does the ${word} replace?`), el("p", "", `There is room for ${MOST_LANES} lanes. Undo brings the replaced one back.`),
    ...choices, button("quiet cancel", "Cancel", "", close));
  dialog.addEventListener("close", () => dialog.remove());
  app.live.append(dialog);
  dialog.showModal();
}

function laneChoice(card, remark, act) {
  const choice = button("choice", "", "", act);
  choice.dataset.lane = card.order;
  choice.append(el("span", "number", String(card.order + 1)), el("span", "title", card.title), el("small", "", remark));
  return choice;
}
