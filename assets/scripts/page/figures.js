// Plotly's figures. Python makes them in the colours of the light theme; they are drawn in those of the theme that is on, and again when
// it changes.

import { IN_DARK } from "python";

const inDark = new Map(Object.entries(IN_DARK));
const made = new WeakMap(); // by plot: data, layout and configuration as Python made them
const shown = { plotly: undefined, isDark: false };

/** A copy of a part of a figure for the theme that is on. */
const painted = (part) => {
  if (Array.isArray(part)) return part.map(painted);
  if (part && typeof part === "object") return Object.fromEntries(Object.entries(part).map(([name, value]) => [name, painted(value)]));
  return shown.isDark ? inDark.get(part) ?? part : part;
};

const lookAtTheme = () => {
  const isDark = document.body.classList.contains("dark");
  if (isDark === shown.isDark) return;
  shown.isDark = isDark;
  for (const plot of document.querySelectorAll(".js-plotly-plot")) shown.plotly.react(plot, ...made.get(plot));
};

/** Gradio draws a figure by `react` once it has loaded Plotly: this draws a painted copy. */
const paint = (plotly) => {
  const draw = plotly.react;
  plotly.react = (plot, ...figure) => {
    made.set(plot, figure);
    return draw(plot, ...painted(figure));
  };
  shown.plotly = plotly;
  lookAtTheme();
  new MutationObserver(lookAtTheme).observe(document.body, { attributes: true, attributeFilter: ["class"] });
};

Object.defineProperty(window, "Plotly", { configurable: true, get: () => shown.plotly, set: paint });

// A replaced figure still has a resize listener and would never be freed. Plotly's own `purge` would break one that is still
// being drawn.
const release = (node) => {
  if (node.nodeType !== Node.ELEMENT_NODE) return;
  for (const plot of [node, ...node.querySelectorAll(".js-plotly-plot")]) window.removeEventListener("resize", plot._responsiveChartHandler);
};

new MutationObserver((changes) => {
  if (shown.plotly) for (const { removedNodes } of changes) removedNodes.forEach(release);
}).observe(document.documentElement, { childList: true, subtree: true });
