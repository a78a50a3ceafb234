// The three numbers of a lane that are always shown: its speed, whether its text is that of the plain lane, and its tokens per forward.

/** {name, value, label, help} for what applies to a lane. `likeness`: what sayLikeness says of it. */
function headlines(card, cards, likeness) {
  return [speedOf(card), likenessOf(card, cards, likeness), perForward(card)].filter(Boolean);
}

function speedOf(card) {
  const { plain } = card;
  const found = plain && plain !== card && pace(card, plain);
  if (found) return { name: "speed", value: `${fixed(found.factor, found.factor < 9.95 ? 2 : 1)}×`, label: `speed of lane ${plain.order + 1}`, help: sayPace(card) };
  const own = card.metrics.tokens_per_second;
  return own === null ? null : { name: "speed", value: fixed(own, own < 99.5 ? 1 : 0), label: "tokens/s", help: "Tokens per second, prefill included." };
}

function likenessOf({ plain }, cards, said) {
  if (!said) return null;
  const other = plain || cards[0];
  const place = said.match(/from token (\d+) on/);
  return { name: "likeness", value: place ? `differs at ${place[1]}` : "same text", label: `against lane ${other.order + 1}`, help: said };
}

function perForward(card) {
  const value = card.metrics.tokens_per_target_forward;
  const { help } = STRIP.find(({ name }) => name === "tokens_per_target_forward");
  return value === null ? null : { name: "per-forward", value: fixed(value, 2), label: "tokens per forward", help };
}

function headline({ name }) {
  const pair = el("div");
  pair.dataset.headline = name;
  pair.append(el("dt"), el("dd"));
  return pair;
}

function writeHeadline(pair, { value, label, help }) {
  setAttribute(pair, "title", help);
  setText(pair.firstChild, label);
  setText(pair.lastChild, value);
}
