// The settings drawer, and the place where a problem is mended: a field of it, or a lane as "lane:index:knob".

import { playground } from "../components/playground.js";

const JUST = 1000; // ms that a click may have been on its way
let openedItself = -Infinity; // when

export function showDrawer(open) {
  const drawer = document.querySelector("#drawer");
  if (!drawer) return;
  if (open && !drawer.hasAttribute("data-open")) openedItself = performance.now();
  const shown = drawer.toggleAttribute("data-open", open);
  document.querySelector(".settings-open")?.setAttribute("aria-expanded", String(shown));
  if (shown) document.dispatchEvent(new CustomEvent("drawer-opened")); // beside the lanes it takes the place of an open card
  // Gradio fits their heights when something is typed, and could not do so for what was filled in while they were hidden.
  if (shown) for (const field of drawer.querySelectorAll("textarea")) field.dispatchEvent(new Event("input"));
}

playground.showDrawer = showDrawer;

// A click that was meant to open the drawer does not close it where it has just opened by itself, as for a problem of a link's settings. One
// listener of the document also hears the clicks before the button's own script has run.
document.addEventListener("click", ({ target }) => {
  if (!target.closest?.(".settings-open")) return;
  if (performance.now() - openedItself > JUST) showDrawer();
});

const FIELDS = {
  prompt: "#prompt textarea", context: "#context textarea", form: "#form textarea", system: "#system textarea", tools: "#tools textarea", before: "#before button", chat: "#mode input",
  mode: "#mode input", seed: "#seed input", length: "#length input", stop: "#stop-strings textarea", model: "#model input",
  draft: "#draft input", dtype: "#dtype input", quantization: "#quantization input",
};
const NEEDED = ["context", "draft"]; // by lanes
const MENUS = ["model", "draft", "dtype", "quantization"]; // open when they are focused, over a message beside them

playground.openPlace = (about, chooses = false) => {
  const [place, lane, field] = about.split(":");
  if (place === "lane") document.dispatchEvent(new CustomEvent("open-lane", { detail: { lane: Number(lane), about: field } }));
  if (field && !NEEDED.includes(field)) return; // a knob, whatever it is called
  const name = field ?? place;
  const node = document.querySelector(FIELDS[name]);
  if (!node) return;
  if (node.closest("#drawer")) showDrawer(true);
  if (chooses || !MENUS.includes(name)) node.focus({ preventScroll: true });
  if (chooses) node.scrollIntoView({ block: "nearest" });
  else scrollTo(node);
};

const ROOM = 60; // px above a field, for its label

/** Scroll the drawer, and nothing else, to one of its fields: the message above it stays in sight. */
function scrollTo(node) {
  const drawer = document.querySelector("#drawer"), [field, frame] = [node, drawer].map((one) => one.getBoundingClientRect());
  if (drawer.contains(node) && (field.top < frame.top + ROOM || field.bottom > frame.bottom)) drawer.scrollTop += field.top - frame.top - ROOM;
}
