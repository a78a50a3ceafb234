// Comparison of a lane with plain decoding: greedy without other parts, by the same model on the same prompt, in the same session.
// Speed-up and equality of texts refer to that lane; without one, no speed-up is shown.

import { count, fixed, milliseconds } from "../components/numbers.js";
import { hasPart } from "./headers.js";
import { ratio } from "./metrics.js";
import { isOver } from "./model.js";

export function plainLane(card, cards) {
  const { header } = card.record;
  return cards.find(({ record }) => isPlain(record.header) && isSameTask(record.header, header)) || null;
}

function isPlain({ strategy, parts, forced, canvas }) {
  return strategy === "greedy" && parts.length <= 1 && !forced.length && !canvas;
}

/** Part of a fork's text is given, so its time says nothing about its method. Weights of a lane's own are what it is compared for. */
function isSameTask(a, b) {
  const ownWeights = b.parts.some(({ kind }) => kind === "weights");
  const facts = ({ model, revision, dtype, device, quantization, prompt_ids: prompt }) => JSON.stringify([model, revision, dtype, device, prompt, !ownWeights && quantization]);
  return !b.forced.length && facts(a) === facts(b);
}

/** Speed of a lane relative to the plain one, {factor, mine, theirs, over}, speeds in tokens per second; null before both have text. */
export function pace(card, plain) {
  const [mine, theirs] = [card, plain].map(({ state }) => ratio(state.shown.tokens.length || state.canvas.filled.size, state.clock));
  if (!mine || !theirs) return null;
  return { factor: mine / theirs, mine, theirs, over: [card, plain].every(({ state }) => isOver(state)) };
}

export function sayPace(card) {
  const { plain } = card;
  if (plain === card) return "This is the plain lane, the baseline for the others.";
  if (!plain && card.record.header.canvas) return "No speed-up: a model that fills masked positions has no greedy lane to compare with.";
  if (!plain) return `No speed-up: ${card.record.header.forced.length ? "part of this text was given" : "add a greedy lane without toggles as a baseline"}.`;
  const found = pace(card, plain);
  if (!found) return `Speed-up over lane ${plain.order + 1}, plain greedy: shown once both have text.`;
  const speeds = `${fixed(found.mine, 1)} against ${fixed(found.theirs, 1)} tokens/s of plain greedy in lane ${plain.order + 1}`;
  const sentence = `${fixed(found.factor, 2)} times the speed${found.over ? "" : " so far"}: ${speeds}, both measured in this run, prompt included.`;
  return [sentence, sayLoss(card)].filter(Boolean).join(" ");
}

/** Why drafting loses time here, from the measured times of both lanes; empty where it does not, or where nothing is drafted. */
export function sayLoss(card) {
  const { plain, state, record } = card;
  const found = plain && plain !== card && hasPart(record.header, "drafter") && pace(card, plain);
  if (!found || found.factor >= 1) return "";
  const [mine, theirs] = [state, plain.state].map(perTokenOf);
  const [more, saved] = [mine.rest - theirs.rest, theirs.target - mine.target];
  const spent = [more > 0 && `${milliseconds(more)} more on drafting and checking`, saved < 0 && `${milliseconds(-saved)} more in the target's forwards`];
  const saves = saved > 0 ? ` and saves only ${milliseconds(saved)} of the target's forwards` : "";
  const why = `one forward takes ${milliseconds(secondsPerForward(plain.state))} here. The longer it takes, as on a large model, the more a saved one counts.`;
  return `Per token it spends ${spent.filter(Boolean).join(" and ")}${saves}: ${why}`;
}

/** Seconds per token: of the target's forwards, and of everything else on the lane's clock. */
function perTokenOf({ ledger, clock, shown }) {
  const target = ledger.totals.target.seconds;
  return { target: target / shown.tokens.length, rest: (clock - target) / shown.tokens.length };
}

/** Mean duration of the target's forwards, prefill excluded. */
export function secondsPerForward({ ledger, costs }) {
  return ratio(ledger.decoding, costs.passes);
}

/** Whether a lane has the same text as plain greedy (without a plain lane: as lane 1), up to the shorter of both.
    Compares token ids, so both need the same vocabulary. */
export function sayLikeness(card, cards) {
  const { plain } = card;
  const other = plain || cards[0];
  const [a, b] = [card.record.header, other.record.header];
  if (other === card || a.remote || b.remote || a.model !== b.model || a.vocabulary !== b.vocabulary || other.state.shown.id !== 0) return "";
  return compareTexts(card, other, plain ? `plain greedy (lane ${other.order + 1})` : `lane ${other.order + 1}`);
}

function compareTexts(card, other, name) {
  const [mine, theirs] = [card.state.shown.tokens, other.state.shown.tokens];
  const shared = Math.min(mine.length, theirs.length);
  if (!shared) return "";
  const at = firstDifference(card, other, mine, theirs);
  if (at >= 0) return `Differs from ${name} from token ${at + 1} on.`;
  const bothDone = card.state.done && other.state.done;
  if (bothDone && mine.length === theirs.length) return `Same text as ${name}.`;
  return `Same text as ${name}${bothDone ? " up to the shorter one" : " so far"}, ${count(shared, "token")}.`;
}

/** Index of the first token that differs, or -1. Texts mostly grow, so a prefix known to be equal is not compared again. */
function firstDifference(card, other, mine, theirs) {
  const shared = Math.min(mine.length, theirs.length);
  const known = card.compared;
  const goesOn = known && known.other === other && known.to <= shared && (!known.to || (known.mine === mine[known.to - 1] && known.theirs === theirs[known.to - 1]));
  let at = goesOn ? known.to : 0;
  while (at < shared && mine[at].id === theirs[at].id) at += 1;
  card.compared = { other, to: at, mine: mine[at - 1], theirs: theirs[at - 1] };
  return at < shared ? at : -1;
}
