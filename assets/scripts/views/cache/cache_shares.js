// What a KV cache holds, in shares and in words.

import { bytes, count, fixed, percent } from "../../components/numbers.js";
import { pieceLabel } from "../../components/pieces.js";
import { mostSlots, slotMemory, slots } from "../../run/metrics.js";

/** Stretches of positions with the share of rows that hold them; positions that none holds are left out. */
export function sharesOf(rows) {
  const changes = new Map();
  for (const [from, to] of rows.flat()) {
    changes.set(from, (changes.get(from) || 0) + 1);
    changes.set(to, (changes.get(to) || 0) - 1);
  }
  const edges = [...changes.keys()].sort((a, b) => a - b);
  let held = 0;
  const stretches = edges.map((from, i) => {
    held += changes.get(from);
    return { from, to: edges[i + 1] ?? from, share: held / rows.length };
  });
  return stretches.filter(({ share, from, to }) => share > 0 && to > from);
}

export function shadeOfShare(share) {
  return 0.15 + 0.85 * share;
}

/** The first `number` live slots of a row, as stretches. */
export function oldest(runs, number) {
  const stretches = [];
  for (const [from, to] of runs) {
    if (number <= 0) break;
    stretches.push([from, Math.min(to, from + number)]);
    number -= to - from;
  }
  return stretches;
}

/** The positions at both ends of the text that every layer and head holds, if any were evicted: sinks and window. */
export function sayEdges(cache) {
  const rows = cache.live.flat();
  if (rows.every((runs) => slots(runs) === cache.length)) return "";
  const first = Math.min(...rows.map(([run]) => (run && run[0] === 0 ? run[1] : 0)));
  const newest = cache.length - Math.max(...rows.map((runs) => (runs.length && runs[runs.length - 1][1] === cache.length ? runs[runs.length - 1][0] : cache.length)));
  const evicted = rows.reduce((sum, runs) => sum + cache.length - slots(runs), 0) / rows.length;
  const between = `of ${count(cache.length, "position")}, ${fixed(evicted, 1).replace(".0", "")} are evicted${rows.length > 1 ? " on average" : ""}`;
  return `Every layer and head holds the first ${first} and the newest ${newest}; ${between}.`;
}

/** Bytes per position and layer, as measured by this lane or by another lane of the same model. */
export function slotBytesOf(card, cards, stream) {
  const facts = ({ record: { header } }) => [header.model, header.revision, header.dtype, header.device, header.quantization, header.draft].join("/");
  const known = [card, ...cards].find((other) => facts(other) === facts(card) && other.record.slotBytes.has(stream));
  return known ? known.record.slotBytes.get(stream) : null;
}

/** The size of the cache compared with that of a full, unquantised one. */
export function sayBudget(cache, slotBytes) {
  const states = cache.state_bytes ? `${bytes(cache.state_bytes)} of recurrent states, in layers without keys and values. ` : "";
  const held = slotMemory(cache);
  if (!held || !slotBytes) return states;
  const full = slotBytes * cache.layers * cache.length;
  const saved = 1 - held / full;
  if (Math.abs(saved) < 0.005) return states;
  return `${states}${bytes(held)} instead of ${bytes(full)} for a full cache: ${percent(Math.abs(saved))} ${saved > 0 ? "saved" : "more"}.`;
}

/** The part of the cache that lanes with the same prompt share; it is stored once but counted in each of them. */
export function sayTogether(cache, all) {
  if (!cache.common) return "";
  const sharing = all.filter((each) => each.common);
  const once = Math.max(...sharing.map((each) => each.common_bytes));
  const total = sharing.reduce((sum, each) => sum + each.bytes - each.common_bytes, once);
  const apart = sharing.reduce((sum, each) => sum + each.bytes, 0);
  const shared = `The first ${count(cache.common, "position")} (${bytes(cache.common_bytes)}) are stored once for all lanes with this prefix`;
  return sharing.length > 1 ? `${shared}: ${bytes(total)} in ${sharing.length} lanes instead of ${bytes(apart)}.` : `${shared}.`;
}

export const HOVER_HINT = "Point at a cell to read it.";

/** What slots beyond the text are for: draft tokens until they are verified, branches while they grow. */
export function holders({ kinds, header }) {
  const reasons = [["draft", "draft tokens"], ["branches", "branches"]].filter(([kind]) => kinds.has(kind)).map(([, reason]) => reason);
  return reasons.join(" and ") || (header.forced.length ? "given tokens" : "draft tokens");
}

export function sayCache(cache, record) {
  const live = mostSlots(cache);
  const words = [`${live} of ${count(cache.length, "position")} live`];
  if (cache.scratch) words.push(`${cache.scratch} reserved for ${holders(record)}`);
  if (cache.evicted) words.push(`${count(cache.evicted, "slot")} freed by this update`);
  if (cache.packed) words.push(`the oldest ${cache.packed} quantised`);
  if (cache.merged) words.push(`${cache.merged} merged`);
  if (cache.bytes) words.push(bytes(cache.bytes));
  return words.join(", ");
}

export function pieceAt(card, position) {
  const { header } = card.record;
  const prompt = header.prompt_ids.length;
  const token = card.state.shown.tokens[position - prompt];
  const piece = position < prompt ? header.prompt_pieces[position] : token && token.piece;
  return piece === undefined ? "" : ` “${pieceLabel(piece)}”`;
}
