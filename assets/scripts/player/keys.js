// The dialog under "?" that lists the keyboard shortcuts. The keys are handled in listening.js, or by the page around the view.

import { button, el } from "../components/elements.js";

const APPLE = /mac|iphone|ipad/i.test(navigator.userAgentData?.platform || navigator.platform);
const NAMES = APPLE ? { Ctrl: "⌘", Enter: "return", Esc: "esc", Shift: "⇧" } : {}; // what is printed on the keys, where it differs

/** `needs`: the element that must exist, for keys that belong to the page around the view. */
const KEYS = [
  { keys: ["Space"], does: "play or pause" },
  { keys: ["←", "→"], does: "one step back or forward; inside a text, one token" },
  { keys: ["Home", "End"], does: "start or end of the run" },
  { keys: ["N"], does: `next interesting place in any lane; with ${NAMES.Shift || "Shift"}, the one before` },
  { keys: ["1", "2", "3", "4"], does: "choose the lane that the views show" },
  { keys: ["↑", "↓"], does: "inside a text: the same token in another lane" },
  { keys: ["Enter"], does: "inside a text: pin the card of the token" },
  { keys: ["O"], does: "switch off, in a copy of the lane, the part that an overlay names first at the token" },
  { keys: ["Esc"], does: "close what is open" },
  { keys: ["Esc"], does: "with nothing open: stop the run", needs: "#stop" },
  { keys: ["Ctrl", "Enter"], does: "run", needs: "#run", together: true },
  { keys: ["Ctrl", "Z"], does: "undo the last change or fork; in a text field, the last typing", needs: ".undo", together: true },
  { keys: ["P"], does: "large type for a projector, on or off", needs: ".to-projector" },
  { keys: ["?"], does: "this list" },
];

/** Show the list until it is closed; the browser then restores the focus. */
export function showKeys(dialog) {
  const close = button("icon close", "×", "Close (Escape)", () => dialog.close());
  close.setAttribute("aria-label", "Close");
  const list = el("dl");
  for (const { keys, does, together } of KEYS.filter(({ needs }) => !needs || document.querySelector(needs))) {
    const names = el("dt");
    names.append(...keys.flatMap((key, i) => [i ? (together ? " + " : " ") : "", el("kbd", "", NAMES[key] || key)]));
    list.append(names, el("dd", "", does));
  }
  dialog.replaceChildren(el("h3", "", "Keys"), close, list);
  dialog.hidden = false; // hidden while closed, so that Escape does not reach it
  dialog.addEventListener("close", () => {
    dialog.hidden = true;
  }, { once: true });
  dialog.showModal();
}
