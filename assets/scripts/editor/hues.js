// The hue of every lane, which it keeps when others are added, moved or removed.

const HUES = 4;
const hueOf = new WeakMap(); // by lane

/** A new lane gets the hue of its place, or the first one that is free. Returns the hue of each lane. */
export function giveHues(lanes) {
  const isFree = (hue) => lanes.every((lane) => hueOf.get(lane) !== hue);
  lanes.forEach((lane, i) => {
    if (!hueOf.has(lane)) hueOf.set(lane, [i, ...Array(HUES).keys()].find(isFree) ?? i % HUES);
  });
  return lanes.map((lane) => hueOf.get(lane) % HUES);
}

/** The lanes that were there before keep their hues: beside a fork, its parent and the others. */
export function keepHues(before, given) {
  const left = [...before];
  for (const lane of given) {
    const at = left.findIndex((one) => JSON.stringify(one) === JSON.stringify(lane));
    if (at >= 0) hueOf.set(lane, hueOf.get(left.splice(at, 1)[0]));
  }
}
