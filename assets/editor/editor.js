// Lane cards. The value of the component is a list of {strategy, knobs, extras: [[name, knobs], ...], forced, seed}; every change is
// written to it at once and checked by the server shortly afterwards. All text enters the page as textContent.
const TOGGLES = { sampler: "Sampler", constraint: "Constraint", cache_policy: "KV cache", compute_policy: "Compute" };
const GROUPS = { // headings in the menus of slots
  drafter: (part) => (part.needs.includes("draft") ? "From a draft model" : "Without a draft model"),
  verifier: (part) => (part.greedy_only ? "For greedy decoding" : "For sampling"),
};
const HUES = 4;
const open = new Set();
const hueOf = new WeakMap(); // by lane: its hue, which it keeps when others are added, moved or removed
let lanes = [];
let verdicts = [];
let failed = {};
let asked = 0;
const EDITOR = Math.random().toString(36).slice(2); // tells the server which check a newer one replaces
let timer = 0;

const root = element.querySelector(".editor");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const uncapital = (text) => (/^[A-Z]{2}/.test(text) ? text : text.charAt(0).toLowerCase() + text.slice(1));

function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const ICONS = { earlier: "M8.5 3 4.5 7l4 4", later: "m5.5 3 4 4-4 4", copy: "M5 5V2.8c0-.5.3-.8.8-.8h5.4c.5 0 .8.3.8.8v5.4c0 .5-.3.8-.8.8H9M2.8 5h5.4c.5 0 .8.3.8.8v5.4c0 .5-.3.8-.8.8H2.8a.8.8 0 0 1-.8-.8V5.8c0-.5.3-.8.8-.8Z", cross: "m3 3 8 8m0-8-8 8" };

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 14 14");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// ---- the chosen model

/** Why the chosen model cannot run a decoder, or an empty text. */
function unfit(main) {
  if (!MAIN.includes(main.kind)) return "";
  const { attention } = props;
  if (attention === null || attention === undefined) return ""; // it is known once the model is loaded
  if (main.kind !== "canvas_decoder") return attention ? "Continues text, and the chosen model fills masked positions: choose another target, in the settings." : "";
  const wanted = `choose ${DENOISERS[main.attention[0]]} as the target, in the settings.`;
  if (!attention) return `Fills masked positions, and the chosen model continues text: ${wanted}`;
  return main.attention.includes(attention) ? "" : `Does not run on the chosen model: ${wanted}`;
}

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
  window.settingsChosen?.({ lanes: JSON.parse(JSON.stringify(lanes)) });
}

/** What lanes need besides their own settings; null on a page that has no such settings. */
function around() {
  const { context } = window.settingsNow?.() || {};
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
  complain(card, problem || failure(i), problem ? about : "");
  card.querySelectorAll(".remark").forEach((node) => node.remove());
  card.append(...remarks.map((remark) => h("p", { class: "remark", role: "status" }, remark)));
}

/** The error of a lane's last run, if the lane is unchanged since. */
function failure(i) {
  return failed[i] && failed[i].lane === JSON.stringify(lanes[i]) ? failed[i].text : "";
}

function promises(names, lane) {
  const shown = new Map();
  const known = names.map((name) => [qualified(name, names, lane), (PROMISES[name] || [])[1]]);
  for (const [label, help] of known) if (label) shown.set(label, [...(shown.get(label) || []), help]);
  return [...shown].map(([label, helps]) => h("span", { class: `promise ${label === "heuristic" ? "loose" : "firm"}`, title: helps.join(" ") }, label));
}

/** A lossless lane is compared with plain decoding under the same additions, whose text may differ from that without them. */
function qualified(name, names, { strategy, extras = [], weights }) {
  const [label] = PROMISES[name] || [];
  if (!label?.startsWith("same ")) return label;
  const greedy = name === "greedy_identical";
  if (greedy && strategy === "greedy") return ""; // it is greedy decoding
  const has = (kind) => extras.some(([extra]) => byName.get(extra)?.kind === kind);
  const own = [["cache", names.includes("budget_respected") || has("cache_policy")], ["compute policy", has("compute_policy")], ["weights", weights],
    ["constraint", greedy && has("constraint")], ["processors", greedy && has("sampler")]];
  const named = own.filter(([, added]) => added).map(([addition]) => addition);
  return named.length ? `${label} with its ${named.join(" and ")}` : label;
}

