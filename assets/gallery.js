// A pick is told to the page; a task shows its own list and hides the others. Once a question is picked its list is out of the way.
const taskButtons = [...element.querySelectorAll("[data-task]")];

function openTask(chosen) {
  for (const button of taskButtons) {
    const isOpen = button === chosen && button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(isOpen));
    element.querySelector(`#${button.getAttribute("aria-controls")}`).hidden = !isOpen;
  }
}

element.addEventListener("click", (event) => {
  const task = event.target.closest("button[data-task]");
  if (task) openTask(task);
  const chip = event.target.closest("button[data-index]");
  if (!chip) return;
  trigger("pick", { part: chip.dataset.part, index: Number(chip.dataset.index) });
  const fold = chip.closest("details");
  if (!fold) return;
  fold.open = false;
  fold.querySelector("summary").focus();
});
