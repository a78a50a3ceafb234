// The card of one lane: its strategy and status, its text, and the strip of costs.

import { props } from "component";
import { PROMISES } from "python";
import { button, el, setAttribute, setText } from "../components/elements.js";
import { DASH, fixed } from "../components/numbers.js";
import { describe, SCORE } from "../run/headers.js";
import { measure, STRIP } from "../run/metrics.js";
import { LaneState } from "../run/model.js";
import { sayLikeness } from "../run/plain.js";
import { headline, headlines, writeHeadline } from "./headlines.js";
import { TextView } from "./text.js";

const LOSSLESS = new Set(["greedy_identical", "distribution_identical"]);

/** A lossless lane is compared with plain decoding under the same additions, whose text may differ from that without them. */
function qualified(name, label, { guarantee, parts }) {
  const greedy = name === "greedy_identical";
  const has = (kind) => parts.some((part) => part.kind === kind);
  const own = [
    ["cache", guarantee.includes("budget_respected") || has("cache_policy")],
    ["compute policy", has("compute_policy")],
    ["weights", has("weights")],
    ["constraint", greedy && has("constraint")],
    ["processors", greedy && has("sampler")],
  ].filter(([, added]) => added).map(([addition]) => addition);
  return LOSSLESS.has(name) && own.length ? `${label} with its ${own.join(" and ")}` : label;
}

export const REASONS = {
  end: "ended",
  length: "reached the token limit",
  stop_string: "hit a stop string",
  grammar: "grammar complete",
  stopped: "stopped",
  failed: "failed",
};

export class LaneCard {
  constructor(record, order, app, { name, short }) {
    Object.assign(this, { title: name, short });
    this.order = order;
    this.record = record;
    this.app = app;
    this.state = new LaneState(record);
    this.text = new TextView(order);
    this.text.setPrompt(record.header);
    this.text.node.classList.toggle("is-scored", record.header.strategy === SCORE);
    this.node = el("article", "lane");
    this.node.dataset.lane = order;
    this.node.style.setProperty("--expected-tokens", record.header.max_new_tokens || 0);
    this.node.setAttribute("aria-label", `Lane ${order + 1}, ${name}`);
    this.status = el("span", "status");
    this.stop = button("quiet stop", "Stop", "Stop this lane", () => app.requests.stopLane(record.header.lane));
    this.branch = el("p", "branch-shown");
    this.trouble = el("p", "trouble");
    this.trouble.setAttribute("role", "alert");
    this.trouble.hidden = true;
    this.verdict = el("div", "verdict");
    this.verdict.setAttribute("role", "status");
    this.verdict.hidden = true;
    this.remark = el("p", "remark");
    this.note = el("p", "note");
    this.strip = el("dl", "strip");
    this.details = {}; // by metric: how its number comes about
    this.values = STRIP.map((metric) => this.metric(metric));
    this.node.append(this.head(), this.branch, this.text.node, this.trouble, this.verdict, this.remark, this.note, this.costs());
  }

  /** Three headline numbers, and the others in a fold that opens in all lanes together. */
  costs() {
    this.heads = el("dl", "headlines");
    this.more = el("details", "more");
    this.more.open = this.app.moreNumbers;
    this.more.addEventListener("toggle", () => this.app.showNumbers(this.more.open));
    this.more.append(el("summary", "", "More numbers"), this.strip);
    const costs = el("section", "costs");
    costs.append(this.heads, this.more);
    return costs;
  }

  /** All numbers of the lane and its comparison with plain greedy, for the text that is shown. */
  drawNumbers(cards) {
    this.metrics = measure(this.state);
    this.drawStrip();
    const likeness = sayLikeness(this, cards);
    setText(this.remark, this.state.shown.id === 0 ? likeness : "");
    this.drawHeadlines(headlines(this, cards, likeness));
  }

  /** Which branch is shown, while no branch has become the text. */
  drawBranch() {
    const { shown, living } = this.state;
    const alone = shown.id === 0;
    setText(this.branch, alone ? "" : `Sequence ${shown.id}, best of ${living.length} so far`);
    this.node.classList.toggle("shows-branch", !alone);
  }

  drawHeadlines(found) {
    const names = found.map(({ name }) => name).join();
    if (names !== this.headlineNames) this.heads.replaceChildren(...found.map(headline));
    this.headlineNames = names;
    found.forEach((one, i) => writeHeadline(this.heads.children[i], one));
  }

  head() {
    const { header } = this.record;
    const head = el("header", "lane-head");
    const choose = button("lane-name", "", `Show this lane in the views below (key ${this.order + 1})`, () => this.app.choose(this.order));
    choose.append(el("span", "number", String(this.order + 1)), el("span", "title", this.title));
    const top = el("div", "lane-top");
    top.append(choose, this.stop);
    const second = el("div", "lane-second");
    second.append(this.badges(header), this.status);
    const setting = el("p", "setting", describe(header, this.app.trace.lanes.map((record) => record.header)));
    setting.title = setting.textContent;
    head.append(top, second, setting);
    return head;
  }

