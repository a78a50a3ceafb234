// Light or dark, and large type for a projector: kept in the browser.

import { playground } from "../components/playground.js";

const THEME = "decoding-playground-theme";
const PROJECTOR = "decoding-playground-projector";

// Called once the page is loaded; a theme in the address takes precedence.
playground.keepTheme = () => {
  const chosen = localStorage.getItem(THEME);
  if (chosen && !new URLSearchParams(location.search).has("__theme")) document.body.classList.toggle("dark", chosen === "dark");
};

playground.switchTheme = () => {
  const dark = document.body.classList.toggle("dark");
  localStorage.setItem(THEME, dark ? "dark" : "light");
};

// Gradio scopes most rules to the column of the page: those of the body alone would lose to them.
const project = (on) => {
  for (const node of [document.body, document.querySelector("main.contain > .column")]) node?.classList.toggle("projector", on);
  document.querySelector(".to-projector")?.setAttribute("aria-pressed", String(on));
};

playground.keepProjector = () => project(localStorage.getItem(PROJECTOR) === "on");

export function switchProjector() {
  const on = !document.body.classList.contains("projector");
  project(on);
  localStorage.setItem(PROJECTOR, on ? "on" : "off");
}

playground.switchProjector = switchProjector;
