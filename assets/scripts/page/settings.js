// The settings of the page: their summary, and what depends on them.

import { count } from "../components/numbers.js";
import { playground } from "../components/playground.js";
import { isReload } from "../components/reload.js";
import { chosen } from "./chosen.js";
import { showDrawer } from "./drawer.js";
import { remember } from "./undo.js";

const summary = ({ mode, length, seed, model, draft, stop, system, tools, context, before, dtype, quantization }) => [
  mode === "chat" ? "chat" : "raw text",
  count(length, "token"),
  `seed ${seed}`,
  model === "default" ? playground.settingsModel : model,
  draft && draft !== "default" && `draft ${draft}`,
  dtype && dtype !== "auto" && dtype,
  quantization && quantization !== "none" && quantization,
  stop && "stop strings",
  mode === "chat" && system && "system message",
  mode === "chat" && tools?.trim() && "tools",
  before?.length && count(before.length, "earlier turn"),
  context?.trim() && `context of ${count(context.trim().split(/\s+/).length, "word")}`,
].filter(Boolean).join(" · ");

/** Whether a chosen lane reads a context that is not there. */
const lacksContext = ({ lanes = [], context = "" }) => {
  const parts = lanes.flatMap((lane) => [lane.strategy, ...(lane.extras || []).map(([name]) => name)]);
  return !context.trim() && parts.some((name) => chosen.readers.includes(name));
};

/** Announce changed settings. The drawer opens by itself when a lane begins to lack its context. */
playground.settingsChosen = (some, readers = chosen.readers) => {
  Object.assign(chosen, { settings: { ...chosen.settings, ...some }, readers });
  const line = document.querySelector(".settings-open .summary");
  if (line) line.textContent = summary(chosen.settings);
  const lacking = lacksContext(chosen.settings);
  if (lacking && !chosen.lacking) showDrawer(true);
  chosen.lacking = lacking;
  document.dispatchEvent(new CustomEvent("settings-chosen", { detail: chosen.settings }));
  remember();
  return some;
};

playground.settingsNow = () => chosen.settings;

// A page that is loaded again, also by itself after a lost connection, keeps what was chosen in this tab at this address. Before a link or
// the last visit is set up, nothing was chosen: the controls show what every page begins with.

const LEFT = "decoding-playground.settings";

playground.settingsSetUp = () => { chosen.isSetUp = true; };

addEventListener("pagehide", () => {
  if (!chosen.isSetUp || !("prompt" in chosen.settings)) return;
  try {
    sessionStorage.setItem(LEFT, JSON.stringify({ address: location.href, settings: chosen.settings }));
  } catch { /* without storage the address or the browser's storage decides */ }
});

playground.settingsToOpen = (stored) => {
  try {
    const { address, settings } = JSON.parse(sessionStorage.getItem(LEFT)) || {};
    return isReload() && address === location.href ? { ...settings, reloaded: true } : stored;
  } catch {
    return stored;
  }
};
