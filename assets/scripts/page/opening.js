// Until the settings of a link or of the last visit are in place, Run would take the page's own: it waits for them. A prompt that is typed
// meanwhile is the visitor's latest wish and stays.

import { playground } from "../components/playground.js";
import { isReload } from "../components/reload.js";
import { press } from "./shortcuts.js";
import { beginHistory } from "./undo.js";

const PROMPT = "#prompt textarea";
const opening = { isOver: false, wantsRun: false, typed: null };

document.addEventListener("click", (event) => {
  if (opening.isOver || !document.querySelector("#drawer") || !event.target.closest?.("#run")) return;
  event.stopPropagation();
  opening.wantsRun = true;
}, true);

document.addEventListener("input", ({ target }) => {
  if (!opening.isOver && target.matches?.(PROMPT)) opening.typed = target.value;
}, true);

function writeTyped() {
  const field = document.querySelector(PROMPT);
  if (opening.typed === null || !field || field.value === opening.typed) return;
  field.value = opening.typed;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

/** The last lane holds the strategy of the library: the views follow it. */
const showLast = () => document.querySelector(".live .chooser .tab:last-child")?.click();

// A link with a position shows its run there, and one of the library shows a strategy, so their runs begin by themselves; after a reload
// the tab's own runs are shown.
playground.linkOpened = () => {
  const address = new URL(location.href);
  const params = address.searchParams;
  const ofLibrary = params.has("run") && !isReload();
  const runsItself = params.has("s") && (ofLibrary || (params.has("at") && !isReload()));
  params.delete("run"); // a bookmark of the page does not run
  if (address.href !== location.href) history.replaceState(history.state, "", address);
  setTimeout(() => {
    opening.isOver = true;
    writeTyped();
    beginHistory();
    if (ofLibrary) document.addEventListener("run-begun", showLast, { once: true });
    if (runsItself || opening.wantsRun) press("run");
  }, 100);
};
