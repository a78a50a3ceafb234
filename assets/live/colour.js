// What the colour of a token means. Levels 0 (page colour) to 10 (strongest) have a class each, so that a change of
// theme recolours without any script. The scales are fixed: a colour means the same in every lane and at any time.

const LEVELS = 10;

const ORIGINS = {
  sampled: { label: "chosen", help: "Chosen from the target's own row." },
  draft: { label: "accepted guess", help: "Guessed ahead and accepted by the target." },
  forced: { label: "forced", help: "Given: the grammar left no other token, a fork begins with it, or the whole text is only read." },
  redraw: { label: "redrawn", help: "Replaces a refused guess." },
  bonus: { label: "bonus", help: "One more token from the target after every guess was accepted." },
};

const COLOURS = {
  entropy: {
    label: "entropy",
    ends: ["0", "1.5", "6 nats or more"],
    help: "Entropy of the model's own row before this token: how open the choice was.",
    level: (token, step) => (step ? LEVELS * Math.sqrt(Math.min(1, step.entropy / 6)) : null),
  },
  final: {
    label: "entropy after filters",
    ends: ["0", "1.5", "6 nats or more"],
    help: "Entropy of the row the token was really drawn from, after masks and samplers.",
    level: (token, step) => (step ? LEVELS * Math.sqrt(Math.min(1, step.final_entropy / 6)) : null),
  },
  probability: {
    label: "probability",
    ends: ["100 %", "50 %", "0 %"],
    help: "Probability the model gave this token: the less likely, the stronger the colour.",
    level: (token) => (isNumber(token.logprob) ? LEVELS * (1 - Math.exp(token.logprob)) : null),
  },
  surprisal: {
    label: "surprisal",
    ends: ["0", "2", "8 nats or more"],
    help: "Minus the log-probability of this token.",
    level: (token) => (isNumber(token.logprob) ? LEVELS * Math.sqrt(Math.min(1, -token.logprob / 8)) : null),
  },
  latency: {
    label: "latency",
    ends: ["1 ms", "30 ms", "1 s or more"],
    help: "Seconds on the lane's own clock since the text last grew, shared by the tokens that came together; the first waits for the prompt.",
    level: (token) => (isNumber(token.seconds) ? (LEVELS * Math.log10(Math.max(0.001, token.seconds) / 0.001)) / 3 : null),
  },
  origin: {
    label: "origin",
    ends: null,
    help: "How the token came into the text.",
    level: () => null,
  },
};

/** Two channels carry two numbers of a token at once; `channels` names them as "colour/underline". */
function tokenClass(token, step, channels) {
  const [colour, underline] = channels.split("/");
  const base = "t o-" + (token.origin in ORIGINS ? token.origin : "sampled") + lineClass(token, step, underline);
  if (colour === "origin") return base + " tinted";
  const level = levelOf(token, step, colour);
  return base + (level === null ? " unknown" : " h" + Math.round(level));
}

/** The underline of an origin has its own style; for a number the line grows thicker. */
function lineClass(token, step, underline) {
  if (underline === "origin") return "";
  const level = underline === "none" ? null : levelOf(token, step, underline);
  return " lined" + (level === null ? "" : " u" + Math.round(level / 2));
}

function levelOf(token, step, name) {
  const level = COLOURS[name].level(token, step);
  return level === null ? null : Math.max(0, Math.min(LEVELS, level));
}

/** The legend: the scale of the colour, and the underlines of the origins. */
function drawScale(host, metric) {
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

function drawUnderlines(host, metric, underline) {
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
