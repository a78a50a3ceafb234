// A pick is sent to the page and closes its list; a group shows its own list and hides the others. On a calm page all of it is behind one
// button.

import { element, trigger } from "component";
import { button, el } from "../components/elements.js";

const gallery = element.querySelector(".gallery");
const box = el("div", "examples-box");
const opener = button("examples-open", "Examples");
box.append(...gallery.children);
gallery.append(opener, box);

function openExamples(isOpen) {
  gallery.classList.toggle("open", isOpen);
  opener.setAttribute("aria-expanded", String(isOpen));
  if (isOpen) box.setAttribute("role", "dialog"); // Escape closes it and stops no run
  else box.removeAttribute("role");
}

openExamples(false);
opener.addEventListener("click", () => openExamples(!gallery.classList.contains("open")));
element.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !gallery.classList.contains("open")) return;
  openExamples(false);
  opener.focus();
});
document.addEventListener("pointerdown", ({ target }) => gallery.contains(target) || openExamples(false));

function openGroup(chosen) {
  for (const group of chosen.closest("details").querySelectorAll("[data-group]")) {
    const isOpen = group === chosen && group.getAttribute("aria-expanded") !== "true";
    group.setAttribute("aria-expanded", String(isOpen));
    element.querySelector(`#${group.getAttribute("aria-controls")}`).hidden = !isOpen;
  }
}

element.addEventListener("click", (event) => {
  const group = event.target.closest("button[data-group]");
  if (group) openGroup(group);
  const chip = event.target.closest("button[data-index]");
  if (!chip) return;
  trigger("pick", { part: chip.dataset.part, index: Number(chip.dataset.index) });
  openExamples(false);
  const fold = chip.closest("details");
  if (!fold) return;
  fold.open = false;
  (fold.checkVisibility() ? fold.querySelector("summary") : opener).focus();
});
