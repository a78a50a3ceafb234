// The list of all keys, in a dialog: what a person finds under "?". A key is worked in listening.js, or in the page around the view.

/** One line for each: the keys, what they do, and, where they belong to the page around the view, what must be there for them. */
const KEYS = [
  { keys: ["Space"], does: "play or pause" },
  { keys: ["←", "→"], does: "one beat back or on; inside a text, one token" },
  { keys: ["Home", "End"], does: "the beginning or the end of the run" },
  { keys: ["1", "2", "3", "4"], does: "choose the lane that the views show" },
  { keys: ["Enter"], does: "inside a text: keep the card of the token open" },
  { keys: ["Esc"], does: "close what is open" },
  { keys: ["Esc"], does: "with nothing open: stop the run", needs: "#stop" },
  { keys: ["Ctrl", "Enter"], does: "run", needs: "#run", together: true },
  { keys: ["P"], does: "large type for a projector, or back", needs: ".to-projector" },
  { keys: ["?"], does: "this list" },
];

/** Show the list until it is closed; the focus then goes back to where it was. */
function showKeys(dialog) {
  const close = button("icon close", "×", "Close (Escape)", () => dialog.close());
  close.setAttribute("aria-label", "Close");
  const list = el("dl");
  for (const { keys, does, together } of KEYS.filter(({ needs }) => !needs || document.querySelector(needs))) {
    const names = el("dt");
    names.append(...keys.flatMap((key, i) => [i ? (together ? " + " : " ") : "", el("kbd", "", key)]));
    list.append(names, el("dd", "", does));
  }
  dialog.replaceChildren(el("h3", "", "Keys"), close, list);
  dialog.hidden = false; // it is only there while it is open: Escape belongs to what is open
  dialog.addEventListener("close", () => {
    dialog.hidden = true;
  }, { once: true });
  dialog.showModal();
}
