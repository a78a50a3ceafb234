// Lane cards. The value of the component is a list of {strategy, knobs, extras: [[name, knobs], ...], forced, seed}; every change is
// written to it at once and checked by the server shortly afterwards. All text enters the page as textContent.

import { element, props, server, trigger, watch } from "component";
import { MOST_LANES, STRATEGIES } from "python";
import { el } from "../components/elements.js";
import { playground } from "../components/playground.js";
import { namesOf } from "../run/lane_names.js";
import { adviceBeside } from "./advice.js";
import { lanesWithOnePart } from "./combined.js";
import { mainStrategies, unfit } from "./fit.js";
import { giveHues, keepHues } from "./hues.js";
import { control } from "./knobs.js";
import { capital, fresh, knobOf, uncapital } from "./lane_config.js";
import { icon, marks } from "./marks.js";
import { menu, reopenMenu } from "./menu.js";
import { forcedChip, seedRow, weightsRow } from "./own_settings.js";
import { byName, fill, fits, objection, settle, words } from "./rules.js";
import { factsOf, laneConfigNodes, titleOf } from "./summary.js";
import { staying, SweepForm } from "./sweep.js";
import { complain, promises } from "./verdicts.js";

const TOGGLES = { sampler: "Sampler", constraint: "Constraint", cache_policy: "KV cache", compute_policy: "Compute", overlay: "Overlay" };
const GROUPS = { // headings in the menus of slots
  drafter: (part) => (part.needs.includes("draft") ? "From a draft model" : "Without a draft model"),
  verifier: (part) => (part.greedy_only ? "For greedy decoding" : "For sampling"),
};
const open = new Set();
let lanes = [];
let verdicts = [];
let failed = {};
let asked = 0;
const EDITOR = Math.random().toString(36).slice(2); // tells the server which check a newer one replaces
let timer = 0;

const root = element.querySelector(".editor");

// ---- page and server

function commit() {
  props.value = JSON.parse(JSON.stringify(lanes));
  trigger("change", {});
  nameCards();
  announce();
  clearTimeout(timer);
  timer = setTimeout(ask, 150);
}

/** Tell the page, which compares the lanes with those that are drawn. */
function announce() {
  playground.settingsChosen?.({ lanes: JSON.parse(JSON.stringify(lanes)) });
}

/** What lanes need besides their own settings; null on a page that has no such settings. */
function around() {
  const { context } = playground.settingsNow?.() || {};
  return context === undefined ? null : { context: context.trim() && "given", drafted: props.drafted !== false, attention: props.attention };
}

async function ask() {
  const mine = ++asked;
  const answer = await server.judged({ lanes, around: around(), editor: EDITOR });
  if (mine !== asked || answer.length !== lanes.length) return;
  verdicts = answer;
  lanes.forEach((lane, i) => judge(i));
}

function judge(i) {
  const card = root.querySelector(`.lane-card[data-lane="${i}"]`);
  if (!card) return;
  const { guarantee = [], problem = "", about = "", remarks = [] } = verdicts[i] || {};
  card.querySelector(".promises").replaceChildren(...promises(failure(i) ? [] : guarantee, lanes[i]));
  complain(card, problem || failure(i), problem ? about : "", (place) => remedies(i, about, place));
  card.querySelectorAll(".remark").forEach((node) => node.remove());
  card.append(...remarks.map((remark) => el("p", { class: "remark", role: "status" }, remark)));
}

/** The error of a lane's last run, if the lane is unchanged since. */
function failure(i) {
  return failed[i] && failed[i].lane === JSON.stringify(lanes[i]) ? failed[i].text : "";
}