function complain(card, text, about) {
  card.querySelectorAll(".complaint").forEach((node) => node.remove());
  card.querySelectorAll(".wrong").forEach((node) => node.classList.remove("wrong"));
  if (!text) return;
  const isOpen = card.classList.contains("open"); // a closed card has it below its head, where the text would be
  const place = isOpen && [...card.querySelectorAll("[data-about]")].find((node) => node.dataset.about === about && node.offsetParent);
  const note = h("p", { class: "complaint", role: "alert" }, text, ...(about ? remedies(Number(card.dataset.lane), about, place) : []));
  if (place) { place.classList.add("wrong"); place.append(note); } else card.append(note);
}

/** Buttons that mend a problem, or open the place where it is mended. */
function remedies(i, about, place) {
  const remedy = (label, act) => h("button", { type: "button", class: "remedy", onclick: act }, label);
  if (about === "context") return [remedy("Add the example passage", () => trigger("mend", { what: about })), remedy("Write one…", () => window.openPlace(about))];
  if (about === "draft") {
    const own = window.settingsNow?.().draft === "none" ? [remedy("Use its own draft", () => trigger("mend", { what: about }))] : [];
    return [...own, remedy("Choose a draft…", () => window.openPlace(about, true))];
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
  return [...model, remedy("Choose a target…", () => window.openPlace("model", true)),
    remedy("Choose another strategy…", () => root.querySelector(`.lane-card[data-lane="${i}"] .strategy`)?.click())];
}

/** The knob of a name in a lane, with the values it is set in. */
function knobOf(lane, name) {
  const parts = [[lane.strategy, lane.knobs], ...lane.extras];
  const found = parts.map(([part, knobs]) => ({ knob: byName.get(part)?.knobs.find((one) => one.name === name), knobs }));
  return found.findLast(({ knob, knobs }) => knob && name in knobs) || found.findLast(({ knob }) => knob);
}

const isBeside = () => root.closest(".stage")?.dataset.beside === "true";

/** Beside the views open cards would cover each other, and the drawer. */
function openAlone(i) {
  if (isBeside()) {
    closeAll();
    window.showDrawer?.(false);
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
  const line = root.querySelector(`.lane-card[data-lane="${i}"] .recipe`);
  if (line) line.replaceChildren(...recipeNodes(lanes[i]));
  commit();
}

function knobRow(knob, knobs, i) {
  const value = knobs[knob.name] ?? knob.default;
  const id = `knob-${Math.random().toString(36).slice(2, 9)}`;
  const change = (given) => set(knobs, knob, given, i);
  const wide = knob.multiline || (knob.type === "str" && !knob.choices.length);
  return h("div", { class: `knob${wide ? " wide" : ""}`, "data-about": knob.name, title: knob.help },
    ...control(knob, value, id, change), h("small", { class: "help" }, knob.help));
}

function control(knob, value, id, change) {
  const label = h("label", { for: id }, capital(words(knob.name)));
  if (knob.type === "bool") {
    return [h("span", { class: "row check" }, h("input", { id, type: "checkbox", checked: Boolean(value), onchange: (e) => change(e.target.checked) }), label)];
  }
  if (knob.choices.length) {
    const options = knob.choices.map((choice) => h("option", { value: choice, selected: choice === value }, words(choice)));
    return [h("span", { class: "row" }, label, h("select", { id, onchange: (e) => change(e.target.value) }, ...options))];
  }
  if (knob.type === "str") return [label, typed(knob, value, id, change)];
  return numeric(knob, value, id, change, label);
}

function typed(knob, value, id, change) {
  if (!knob.multiline) return withValue(h("input", { id, type: "text", spellcheck: "false", oninput: (e) => change(e.target.value) }), value);
  return withValue(h("textarea", { id, rows: 5, spellcheck: "false", oninput: (e) => change(e.target.value) }), value);
}

function withValue(node, value) { node.value = value; return node; }

function numeric(knob, value, id, change, label) {
  const step = knob.step ?? (knob.type === "int" ? 1 : (knob.max - knob.min) / 100 || "any");
  const read = (text) => (text === "" || Number.isNaN(Number(text)) ? text : Number(text));
  const box = withValue(h("input", { id, type: "number", step: knob.type === "int" ? 1 : "any", inputmode: "decimal" }), value);
  const head = h("span", { class: "row" }, label, box);
  if (knob.min === null || knob.max === null) {
    box.addEventListener("input", () => change(read(box.value)));
    return [head];
  }
  const range = h("input", { type: "range", min: knob.min, max: knob.max, step, "aria-label": words(knob.name), tabindex: "-1" });
  range.value = value;
  const fillUp = () => range.style.setProperty("--at", `${(100 * (range.value - knob.min)) / (knob.max - knob.min || 1)}%`);
  fillUp();
  range.addEventListener("input", () => { box.value = Number(Number(range.value).toPrecision(6)); fillUp(); change(read(box.value)); });
  box.addEventListener("input", () => { range.value = box.value; fillUp(); change(read(box.value)); });
  return [head, range];
}

// ---- parts of a card

function knobGrid(part, knobs, i) {
  return part.knobs.length ? h("div", { class: "knobs" }, ...part.knobs.map((knob) => knobRow(knob, knobs, i))) : null;
}

function marks(part) {
  return [part.paper && part.paper !== "baseline" ? paper(part.paper) : null,
    part.needs.includes("context") ? h("span", { class: "mark need", title: "Answers from a passage: enter one as the context, in the settings." }, "needs a context") : null,
    unfit(part) ? h("span", { class: "mark", title: unfit(part) }, part.kind !== "canvas_decoder" ? "needs a text model" : props.attention ? "needs another denoiser" : "needs a denoiser") : null,
    part.reconstruction ? h("span", { class: "mark", title: "The paper leaves details open; the authors' implementation may differ." }, "reconstruction") : null];
}

function paper(reference) {
  const first = reference.split(/[,\s]+/)[0];
  if (!/^\d{4}\.\d{4,5}$/.test(first)) return h("span", { class: "paper" }, reference);
  return h("a", { class: "paper", href: `https://arxiv.org/abs/${first}`, target: "_blank", rel: "noopener", title: "The paper, on arXiv" }, `arXiv ${first}`);
}

// ---- a searchable menu: type to filter, arrows to move, Enter to choose, Escape to close

function menu({ face, label, title, choose, ...offer }) {
  const opener = h("button", { type: "button", class: `opener ${face}`, "aria-haspopup": "dialog", "aria-expanded": "false", "aria-label": label }, title);
  const host = h("div", { class: "menu-host" }, opener);
  opener.addEventListener("click", () => openMenu(host, opener, { label, choose, ...offer }));
  opener.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    event.preventDefault();
    opener.click();
  });
  return host;
}

