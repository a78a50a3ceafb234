// The source of every token: chosen by the target, drafted and accepted, written by the draft model, or forced.

import { el, svg } from "../components/elements.js";
import { hasPart } from "../run/headers.js";
import { WORKER_OF_STREAM } from "../run/ledger.js";
import { CHART } from "./chart.js";
import { surface } from "./panel.js";

const SPEAKERS = {
  target: "target",
  draft: "draft model",
  guess: "accepted draft tokens",
  grammar: "forced by the grammar",
  given: "given",
};
const STRIP_HEIGHT = 12;

function speakerOf(token, step, { kinds }) {
  if (token.origin === "draft") return "guess";
  if (token.origin === "forced") return kinds.has("mask") ? "grammar" : "given";
  return step && WORKER_OF_STREAM[step.stream] === "draft" ? "draft" : "target";
}

/** Whether tokens may have another source than the target; the header shows it before the first token. */
export function hasSpeakers({ header, kinds }) {
  return Boolean(header.draft) || hasPart(header, "drafter", "constraint") || ["draft", "mask", "switch"].some((kind) => kinds.has(kind));
}

/** Stretches of tokens with the same source, {who, from, to}. */
function speakerRuns({ tokens, steps }, record) {
  const runs = [];
  tokens.forEach((token, i) => {
    const who = speakerOf(token, steps.get(i), record);
    const last = runs[runs.length - 1];
    if (last && last.who === who) last.to = i + 1;
    else runs.push({ who, from: i, to: i + 1 });
  });
  return runs;
}

/** A strip below a chart, on its token axis, and a key with the tokens per source. */
export function speakerStrip(card, scale) {
  const { record, state } = card;
  const runs = speakerRuns(state.shown, record);
  const number = Object.fromEntries(Object.keys(SPEAKERS).map((who) => [who, runs.reduce((sum, run) => sum + (run.who === who ? run.to - run.from : 0), 0)]));
  const heard = Object.keys(SPEAKERS).filter((who) => number[who]);
  const words = heard.map((who) => `${SPEAKERS[who]} ${number[who]}`);
  const drawing = surface(scale.width, STRIP_HEIGHT, `Sources of the tokens of lane ${card.order + 1}: ${words.join(", ") || "none yet"}.`);
  drawing.append(svg("text", { class: "tick", x: CHART.left - 6, y: STRIP_HEIGHT - 2, "text-anchor": "end" }, "from"));
  for (const who of heard) drawing.append(svg("path", { class: `who speaks-${who}`, d: runs.filter((run) => run.who === who).map((run) => runBox(run, scale)).join("") }));
  const key = el("p", "chart-key speakers");
  key.append(...heard.map((who, i) => el("span", `key-who speaks-${who}`, words[i])));
  return { drawing, key };
}

function runBox({ from, to }, scale) {
  const [left, right] = [scale.x(from - 0.5), scale.x(to - 0.5)];
  return `M${left.toFixed(1)} 1H${Math.max(right, left + 0.6).toFixed(1)}V${STRIP_HEIGHT - 1}H${left.toFixed(1)}Z`;
}