/** Buttons that mend a problem, or open the place where it is mended. */
function remedies(i, about, place) {
  const remedy = (label, act) => el("button", { type: "button", class: "remedy", onclick: act }, label);
  if (about === "context") return [remedy("Add the example passage", () => trigger("mend", { what: about })), remedy("Write one…", () => playground.openPlace(about))];
  if (about === "draft") {
    const own = playground.settingsNow?.().draft === "none" ? [remedy("Use its own draft", () => trigger("mend", { what: about }))] : [];
    return [...own, remedy("Choose a draft…", () => playground.openPlace(about, true))];
  }
  if (about === "model") return modelRemedies(i, remedy);
  if (about === "constraint") return [remedy("Add a constraint…", () => { openLane(i); root.querySelector(`.lane-card[data-lane="${i}"] .adder`)?.click(); })];
  const found = knobOf(lanes[i], about);
  if (!place && found) return [remedy("Show it", () => openLane(i, about))];
  const restores = found && found.knob.type === "str" && !found.knob.choices.length && about in found.knobs;
  return restores ? [remedy("Restore the example", () => { delete found.knobs[about]; redraw(i); commit(); openLane(i, about); })] : [];
}

/** What mends a lane that the target cannot run: another target, if all lanes can run on it, or another strategy. */
function modelRemedies(i, remedy) {
  const fills = byName.get(lanes[i].strategy).kind === "canvas_decoder";
  const suits = ({ strategy }) => (fills ? byName.get(strategy)?.attention.includes("full") : byName.get(strategy)?.kind !== "canvas_decoder");
  const [name, what] = fills ? ["Pocket diffusion", "denoiser"] : ["Pocket", "text model"];
  const model = lanes.every(suits) ? [remedy(`Use ${name}`, () => trigger("mend", { what }))] : [];
  return [...model, remedy("Choose a target…", () => playground.openPlace("model", true)),
    remedy("Choose another strategy…", () => root.querySelector(`.lane-card[data-lane="${i}"] .strategy`)?.click())];
}

const isBeside = () => root.closest(".stage")?.dataset.beside === "true";

/** Beside the views open cards would cover each other, and the drawer. */
function openAlone(i) {
  if (isBeside()) {
    closeAll();
    playground.showDrawer?.(false);
  }
  open.add(i);
}

/** Close the open cards, except one that is being written in. */
function closeAll() {
  for (const i of [...open]) {
    if (root.querySelector(`.lane-card[data-lane="${i}"]`)?.contains(document.activeElement)) continue;
    open.delete(i);
    redraw(i);
    judge(i);
  }
}

/** Open the card of a lane, at a knob or part. */
function openLane(i, about = "") {
  if (!lanes[i]) return;
  if (!open.has(i)) { openAlone(i); redraw(i); judge(i); }
  const place = [...root.querySelectorAll(`.lane-card[data-lane="${i}"] [data-about]`)].find((node) => node.dataset.about === about);
  place?.querySelector("input, textarea, select, button")?.focus({ preventScroll: true });
  place?.scrollIntoView({ block: "nearest" });
}

/** Listen to the page while the editor is part of it. */
function listen(name, act) {
  const listener = (event) => (root.isConnected ? act(event.detail) : document.removeEventListener(name, listener));
  document.addEventListener(name, listener);
}

// ---- knobs

function set(knobs, knob, value, i) {
  if (value === knob.default) delete knobs[knob.name]; else knobs[knob.name] = value;
  changed(i);
}

function changed(i) {
  const line = root.querySelector(`.lane-card[data-lane="${i}"] .lane-config`);
  if (line) line.replaceChildren(...laneConfigNodes(lanes[i]));
  commit();
}

function knobRow(knob, knobs, i) {
  const value = knobs[knob.name] ?? knob.default;
  const id = `knob-${Math.random().toString(36).slice(2, 9)}`;
  const change = (given) => set(knobs, knob, given, i);
  const wide = knob.multiline || (knob.type === "str" && !knob.choices.length);
  return el("div", { class: `knob${wide ? " wide" : ""}`, "data-about": knob.name, title: knob.help },
    ...control(knob, value, id, change), el("small", "help", knob.help));
}

// ---- parts of a card

function knobGrid(part, knobs, i) {
  return part.knobs.length ? el("div", "knobs", ...part.knobs.map((knob) => knobRow(knob, knobs, i))) : null;
}

