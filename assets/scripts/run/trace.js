// The browser's record of a run: headers and events by lane, in the order of the run. Frames that come before those ahead of them are kept
// until these are there, so that no text is shown with a hole. A finished run may be compressed while it is not shown.

import { EVENTS, HEADER, VERSION } from "python";
import { isNumber } from "../components/numbers.js";
import { CacheContents } from "./contents.js";
import { placesOf, slotMemory } from "./metrics.js";

export const FORMAT = "decoding-playground-trace";
export const LARGEST_FILE = 200 * 1024 * 1024;

const LEADS_ON = new Set(["forward", "mask", "step", "top_logprobs", "draft", "verdict"]);
export const LENGTHENS = new Set(["commit", "fill"]);

export class Trace {
  constructor() {
    this.clear("", []);
  }

  clear(run, headers) {
    this.run = run;
    this.headers = headers;
    this.empty();
    this.packed = null; // headers and events as one compressed blob, outside the script's heap
    this.nextFrame = 0;
    this.state = "running";
    this.early = new Map(); // by number: frames that came while one before them is missing; the whole run has been requested
    this.recorded = false;
    this.fromFile = false;
    this.left = false; // a newer run has replaced it on the server
    this.restored = false; // from before a reload: the server does not know it
    this.interrupted = false; // the page was left before it had ended
    this.settings = ""; // the code of its settings, with which it can be forked when the server no longer has it
  }

  empty() {
    this.lanes = this.headers.map((header, order) => new LaneRecord(withDefaults(header, HEADER), order));
    this.byId = new Map(this.lanes.map((lane) => [lane.header.lane, lane]));
    this.seen = new Set(); // seq of every event that arrived: a repeated frame changes nothing
    this.version = 0; // number of events, to detect changes
  }

  /** Add one frame. Returns "new", "more", "old", or "gap" if frames before it are missing and have not been requested yet. */
  take(frame) {
    const fresh = Array.isArray(frame.headers) && frame.headers.length > 0 && frame.run !== this.run;
    if (fresh) this.clear(frame.run, frame.headers);
    else if (frame.run !== this.run) return "gap";
    else if (this.packed) return "old";
    if (frame.n > this.nextFrame && !frame.headers) return this.keepEarly(frame);
    const [known, before] = [frame.n < this.nextFrame, this.version];
    this.append(frame);
    this.appendEarly();
    if (fresh) return "new";
    if (this.early.size && frame.headers) return "gap"; // another is missing behind the whole run
    return this.version > before || !known ? "more" : "old";
  }

  keepEarly(frame) {
    const requested = this.early.size > 0;
    this.early.set(frame.n, frame);
    return requested ? "old" : "gap";
  }

  appendEarly() {
    for (const number of this.early.keys()) if (number < this.nextFrame) this.early.delete(number);
    for (let frame; (frame = this.early.get(this.nextFrame)); this.early.delete(frame.n)) this.append(frame);
  }

  /** Append a frame; one with headers contains the whole run. */
  append(frame) {
    const known = frame.n < this.nextFrame;
    this.nextFrame = Math.max(this.nextFrame, frame.n + 1);
    if (frame.state && !known && !this.left) this.state = frame.state;
    if (frame.recorded) this.recorded = true;
    if (frame.fromFile) this.fromFile = true;
    if (frame.settings) this.settings = frame.settings;
    for (const event of [...(frame.events || [])].sort((a, b) => a.seq - b.seq)) this.add(event);
  }

  add(raw) {
    const lane = this.byId.get(raw.lane);
    if (!lane || !(raw.kind in EVENTS) || this.seen.has(raw.seq)) return;
    this.seen.add(raw.seq);
    lane.add(raw);
    this.version += 1;
  }

  /** Whether no more events will arrive. */
  get over() {
    if (this.packed !== null || this.recorded || this.left) return true;
    return !this.early.size && (this.state === "done" || (this.lanes.length > 0 && this.lanes.every((lane) => lane.over)));
  }

  /** The server has started another run: no more events will arrive. */
  leave() {
    this.left = true;
    this.state = "done";
  }

  /** Compress headers and events, unless the run is needed again by then. `version` keeps the number of events. */
  async pack(isUnwanted) {
    if (this.packed || !this.over || typeof CompressionStream === "undefined") return;
    const packed = await this.compressed();
    if (!isUnwanted()) return;
    const { version } = this;
    this.headers = [];
    this.empty();
    this.version = version;
    this.packed = packed;
  }