  badges(header) {
    const badges = el("p", "badges");
    for (const name of header.guarantee) {
      if (PROMISES[name] === null || (name === "greedy_identical" && header.strategy === "greedy")) continue; // it is greedy decoding
      const [plain, help] = PROMISES[name] || [name.replaceAll("_", " "), ""];
      const node = badge(qualified(name, plain, header), help);
      node.classList.toggle("lossless", LOSSLESS.has(name)); // not shown on a lane that failed
      badges.append(node);
    }
    if (header.remote) badges.append(badge("remote", `Generated by the server ${header.remote}, which does not report its forwards, draft tree, KV cache and token masks: they are not shown.`));
    if (header.reconstruction) badges.append(badge("reconstruction", "The paper leaves details open; this is one reading of it."));
    return badges;
  }

  metric({ name, label, help, detail }) {
    const pair = el("div");
    pair.title = help;
    const value = el("dd", "", DASH);
    value.dataset.metric = name;
    pair.append(el("dt", "", label), value);
    this.strip.append(pair);
    if (detail) {
      pair.className = "detailed";
      pair.prepend(this.details[name] = el("dd", "detail")); // below the label: the pair is drawn from the bottom up
    }
    return value;
  }

  /** Show the first `cursor` events. */
  draw(cursor, channels, atHead) {
    const moved = this.state.goTo(cursor);
    const look = `${this.state.version}/${channels}/${this.app.trace.state}/${atHead}/${this.app.trace.over}`;
    if (look === this.look) return false;
    this.look = look;
    const { state } = this;
    const sequence = state.shown;
    this.text.draw(sequence, state, channels);
    this.drawStatus(atHead);
    this.drawBranch();
    const last = state.notes[state.notes.length - 1];
    setText(this.note, last ? last.text : "");
    return moved;
  }

  drawStrip() {
    const now = this.metrics;
    STRIP.forEach(({ name, write, detail }, i) => {
      const written = write(now[name]);
      setText(this.values[i], written);
      this.values[i].parentNode.hidden = written === DASH; // it does not apply to this lane
      if (detail) setText(this.details[name], detail(this.state));
      setAttribute(this.values[i], "data-value", now[name]);
    });
    setAttribute(this.strip, "data-peak", now.kv_live_peak);
  }

  drawStatus(atHead) {
    const { state, app } = this;
    const [name, label] = this.statusOf(atHead);
    setText(this.status, label);
    setAttribute(this.status, "title", label); // a narrow lane cuts it
    setAttribute(this.status, "data-status", name);
    this.stop.hidden = props.follows || app.trace.over || this.record.over || app.trace.recorded;
    this.node.classList.toggle("can-stop", !this.stop.hidden);
    this.trouble.hidden = !state.failed;
    setText(this.trouble, state.failed ? state.failed.message || "This lane has failed." : "");
    this.node.classList.toggle("has-failed", Boolean(state.failed));
    this.drawVerdict(state.judged);
  }

  /** Whether the answer is right, once it has been judged. An unchanged verdict is not redrawn: an unfolded answer stays unfolded. */
  drawVerdict(judged) {
    if (judged === this.judged) return;
    this.judged = judged;
    this.verdict.hidden = !judged;
    this.verdict.replaceChildren(...(judged ? sayVerdict(judged) : []));
  }

  /** [status, label]. */
  statusOf(atHead) {
    const { state, app } = this;
    if (state.failed) return ["failed", "failed"];
    if (state.done) return [state.done.reason, state.done.limit || REASONS[state.done.reason] || state.done.reason];
    if (!atHead) return ["earlier", "earlier"];
    if (app.trace.interrupted) return ["stopped", "interrupted"];
    if (app.trace.recorded || app.trace.state === "done") return ["replay", "recording ends here"];
    return app.trace.state === "held" ? ["held", "held"] : ["running", "running"];
  }
}

/** The verdict on an answer with its sign, and the expected answer, folded if it is long. */
function sayVerdict({ checked, score, expected, why }) {
  const [name, words] = why ? ["unchecked", `Not judged: ${why}`]
    : !checked ? ["unchecked", "Not checked: this requires running the program"]
    : score === 1 ? ["right", "Right"] : score > 0 ? ["partly", `Partly right, ${fixed(score, 2)} of 1`] : ["wrong", "Wrong"];
  const said = el("span", "verdict-said", words);
  said.dataset.verdict = name;
  const isShort = expected.length <= 60 && !expected.includes("\n");
  return [said, isShort ? el("span", "expected", `expected: ${expected}`) : unfolded(expected)];
}

function unfolded(expected) {
  const fold = el("details", "expected");
  fold.append(el("summary", "", "expected answer"), el("pre", "", expected));
  return fold;
}

function badge(label, help) {
  const node = el("span", "badge", label);
  node.title = help;
  return node;
}
