// Token colours. Levels 0 (page colour) to 10 (strongest) have a class each, so that a change of theme needs no script.
// The scales are fixed: a colour means the same in every lane and at any time.

import { el } from "../components/elements.js";
import { isNumber } from "../components/numbers.js";

export const LEVELS = 10;

export const ORIGINS = {
  sampled: { label: "chosen", help: "Chosen from the target's distribution." },
  draft: { label: "accepted draft token", help: "Proposed by the drafter and accepted by the target." },
  forced: { label: "forced", help: "The only token the grammar allowed, the start of a fork, or a text that is only scored." },
  redraw: { label: "replaced", help: "Replaces a rejected draft token: the target's own choice, or, where tokens are drawn, a sample of its distribution or of what the rejected tokens leave of it." },
  bonus: { label: "bonus", help: "One more token from the target after all draft tokens were accepted." },
};

/** What a method says of a token, in a figure that colours it. */
function marked(token, step, mark) {
  return isNumber(mark) ? LEVELS * mark : null;
}

export const COLOURS = {
  entropy: {
    label: "entropy",
    ends: ["0", "1.5", "6 nats or more"],
    help: "Entropy of the model's distribution before this token, in nats.",
    level: (token, step) => (step ? LEVELS * Math.sqrt(Math.min(1, step.entropy / 6)) : null),
  },
  final: {
    label: "entropy after processors",
    ends: ["0", "1.5", "6 nats or more"],
    help: "Entropy of the distribution the token was chosen from, after masks and processors, in nats.",
    level: (token, step) => (step ? LEVELS * Math.sqrt(Math.min(1, step.final_entropy / 6)) : null),
  },
  probability: {
    label: "probability",
    ends: ["100 %", "50 %", "0 %"],
    help: "Probability of this token under the model; less likely tokens have a stronger colour.",
    level: (token) => (isNumber(token.logprob) ? LEVELS * (1 - Math.exp(token.logprob)) : null),
  },
  surprisal: {
    label: "surprisal",
    ends: ["0", "2", "8 nats or more"],
    help: "Minus the log-probability of this token, in nats.",
    level: (token) => (isNumber(token.logprob) ? LEVELS * Math.sqrt(Math.min(1, -token.logprob / 8)) : null),
  },
  latency: {
    label: "latency",
    ends: ["1 ms", "30 ms", "1 s or more"],
    help: "Time on the lane's clock since the previous commit, split among the tokens of this commit; the first includes the prefill.",
    level: (token) => (isNumber(token.seconds) ? (LEVELS * Math.log10(Math.max(0.001, token.seconds) / 0.001)) / 3 : null),
  },
  watermark: {
    label: "watermark",
    ends: ["0", "0.5", "1"],
    help: "What the detector of a watermark counts for this token: 1 if it is in the green list, or the share of coin flips it won.",
    level: marked,
  },
  overlay: {
    label: "overlay",
    ends: ["0", "0.5", "1"],
    help: "What an overlay of the lane says of this token, from 0 to 1. Point at the token to read it in words.",
    level: marked,
  },
  origin: {
    label: "origin",
    ends: null,
    help: "How the token was produced.",
    level: () => null,
  },
};

/** Colour and underline show one quantity each; `channels` names them as "colour/underline". */
export function tokenClass(token, step, channels, mark) {
  const [colour, underline] = channels.split("/");
  const base = "t o-" + (token.origin in ORIGINS ? token.origin : "sampled") + lineClass(token, step, underline, mark);
  if (colour === "origin") return base + " tinted";
  const level = levelOf(token, step, colour, mark);
  return base + (level === null ? " unknown" : " h" + Math.round(level));
}

/** Each origin has its own line style; for a number, larger values have a thicker line. */
function lineClass(token, step, underline, mark) {
  if (underline === "origin") return "";
  const level = underline === "none" ? null : levelOf(token, step, underline, mark);
  return " lined" + (level === null ? "" : " u" + Math.round(level / 2));
}

function levelOf(token, step, name, mark) {
  const level = COLOURS[name].level(token, step, mark);
  return level === null ? null : Math.max(0, Math.min(LEVELS, level));
}

/** The legend: the scale of the colour, and the underlines of the origins. */
export function drawScale(host, metric) {
  host.replaceChildren();
  const { ends, help } = COLOURS[metric];
  host.title = help;
  host.hidden = !ends;
  if (!ends) return;
  const ramp = el("span", "ramp");
  for (let level = 0; level <= LEVELS; level++) ramp.append(el("i", "h" + level));
  const names = el("span", "ends");
  for (const end of ends) names.append(el("span", "", end));
  host.append(ramp, names);
}

export function drawUnderlines(host, metric, underline) {
  const named = COLOURS[underline];
  host.title = named ? named.help : "";
  if (underline === "origin") drawOrigins(host, metric);
  else host.replaceChildren(...(named ? named.ends : []).map((end, i) => el("span", `t lined u${[0, 2, 5][i]}`, end)));
}

function drawOrigins(host, metric) {
  host.replaceChildren(...Object.entries(ORIGINS).map(([name, { label, help }]) => {
    const sample = el("span", `t o-${name}${metric === "origin" ? " tinted" : ""}`, label);
    sample.title = help;
    return sample;
  }));
}
