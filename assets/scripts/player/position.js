// The position of a view as text, for a link: "lane.tokens" or, with the pinned token, "lane.tokens.token", all counted from 1.

import { count } from "../components/numbers.js";

/** The position that is shown; empty where there is nothing to link to. */
export function positionOf(app) {
  const card = app.cards[app.chosen];
  if (!card || app.trace.fromFile) return "";
  const { lane, position } = app.selection.selected || { lane: app.chosen, position: null };
  return [lane + 1, app.cards[lane].text.shown.length, ...(position === null ? [] : [position + 1])].join(".");
}

/** What a link to a position opens, in words: "with the moment: lane 2 after 5 tokens, token 3 held". */
export function sayPosition(text) {
  const position = readPosition(text);
  if (!position) return "prompt, lanes and settings";
  const held = position.token === null ? "" : `, token ${position.token + 1} held`;
  return `with the moment: lane ${position.lane + 1} after ${count(position.tokens, "token")}${held}`;
}

/** A position from a link; null for any other text. */
export function readPosition(text) {
  const [, lane, tokens, token] = /^(\d{1,2})\.(\d{1,6})(?:\.(\d{1,6}))?$/.exec(text || "") || [];
  return lane === undefined ? null : { lane: lane - 1, tokens: Number(tokens), token: token === undefined ? null : token - 1 };
}

/** Go to a position of an ended run: the moment at which its lane had so many tokens, and the card of its token. */
export function goToPosition(app, { lane, tokens, token }) {
  const card = app.cards[lane];
  if (!card) return;
  app.choose(lane);
  const last = card.text.shown[Math.min(tokens, card.text.shown.length) - 1];
  if (tokens < card.text.shown.length && last) app.seekEvent(lane, last.commit);
  requestAnimationFrame(() => requestAnimationFrame(() => { if (token !== null) app.selection.reveal(lane, token); }));
}
