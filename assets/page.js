// Small things the whole page needs: the keyboard, the theme, large type for a projector, the link, and figures that are gone.
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

  // Called once the page stands; an address that names a theme wins.
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

  // A figure that is replaced still listens for the size of the window, and so would be kept for ever. Plotly's own `purge` would
  // break one that is still being drawn.
  const letGo = (node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    for (const plot of [node, ...node.querySelectorAll(".js-plotly-plot")]) window.removeEventListener("resize", plot._responsiveChartHandler);
  };

  new MutationObserver((changes) => {
    if (window.Plotly) for (const { removedNodes } of changes) removedNodes.forEach(letGo);
  }).observe(document.documentElement, { childList: true, subtree: true });

  // The code of the settings becomes this page's address and goes to the clipboard.
  window.shareLink = async (code) => {
    if (!code) return;
    const address = new URL(location.href);
    address.search = "";
    address.searchParams.set("s", code);
    history.replaceState(null, "", address);
    const button = document.querySelector("#share");
    const label = button?.textContent;
    try { await navigator.clipboard.writeText(address.href); } catch { if (button) button.textContent = "Link is in the address bar"; }
    if (button && button.textContent === label) button.textContent = "Copied";
    setTimeout(() => { if (button) button.textContent = label; }, 1600);
  };
})();
