// The player's bar: what its buttons, slider and clock show.

import { el, setAttribute, setText, svg } from "../components/elements.js";
import { bytes, count, isNumber, percent } from "../components/numbers.js";
import { courseOf, placeOnCurve } from "../run/course.js";

const FIGURE_SPACE = "\u2007";
const UNITS = { tokens: "token", forwards: "forward" };

export class PlayerBar {
  constructor(root) {
    this.node = root.querySelector(".player");
    for (const name of ["scrub", "marks", "clock", "follow", "play", "place", "machine", "curve", "course", "pointer"]) this[name] = this.node.querySelector("." + name);
  }

  /** `chosen`: the lane whose entropy is behind the slider. */
  draw(player, trace, chosen) {
    const end = player.end();
    const value = player.value();
    this.play.classList.toggle("playing", player.playing);
    setAttribute(this.play, "aria-label", player.playing ? "Pause" : "Play");
    this.scrub.max = end || 1;
    this.scrub.step = player.mode === "time" ? "any" : "1";
    if (document.activeElement !== this.scrub || player.playing) this.scrub.value = value;
    this.scrub.style.setProperty("--done", end ? (value / end) * 100 + "%" : "0%");
    const [at, last] = player.mode === "time" ? [value.toFixed(2), end.toFixed(2)] : [String(value), String(end)];
    const ofAll = `of ${player.mode === "time" ? `${last} s` : count(end, UNITS[player.mode])}`;
    setText(this.clock, `${at.padStart(last.length, FIGURE_SPACE)} ${ofAll}`); // of one width, so that the timeline stays where it is
    setAttribute(this.scrub, "aria-valuetext", `${at} ${ofAll}`);
    this.follow.hidden = trace.over;
    setAttribute(this.follow, "aria-pressed", player.following);
    setText(this.follow, trace.state === "held" && !player.following ? "Held" : "Live");
    this.drawMarks(player, trace, end);
    this.drawCurve(player, trace, trace.lanes[chosen], end);
  }

  /** The entropy of each token as a line above the slider, and its origin below it; while a run grows, drawn again when it is a tenth longer. */
  drawCurve({ mode }, trace, lane, end) {
    const grown = trace.over ? "over" : Math.floor(Math.log(1 + lane.events.length) / Math.log(1.1));
    const look = `${trace.run}/${lane.order}/${mode}/${grown}/${trace.over ? end : ""}`;
    if (look === this.curveLook) return;
    this.curveLook = look;
    const steps = end ? lane.events.filter(({ kind, entropy }) => kind === "step" && isNumber(entropy)) : [];
    const place = placeOnCurve(mode, lane);
    const lines = Array.from({ length: BAR_COLOURS }, () => "");
    for (const step of steps) lines[barColour(step.entropy)] += curveLine(place(step) / end, step.entropy);
    this.curve.replaceChildren(...lines.map((d, i) => svg("path", { class: `b${i}`, d })));
    this.course.dataset.lane = lane.order; // its hue
    this.course.replaceChildren(...Object.entries(courseOf(mode, lane, end)).filter(([, d]) => d).map(([name, d]) => svg("path", { class: name, d })));
  }

  /** The place of a token in the run as a line on the curve; none if no token is marked. */
  point(player, lane, position) {
    const step = lane && position !== null ? lane.events.findLast(({ kind, position: at }) => kind === "step" && at === position) : null;
    const end = player.end();
    this.pointer.hidden = !step || !end;
    if (step) this.pointer.style.setProperty("--at", placeOnCurve(player.mode, lane)(step) / (end || 1));
  }

  /** Whether the buttons for steps are left to the keys that do the same. */
  leaveToKeys(isCalm) {
    for (const name of ["back", "forward", "place"]) this.node.querySelector(`[data-do=${name}]`).tabIndex = isCalm ? -1 : 0;
  }

  /** What is at the interesting place that was visited; hidden if empty. */
  sayPlace(sentence) {
    setText(this.place, sentence);
    this.place.hidden = !sentence;
  }

