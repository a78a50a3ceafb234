// Saving a run as a trace, as CSV, or as a page that plays without a server (filled in as in playground/player/standalone.py).

import { SOURCE } from "component";
import { STANDALONE, VERSION } from "python";
import { download, toBase64 } from "../components/files.js";
import { namesOfRun } from "../run/headers.js";
import { toCsv } from "../run/spreadsheet.js";
import { FORMAT, piped } from "../run/trace.js";

const LONGEST_NAME = 80; // characters of a file name for the lanes; half of it for the prompt

const SAVES = {
  trace: { ending: "jsonl", type: "application/x-ndjson", write: (trace) => trace.toLines() },
  csv: { ending: "csv", type: "text/csv", write: toCsv },
  page: { ending: "html", type: "text/html", write: toPage },
};

export async function saveRun(trace, kind) {
  const { ending, type, write } = SAVES[kind];
  download(new Blob([await write(trace)], { type }), `${fileStem(trace)}.${ending}`);
}

/** One HTML file: the page frame, the view's styles, its script packed, and the trace. */
async function toPage(trace) {
  const whole = { format: FORMAT, version: VERSION, lanes: trace.headers, events: trace.inOrder().map((event) => event.raw) };
  const parts = { styles: document.querySelector("style[data-live]").textContent, trace: inert(whole), source: await packed(SOURCE) };
  return STANDALONE.replace(/\{\{(\w+)\}\}/g, (blank, name) => parts[name]);
}

/** JSON that cannot close the script element around it. */
function inert(value) {
  return JSON.stringify(value).replaceAll("<", "\\u003c");
}

/** A text as gzip in Base64, a third of its size; DecompressionStream reads it. */
async function packed(text) {
  return toBase64(await piped(text, new CompressionStream("gzip")).arrayBuffer());
}

/** A file name without its ending that says lanes and prompt: "greedy-vs-eagle-tell-me-a-story". */
export function fileStem({ headers, run }) {
  const lanes = namesOfRun(headers).map(({ name }) => slug(name, LONGEST_NAME / 2)).filter(Boolean).join("-vs-");
  const prompt = headers.length ? slug(headers[0].prompt, LONGEST_NAME / 2) : "";
  return [lanes.slice(0, LONGEST_NAME), prompt].filter(Boolean).join("-") || `run-${slug(run, LONGEST_NAME)}`;
}

/** Letters and digits of any script in lower case, joined by hyphens: nothing that a file system or a shell reads. */
function slug(text, longest) {
  const whole = text.slice(0, 4 * longest).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+/, "");
  return [...whole].slice(0, longest).join("").replace(/-+$/, "");
}
