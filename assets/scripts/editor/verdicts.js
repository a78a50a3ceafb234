// What the server says of a lane, on its card: what its text is guaranteed to be, and what is wrong with it.

import { PROMISES } from "python";
import { el } from "../components/elements.js";
import { qualified } from "./lane_config.js";

/** Badges of a lane's guarantees; those of one label share a badge. */
export function promises(names, lane) {
  const shown = new Map();
  const known = names.map((name) => [qualified(name, names, lane), (PROMISES[name] || [])[1]]);
  for (const [label, help] of known) if (label) shown.set(label, [...(shown.get(label) || []), help]);
  return [...shown].map(([label, helps]) => el("span", { class: `promise ${label === "heuristic" ? "loose" : "firm"}`, title: helps.join(" ") }, label));
}

/** Write a complaint on a card, at the knob or part it is about where that is shown; `remedies(place)` are its buttons. */
export function complain(card, text, about, remedies) {
  card.querySelectorAll(".complaint").forEach((node) => node.remove());
  card.querySelectorAll(".wrong").forEach((node) => node.classList.remove("wrong"));
  if (!text) return;
  const isOpen = card.classList.contains("open"); // a closed card has it below its head, where the text would be
  const place = isOpen && [...card.querySelectorAll("[data-about]")].find((node) => node.dataset.about === about && node.offsetParent);
  const note = el("p", { class: "complaint", role: "alert" }, text, ...(about ? remedies(place) : []));
  if (place) { place.classList.add("wrong"); place.append(note); } else card.append(note);
}
