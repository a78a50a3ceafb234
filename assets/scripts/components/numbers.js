// Numbers as text, each unit in one form.

export const DASH = "–"; // shown for a number that is undefined

export function isText(value) {
  return typeof value === "string";
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function fixed(value, digits) {
  if (!isNumber(value)) return DASH;
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

export function percent(value) {
  if (!isNumber(value)) return DASH;
  const hundred = value * 100;
  if (hundred === 0 || hundred >= 99.95) return Math.round(hundred) + " %";
  if (hundred > 0 && hundred < 0.1) return "<0.1 %";
  return hundred.toFixed(hundred < 9.95 || hundred > 99 ? 1 : 0) + " %";
}

export function seconds(value) {
  if (!isNumber(value)) return DASH;
  return value < 10 ? value.toFixed(2) + " s" : value.toFixed(1) + " s";
}

export function bytes(value) {
  if (!value) return DASH;
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(3, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return scaled.toFixed(power && scaled < 100 ? 1 : 0) + " " + units[power];
}

export function count(number, one, many = one + "s") {
  return number + " " + (number === 1 ? one : many);
}

/** First index whose value is greater than `limit`, in a sorted array. */
export function upperBound(length, valueAt, limit) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function milliseconds(value) {
  return `${fixed(Math.max(0, value) * 1000, value < 0.01 ? 2 : 1)} ms`;
}