function slotSection(slot, lane, i) {
  const main = byName.get(lane.strategy);
  const [name, knobs] = heldIn(lane, slot);
  const part = byName.get(name);
  const title = part?.title || words(name);
  const group = GROUPS[slot.kind] || (() => "");
  const candidates = slot.takes.map((taken) => byName.get(taken)).sort((a, b) => group(a).localeCompare(group(b)));
  const choose = (taken) => { fill(lane, slot, taken); settle(lane); redraw(i); commit(); focusOn(i, `.part[data-slot="${slot.field}"] .opener`); };
  return el("section", { class: "part", "data-about": name, "data-slot": slot.field },
    el("header", "", el("span", "role", words(slot.field)),
      menu({ face: "slot", label: `${capital(words(slot.field))} of lane ${i + 1}: ${title}`, title, candidates, group,
        against: (one) => objection(one, lane, main), current: name, choose }),
      ...(part ? marks(part) : [])),
    part ? knobGrid(part, knobs, i) : null);
}

function heldIn(lane, slot) {
  // The pair in the lane's own list, so that its knobs can be set; a default is added to it on first use.
  const held = lane.extras.find(([name]) => byName.get(name)?.kind === slot.kind);
  if (held) return held;
  const pair = [slot.default, {}];
  lane.extras.push(pair);
  return pair;
}

function toggleSection([name, knobs], lane, i) {
  const part = byName.get(name);
  const remove = () => { lane.extras = lane.extras.filter((pair) => pair[0] !== name); redraw(i); commit(); };
  return el("section", { class: "part", "data-about": name },
    el("header", "", el("span", "role", part ? TOGGLES[part.kind] || words(part.kind) : "Unknown"),
      el("strong", { title: part?.summary }, part?.title || name), ...(part ? marks(part) : []),
      el("button", { type: "button", class: "icon", "aria-label": `Remove ${name}`, title: "Remove", onclick: remove }, icon("cross"))),
    part ? knobGrid(part, knobs, i) : null);
}

function adder(lane, i) {
  const main = byName.get(lane.strategy);
  const lacking = main?.needs.includes("constraint") && !lane.extras.some(([name]) => byName.get(name)?.kind === "constraint");
  const kindOrder = Object.keys(TOGGLES);
  const offered = (main ? STRATEGIES.filter((part) => fits(main, part, lane) && (!lacking || part.kind === "constraint")) : [])
    .sort((a, b) => kindOrder.indexOf(a.kind) - kindOrder.indexOf(b.kind));
  if (!offered.length) return null;
  const add = (name) => { lane.extras.push([name, {}]); redraw(i); commit(); focusOn(i, ".adder"); };
  const kinds = [...new Set(offered.map((part) => TOGGLES[part.kind]))];
  return menu({ face: "adder", label: `Add to lane ${i + 1}: ${kinds.join(", ")}`, candidates: offered, group: (part) => TOGGLES[part.kind],
    against: (part) => objection(part, lane, main), title: lacking ? "+ Add the constraint it needs…" : `+ Add ${kinds.map(uncapital).join(", ")}…`, choose: add });
}

function body(lane, i) {
  const main = byName.get(lane.strategy);
  if (!main) return el("div", "body");
  const slotKinds = main.slots.map((slot) => slot.kind);
  const sections = main.slots.map((slot) => slotSection(slot, lane, i));
  const toggles = lane.extras.filter(([name]) => !slotKinds.includes(byName.get(name)?.kind));
  return el("div", { class: "body", id: `lane-body-${i}` },
    el("p", "summary", main.summary), knobGrid(main, lane.knobs, i), ...sections,
    ...toggles.map((pair) => toggleSection(pair, lane, i)), adder(lane, i),
    around() && weightsRow(lane, () => changed(i)), seedRow(lane, () => changed(i)), new SweepForm(lanes, i, spread).draw());
}

