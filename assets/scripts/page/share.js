// The link of this page, and a frame of it for another one.

import { el } from "../components/elements.js";
import { playground } from "../components/playground.js";

// Put the encoded settings into this page's address and copy it.
playground.shareLink = async (code) => {
  if (!code) return;
  const address = new URL(location.href);
  address.search = "";
  address.searchParams.set("s", code);
  const position = playground.livePosition?.();
  if (position) address.searchParams.set("at", position);
  window.history.replaceState(null, "", address);
  await copy(document.querySelector("#share"), address.href, "Copy it from the address bar");
};

// Copy a frame for another page: it opens this page with the settings of the last link.
playground.embedCode = async (code) => {
  if (!code) return;
  const address = new URL(location.pathname, location.href);
  address.searchParams.set("s", code);
  const frame = el("iframe", { src: address.href, title: "Decoding playground", width: "100%", height: "900", style: "border: 0", loading: "lazy", allow: "clipboard-write" });
  await copy(document.querySelector("#embed"), frame.outerHTML, "Not allowed by the browser");
};

const copy = async (button, text, failed) => {
  const label = button?.textContent;
  try { await navigator.clipboard.writeText(text); } catch { if (button) button.textContent = failed; }
  if (button && button.textContent === label) button.textContent = "Copied";
  setTimeout(() => { if (button) button.textContent = label; }, 1600);
};
