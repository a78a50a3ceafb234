// The draft tree of one round: the draft tokens, the verdict on each, and the accepted path. It is the round at the player's position, or
// that of the selected token. The trees of other lanes are drawn small.

import { labelBetween, LONGEST_CHARACTER } from "../components/composed.js";
import { button, el, setText, svg } from "../components/elements.js";
import { count, DASH, fixed, isNumber } from "../components/numbers.js";
import { pieceLabel, writePiece } from "../components/pieces.js";
import { ORIGINS } from "../lane/colour.js";
import { leftoverPart } from "../lane/probabilities.js";
import { hasPart, nameOf } from "../run/headers.js";
import { TEST_NUMBERS, testNumbers } from "../run/round.js";
import { Panel, smallLane, surface } from "./panel.js";

const TREE = { node: [128, 134], gap: 14, height: 38, row: 48, margin: 6, rootWidth: 84, highest: 560 };
const STATE_WORDS = { kept: "accepted", passed: "passed, off the path", refused: "rejected", untested: "not tested", pending: "not verified yet" };

export class TreePanel extends Panel {
  constructor() {
    super({
      name: "tree", title: "Draft tree", kinds: ["draft"], expects: (header) => hasPart(header, "drafter"),
      empty: "Shows the draft tokens of a round, the verdict on each, and the accepted path.",
    });
    this.previous = button("icon small", "‹", "Previous round", () => this.turn(-1));
    this.next = button("icon small", "›", "Next round", () => this.turn(1));
    this.previous.setAttribute("aria-label", "Previous round");
    this.next.setAttribute("aria-label", "Next round");
    this.which = el("span", "which");
    this.tools.append(this.previous, this.which, this.next);
    new ResizeObserver(([{ contentRect }]) => this.holdHeight(contentRect.height)).observe(this.body);
  }

  /** Rounds differ in size; the panel keeps its greatest height so far, so that the page below does not jump. */
  holdHeight(height) {
    if (height <= this.floor) return;
    this.floor = Math.min(height, TREE.highest);
    this.body.style.minHeight = `${this.floor}px`;
  }

  /** Forget the height for another lane or width. */
  releaseHeight(place) {
    if (place === this.place) return;
    Object.assign(this, { place, floor: 0 });
    this.body.style.minHeight = "";
  }

  look(card, app) {
    return [card, ...this.besides(card, app)].map((one) => {
      const round = roundOf(one, app);
      return `${round ? `${round.number}/${Boolean(round.verdict)}` : "none"}/${roundsIn(one.record)}`;
    }).join();
  }

  draw(card, app) {
    Object.assign(this, { card, app });
    this.releaseHeight(`${app.trace.run}/${card.order}/${this.width}`);
    const round = roundOf(card, app);
    const all = roundsIn(card.record);
    setText(this.which, round ? `round ${round.number} of ${all}` : `before round 1 of ${all}`);
    this.previous.disabled = !round;
    this.next.disabled = Boolean(round) && round.number >= all;
    if (!round) {
      setText(this.readout, "");
      this.body.replaceChildren(el("p", "vacancy", "No draft tokens yet at this point of the run."), this.beside(card, app));
      return;
    }
    setText(this.readout, summaryOf(round));
    const scroller = el("div", "tree-scroll");
    scroller.tabIndex = 0;
    scroller.setAttribute("aria-label", "Draft tree, scrolls sideways");
    scroller.append(treeDrawing(round, piecesBefore(card, round), this.width));
    const leftover = round.hasNext ? leftoverPart(round) : [];
    this.body.replaceChildren(scroller, treeKey(round), this.tests(round), ...leftover, this.beside(card, app));
    bringPathInSight(scroller);
  }

  beside(card, app) {
    const host = el("div", "beside");
    for (const other of this.besides(card, app)) {
      const round = roundOf(other, app);
      host.append(smallLane(other, app, round ? smallTree(round) : "", round ? `round ${round.number} of ${roundsIn(other.record)}: ${summaryOf(round)}` : "no draft tokens yet"));
    }
    return host;
  }

