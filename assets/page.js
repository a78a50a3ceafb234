// Small things the whole page needs: the keyboard, the theme and the link.
(() => {
  const press = (id) => document.querySelector(`#${id}:not([disabled])`)?.click();

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); press("run"); }
    if (event.key === "Escape" && !document.querySelector("[role=dialog]:not([hidden])")) press("stop");
  }, true);

  const THEME = "decoding-playground-theme";

  // Called once the page stands; an address that names a theme wins.
  window.keepTheme = () => {
    const chosen = localStorage.getItem(THEME);
    if (chosen && !new URLSearchParams(location.search).has("__theme")) document.body.classList.toggle("dark", chosen === "dark");
  };

  window.switchTheme = () => {
    const dark = document.body.classList.toggle("dark");
    localStorage.setItem(THEME, dark ? "dark" : "light");
  };

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
