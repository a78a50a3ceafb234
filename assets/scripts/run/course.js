// Below the slider: where the tokens of the followed lane come from, by form, and where its cache freed slots.

const COURSE = ["draft", "redraw", "bonus", "forced", "evicted", "evicted-hole"]; // origins, and what is drawn last

/** The paths of the marks by their names; places are shares of `end`. */
export function courseOf(mode, lane, end) {
  const paths = Object.fromEntries(COURSE.map((name) => [name, ""]));
  if (!end) return paths;
  const x = (place) => (1000 * Math.min(1, Math.max(0, place / end))).toFixed(1);
  const place = placeOnCurve(mode, lane);
  let before = 0;
  for (const event of lane.events) {
    if (event.kind === "cache" && event.evicted) paths.evicted += `M${x(place(event))} 50h0`;
    if (event.kind !== "commit" || event.sequence) continue;
    const [from, to] = spanOf(mode, event, before, place);
    before = to;
    event.origins.forEach((origin, i) => {
      const at = (k) => x(from + ((to - from) * k) / event.origins.length);
      if (origin in paths) paths[origin] += markOf(origin, at(i), at(i + 1));
    });
  }
  return { ...paths, "evicted-hole": paths.evicted };
}

/** From where to where a commit is drawn; several tokens share one forward, or one moment. */
function spanOf(mode, event, before, place) {
  if (mode === "tokens") return [event.position, event.position + event.origins.length];
  const at = place(event);
  return mode === "forwards" ? [Math.max(0, Math.ceil(at) - 1), Math.ceil(at)] : [before, at];
}

function markOf(origin, from, to) {
  if (origin === "bonus") return `M${to} 50h0`;
  return origin === "redraw" ? `M${from} 100L${(Number(from) + 4).toFixed(1)} 0` : `M${from} 50H${to}`;
}

/** The forwards of a lane up to an event, and as a fraction the event's place in time between two of them. */
export function forwardKey({ forwards }, { forwards: number, at }) {
  const from = number ? forwards[number - 1] : 0;
  const next = forwards[number];
  return number + (next > from ? Math.min(0.999, Math.max(0, at - from) / (next - from)) : 0);
}

/** Where a step of a lane is on the slider, in its unit. */
export function placeOnCurve(mode, lane) {
  return { time: ({ at }) => at, tokens: (event) => (event.kind === "step" ? event.position + 1 : event.key), forwards: (event) => forwardKey(lane, event) }[mode];
}
