// The weights of a lane as one text: a quantisation, adapters, and changes of layers, in this order.

import { LAYER_CHANGES } from "python";

export const WEIGHTS = ["int8", "nf4", "fp4"];
const ADAPTER = "adapter:";
const JOINT = " + ";

const isChange = (part) => LAYER_CHANGES.includes(part.split(":")[0].trim());

/** The parts of a text: a quantisation or nothing, what follows the first "adapter:", and changes of layers. */
export function partsOf(weights = "") {
  const parts = weights.split(JOINT);
  const packed = WEIGHTS.find((name) => parts[0] === name) || "";
  const changes = parts.findIndex(isChange);
  const before = changes < 0 ? weights : parts.slice(0, changes).join(JOINT);
  const adapter = before.includes(ADAPTER) ? before.slice(before.indexOf(ADAPTER) + ADAPTER.length) : null;
  return { packed, adapter, changes: changes < 0 ? "" : parts.slice(changes).join(JOINT) };
}

/** The text of such parts. */
export const textOf = ({ packed, adapter, changes }) => [packed, adapter && ADAPTER + adapter, changes].filter(Boolean).join(JOINT);

export function phraseOf(weights) {
  const { packed, adapter, changes } = partsOf(weights);
  const named = adapter === null ? "" : `adapter ${adapter.replace(/\/+$/, "").split("/").at(-1)}`;
  return [packed && `${packed} weights`, named, changes].filter(Boolean).join(", ");
}
