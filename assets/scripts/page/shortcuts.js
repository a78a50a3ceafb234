// Keys of every page: Run, Stop, and large type.

import { playground } from "../components/playground.js";
import { switchProjector } from "./themes.js";

playground.isApple = /mac|iphone|ipad/i.test(navigator.userAgentData?.platform || navigator.platform); // its keys have other names

export const press = (id) => document.querySelector(`#${id}:not([disabled])`)?.click();

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!event.repeat) press("run"); }
  if (event.key === "Enter" && event.repeat && event.target.closest?.("#run")) event.preventDefault();
  if (event.key === "Escape" && !document.querySelector("[role=dialog]:not([hidden])")) press("stop");
}, true);

/** Who double-clicks Run wants one run. */
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest?.("#run")) event.stopPropagation();
}, true);

export const TYPED = "input, textarea, select, [contenteditable], dialog";

document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "p" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(TYPED)) return;
  switchProjector();
});

const CONTENTS = [".live .lane:not([hidden]) .text[tabindex='0']", ".game .stage", "main h2"]; // of a page, the first that it has

/** The first stop of the Tab key leads past the header, and past what sets up a run. */
playground.skipHeader = () => {
  const contents = CONTENTS.map((part) => document.querySelector(part)).find(Boolean);
  if (contents && !contents.hasAttribute("tabindex")) contents.tabIndex = -1;
  contents?.focus();
};