  /** The tests as a table: an accessible form of the drawing. Short lists are unfolded at first. */
  tests(round) {
    const list = testList(round);
    list.open = this.opened ?? round.tests.size <= 12;
    list.querySelector("summary").addEventListener("click", () => {
      this.opened = !list.open;
    });
    return list;
  }

  /** Views follow the player, so another round means another position of the player. */
  turn(by) {
    const round = roundOf(this.card, this.app);
    const wanted = (round ? round.number : 0) + by;
    this.app.selection.unpin();
    const event = roundEnds(this.card.record)[wanted - 1];
    if (wanted === 0) this.app.seekEvent(this.card.order, this.card.record.events.findIndex((e) => e.kind === "draft") - 1);
    else if (event !== undefined) this.app.seekEvent(this.card.order, event);
  }
}

/** The round of the selected token while its card is pinned, otherwise the newest one. */
function roundOf({ order, text, state: { rounds } }, app) {
  const at = app.card.pinned ? app.selection.markOf(order) : null;
  return (at !== null && text.shown[at].round) || rounds[rounds.length - 1];
}

export function roundsIn(record) {
  return roundEnds(record).length;
}

/** For every round of the trace, the index of the event that ends it: its verdict, or its draft if there is none. */
function roundEnds(record) {
  record.roundEnds ||= { upTo: 0, ends: [] };
  const known = record.roundEnds;
  for (; known.upTo < record.events.length; known.upTo++) {
    const { kind } = record.events[known.upTo];
    if (kind === "draft") known.ends.push(known.upTo);
    else if (kind === "verdict" && known.ends.length) known.ends[known.ends.length - 1] = known.upTo;
  }
  return known.ends;
}

function summaryOf(round) {
  const drafted = count(round.draft.tokens.length, "draft token");
  const by = round.draft.source ? ` by ${nameOf(round.draft.source)}` : "";
  if (!round.verdict) return `${drafted}${by}, not verified yet`;
  return `${drafted}${by}, ${round.tests.size} tested, ${round.verdict.kept.length} accepted`;
}

/** The last pieces of the text that a round continues. */
function piecesBefore(card, round) {
  const tokens = card.state.sequence(round.sequence).tokens;
  const own = round.settled ? tokens.findIndex((token) => token.round && token.round.number >= round.number) : -1;
  const before = own < 0 ? tokens : tokens.slice(0, own);
  const pieces = before.length ? before.map(({ piece }) => piece) : card.record.header.prompt_pieces;
  return pieces.slice(-LONGEST_CHARACTER);
}

/** The label of a draft token: its bytes may continue a character of those before it, and share one with its only child. */
function draftLabel(node, { parents, pieces }, text) {
  const path = [];
  for (let at = parents[node]; at >= 0 && path.length < LONGEST_CHARACTER; at = parents[at]) path.unshift(pieces[at] ?? "");
  const after = [];
  for (let next = onlyChild(node, parents); next >= 0 && after.length < LONGEST_CHARACTER; next = onlyChild(next, parents)) after.push(pieces[next] ?? "");
  return labelBetween([...text, ...path].slice(1 - LONGEST_CHARACTER), pieces[node] ?? "", after);
}

function onlyChild(node, parents) {
  const child = parents.indexOf(node);
  return child === parents.lastIndexOf(node) ? child : -1;
}

/** Columns by depth; leaves below each other, parents centred on their children. */
function layout(parents) {
  const children = new Map([[-1, []]]);
  parents.forEach((parent, node) => {
    children.set(node, []);
    if (children.has(parent)) children.get(parent).push(node);
  });
  const places = new Map();
  let leaves = 0;
  const visit = (node, depth) => {
    const below = children.get(node).map((child) => visit(child, depth + 1));
    const row = below.length ? (below[0] + below[below.length - 1]) / 2 : leaves++;
    places.set(node, { depth, row });
    return row;
  };
  visit(-1, 0);
  return { places, rows: Math.max(1, leaves) };
}