function picker(lane, i) {
  const mains = mainStrategies();
  const choose = (name) => { lane.strategy = name; lane.knobs = {}; settle(lane); redraw(i); commit(); focusOn(i, ".strategy"); };
  const title = titleOf(lane);
  return menu({ face: "strategy", label: `Strategy of lane ${i + 1}: ${title}`, candidates: mains, group: (s) => capital(words(s.family)),
    against: (s) => ({ reason: unfit(s), barred: true }), title, current: lane.strategy, choose });
}

function focusOn(i, selector) {
  root.querySelector(`.lane-card[data-lane="${i}"] ${selector}`)?.focus();
}

function card(lane, i) {
  const main = byName.get(lane.strategy);
  const opened = open.has(i);
  const toggle = () => { if (opened) open.delete(i); else openAlone(i); redraw(i); judge(i); root.querySelector(`.lane-card[data-lane="${i}"] .edit`)?.focus(); };
  return el("article", { class: `lane-card${opened ? " open" : ""}`, "data-lane": i },
    el("header", "head", el("span", { class: "number", "aria-hidden": "true" }, String(i + 1)), el("span", { class: "lane-title", "aria-hidden": "true" }), picker(lane, i), ...movers(i),
      el("button", { type: "button", class: "icon", "aria-label": `Duplicate lane ${i + 1}`, title: "Duplicate", disabled: lanes.length >= MOST_LANES, onclick: () => duplicate(i) }, icon("copy")),
      el("button", { type: "button", class: "icon", "aria-label": `Remove lane ${i + 1}`, title: "Remove", onclick: () => remove(i) }, icon("cross"))),
    el("p", { class: "lane-config", title: main?.summary }, ...laneConfigNodes(lane)),
    el("div", { class: "foot", "data-about": lane.strategy },
      el("button", { type: "button", class: "edit", "aria-expanded": String(opened), "aria-label": `Edit lane ${i + 1}`, onclick: toggle }, opened ? "Done" : "Edit"),
      forcedChip(lane, () => { redraw(i); commit(); }), el("span", "promises"), ...(main ? marks(main) : [])),
    opened ? body(lane, i) : null);
}

/** Buttons that change the order of lanes; a lane's colour and its place in the live view follow its number. */
function movers(i) {
  if (lanes.length < 2) return [];
  return [[-1, "earlier", "before"], [1, "later", "after"]].map(([by, name, where]) => {
    const label = lanes[i + by] ? `Move lane ${i + 1} ${where} lane ${i + 1 + by}` : `Move lane ${i + 1} ${name}`;
    return el("button", { type: "button", class: `icon move ${name}`, "aria-label": label, title: label, disabled: !lanes[i + by], onclick: () => move(i, by) }, icon(name));
  });
}

// ---- the row of cards

function redraw(i) {
  const old = root.querySelector(`.lane-card[data-lane="${i}"]`);
  if (old) old.replaceWith(card(lanes[i], i));
  nameCards();
}

/** The hues of the lanes, for the cards and, by an attribute, for the live view. */
function colourLanes() {
  const hues = giveHues(lanes);
  hues.forEach((hue, i) => root.style.setProperty(`--hue-${i}`, `var(--pg-lane-${hue})`));
  root.dataset.hues = hues.join();
}

function draw() {
  const search = root.querySelector(".menu input"), typed = search?.value;
  colourLanes();
  root.dataset.count = lanes.length;
  root.style.setProperty("--lanes", lanes.length || 1);
  root.replaceChildren(...lanes.map(card), ...(lanes.length < MOST_LANES ? [laneAdder()] : []));
  nameCards();
  lanes.forEach((lane, i) => judge(i));
  if (search) reopenMenu(root, search.getAttribute("aria-label"), typed); // a late answer of the server draws the cards again
}

