// Page-wide behaviour: keyboard shortcuts, theme, projector mode, share link, clean-up of removed figures.

import "../components/glossary.js";
import { el } from "../components/elements.js";
import { count } from "../components/numbers.js";

// When a page is left, Gradio's client aborts its streams and reports them as errors: here they end instead. What it asks meanwhile is not
// answered.

const STREAMS = /\/(queue\/data|heartbeat\/)/;
const streams = new Set(); // functions that end a stream
const ask = window.fetch.bind(window);
let isLeft = false;

const ending = (answer) => {
  const reader = answer.body.getReader();
  let isOver = false;
  const body = new ReadableStream({
    start(controller) {
      this.end = () => {
        isOver = true;
        streams.delete(this.end);
        controller.close();
      };
      streams.add(this.end);
    },
    async pull(controller) {
      try {
        const { done, value } = await reader.read();
        if (done && !isOver) this.end();
        else if (!isOver) controller.enqueue(value);
      } catch (reason) {
        if (isOver) return;
        if (reason?.name === "AbortError") return this.end(); // the client's own
        streams.delete(this.end);
        throw reason;
      }
    },
    cancel(reason) {
      streams.delete(this.end);
      return reader.cancel(reason);
    },
  });
  return new Response(body, answer);
};

window.fetch = async (resource, options) => {
  try {
    const answer = await ask(resource, options);
    return answer.body && STREAMS.test(resource?.url ?? resource) ? ending(answer) : answer;
  } catch (reason) {
    if (isLeft || (reason?.name === "AbortError" && STREAMS.test(resource?.url ?? resource))) return new Promise(() => {});
    throw reason;
  }
};

addEventListener("pagehide", () => {
  isLeft = true;
  for (const end of streams) end();
});

addEventListener("pageshow", ({ persisted }) => {
  if (persisted) location.reload(); // its streams have ended; what was chosen is kept
});

window.isApple = /mac|iphone|ipad/i.test(navigator.userAgentData?.platform || navigator.platform); // its keys have other names

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
  const on = !document.body.classList.contains("projector");
  project(on);
  localStorage.setItem(PROJECTOR, on ? "on" : "off");
};

// The settings drawer, and what is chosen on the page. The live view compares what it draws with it.

window.showDrawer = (open) => {
  const drawer = document.querySelector("#drawer");
  if (!drawer) return;
  const shown = drawer.toggleAttribute("data-open", open);
  document.querySelector(".settings-open")?.setAttribute("aria-expanded", String(shown));
  if (shown) document.dispatchEvent(new CustomEvent("drawer-opened")); // beside the lanes it takes the place of an open card
  // Gradio fits their heights when something is typed, and could not do so for what was filled in while they were hidden.
  if (shown) for (const field of drawer.querySelectorAll("textarea")) field.dispatchEvent(new Event("input"));
};

const chosen = { settings: {}, readers: [], lacking: false };

// Undo: the settings before each change, with the run that was shown beside them. What is typed in one go is one change.

const MOST_UNDONE = 50;
const TYPING = 700; // ms without a change after which the next one can be undone by itself
const RESTORING = 3000; // ms until a restoration counts as done, whatever the server has answered
const changes = { past: [], now: null, timer: 0, restoring: 0, waiting: 0 };

const laneKey = ({ strategy, knobs = {}, extras = [], forced = [], seed, forked_at: at }) => [strategy, knobs, extras, forced, seed ?? null, at ?? null];
const keyOf = (settings) => JSON.stringify({ ...settings, lanes: (settings.lanes || []).map(laneKey) });

const showUndo = () => {
  const button = document.querySelector(".undo");
  if (button) button.disabled = !changes.past.length && (changes.restoring > 0 || !isChanged());
};

const isChanged = () => changes.now !== null && changes.now.key !== keyOf(chosen.settings);

/** Take down the settings as they are now, once all of them are known. */
const record = () => {
  clearTimeout(changes.timer);
  if (changes.restoring) return;
  if (!("prompt" in chosen.settings) || !chosen.settings.lanes) return;
  if (changes.now && !isChanged()) return;
  if (changes.now) changes.past = [...changes.past, changes.now].slice(-MOST_UNDONE);
  changes.now = { settings: JSON.parse(JSON.stringify(chosen.settings)), key: keyOf(chosen.settings), run: changes.now?.run ?? null };
  showUndo();
};

/** What a link or the browser's storage has set is where undo ends. */
const beginHistory = () => {
  Object.assign(changes, { past: [], now: null });
  record();
  showUndo();
};

/** The controls have their former values again; what was asked for meanwhile is undone next. */
const restored = () => {
  clearTimeout(changes.restoring);
  changes.restoring = 0;
  if (changes.waiting) {
    changes.waiting -= 1;
    setTimeout(window.undo);
  }
};

const remember = () => {
  clearTimeout(changes.timer);
  if (changes.restoring && !isChanged()) restored();
  changes.timer = setTimeout(record, TYPING);
  showUndo();
};

