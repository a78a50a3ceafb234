// Light or dark, and large type for a projector: kept in the browser.

const THEME = "decoding-playground-theme";
const PROJECTOR = "decoding-playground-projector";

// Called once the page is loaded; a theme in the address takes precedence.
window.keepTheme = () => {
  const chosen = localStorage.getItem(THEME);
  if (chosen && !new URLSearchParams(location.search).has("__theme")) document.body.classList.toggle("dark", chosen === "dark");
};

window.switchTheme = () => {
  const dark = document.body.classList.toggle("dark");
  localStorage.setItem(THEME, dark ? "dark" : "light");
};

// Gradio scopes most rules to the column of the page: those of the body alone would lose to them.
const project = (on) => {
  for (const node of [document.body, document.querySelector("main.contain > .column")]) node?.classList.toggle("projector", on);
  document.querySelector(".to-projector")?.setAttribute("aria-pressed", String(on));
};

window.keepProjector = () => project(localStorage.getItem(PROJECTOR) === "on");

export function switchProjector() {
  const on = !document.body.classList.contains("projector");
  project(on);
  localStorage.setItem(PROJECTOR, on ? "on" : "off");
}

window.switchProjector = switchProjector;