/** The menu that adds a lane: what teaches most beside the lanes that are there, then every strategy, and by typing every part. */
function laneAdder() {
  const offers = adviceBeside(lanes, { partOf: (name) => byName.get(name), fills: Boolean(props.attention), drafted: props.drafted !== false });
  const advised = offers.filter(({ lane }) => byName.has(lane.strategy)).map(({ title, why, lane }, i) => {
    const main = byName.get(lane.strategy);
    return { ...main, name: `advised-${i}`, title: title || main.title || words(main.name), summary: why, lane };
  });
  const combined = lanesWithOnePart();
  const choose = (name) => addLane([...advised, ...combined].find((one) => one.name === name)?.lane || { strategy: name });
  const adding = menu({ face: "add-lane", label: "Add a lane", title: lanes.length ? "+ Add lane" : "+ Add a lane", candidates: [...advised, ...mainStrategies(), ...combined], hint: `Search all ${STRATEGIES.length}, such as json, cache or eagle`,
    group: (s) => capital(words(s.family)), against: (s) => ({ reason: unfit(s.main || s), barred: Boolean(unfit(s.main || s)) }), choose });
  adding.classList.add("lane-adder");
  return adding;
}

function addLane(lane) {
  lanes.push(fresh(lane));
  settle(lanes[lanes.length - 1]);
  verdicts = [];
  draw();
  commit();
  focusOn(lanes.length - 1, isBeside() ? ".edit" : ".strategy"); // the head of a lane on a stage has no menu
}

/** Replace a lane by copies of it, as a sweep plans them. */
function spread(i, copies) {
  const stay = staying(lanes, i, copies.length);
  lanes = lanes.flatMap((lane, j) => (j === i ? copies : stay.includes(j) ? [lane] : []));
  change();
  focusOn(stay.filter((j) => j < i).length, ".strategy");
}

function duplicate(i) {
  lanes.splice(i + 1, 0, fresh(JSON.parse(JSON.stringify(lanes[i]))));
  change();
}

function remove(i) {
  lanes.splice(i, 1);
  change();
}

function move(i, by) {
  [lanes[i], lanes[i + by]] = [lanes[i + by], lanes[i]];
  const [here, there] = [open.has(i), open.has(i + by)];
  for (const [at, opened] of [[i, there], [i + by, here]]) if (opened) open.add(at); else open.delete(at);
  verdicts = [];
  draw();
  commit();
  focusOn(i + by, `.move.${by < 0 ? "earlier" : "later"}:not(:disabled)`);
  if (!root.contains(document.activeElement)) focusOn(i + by, ".move:not(:disabled)");
}

function change() {
  open.clear();
  verdicts = [];
  draw();
  commit();
}

function take() {
  const given = (props.value || []).slice(0, MOST_LANES).map(fresh);
  if (JSON.stringify(given) === JSON.stringify(lanes)) return;
  keepHues(lanes, given);
  lanes = given;
  verdicts = [];
  draw();
  announce();
  ask();
}

let surrounded = "";

/** Ask again when a context or a draft was added or taken away. */
function lookAround() {
  const now = JSON.stringify(around());
  if (now === surrounded) return;
  surrounded = now;
  ask();
}

watch("value", take);
watch("attention", () => { draw(); lookAround(); });
watch("drafted", lookAround);
listen("settings-chosen", lookAround);
listen("drawer-opened", () => { if (isBeside()) closeAll(); });
listen("run-begun", closeAll); // an open card may cover the run
listen("open-lane", ({ lane, about }) => { if (!["context", "draft"].includes(about)) openLane(lane, about); });
watch("problems", () => {
  const given = (props.value || []).map(fresh); // may not have been taken yet
  failed = Object.fromEntries(Object.entries(props.problems || {}).map(([i, text]) => [i, { text, lane: JSON.stringify(given[i]) }]));
  lanes.forEach((_, i) => judge(i));
});
take();
if (!lanes.length) draw();

/** The cards' names say what differs, so a change of one lane may rename another. */
function nameCards() {
  namesOf(lanes.map(factsOf)).forEach(({ name, short }, i) => {
    const title = root.querySelector(`.lane-card[data-lane="${i}"] .lane-title`);
    if (!title) return;
    title.replaceChildren(short, el("span", "rest", name.slice(short.length))); // the name begins with the short one
    title.title = name;
    title.dataset.short = short;
  });
}
