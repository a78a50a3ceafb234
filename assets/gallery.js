// A pick is sent to the page and closes its list; a group shows its own list and hides the others.
function openGroup(chosen) {
  for (const button of chosen.closest("details").querySelectorAll("[data-group]")) {
    const isOpen = button === chosen && button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(isOpen));
    element.querySelector(`#${button.getAttribute("aria-controls")}`).hidden = !isOpen;
  }
}

element.addEventListener("click", (event) => {
  const group = event.target.closest("button[data-group]");
  if (group) openGroup(group);
  const chip = event.target.closest("button[data-index]");
  if (!chip) return;
  trigger("pick", { part: chip.dataset.part, index: Number(chip.dataset.index) });
  const fold = chip.closest("details");
  if (!fold) return;
  fold.open = false;
  fold.querySelector("summary").focus();
});
