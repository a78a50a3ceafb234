// Page-wide behaviour: keyboard shortcuts, theme, projector mode, share link, clean-up of removed figures.
(() => {
  const press = (id) => document.querySelector(`#${id}:not([disabled])`)?.click();

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); press("run"); }
    if (event.key === "Escape" && !document.querySelector("[role=dialog]:not([hidden])")) press("stop");
  }, true);

  const TYPED = "input, textarea, select, [contenteditable], dialog";

  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "p" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(TYPED)) return;
    window.switchProjector();
  });

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

  const project = (on) => {
    document.body.classList.toggle("projector", on);
    document.querySelector(".to-projector")?.setAttribute("aria-pressed", String(on));
  };

  window.keepProjector = () => project(localStorage.getItem(PROJECTOR) === "on");

  window.switchProjector = () => {
    if (!document.querySelector(".live")) return;
    const on = !document.body.classList.contains("projector");
    project(on);
    localStorage.setItem(PROJECTOR, on ? "on" : "off");
  };

  // A replaced figure still has a resize listener and would never be freed. Plotly's own `purge` would break one that is still
  // being drawn.
  const release = (node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    for (const plot of [node, ...node.querySelectorAll(".js-plotly-plot")]) window.removeEventListener("resize", plot._responsiveChartHandler);
  };

  new MutationObserver((changes) => {
    if (window.Plotly) for (const { removedNodes } of changes) removedNodes.forEach(release);
  }).observe(document.documentElement, { childList: true, subtree: true });

  // Put the encoded settings into this page's address and copy it.
  window.shareLink = async (code) => {
    if (!code) return;
    const address = new URL(location.href);
    address.search = "";
    address.searchParams.set("s", code);
    history.replaceState(null, "", address);
    const button = document.querySelector("#share");
    const label = button?.textContent;
    try { await navigator.clipboard.writeText(address.href); } catch { if (button) button.textContent = "Copy it from the address bar"; }
    if (button && button.textContent === label) button.textContent = "Copied";
    setTimeout(() => { if (button) button.textContent = label; }, 1600);
  };
})();
