// The numbers of a lane that are always shown: its tokens per forward and its forwards, which do not depend on this machine; whether its text
// is that of the plain lane; and, last, how it fares by the clock.

import { el, setAttribute, setText } from "../components/elements.js";
import { fixed, milliseconds } from "../components/numbers.js";
import { STRIP } from "../run/metrics.js";
import { isOver } from "../run/model.js";
import { pace, sayLoss, sayPace, secondsPerForward } from "../run/plain.js";

/** {name, value, label, help} for what applies to a lane. `likeness`: what sayLikeness says of it. */
export function headlines(card, cards, likeness) {
  return [perForward(card), forwardsOf(card), likenessOf(card, cards, likeness), speedOf(card)].filter(Boolean);
}

function perForward(card) {
  const value = card.metrics.tokens_per_target_forward;
  const { help } = STRIP.find(({ name }) => name === "tokens_per_target_forward");
  return value === null ? null : { name: "per-forward", value: fixed(value, 2), label: "tokens per forward", help };
}

/** "11 forwards instead of 61", where the plain lane wrote as many tokens. */
function forwardsOf({ plain, state, metrics }) {
  const value = metrics.target_forwards;
  const { help } = STRIP.find(({ name }) => name === "target_forwards");
  if (!value) return null;
  const theirs = plain && plain.state !== state && [plain.state, state].every(isOver) && plain.state.shown.tokens.length === metrics.tokens ? plain.state.costs.passes : value;
  return { name: "forwards", value: String(value), label: `${value === 1 ? "forward" : "forwards"}${theirs === value ? "" : ` instead of ${theirs}`}`, help };
}

function likenessOf({ plain }, cards, said) {
  if (!said) return null;
  const other = plain || cards[0];
  const place = said.match(/from token (\d+) on/);
  return { name: "likeness", value: place ? `differs at ${place[1]}` : "same text", label: `against lane ${other.order + 1}`, help: said };
}

function speedOf(card) {
  const { plain } = card;
  const found = plain && plain !== card && pace(card, plain);
  if (found) return { name: "speed", value: `${fixed(found.factor, found.factor < 9.95 ? 2 : 1)}×`, label: clockLabel(card), help: sayPace(card) };
  const own = card.metrics.tokens_per_second;
  return own === null ? null : { name: "speed", value: fixed(own, own < 99.5 ? 1 : 0), label: "tokens/s", help: "Tokens per second, prefill included." };
}

/** "by the clock", and where drafting loses time the reason. */
function clockLabel(card) {
  return sayLoss(card) ? `by the clock: a forward takes only ${milliseconds(secondsPerForward(card.plain.state))} here` : "by the clock";
}

export function headline({ name }) {
  const pair = el("div");
  pair.dataset.headline = name;
  pair.append(el("dt"), el("dd"));
  return pair;
}

export function writeHeadline(pair, { value, label, help }) {
  setAttribute(pair, "title", help);
  setText(pair.firstChild, label);
  setText(pair.lastChild, value);
}
