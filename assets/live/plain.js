// A lane held against plain decoding: greedy with nothing added, by the same model on the same prompt, in the same session. What is said of
// speed and of sameness is measured against that lane, and where there is none, nothing is said of speed.

function plainLane(card, cards) {
  const { header } = card.record;
  return cards.find(({ record }) => isPlain(record.header) && isSameTask(record.header, header)) || null;
}

function isPlain({ strategy, parts, forced, canvas }) {
  return strategy === "greedy" && parts.length <= 1 && !forced.length && !canvas;
}

/** A fork is given part of its text, so that its time tells nothing about its method. */
function isSameTask(a, b) {
  const facts = ({ model, revision, dtype, device, quantization, prompt_ids: prompt }) => JSON.stringify([model, revision, dtype, device, quantization, prompt]);
  return !b.forced.length && facts(a) === facts(b);
}

/** How fast a lane is beside the plain one, {factor, mine, theirs, over} with speeds in tokens a second; null before both have written. */
function pace(card, plain) {
  const [mine, theirs] = [card, plain].map(({ state }) => ratio(state.shown.tokens.length || state.canvas.filled.size, state.clock));
  if (!mine || !theirs) return null;
  return { factor: mine / theirs, mine, theirs, over: [card, plain].every(({ state }) => isOver(state)) };
}

function sayPace(card, cards) {
  const plain = plainLane(card, cards);
  if (plain === card) return "This is the plain lane: the others are measured against it.";
  if (!plain) return `No speed-up is given: ${card.record.header.forced.length ? "part of this text was given" : "add a greedy lane without toggles to measure one against"}.`;
  const found = pace(card, plain);
  if (!found) return `The speed-up is measured against lane ${plain.order + 1}, plain greedy, once both have written.`;
  const speeds = `${fixed(found.mine, 1)} against ${fixed(found.theirs, 1)} tokens/s of plain greedy in lane ${plain.order + 1}`;
  return `${fixed(found.factor, 2)} times the speed${found.over ? "" : " so far"}: ${speeds}, both measured in this run, prompt included.`;
}

/** Whether a lane writes what plain greedy writes, or the first lane where there is no plain one, as far as both have come.
    Compares ids, and only within one vocabulary. */
function sayLikeness(card, cards) {
  const plain = plainLane(card, cards);
  const other = plain || cards[0];
  const [a, b] = [card.record.header, other.record.header];
  if (other === card || a.model !== b.model || a.vocabulary !== b.vocabulary || other.state.shown.id !== 0) return "";
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
  return `Same text as ${name}${bothDone ? " as far as both go" : " so far"}, ${count(shared, "token")}.`;
}

/** Index of the first token that differs, or -1. Texts mostly grow, so what was found the same before need not be compared again. */
function firstDifference(card, other, mine, theirs) {
  const shared = Math.min(mine.length, theirs.length);
  const known = card.compared;
  const goesOn = known && known.other === other && known.to <= shared && (!known.to || (known.mine === mine[known.to - 1] && known.theirs === theirs[known.to - 1]));
  let at = goesOn ? known.to : 0;
  while (at < shared && mine[at].id === theirs[at].id) at += 1;
  card.compared = { other, to: at, mine: mine[at - 1], theirs: theirs[at - 1] };
  return at < shared ? at : -1;
}
