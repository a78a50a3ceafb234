// A searchable menu: type to filter, arrows to move, Enter to choose, Escape to close.

import { el } from "../components/elements.js";
import { FIRST_STRATEGIES, matchRank } from "./advice.js";
import { misfit } from "./fit.js";
import { MAIN, words } from "./rules.js";

export function menu({ face, label, title, choose, ...offer }) {
  const opener = el("button", { type: "button", class: `opener ${face}`, "aria-haspopup": "dialog", "aria-expanded": "false", "aria-label": label }, title);
  const host = el("div", "menu-host", opener);
  opener.addEventListener("click", () => openMenu(host, opener, { label, choose, ...offer }));
  opener.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    event.preventDefault();
    opener.click();
  });
  return host;
}

/** Open a menu that was drawn again while somebody typed in it, with what was typed. */
export function reopenMenu(root, label, typed) {
  [...root.querySelectorAll(".menu-host .opener")].find((opener) => opener.getAttribute("aria-label") === label)?.click();
  const search = root.querySelector(".menu input");
  if (!search) return;
  search.value = typed;
  search.dispatchEvent(new Event("input"));
}

/** `candidates`: the parts; `group`: the heading of a part; `against`: its objection, as of `objection`. */
function openMenu(host, opener, { label, candidates, group, against = () => ({ reason: "", barred: false }), current, hint, choose }) {
  if (host.querySelector(".menu")) return;
  const id = `menu-${Math.random().toString(36).slice(2, 9)}`;
  const list = el("div", { id, class: "options", role: "listbox", "aria-label": label });
  const search = el("input", { type: "search", role: "combobox", spellcheck: "false", autocomplete: "off", placeholder: hint || `Search ${candidates.length}`,
    "aria-label": label, "aria-expanded": "true", "aria-controls": id, "aria-autocomplete": "list" });
  const popup = el("div", { class: "menu", role: "dialog", "aria-label": label }, search, list);
  const outside = (event) => { if (!host.contains(event.target)) close(); };
  const close = () => { popup.remove(); opener.setAttribute("aria-expanded", "false"); document.removeEventListener("pointerdown", outside); };
  const optionOf = (part) => option(part, against(part), () => { close(); choose(part.name); });
  const show = () => { list.replaceChildren(...optionGroups(candidates, group, search.value, optionOf)); activate(list, search, bestOption(list, search.value, current)); };
  search.addEventListener("input", show);
  search.addEventListener("keydown", (event) => menuKey(event, list, search, () => { close(); opener.focus(); }));
  popup.addEventListener("focusout", (event) => { if (event.relatedTarget && !host.contains(event.relatedTarget)) close(); });
  document.addEventListener("pointerdown", outside);
  opener.setAttribute("aria-expanded", "true");
  host.append(popup);
  show();
  keepInSight(popup);
  search.focus();
}

/** Whether every typed word occurs in the description of a part. */
function found(part, text) {
  const description = [part.title, part.name, words(part.name), words(part.family), words(part.kind), part.paper, part.summary].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => description.includes(word));
}

/** The heading of a part: while nothing is typed, the recommended strategies come first, and those for another model last. */
function headingOf(part, group, text) {
  if (text.trim() || !(part.lane || MAIN.includes(part.kind))) return group(part);
  if (part.lane && !part.whenTyped) return "Beside these lanes";
  if (misfit(part)) return "For another model";
  return FIRST_STRATEGIES.includes(part.name) ? "Recommended" : group(part);
}

/** Of two parts that match equally well the plainer one comes first, "EAGLE" before "EAGLE-2". */
const titleLength = (part) => (part.title || part.name).length;

function optionGroups(candidates, group, text, optionOf) {
  const groups = new Map();
  const matches = candidates.filter((one) => found(one, text) && (text.trim() || !one.whenTyped));
  if (text.trim()) matches.sort((a, b) => matchRank(a, text) - matchRank(b, text) || titleLength(a) - titleLength(b));
  for (const part of matches) {
    const heading = headingOf(part, group, text);
    groups.set(heading, [...(groups.get(heading) || []), part]);
  }
  if (!groups.size) return [el("p", "none", `No strategy matches “${text}”. Search by what it does: “json”, “cache”, “draft”, “watermark”.`)];
  return [...groups].map(([name, parts]) => el("div", { role: "group", "aria-label": name },
    el("p", { class: "heading", "aria-hidden": "true" }, name), ...parts.map(optionOf)));
}

/** One part in a menu. An objection is shown in place of its summary; if it is barred, it cannot be chosen. */
function option(part, { reason, barred }, take) {
  const node = el("div", { class: `option${reason ? " grey" : ""}`, role: "option", id: `option-${part.name}`, "data-name": part.name, "aria-selected": "false",
    "aria-disabled": reason && barred ? "true" : null, title: reason || null },
  el("span", "name", part.title || words(part.name)), el("small", "", reason || part.summary));
  if (!reason || !barred) node.addEventListener("click", take);
  return node;
}

/** The option to activate: the current part while nothing is typed, otherwise the first one that can be chosen. */
function bestOption(list, text, current) {
  const options = choosable(list);
  return (!text.trim() && options.find((option) => option.dataset.name === current)) || options[0] || null;
}

/** The options that are not barred: only these are reached by key. */
function choosable(list) {
  return [...list.querySelectorAll(".option:not([aria-disabled=true])")];
}

function activate(list, search, option) {
  for (const other of list.querySelectorAll("[aria-selected=true]")) other.setAttribute("aria-selected", "false");
  search.setAttribute("aria-activedescendant", option ? option.id : "");
  option?.setAttribute("aria-selected", "true");
  option?.scrollIntoView({ block: "nearest" });
}

function menuKey(event, list, search, leave) {
  const options = choosable(list);
  const at = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 8, PageUp: at - 8 }[event.key];
  if (next !== undefined) activate(list, search, options[Math.max(0, Math.min(options.length - 1, next))] || null);
  else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) options[at]?.click();
  else if (event.key === "Escape") leave();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function keepInSight(popup) {
  const { right } = popup.getBoundingClientRect();
  const over = right - document.documentElement.clientWidth + 8;
  if (over > 0) popup.style.left = `${-over / (popup.currentCSSZoom ?? 1)}px`; // large type zooms the page
  popup.scrollIntoView({ block: "nearest" });
}
