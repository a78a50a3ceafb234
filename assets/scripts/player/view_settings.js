// How runs are shown: kept in the browser.

import { prefersStillness } from "../components/elements.js";
import { COLOURS } from "../lane/colour.js";
import { ALIGNMENTS, SPEEDS } from "./player.js";

const VIEW_SETTINGS = "decoding-playground.view"; // the only data stored in the browser: view settings, never content
export const RIVALS = ["3", "5", "all"]; // candidates the card of a token shows
export const UNDERLINES = new Map([...Object.entries(COLOURS).map(([name, { label }]) => [name, label]), ["none", "none"]]);

export function readSettings() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(VIEW_SETTINGS)) || {};
  } catch (reason) { /* missing or malformed: use the defaults */ }
  return {
    metric: stored.metric in COLOURS ? stored.metric : "entropy",
    underline: UNDERLINES.has(stored.underline) ? stored.underline : "origin",
    rivals: RIVALS.includes(stored.rivals) ? stored.rivals : "all",
    views: stored.views === "all" ? "all" : "one", // beside the lanes one at a time, or all below them
    align: ALIGNMENTS.includes(stored.align) ? stored.align : "forwards",
    speed: SPEEDS.includes(stored.pace) ? stored.pace : prefersStillness() ? "live" : "reading",
  };
}

export function keepSettings({ metric, underline, rivals, speed, align, views }) {
  try {
    localStorage.setItem(VIEW_SETTINGS, JSON.stringify({ metric, underline, rivals, pace: speed, align, views }));
  } catch (reason) { /* without storage the settings last for this visit only */ }
}