/** `candidates`: the parts; `group`: the heading of a part; `against`: its objection, as of `objection`. */
function openMenu(host, opener, { label, candidates, group, against = () => ({ reason: "", barred: false }), current, hint, choose }) {
  if (host.querySelector(".menu")) return;
  const id = `menu-${Math.random().toString(36).slice(2, 9)}`;
  const list = h("div", { id, class: "options", role: "listbox", "aria-label": label });
  const search = h("input", { type: "search", role: "combobox", spellcheck: "false", autocomplete: "off", placeholder: hint || `Search ${candidates.length}`,
    "aria-label": label, "aria-expanded": "true", "aria-controls": id, "aria-autocomplete": "list" });
  const popup = h("div", { class: "menu", role: "dialog", "aria-label": label }, search, list);
  const outside = (event) => { if (!host.contains(event.target)) close(); };
  const close = () => { popup.remove(); opener.setAttribute("aria-expanded", "false"); document.removeEventListener("pointerdown", outside); };
  const optionOf = (part) => option(part, against(part), () => { close(); choose(part.name); });
  const show = () => { list.replaceChildren(...optionGroups(candidates, group, search.value, optionOf)); activate(list, search, bestOption(list, search.value, current)); };
  search.addEventListener("input", show);
  search.addEventListener("keydown", (event) => menuKey(event, list, search, () => { close(); opener.focus(); }));
  popup.addEventListener("focusout", (event) => { if (event.relatedTarget && !host.contains(event.relatedTarget)) close(); });
  document.addEventListener("pointerdown", outside);
  opener.setAttribute("aria-expanded", "true");
  host.append(popup);
  show();
  keepInSight(popup);
  search.focus();
}

/** Whether every typed word occurs in the description of a part. */
function found(part, text) {
  const description = [part.title, part.name, words(part.name), words(part.family), words(part.kind), part.paper, part.summary].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => description.includes(word));
}

