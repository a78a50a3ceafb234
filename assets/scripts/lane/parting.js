// The rows of two lanes at one position: what each model thought of the tokens that either recorded.

/** Candidates of two steps without those `taken`, the most probable in either lane first: [{piece, shares}], where a share is a
    probability of the model, or null in a lane that did not record this candidate. */
export function otherCandidates(steps, taken, most) {
  const found = new Map();
  steps.forEach((step, of) => {
    for (const [id, piece, raw] of step?.top || []) {
      if (taken.includes(id)) continue;
      if (!found.has(id)) found.set(id, { piece, shares: steps.map(() => null) });
      found.get(id).shares[of] = raw;
    }
  });
  const highest = ({ shares }) => Math.max(...shares); // null counts as 0
  return [...found.values()].sort((a, b) => highest(b) - highest(a)).slice(0, most);
}

/** The probability that a lane gives to all tokens without a share of their own here. */
export function restOf(shares) {
  return Math.max(0, 1 - shares.reduce((sum, share) => sum + (share || 0), 0));
}

const KL = "KL(loaded || lane)"; // a series of the overlay weights_kl

/** KL from the loaded weights to those of a lane, in nats over the full vocabulary, where an overlay measured it; else null. */
export function measuredKL(figures, position) {
  for (const { parts } of figures) {
    const part = parts.find(({ x = 0, series }) => x === position && series && KL in series);
    if (part) return part.series[KL];
  }
  return null;
}
