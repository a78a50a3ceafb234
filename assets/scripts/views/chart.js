// What charts over the positions of a text share: their scale, its lines and labels.

import { svg } from "../components/elements.js";
import { roundValues, ticks } from "./panel.js";

export const CHART = { left: 34, right: 10, top: 20, bottom: 22 };
export const LETTER = 7; // px, the width of a letter beside an axis

export function limitLine(name, value, scale) {
  const y = scale.y(value);
  return [
    svg("line", { class: "limit", x1: CHART.left, x2: scale.width - CHART.right, y1: y, y2: y }),
    svg("text", { class: "tick limit-name", x: scale.width - CHART.right - 2, y: y - 4, "text-anchor": "end" }, name),
  ];
}

/** Maps token positions and values to a chart. */
export class Scale {
  constructor(width, height, room, top, bottom = 0) {
    Object.assign(this, { width, height, room, top, bottom, along: "token" });
    this.inner = width - CHART.left - CHART.right;
  }

  x(position) {
    return CHART.left + ((position + 0.5) / this.room) * this.inner;
  }

  y(value) {
    const share = (value - this.bottom) / (this.top - this.bottom || 1);
    return this.height - CHART.bottom - share * (this.height - CHART.top - CHART.bottom);
  }

  positionAt(x, length) {
    if (!length) return null;
    const position = Math.floor(((x - CHART.left) / this.inner) * this.room);
    return Math.max(0, Math.min(length - 1, position));
  }

  axes(unit) {
    const parts = [];
    for (const value of roundValues(this.bottom, this.top, 3)) {
      const y = this.y(value);
      parts.push(svg("line", { class: "grid", x1: CHART.left, x2: this.width - CHART.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: CHART.left - 6, y: y + 3.5, "text-anchor": "end" }, shortNumber(value)));
    }
    if (unit) parts.push(svg("text", { class: "tick unit", x: 0, y: 9 }, unit));
    const base = this.height - 6;
    parts.push(...this.positions(base));
    return parts;
  }

  /** Numbers along the bottom, counted from 1, and at its end what is counted. */
  positions(y) {
    const end = this.width - CHART.right;
    const room = end - LETTER * (this.along.length + 3);
    const values = ticks(this.room, Math.max(2, Math.min(8, this.inner / 80))).filter((value) => value > 0 && this.x(value - 1) <= room && Number.isInteger(value));
    const numbers = values.map((value) => svg("text", { class: "tick", x: this.x(value - 1), y, "text-anchor": "middle" }, String(value)));
    return [...numbers, svg("text", { class: "tick along", x: end, y, "text-anchor": "end" }, this.along)];
  }
}

/** At most three significant digits: there is little room beside an axis. */
export function shortNumber(value) {
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
}

/** A line through all points: some methods measure at every token, others once per round. */
export function joinedPath(points, scale) {
  return points.map(({ position, value }, i) => `${i ? "L" : "M"}${scale.x(position).toFixed(1)} ${scale.y(value).toFixed(1)}`).join("");
}