function treeDrawing(round, text, room) {
  const { draft, verdict } = round;
  const parents = [...draft.parents];
  const extra = round.hasNext ? parents.length : null; // the token after the path is drawn like one more node
  const pieces = [...draft.pieces];
  if (round.hasNext) {
    parents.push(verdict.kept.length ? verdict.kept[verdict.kept.length - 1] : -1);
    pieces[extra] = verdict.piece;
  }
  const { places, rows } = layout(parents);
  const depth = Math.max(...[...places.values()].map((place) => place.depth));
  const grid = treeGrid(depth, room);
  const drawing = surface(grid.left + depth * grid.column, rows * TREE.row + TREE.margin, `Draft tree of round ${round.number}: ${summaryOf(round)}`);
  drawing.classList.add("tree");
  const edges = svg("g");
  const nodes = svg("g");
  nodes.append(treeNode(nodeBox(places.get(-1), grid), { state: "root", piece: labelBetween(text.slice(0, -1), text.at(-1) ?? ""), under: "text so far" }));
  parents.forEach((parent, node) => {
    if (!places.has(node)) return; // malformed: its parent does not precede it
    const content = { ...(node === extra ? nextNode(verdict) : draftNode(round, node)), piece: draftLabel(node, { parents, pieces }, text) };
    edges.append(edge(nodeBox(places.get(parent), grid), nodeBox(places.get(node), grid), content.state));
    nodes.append(treeNode(nodeBox(places.get(node), grid), content));
  });
  drawing.append(edges, nodes);
  return drawing;
}

/** A large tree opens where its root is, not at its topmost branch. */
function bringPathInSight(scroller) {
  const root = scroller.querySelector(".node.root").transform.baseVal.consolidate().matrix.f;
  scroller.scrollTop = root + TREE.height / 2 - scroller.clientHeight / 2;
}

const SMALL_TREE = { column: 13, row: 9, margin: 6 };

/** A tree without its words: one dot for each draft token, in the colour of its verdict. */
function smallTree(round) {
  const { places, rows } = layout(round.draft.parents);
  const at = (node) => ({ x: SMALL_TREE.margin + places.get(node).depth * SMALL_TREE.column, y: SMALL_TREE.margin + places.get(node).row * SMALL_TREE.row });
  const depth = Math.max(...[...places.values()].map((place) => place.depth));
  const size = { width: 2 * SMALL_TREE.margin + depth * SMALL_TREE.column, height: 2 * SMALL_TREE.margin + (rows - 1) * SMALL_TREE.row };
  const drawing = svg("svg", { class: "small-tree", ...size, "aria-hidden": "true" });
  const nodes = round.draft.parents.map((parent, node) => ({ parent, node })).filter(({ node }) => places.has(node));
  for (const { parent, node } of nodes) {
    const [a, b] = [at(parent), at(node)];
    drawing.append(svg("path", { class: `edge ${round.nodeState(node)}`, d: `M${a.x} ${a.y}L${b.x} ${b.y}` }));
  }
  drawing.append(svg("circle", { class: "dot root", cx: at(-1).x, cy: at(-1).y, r: 3 }));
  for (const { node } of nodes) drawing.append(svg("circle", { class: `dot ${round.nodeState(node)}`, cx: at(node).x, cy: at(node).y, r: 3.5 }));
  return drawing;
}

function draftNode(round, node) {
  const test = round.tests.get(node);
  const q = round.draft.q[node];
  const numbers = test ? testNumbers(test) : [["q", q]];
  const words = [STATE_WORDS[round.nodeState(node)], ...numbers.map(([name, value]) => `${TEST_NUMBERS[name]} ${fixed(value, 4)}`)];
  const compared = test && test.chance !== null ? ["a", "u"] : ["p", "r", "q", "u"]; // there is room for three
  const under = numbers.filter(([name, value]) => isNumber(value) && compared.includes(name)).map(([name, value]) => `${name} ${short(value)}`);
  return { node, state: round.nodeState(node), under: under.join("  "), help: words.join(", ") };
}

