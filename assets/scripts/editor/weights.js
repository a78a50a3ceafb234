// The weights of a lane as one text: a quantisation, adapters, and changes of layers, in this order.

import { LAYER_CHANGES } from "python";

export const WEIGHTS = ["int8", "nf4", "fp4"];
const ADAPTER = "adapter:";
const JOINT = " + ";

const isChange = (part) => LAYER_CHANGES.includes(part.split(":")[0].trim());

/** The parts of a text: a quantisation or nothing, what follows the first "adapter:", and changes of layers. What is
    none of these is taken for a change, which Python refuses with its reason. */
export function partsOf(weights = "") {
  const parts = weights.split(JOINT);
  const packed = WEIGHTS.includes(parts[0]) ? parts.shift() : "";
  const isAdapted = parts[0]?.startsWith(ADAPTER);
  const changes = isAdapted ? parts.findIndex(isChange) : 0;
  const adapters = changes < 0 ? parts.splice(0) : parts.splice(0, changes);
  return { packed, adapter: isAdapted ? adapters.join(JOINT).slice(ADAPTER.length) : null, changes: parts.join(JOINT) };
}

/** The text of such parts. */
export const textOf = ({ packed, adapter, changes }) => [packed, adapter && ADAPTER + adapter, changes].filter(Boolean).join(JOINT);

export function phraseOf(weights) {
  const { packed, adapter, changes } = partsOf(weights);
  const named = adapter === null ? "" : `adapter ${adapter.replace(/\/+$/, "").split("/").at(-1)}`;
  return [packed && `${packed} weights`, named, changes].filter(Boolean).join(", ");
}