  /** The newest reading of the machine, or null to hide the meters, whose room stays. Only what was measured has a meter. */
  showMachine(reading) {
    const meters = reading ? [...METERS, ...vramMeters(reading)].filter(({ share }) => isNumber(share(reading))) : [];
    this.machine.hidden &&= !meters.length;
    this.machine.classList.toggle("is-off", !meters.length);
    if (meters.length) this.machine.replaceChildren(...meters.map((one) => meter(one, reading)));
    this.machine.title = meters.map(({ says }) => says(reading)).join("; ");
  }

  /** Marks above the slider: where each lane ended. */
  drawMarks(player, trace, end) {
    const ends = trace.lanes.map((lane) => (lane.over ? player.endOf(lane) : null));
    const width = ends.every((at) => at === null) ? 0 : this.marks.clientWidth; // measuring it lays out the page
    const look = JSON.stringify([ends, end, width]);
    if (look === this.marksLook) return;
    this.marksLook = look;
    const marks = end ? endMarks(ends.map((at) => at === null ? null : at / end), MARK_GAP / (width || 1)) : [];
    this.marks.replaceChildren(...marks.map(({ place, lanes }) => {
      const mark = el("span", "", lanes.join(", "));
      mark.style.left = `calc(8px + (100% - 16px) * ${place})`;
      return mark;
    }));
  }
}

/** `share`: what the meter shows, of 1; `says`: the same in words. The first is there from the first frame on and keeps its place. */
const METERS = [
  { name: "RAM", share: ({ memory, memory_total: all }) => memory / all, says: ({ memory, memory_total: all }) => `memory ${bytes(memory)} of ${bytes(all)}` },
  { name: "CPU", share: ({ cpu }) => cpu, says: ({ cpu }) => `processor ${percent(cpu)} of all cores` },
  { name: "GPU", share: ({ gpu }) => gpu, says: ({ gpu }) => `GPU busy ${percent(gpu)} of the time` },
];

/** The memory of each GPU in use, numbered if there are several. */
function vramMeters({ gpu_memory: memories = [], gpu_memory_total: totals = [] }) {
  return memories.map((memory, i) => {
    const number = memories.length > 1 ? ` ${i + 1}` : "";
    return { name: `VRAM${number}`, share: () => memory / totals[i], says: () => `memory of GPU${number} ${bytes(memory)} of ${bytes(totals[i])}` };
  });
}

function meter({ name, share, says }, reading) {
  const node = el("span", "machine-meter");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", says(reading));
  const bar = el("i");
  bar.style.setProperty("--share", Math.max(0, Math.min(1, share(reading))));
  node.append(el("b", "", name), bar, el("span", "num", `${Math.round(100 * share(reading))} %`));
  return node;
}

const HIGHEST = 6; // nats at the top of the curve
const BAR_COLOURS = 8;

/** The colour of a line, from 0: as its height, by the square root. */
function barColour(entropy) {
  return Math.min(BAR_COLOURS - 1, Math.floor(BAR_COLOURS * Math.sqrt(Math.max(0, entropy) / HIGHEST)));
}

/** A vertical line; the square root keeps small entropies visible. */
function curveLine(place, entropy) {
  const height = 100 * Math.sqrt(Math.min(1, Math.max(0, entropy) / HIGHEST));
  return `M${(1000 * place).toFixed(1)} 100v${(-height).toFixed(1)}`;
}

const MARK_GAP = 34; // px: lanes that ended closer together share a mark, which lists them

/** One mark for each group of lanes that ended at nearly the same place, [{place, lanes}], lanes counted from 1. Places are shares of
    the run, null for a lane that has not ended. */
function endMarks(places, gap) {
  const ended = places.flatMap((place, lane) => (place === null ? [] : [{ place, lane: lane + 1 }])).sort((a, b) => a.place - b.place);
  const groups = [];
  for (const { place, lane } of ended) {
    const last = groups[groups.length - 1];
    if (last && place - last.place < gap) Object.assign(last, { place, lanes: [...last.lanes, lane].sort((a, b) => a - b) });
    else groups.push({ place, lanes: [lane] });
  }
  return groups;
}
