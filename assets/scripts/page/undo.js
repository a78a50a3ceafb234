// Undo: the settings before each change, with the run that was shown beside them. What is typed in one go is one change.

import { playground } from "../components/playground.js";
import { chosen } from "./chosen.js";
import { TYPED } from "./shortcuts.js";

const MOST_UNDONE = 50;
const TYPING = 700; // ms without a change after which the next one can be undone by itself
const RESTORING = 3000; // ms until a restoration counts as done, whatever the server has answered
const changes = { past: [], now: null, timer: 0, restoring: 0, waiting: 0 };

const laneKey = ({ strategy, knobs = {}, extras = [], forced = [], seed, forked_at: at }) => [strategy, knobs, extras, forced, seed ?? null, at ?? null];
const keyOf = (settings) => JSON.stringify({ ...settings, lanes: (settings.lanes || []).map(laneKey) });

const showUndo = () => {
  const button = document.querySelector(".undo");
  if (button) button.disabled = !changes.past.length && (changes.restoring > 0 || !isChanged());
};

const isChanged = () => changes.now !== null && changes.now.key !== keyOf(chosen.settings);

/** Take down the settings as they are now, once all of them are known. */
const record = () => {
  clearTimeout(changes.timer);
  if (changes.restoring) return;
  if (!("prompt" in chosen.settings) || !chosen.settings.lanes) return;
  if (changes.now && !isChanged()) return;
  if (changes.now) changes.past = [...changes.past, changes.now].slice(-MOST_UNDONE);
  changes.now = { settings: JSON.parse(JSON.stringify(chosen.settings)), key: keyOf(chosen.settings), run: changes.now?.run ?? null };
  showUndo();
};

/** What a link or the browser's storage has set is where undo ends. */
export const beginHistory = () => {
  Object.assign(changes, { past: [], now: null });
  record();
  showUndo();
};

/** The controls have their former values again; what was asked for meanwhile is undone next. */
const restored = () => {
  clearTimeout(changes.restoring);
  changes.restoring = 0;
  if (changes.waiting) {
    changes.waiting -= 1;
    setTimeout(undo);
  }
};

export const remember = () => {
  clearTimeout(changes.timer);
  if (changes.restoring && !isChanged()) restored();
  changes.timer = setTimeout(record, TYPING);
  showUndo();
};

function undo() {
  if (changes.restoring) {
    changes.waiting += 1;
    return;
  }
  record();
  const before = changes.past.pop();
  if (!before) return;
  changes.now = before;
  if (isChanged()) changes.restoring = setTimeout(restored, RESTORING);
  playground.restoreSettings?.(before.settings);
  if (before.run) document.dispatchEvent(new CustomEvent("show-run", { detail: before.run }));
  showUndo();
}

document.addEventListener("click", ({ target }) => { if (target.closest?.(".undo")) undo(); });

// A fork shows its run after its lanes were set: the run belongs to these.
document.addEventListener("run-begun", ({ detail }) => {
  record();
  if (changes.now) changes.now.run = detail;
});

document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  if (event.target.closest?.(TYPED) && !event.target.closest("[type=range], [type=checkbox], [type=radio]")) return;
  event.preventDefault();
  undo();
});
