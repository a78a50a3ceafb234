// Runs of this tab over a reload: each ended run is kept, compressed, in the tab's session storage, up to a total size. A run that is not
// kept when the page is left is kept then, as far as it has come: a browser that has lost its server loads the page again.

import { fromBase64, toBase64 } from "../components/files.js";
import { Trace } from "../run/trace.js";

const KEPT_RUNS = "decoding-playground.runs";
const MOST_KEPT = 3_000_000; // characters of all kept runs; browsers allow about five million

/** Keep an ended run; the oldest are dropped where there is no room. */
export async function keepRun(run) {
  if (run.isKept || run.isPacking || typeof CompressionStream === "undefined") return;
  run.isPacking = true;
  store({ ...entryOf(run), packed: await inBase64(run.trace) });
  run.isKept = true;
}

/** Keep a run that is not kept yet, at once: a page that is left waits for no compression. */
export function keepAtOnce(run) {
  if (!run || run.isKept || !run.trace.version || run.trace.recorded || run.trace.fromFile) return;
  store({ ...entryOf(run), packed: JSON.stringify(run.trace.whole()), unended: !run.trace.over });
}

function entryOf({ said, number, parent, trace: { run, version: events, settings } }) {
  return { run, said, number, parent: parent?.trace.run ?? null, events, settings };
}

/** Add a run to those that are kept; the oldest are dropped where there is no room. */
function store(entry) {
  if (entry.packed.length > MOST_KEPT) return;
  let kept = [...readKept().filter((one) => one.run !== entry.run), entry];
  while (sizeOf(kept) > MOST_KEPT) kept = kept.slice(1);
  try {
    sessionStorage.setItem(KEPT_RUNS, JSON.stringify(kept));
  } catch (reason) { /* without storage the runs last until the page is left */ }
}

const sizeOf = (kept) => kept.reduce((sum, { packed }) => sum + packed.length, 0);

function forgetKept() {
  try {
    sessionStorage.removeItem(KEPT_RUNS);
  } catch (reason) { /* without storage there is nothing to forget */ }
}

function readKept() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT_RUNS));
    return Array.isArray(kept) ? kept : [];
  } catch (reason) {
    return [];
  }
}

/** Whether the page was loaded again rather than opened. */
export const comesBack = () => ["reload", "back_forward"].includes(performance.getEntriesByType("navigation")[0]?.type);

/** The runs kept before a reload, as entries of a visit whose traces are unpacked when they are shown. A new visit begins without. */
export function keptRuns() {
  const runs = [];
  if (!comesBack()) forgetKept();
  for (const { run, said, number, parent, events, settings, packed, unended } of readKept()) {
    const trace = new Trace();
    if (packed.startsWith("{")) trace.take({ run, n: 0, ...JSON.parse(packed) }); // not compressed
    else Object.assign(trace, { run, version: events, packed: new Blob([fromBase64(packed)]) });
    Object.assign(trace, { settings, state: "done", left: true, restored: true, interrupted: Boolean(unended) });
    runs.push({ trace, number, said, parent: runs.find((one) => one.trace.run === parent) || null, isKept: true });
  }
  return runs;
}

/** A run as text, compressed. */
export const inBase64 = async (trace) => toBase64(await (await trace.compressed()).arrayBuffer());