  /** Headers and events as one compressed blob. */
  compressed() {
    if (this.packed) return Promise.resolve(this.packed);
    return piped(JSON.stringify(this.whole()), new CompressionStream("gzip")).blob();
  }

  /** Headers and events as they arrived. */
  whole() {
    return { headers: this.headers, events: this.inOrder().map((event) => event.raw) };
  }

  async unpack() {
    if (!this.packed) return;
    const { headers, events } = JSON.parse(await piped(this.packed, new DecompressionStream("gzip")).text());
    if (!this.packed) return; // another call was faster
    this.packed = null;
    this.headers = headers;
    this.empty();
    for (const event of events) this.add(event);
  }

  /** The events of all lanes in the order of the run. */
  inOrder() {
    return this.lanes.flatMap((lane) => lane.events).sort((a, b) => a.seq - b.seq);
  }

  /** The trace as a file: a header line, then one line per event. */
  toLines() {
    const header = { format: FORMAT, version: VERSION, lanes: this.headers };
    return [header, ...this.inOrder().map((event) => event.raw)].map((line) => JSON.stringify(line)).join("\n") + "\n";
  }
}

export function piped(content, transform) {
  return new Response(new Blob([content]).stream().pipeThrough(transform));
}

/** One lane: its header, its events, and what drawing any part of them needs to know about all of them. */
class LaneRecord {
  constructor(header, order) {
    this.header = header;
    this.order = order;
    this.events = [];
    this.kinds = new Set();
    this.streams = new Set(); // streams with forwards
    this.over = false;
    this.tokens = 0; // longest sequence so far; for a canvas, filled positions
    this.forwards = []; // times of the target's forwards on the lane's clock, prefill excluded
    this.lengths = new Map(); // by sequence: its greatest length so far
    this.lastKey = 0;
    this.highestEntropy = 0;
    this.partial = new Set(); // streams whose cache has evicted positions
    this.widestCache = new Map(); // by stream: positions the widest drawing of the cache needs
    this.contents = new Map(); // by stream: what its cache holds after each event
    this.packs = new Set(); // streams with quantised slots
    this.merges = new Set(); // streams with merged slots
    this.scratches = new Set(); // streams whose cache has slots beyond the text
    this.fillings = 0; // Fill events so far
    this.filled = 0; // positions of a canvas that hold a token
    this.figuresBeside = false; // whether the method has figures other than numbers over the tokens
    this.hasHeads = false; // whether slots are listed by head
    this.slotBytes = new Map(); // by stream: bytes per position and layer, from the first cache event that shows it
    this.roundEnds = null; // for views/tree.js
  }

  add(raw) {
    const event = withDefaults(raw, EVENTS[raw.kind]);
    Object.assign(event, { raw, kind: raw.kind, seq: raw.seq, at: raw.at || 0, index: this.events.length });
    this.kinds.add(event.kind);
    this.notice(event);
    event.forwards = this.forwards.length;
    event.key = this.lastKey = Math.max(this.lastKey, this.tokenKey(event));
    this.events.push(event);
  }

  noticeForward({ stream, phase, at }) {
    this.streams.add(stream);
    if (stream === "target" && phase !== "prefill") this.forwards.push(at);
  }

  notice(event) {
    if (event.kind === "commit") this.lengthen(event.sequence, event.position + event.ids.length);
    else if (event.kind === "branches") this.addBranches(event.born);
    else if (event.kind === "fill") this.fill(event);
    else if (event.kind === "step") this.highestEntropy = Math.max(this.highestEntropy, event.entropy, event.final_entropy);
    else if (event.kind === "forward") this.noticeForward(event);
    else if (event.kind === "figure") this.figuresBeside ||= !isOverTokens(event.shape, event.data);
    else if (event.kind === "done" || event.kind === "failed") this.over = true;
    else if (event.kind === "cache") this.noticeCache(event);
  }

