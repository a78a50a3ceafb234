// A run as CSV, one line per token. The columns are documented in playground/trace/csv_export.py, which writes the same file.

import { COLUMNS } from "python";
import { isNumber } from "../components/numbers.js";
import { LaneState } from "./model.js";

const FORMULA = /^(?:\n*[=+\-@＝＋－＠]|[\t\r])/; // a spreadsheet would evaluate this instead of showing it; wide signs in some languages
const ORIGIN_WORDS = { sampled: "chosen", redraw: "replaced" }; // greedy decoding samples nothing
const ROUNDING = 1e-5; // of a softmax in float32: a log-probability above it is none
const NUMERAL = /^[+-]?[0-9]+(\.[0-9]+)?$/;

export function toCsv(trace) {
  const rows = trace.lanes.flatMap(rowsOfLane).map((row) => COLUMNS.map((name) => row[name]));
  return [COLUMNS, ...rows].map((cells) => cells.map(csvCell).join(",") + "\r\n").join("");
}

function rowsOfLane(record) {
  const state = new LaneState(record);
  state.goTo(record.events.length);
  const commits = commitsOf(record.events);
  const sequences = [...state.sequences.values()].sort((a, b) => a.id - b.id);
  return sequences.flatMap((sequence) => sequence.tokens.map((token, position) => ({
    lane: record.header.lane + 1, strategy: record.header.strategy, sequence: sequence.id, position,
    id: token.id, text: token.piece, origin: ORIGIN_WORDS[token.origin] || token.origin,
    ...probabilitiesOf(token, sequence.steps.get(position)), ...commits.get(token.commit),
  })));
}

/** The recorded probabilities of a token; empty if no row was recorded. */
function probabilitiesOf(token, step) {
  const place = step ? step.top.findIndex(([id]) => id === token.id) : -1;
  return {
    entropy: sixDecimals(step && step.entropy),
    final_entropy: sixDecimals(step && step.final_entropy),
    logprob: sixDecimals(token.logprob),
    probability: isNumber(token.logprob) && token.logprob <= ROUNDING ? sixDecimals(Math.exp(token.logprob)) : "",
    final_probability: place < 0 ? "" : sixDecimals(step.top[place][3]),
    rank: place < 0 ? "" : place + 1,
  };
}

/** Every commit by the index of its event: its number, its time, and the target forwards until then. */
function commitsOf(events) {
  const commits = new Map();
  let forwards = 0;
  events.forEach((event, index) => {
    if (event.kind === "forward" && event.stream === "target" && event.phase !== "prefill") forwards += 1;
    if (event.kind === "commit") commits.set(index, { step: commits.size, seconds: sixDecimals(event.at), forwards });
  });
  return commits;
}

function sixDecimals(value) {
  return isNumber(value) ? value.toFixed(6) : "";
}

function csvCell(value) {
  const text = String(value);
  const safe = FORMULA.test(text) && !NUMERAL.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