/** The heading of a part: while nothing is typed, the recommended strategies come first, and those for another model last. */
function headingOf(part, group, text) {
  if (text.trim() || !(part.lane || MAIN.includes(part.kind))) return group(part);
  if (part.lane && !part.whenTyped) return "Beside these lanes";
  if (misfit(part)) return "For another model";
  return FIRST_STRATEGIES.includes(part.name) ? "Recommended" : group(part);
}

/** Why the chosen models cannot run a strategy, or an empty text. */
function misfit(part) {
  return unfit(part) || (part.needs.includes("draft") && props.drafted === false ? "Needs a draft model." : "");
}

/** Of two parts that match equally well the plainer one comes first, "EAGLE" before "EAGLE-2". */
const titleLength = (part) => (part.title || part.name).length;

function optionGroups(candidates, group, text, optionOf) {
  const groups = new Map();
  const matches = candidates.filter((one) => found(one, text) && (text.trim() || !one.whenTyped));
  if (text.trim()) matches.sort((a, b) => matchRank(a, text) - matchRank(b, text) || titleLength(a) - titleLength(b));
  for (const part of matches) {
    const heading = headingOf(part, group, text);
    groups.set(heading, [...(groups.get(heading) || []), part]);
  }
  if (!groups.size) return [h("p", { class: "none" }, `No strategy matches “${text}”. Search by what it does: “json”, “cache”, “draft”, “watermark”.`)];
  return [...groups].map(([name, parts]) => h("div", { role: "group", "aria-label": name },
    h("p", { class: "heading", "aria-hidden": "true" }, name), ...parts.map(optionOf)));
}

/** One part in a menu. An objection is shown in place of its summary; if it is barred, it cannot be chosen. */
function option(part, { reason, barred }, take) {
  const node = h("div", { class: `option${reason ? " grey" : ""}`, role: "option", id: `option-${part.name}`, "data-name": part.name, "aria-selected": "false",
    "aria-disabled": reason && barred ? "true" : null, title: reason || null },
  h("span", { class: "name" }, part.title || words(part.name)), h("small", {}, reason || part.summary));
  if (!reason || !barred) node.addEventListener("click", take);
  return node;
}

/** The option to activate: the current part while nothing is typed, otherwise the first one that can be chosen. */
function bestOption(list, text, current) {
  const options = choosable(list);
  return (!text.trim() && options.find((option) => option.dataset.name === current)) || options[0] || null;
}

/** The options that are not barred: only these are reached by key. */
function choosable(list) {
  return [...list.querySelectorAll(".option:not([aria-disabled=true])")];
}

function activate(list, search, option) {
  for (const other of list.querySelectorAll("[aria-selected=true]")) other.setAttribute("aria-selected", "false");
  search.setAttribute("aria-activedescendant", option ? option.id : "");
  option?.setAttribute("aria-selected", "true");
  option?.scrollIntoView({ block: "nearest" });
}

function menuKey(event, list, search, leave) {
  const options = choosable(list);
  const at = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 8, PageUp: at - 8 }[event.key];
  if (next !== undefined) activate(list, search, options[Math.max(0, Math.min(options.length - 1, next))] || null);
  else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) options[at]?.click();
  else if (event.key === "Escape") leave();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function keepInSight(popup) {
  const { right } = popup.getBoundingClientRect();
  const over = right - document.documentElement.clientWidth + 8;
  if (over > 0) popup.style.left = `${-over / (popup.currentCSSZoom ?? 1)}px`; // large type zooms the page
  popup.scrollIntoView({ block: "nearest" });
}

