// Searches and filters the entries of the library. All entries are in the page; those that do not match are hidden.

import { element } from "component";

const NONE_CHOSEN = { family: "", promise: "", new: "", drafts: "" };

class Library {
  constructor(root) {
    this.root = root;
    this.search = root.querySelector("input[type=search]");
    this.entries = [...root.querySelectorAll(".entry")];
    this.named = root.querySelector(".named-so .entries");
    this.homes = new Map(this.entries.map((entry) => [entry, entry.parentNode])); // the sections of the families
    this.chips = [...root.querySelectorAll(".chips button")];
    this.chosen = { ...NONE_CHOSEN };
    this.search.addEventListener("input", () => this.show());
    this.search.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.search.value) { event.preventDefault(); this.search.value = ""; this.show(); } });
    for (const chip of this.chips) chip.addEventListener("click", () => this.press(chip));
    root.querySelector(".clear").addEventListener("click", () => { this.clear(); this.search.focus(); });
    window.addEventListener("hashchange", () => this.goTo(location.hash));
    this.show();
    if (location.hash) requestAnimationFrame(() => this.goTo(location.hash));
  }

  /** Pressing a selected chip deselects it. */
  press({ dataset }) {
    const [filter] = Object.keys(dataset);
    this.chosen[filter] = this.chosen[filter] === dataset[filter] ? "" : dataset[filter];
    this.show();
  }

  clear() {
    this.search.value = "";
    this.chosen = { ...NONE_CHOSEN };
    this.show();
  }

  /** Whether an entry contains every typed word and matches the selected chips. */
  fits({ dataset }, { family, promise, new: year, drafts }) {
    const typed = this.typed;
    const chosen = (!family || dataset.family === family) && (!promise || dataset.promise.split(",").includes(promise)) && (!drafts || dataset.drafts === drafts);
    return chosen && (!year || dataset.new === year) && typed.every((word) => dataset.words.includes(word));
  }

  get typed() {
    return this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  }

  show() {
    for (const entry of this.entries) entry.hidden = !this.fits(entry, this.chosen);
    this.sort();
    for (const section of this.root.querySelectorAll("section:not(.glossary)")) section.hidden = !section.querySelector(".entry:not([hidden])");
    this.chips.forEach((chip) => this.count(chip));
    const found = this.entries.filter((entry) => !entry.hidden).length;
    this.root.querySelector(".found").textContent = `${this.counted(found)} ${this.meaning()}`;
    this.sayNothing(found === 0);
  }

  /** Entries whose name has what was typed come first, the closest name at the top; all others stay with their family. */
  sort() {
    for (const entry of this.entries) this.homes.get(entry).append(entry);
    const close = this.entries.filter((entry) => !entry.hidden && closeness(entry.dataset.name, this.typed));
    close.sort((one, other) => closeness(other.dataset.name, this.typed) - closeness(one.dataset.name, this.typed) || byLength(one, other));
    this.named.append(...close);
  }

  counted(found) {
    const all = this.entries.length;
    return found === all ? `${all} entries.` : `${found} of ${all} entries.`;
  }

  /** The meaning of the selected guarantee, or an empty text. */
  meaning() {
    const chip = this.chips.find(({ dataset }) => dataset.promise && dataset.promise === this.chosen.promise);
    return chip ? `${chip.dataset.promise.replace(/^./, (letter) => letter.toUpperCase())}: ${chip.title}` : "";
  }

  /** Show how many entries this chip would leave, given the search and the other rows of chips. */
  count(chip) {
    const [filter] = Object.keys(chip.dataset);
    const number = this.entries.filter((entry) => this.fits(entry, { ...this.chosen, [filter]: chip.dataset[filter] })).length;
    const pressed = this.chosen[filter] === chip.dataset[filter];
    chip.setAttribute("aria-pressed", String(pressed));
    chip.disabled = number === 0 && !pressed;
    chip.querySelector(".count").textContent = String(number);
  }

  sayNothing(nothing) {
    const note = this.root.querySelector(".none");
    note.hidden = !nothing;
    const typed = this.search.value.trim();
    note.querySelector("p").textContent = typed ? `No entry matches “${typed}”.` : "No strategy has all of these.";
  }

  /** Show the entry named in the address, unfolded, regardless of the filters. */
  goTo(hash) {
    if (hash === "#glossary") this.root.querySelector(".glossary").scrollIntoView({ block: "start" });
    const entry = this.entries.find(({ id }) => id === decodeURIComponent(hash.slice(1)));
    if (!entry) return;
    if (entry.hidden) this.clear();
    for (const other of this.entries) other.classList.toggle("named", other === entry);
    for (const fold of entry.querySelectorAll("details")) fold.open = true;
    entry.scrollIntoView({ block: "start" });
    entry.focus({ preventScroll: true });
  }
}

/** 3 if a name begins with the typed words, 2 if they begin words of it, 1 if it contains them, 0 if not or nothing is typed. */
function closeness(name, typed) {
  if (!typed.length || !typed.every((word) => name.includes(word))) return 0;
  if (name.startsWith(typed.join(" "))) return 3;
  const words = name.split(/[^\p{L}\p{N}]+/u);
  return typed.every((word) => words.some((part) => part.startsWith(word))) ? 2 : 1;
}

function byLength(one, other) {
  return one.dataset.name.length - other.dataset.name.length || one.dataset.name.localeCompare(other.dataset.name);
}

new Library(element.querySelector(".strategies"));