  noticeCache(event) {
    const { stream, length, layers, scratch } = event;
    if (!this.contents.has(stream)) this.contents.set(stream, new CacheContents());
    const counts = this.contents.get(stream).add(event);
    this.widestCache.set(stream, Math.max(this.widestCache.get(stream) || 0, length + scratch));
    if (counts.some((heads) => heads.some((held) => held < length))) this.partial.add(stream);
    if (event.packed) this.packs.add(stream);
    if (event.merged) this.merges.add(stream);
    if (scratch) this.scratches.add(stream);
    this.hasHeads ||= counts.some((heads) => heads.length > 1);
    const branching = scratch && this.kinds.has("branches"); // then the bytes include slots of branches
    if (!this.slotBytes.has(stream) && event.bytes && !event.packed && !branching) this.slotBytes.set(stream, slotMemory(event) / placesOf(counts, layers));
  }

  lengthen(sequence, length) {
    this.lengths.set(sequence, Math.max(this.lengths.get(sequence) || 0, length));
    this.tokens = Math.max(this.tokens, length);
  }

  fill({ sequence, positions, replaced, remasked }) {
    this.fillings += 1;
    this.filled += positions.length - Object.keys(replaced).length - Object.keys(remasked).length;
    this.lengthen(sequence, this.filled);
  }

  addBranches(born) {
    const lengths = born.map(([, parent]) => this.lengths.get(parent) || 0);
    born.forEach(([child], i) => this.lengths.set(child, lengths[i]));
  }

  /** The token an event is shown with if lanes share the token count: events before a commit belong to its first token. */
  tokenKey(event) {
    if (!LEADS_ON.has(event.kind)) return this.tokens;
    const length = event.sequence ? this.lengths.get(event.sequence) || 0 : this.tokens;
    return length + 1;
  }

  get end() {
    return this.events.length ? this.events[this.events.length - 1].at : 0;
  }
}

/** Whether the x axis of a figure is the token position. */
export function isOverTokens(shape, data) {
  return shape === "scalar" && !data.axis;
}

/** A copy with every field: the wire format omits defaults. Unknown fields are dropped. */
function withDefaults(raw, defaults) {
  const full = {};
  for (const name in defaults) full[name] = Object.hasOwn(raw, name) ? raw[name] : defaults[name];
  return full;
}

/** Read a trace file; throws an Error whose message is shown to the user. */
export function readTrace(text) {
  const lines = text.split("\n").filter((line) => line.trim() !== "");
  if (!lines.length) throw new Error("This file is empty: open a trace that was saved here.");
  const header = parseLine(lines[0], 1);
  if (header.format !== FORMAT) throw new Error("This is not a trace of the decoding playground: its first line should name the format.");
  if (header.version !== VERSION) throw new Error(`This trace has format version ${header.version}, and this page reads version ${VERSION}: save it again with the same release.`);
  if (!Array.isArray(header.lanes) || !header.lanes.length) throw new Error("This trace has no lanes: its first line should list them.");
  header.lanes.forEach((lane) => checkShape(lane, HEADER, 1));
  const events = lines.slice(1).map((line, i) => checkEvent(parseLine(line, i + 2), i + 2, header.lanes));
  return { run: "file " + Date.now(), n: 0, headers: header.lanes, events, state: "done", recorded: true, fromFile: true };
}

function parseLine(line, number) {
  try {
    const value = JSON.parse(line);
    if (value && typeof value === "object") return value;
  } catch (reason) { /* reported below */ }
  throw new Error(`Line ${number} of this file is not JSON: it may have been cut off or edited.`);
}

function checkEvent(event, number, headers) {
  if (!(event.kind in EVENTS)) throw new Error(`Line ${number} of this trace has an event of an unknown kind: it may be from a newer release.`);
  if (!headers.some((header) => (header.lane || 0) === event.lane)) throw new Error(`Line ${number} of this trace refers to a lane that its first line does not list.`);
  if (!isNumber(event.seq) || !isNumber(event.at)) throw new Error(`Line ${number} of this trace has no number or no time.`);
  return checkShape(event, EVENTS[event.kind], number);
}

function checkShape(entry, defaults, number) {
  if (!entry || typeof entry !== "object") throw new Error(`Line ${number} of this trace is not an object with fields.`);
  for (const [name, blank] of Object.entries(defaults)) {
    if (Object.hasOwn(entry, name) && !sameShape(entry[name], blank)) throw new Error(`Line ${number} of this trace has a wrong value for ${name}.`);
  }
  return entry;
}

function sameShape(value, blank) {
  return Array.isArray(blank) ? Array.isArray(value) : typeof value === typeof blank;
}