function slotSection(slot, lane, i) {
  const main = byName.get(lane.strategy);
  const [name, knobs] = heldIn(lane, slot);
  const part = byName.get(name);
  const title = part?.title || words(name);
  const group = GROUPS[slot.kind] || (() => "");
  const candidates = slot.takes.map((taken) => byName.get(taken)).sort((a, b) => group(a).localeCompare(group(b)));
  const choose = (taken) => { fill(lane, slot, taken); settle(lane); redraw(i); commit(); focusOn(i, `.part[data-slot="${slot.field}"] .opener`); };
  return h("section", { class: "part", "data-about": name, "data-slot": slot.field },
    h("header", {}, h("span", { class: "role" }, words(slot.field)),
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
  return h("section", { class: "part", "data-about": name },
    h("header", {}, h("span", { class: "role" }, part ? TOGGLES[part.kind] || words(part.kind) : "Unknown"),
      h("strong", { title: part?.summary }, part?.title || name), ...(part ? marks(part) : []),
      h("button", { type: "button", class: "icon", "aria-label": `Remove ${name}`, title: "Remove", onclick: remove }, icon("cross"))),
    part ? knobGrid(part, knobs, i) : null);
}

function adder(lane, i) {
  const main = byName.get(lane.strategy);
  const lacking = main?.needs.includes("constraint") && !lane.extras.some(([name]) => byName.get(name)?.kind === "constraint");
  const kindOrder = Object.keys(TOGGLES);
  const offered = (main ? strategies.filter((part) => fits(main, part, lane) && (!lacking || part.kind === "constraint")) : [])
    .sort((a, b) => kindOrder.indexOf(a.kind) - kindOrder.indexOf(b.kind));
  if (!offered.length) return null;
  const add = (name) => { lane.extras.push([name, {}]); redraw(i); commit(); focusOn(i, ".adder"); };
  const kinds = [...new Set(offered.map((part) => TOGGLES[part.kind]))];
  return menu({ face: "adder", label: `Add to lane ${i + 1}: ${kinds.join(", ")}`, candidates: offered, group: (part) => TOGGLES[part.kind],
    against: (part) => objection(part, lane, main), title: lacking ? "+ Add the constraint it needs…" : `+ Add ${kinds.map(uncapital).join(", ")}…`, choose: add });
}

function forcedChip(lane, i) {
  // A fork begins with given tokens.
  if (!lane.forced.length) return null;
  const free = () => { lane.forced = []; delete lane.forked_at; redraw(i); commit(); };
  const given = `begins with ${lane.forced.length} given token${lane.forced.length > 1 ? "s" : ""}`;
  const forked = isCount(lane.forked_at);
  return h("span", { class: "forced", title: forked ? capital(given) : null }, forked ? `forked at token ${lane.forked_at + 1}` : given,
    h("button", { type: "button", class: "icon", "aria-label": "Remove the given tokens", title: "Remove the given tokens", onclick: free }, icon("cross")));
}

/** A lane without its own seed uses the run's seed and shares its random numbers with the other lanes. */
function seedRow(lane, i) {
  const id = `seed-${Math.random().toString(36).slice(2, 9)}`;
  const own = (text) => { if (/^\d+$/.test(text)) lane.seed = Number(text); else delete lane.seed; changed(i); };
  const typing = { type: "number", min: 0, step: 1, inputmode: "numeric", placeholder: "shared" };
  const box = withValue(h("input", { id, ...typing, oninput: (e) => own(e.target.value) }), lane.seed ?? "");
  return h("div", { class: "knob own-seed" }, h("span", { class: "row" }, h("label", { for: id }, "Own seed"), box),
    h("small", { class: "help" }, "If empty, the lane uses the run's seed and the same random numbers as the other lanes."));
}

const WEIGHTS = ["int8", "nf4", "fp4"], ADAPTER = "adapter:", JOINT = " + ";
const adapterIn = (weights = "") => (weights.includes(ADAPTER) ? weights.slice(weights.indexOf(ADAPTER) + ADAPTER.length) : null);
const packedIn = (weights = "") => WEIGHTS.find((name) => weights === name || weights.startsWith(name + JOINT)) || "";
const phraseOf = (weights) => [packedIn(weights) && `${packedIn(weights)} weights`,
  adapterIn(weights) === null ? "" : `adapter ${adapterIn(weights).replace(/\/+$/, "").split("/").at(-1)}`].filter(Boolean).join(", ");

/** A lane may run the target with quantised weights and an adapter, beside lanes with those of the run. Only a page that runs lanes loads them. */
function weightsRow(lane, i) {
  if (!around()) return null;
  const id = `weights-${Math.random().toString(36).slice(2, 9)}`;
  const choose = (packed, adapter) => {
    const name = [packed, adapter && ADAPTER + adapter].filter(Boolean).join(JOINT);
    if (name) lane.weights = name; else delete lane.weights;
    changed(i);
  };
  const packed = () => packedIn(lane.weights), adapter = () => adapterIn(lane.weights) || "";
  const options = ["", ...WEIGHTS].map((name) => h("option", { value: name, selected: name === packed() }, name || "as in the run"));
  const typing = { type: "text", placeholder: "folder or hub id", spellcheck: "false", autocomplete: "off" };
  const box = withValue(h("input", { id: `${id}-adapter`, ...typing, onchange: (e) => choose(packed(), e.target.value.trim()) }), adapter());
  return h("div", { class: "knob own-weights", "data-about": "weights" }, h("span", { class: "row" }, h("label", { for: id }, "Weights"),
    h("select", { id, onchange: (e) => choose(e.target.value, adapter()) }, ...options)),
  h("span", { class: "row" }, h("label", { for: `${id}-adapter` }, "Adapter"), box),
  h("small", { class: "help" }, "Quantised weights of the target, a LoRA adapter on it, or both, in this lane only: what they change and what they cost."));
}

function body(lane, i) {
  const main = byName.get(lane.strategy);
  if (!main) return h("div", { class: "body" });
  const slotKinds = main.slots.map((slot) => slot.kind);
  const sections = main.slots.map((slot) => slotSection(slot, lane, i));
  const toggles = lane.extras.filter(([name]) => !slotKinds.includes(byName.get(name)?.kind));
  return h("div", { class: "body", id: `lane-body-${i}` },
    h("p", { class: "summary" }, main.summary), knobGrid(main, lane.knobs, i), ...sections,
    ...toggles.map((pair) => toggleSection(pair, lane, i)), adder(lane, i), weightsRow(lane, i), seedRow(lane, i), new SweepForm(lane, i).draw());
}

function mainStrategies() {
  return byAdvice(strategies.filter((s) => MAIN.includes(s.kind)), misfit);
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
  return h("article", { class: `lane-card${opened ? " open" : ""}`, "data-lane": i },
    h("header", { class: "head" }, h("span", { class: "number", "aria-hidden": "true" }, String(i + 1)), h("span", { class: "lane-title", "aria-hidden": "true" }), picker(lane, i), ...movers(i),
      h("button", { type: "button", class: "icon", "aria-label": `Duplicate lane ${i + 1}`, title: "Duplicate", disabled: lanes.length >= most, onclick: () => duplicate(i) }, icon("copy")),
      h("button", { type: "button", class: "icon", "aria-label": `Remove lane ${i + 1}`, title: "Remove", onclick: () => remove(i) }, icon("cross"))),
    h("p", { class: "recipe", title: main?.summary }, ...recipeNodes(lane)),
    h("div", { class: "foot", "data-about": lane.strategy },
      h("button", { type: "button", class: "edit", "aria-expanded": String(opened), "aria-label": `Edit lane ${i + 1}`, onclick: toggle }, opened ? "Done" : "Edit"),
      forcedChip(lane, i), h("span", { class: "promises" }), ...(main ? marks(main) : [])),
    opened ? body(lane, i) : null);
}

/** Buttons that change the order of lanes; a lane's colour and its place in the live view follow its number. */
function movers(i) {
  if (lanes.length < 2) return [];
  return [[-1, "earlier", "before"], [1, "later", "after"]].map(([by, name, where]) => {
    const label = lanes[i + by] ? `Move lane ${i + 1} ${where} lane ${i + 1 + by}` : `Move lane ${i + 1} ${name}`;
    return h("button", { type: "button", class: `icon move ${name}`, "aria-label": label, title: label, disabled: !lanes[i + by], onclick: () => move(i, by) }, icon(name));
  });
}

// ---- the row of cards

function redraw(i) {
  const old = root.querySelector(`.lane-card[data-lane="${i}"]`);
  if (old) old.replaceWith(card(lanes[i], i));
  nameCards();
}

/** A new lane gets the hue of its place, or the first one that is free. */
function giveHues() {
  const isFree = (hue) => lanes.every((lane) => hueOf.get(lane) !== hue);
  lanes.forEach((lane, i) => {
    if (!hueOf.has(lane)) hueOf.set(lane, [i, ...Array(HUES).keys()].find(isFree) ?? i % HUES);
    root.style.setProperty(`--hue-${i}`, `var(--pg-lane-${hueOf.get(lane) % HUES})`);
  });
  root.dataset.hues = lanes.map((lane) => hueOf.get(lane) % HUES).join(); // read by the live view
}

function draw() {
  const search = root.querySelector(".menu input"), typed = search?.value;
  giveHues();
  root.dataset.count = lanes.length;
  root.style.setProperty("--lanes", lanes.length || 1);
  root.replaceChildren(...lanes.map(card), ...(lanes.length < most ? [laneAdder()] : []));
  nameCards();
  lanes.forEach((lane, i) => judge(i));
  if (search) reopenMenu(search.getAttribute("aria-label"), typed);
}

/** A late answer of the server draws the cards again; whoever types in a menu meanwhile goes on typing. */
function reopenMenu(label, typed) {
  [...root.querySelectorAll(".menu-host .opener")].find((opener) => opener.getAttribute("aria-label") === label)?.click();
  const search = root.querySelector(".menu input");
  if (!search) return;
  search.value = typed;
  search.dispatchEvent(new Event("input"));
}

const isCount = (value) => Number.isInteger(value) && value >= 0;
const fresh = (raw) => ({ strategy: raw.strategy, knobs: { ...(raw.knobs || {}) }, extras: (raw.extras || []).map(([name, knobs]) => [name, { ...knobs }]), forced: [...(raw.forced || [])],
  ...(isCount(raw.seed) ? { seed: raw.seed } : {}), ...(typeof raw.weights === "string" && phraseOf(raw.weights) ? { weights: raw.weights } : {}), ...(isCount(raw.forked_at) ? { forked_at: raw.forked_at } : {}) });

/** A lane for each part that is no decoder: the plainest decoder with it, "Greedy + JSON Schema". Shown once something is typed. */
function lanesWithOnePart() {
  return strategies.filter((part) => !MAIN.includes(part.kind)).flatMap((part) => {
    const main = mainsFor(part).map((name) => byName.get(name)).find((one) => one && accepts(one, part));
    if (!main) return [];
    // Samplers that are knobs of `sample` join the processors of a greedy lane, where a temperature draws.
    const draws = part.kind === "sampler" && main.name === "greedy" && part.name !== "temperature" ? [["temperature", {}]] : [];
    const decoder = { greedy: part.kind === "sampler" ? "Sampling" : "Greedy", sample: "Sampling", speculative: "Speculative" }[main.name] || main.title;
    return [{ ...part, name: `with-${part.name}`, title: `${decoder} + ${part.title}`, names: [part.name, part.title], main, whenTyped: true,
      lane: { strategy: main.name, knobs: {}, extras: [...draws, [part.name, {}]] } }];
  });
}

function mainsFor(part) {
  const plainest = { sampler: "sample", drafter: "speculative", verifier: "speculative" }[part.kind];
  return [plainest, "greedy", ...strategies.filter(({ kind }) => MAIN.includes(kind)).map(({ name }) => name)];
}

const accepts = (main, part) => main.slots.some((slot) => slot.takes.includes(part.name)) || fits(main, part, { extras: [] });

/** The menu that adds a lane: what teaches most beside the lanes that are there, then every strategy, and by typing every part. */
function laneAdder() {
  const offers = adviceBeside(lanes, { partOf: (name) => byName.get(name), fills: Boolean(props.attention), drafted: props.drafted !== false });
  const advised = offers.filter(({ lane }) => byName.has(lane.strategy)).map(({ title, why, lane }, i) => {
    const main = byName.get(lane.strategy);
    return { ...main, name: `advised-${i}`, title: title || main.title || words(main.name), summary: why, lane };
  });
  const combined = lanesWithOnePart();
  const choose = (name) => addLane([...advised, ...combined].find((one) => one.name === name)?.lane || { strategy: name });
  const adding = menu({ face: "add-lane", label: "Add a lane", title: lanes.length ? "+ Add lane" : "+ Add a lane", candidates: [...advised, ...mainStrategies(), ...combined], hint: `Search all ${strategies.length}, such as json, cache or eagle`,
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
  const given = (props.value || []).slice(0, most).map(fresh);
  if (JSON.stringify(given) === JSON.stringify(lanes)) return;
  keepHues(lanes, given);
  lanes = given;
  verdicts = [];
  draw();
  announce();
  ask();
}

/** The lanes that were there before keep their hues: beside a fork, its parent and the others. */
function keepHues(before, given) {
  const left = [...before];
  for (const lane of given) {
    const at = left.findIndex((one) => JSON.stringify(one) === JSON.stringify(lane));
    if (at >= 0) hueOf.set(lane, hueOf.get(left.splice(at, 1)[0]));
  }
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