/** The numbers that any of these tests has; a rule that draws nothing, for instance, has no u. */
function numbersIn(tests) {
  return Object.keys(TEST_NUMBERS).filter((name) => tests.some((test) => new Map(testNumbers(test)).has(name)));
}

function nextNode(verdict) {
  const origin = ORIGINS[verdict.origin] || { label: verdict.origin, help: "" };
  return { state: verdict.origin, under: origin.label, help: origin.help };
}

function short(value) {
  if (!isNumber(value)) return DASH;
  return value >= 0.99995 ? "1" : Math.min(0.99, value).toFixed(2).replace("0.", ".");
}

/** Deep trees get narrower nodes, down to a readable minimum; beyond that the panel scrolls. */
function treeGrid(depth, room) {
  const left = TREE.margin + TREE.rootWidth + TREE.gap;
  const [narrowest, widest] = TREE.node;
  const width = Math.max(narrowest, Math.min(widest, Math.floor((room - left) / Math.max(1, depth)) - TREE.gap));
  return { left, width, column: width + TREE.gap };
}

function nodeBox({ depth, row }, grid) {
  const y = TREE.margin + row * TREE.row;
  return depth ? { x: grid.left + (depth - 1) * grid.column, y, width: grid.width } : { x: TREE.margin, y, width: TREE.rootWidth };
}

function treeNode({ x, y, width }, { node, state, piece, under, help }) {
  const group = svg("g", { class: `node ${state}`, transform: `translate(${x} ${y})`, "data-state": state });
  if (node !== undefined) group.setAttribute("data-node", node);
  group.append(svg("title", {}, `“${pieceLabel(piece, 60)}”${help ? `, ${help}` : ""}`));
  group.append(svg("rect", { width, height: TREE.height, rx: 6 }));
  group.append(svg("text", { class: "name", x: 8, y: 16 }, pieceLabel(piece, Math.floor((width - 14) / 7.5))));
  group.append(svg("text", { class: "numbers", x: 8, y: 30 }, under || ""));
  return group;
}

function edge(a, b, state) {
  const [x1, y1, x2, y2] = [a.x + a.width, a.y + TREE.height / 2, b.x, b.y + TREE.height / 2];
  const middle = (x1 + x2) / 2;
  return svg("path", { class: `edge ${state}`, d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
}

function treeKey(round) {
  const key = el("p", "chart-key");
  const states = new Set(round.draft.tokens.map((_, node) => round.nodeState(node)));
  if (round.hasNext) states.add(round.verdict.origin);
  for (const state of states) key.append(el("span", `key-node ${state}`, STATE_WORDS[state] || (ORIGINS[state] ? ORIGINS[state].label : state)));
  const words = { p: "p target", r: "r residual after a rejected sibling", q: "q draft", a: "a acceptance probability", u: "u draw" };
  const said = numbersIn([...round.tests.values()]).filter((name) => words[name]).map((name) => words[name]);
  key.append(el("span", "key-words", said.join(", ")));
  return key;
}

function testList(round) {
  const details = el("details", "tests");
  details.append(el("summary", "", `Tests in order (${round.tests.size})`));
  details.hidden = !round.tests.size;
  const table = el("table");
  const tests = [...round.tests.values()];
  const columns = numbersIn(tests);
  const head = el("tr");
  head.append(el("th", "", "draft token"), ...columns.map((name) => el("th", "", TEST_NUMBERS[name])), el("th", "", ""));
  table.append(head);
  for (const test of tests) {
    const numbers = new Map(testNumbers(test));
    const row = el("tr", test.kept ? "kept" : "refused");
    const name = el("td", "piece");
    writePiece(name, round.draft.pieces[test.node] ?? "", true);
    row.append(name, ...columns.map((column) => el("td", "", numbers.has(column) ? fixed(numbers.get(column), 4) : "")), el("td", "", test.kept ? "accepted" : "rejected"));
    table.append(row);
  }
  details.append(table);
  return details;
}
