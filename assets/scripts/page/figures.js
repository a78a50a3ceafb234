// A replaced figure still has a resize listener and would never be freed. Plotly's own `purge` would break one that is still
// being drawn.
const release = (node) => {
  if (node.nodeType !== Node.ELEMENT_NODE) return;
  for (const plot of [node, ...node.querySelectorAll(".js-plotly-plot")]) window.removeEventListener("resize", plot._responsiveChartHandler);
};

new MutationObserver((changes) => {
  if (window.Plotly) for (const { removedNodes } of changes) removedNodes.forEach(release);
}).observe(document.documentElement, { childList: true, subtree: true });