window.undo = () => {
  if (changes.restoring) {
    changes.waiting += 1;
    return;
  }
  record();
  const before = changes.past.pop();
  if (!before) return;
  changes.now = before;
  if (isChanged()) changes.restoring = setTimeout(restored, RESTORING);
  window.restoreSettings?.(before.settings);
  if (before.run) document.dispatchEvent(new CustomEvent("show-run", { detail: before.run }));
  showUndo();
};

// A fork shows its run after its lanes were set: the run belongs to these.
document.addEventListener("run-begun", ({ detail }) => {
  record();
  if (changes.now) changes.now.run = detail;
});

document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  if (event.target.closest?.(TYPED) && !event.target.closest("[type=range], [type=checkbox], [type=radio]")) return;
  event.preventDefault();
  window.undo();
});

const summary = ({ mode, length, seed, model, draft, stop, system, tools, context, before, dtype, quantization }) => [
  mode === "chat" ? "chat" : "raw text",
  count(length, "token"),
  `seed ${seed}`,
  model === "default" ? window.settingsModel : model,
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
window.settingsChosen = (some, readers = chosen.readers) => {
  Object.assign(chosen, { settings: { ...chosen.settings, ...some }, readers });
  const line = document.querySelector(".settings-open .summary");
  if (line) line.textContent = summary(chosen.settings);
  const lacking = lacksContext(chosen.settings);
  if (lacking && !chosen.lacking) window.showDrawer(true);
  chosen.lacking = lacking;
  document.dispatchEvent(new CustomEvent("settings-chosen", { detail: chosen.settings }));
  remember();
  return some;
};

window.settingsNow = () => chosen.settings;

// A page that is loaded again, also by itself after a lost connection, keeps what was chosen in this tab, whatever its address says.

const LEFT = "decoding-playground.settings";

addEventListener("pagehide", () => {
  try {
    if ("prompt" in chosen.settings) sessionStorage.setItem(LEFT, JSON.stringify(chosen.settings));
  } catch { /* without storage the address or the browser's storage decides */ }
});

const isReload = () => performance.getEntriesByType("navigation")[0]?.type === "reload";

window.settingsToOpen = (stored) => {
  try {
    return isReload() && sessionStorage.getItem(LEFT) ? { ...JSON.parse(sessionStorage.getItem(LEFT)), reloaded: true } : stored;
  } catch {
    return stored;
  }
};

// The place where a problem is mended: a field of the drawer, or a lane as "lane:index:knob".

const FIELDS = {
  prompt: "#prompt textarea", context: "#context textarea", form: "#form textarea", system: "#system textarea", tools: "#tools textarea", before: "#before button", chat: "#mode input",
  mode: "#mode input", seed: "#seed input", length: "#length input", stop: "#stop-strings textarea", model: "#model input",
  draft: "#draft input", dtype: "#dtype input", quantization: "#quantization input",
};
const NEEDED = ["context", "draft"]; // by lanes
const MENUS = ["model", "draft", "dtype", "quantization"]; // open when they are focused, over a message beside them

window.openPlace = (about, chooses = false) => {
  const [place, lane, field] = about.split(":");
  if (place === "lane") document.dispatchEvent(new CustomEvent("open-lane", { detail: { lane: Number(lane), about: field } }));
  if (field && !NEEDED.includes(field)) return; // a knob, whatever it is called
  const name = field ?? place;
  const node = document.querySelector(FIELDS[name]);
  if (!node) return;
  if (node.closest("#drawer")) window.showDrawer(true);
  if (chooses || !MENUS.includes(name)) node.focus({ preventScroll: true });
  if (chooses) node.scrollIntoView({ block: "nearest" });
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
  const position = window.livePosition?.();
  if (position) address.searchParams.set("at", position);
  window.history.replaceState(null, "", address);
  await copy(document.querySelector("#share"), address.href, "Copy it from the address bar");
};

// Copy a frame for another page: it opens this page with the settings of the last link.
window.embedCode = async (code) => {
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

// Until the settings of a link or of the last visit are in place, Run would take the page's own: it waits for them.
const opening = { isOver: false, wantsRun: false };

document.addEventListener("click", (event) => {
  if (opening.isOver || !document.querySelector("#drawer") || !event.target.closest?.("#run")) return;
  event.stopPropagation();
  opening.wantsRun = true;
}, true);

/** The last lane holds the strategy of the library: the views follow it. */
const showLast = () => document.querySelector(".live .chooser .tab:last-child")?.click();

// A link with a position shows its run there, and one of the library shows a strategy, so their runs begin by themselves; after a reload
// the tab's own runs are shown.
window.linkOpened = () => {
  const address = new URL(location.href);
  const params = address.searchParams;
  const ofLibrary = params.has("run") && !isReload();
  const runsItself = params.has("s") && (ofLibrary || (params.has("at") && !isReload()));
  params.delete("run"); // a bookmark of the page does not run
  if (address.href !== location.href) history.replaceState(history.state, "", address);
  setTimeout(() => {
    opening.isOver = true;
    beginHistory();
    if (ofLibrary) document.addEventListener("run-begun", showLast, { once: true });
    if (runsItself || opening.wantsRun) press("run");
  }, 100);
};
