// The part of a canvas's pen that the views use, writing SVG: rectangles and text. A view that paints on a canvas is saved with it.

import { el, svg } from "./elements.js";

const TILE = 6; // px, the side of a hatched tile

export class VectorPen {
  /** `ink` turns a CSS colour into {colour, alpha}; `number` tells the pens of one picture apart. */
  constructor(ink, number) {
    Object.assign(this, { ink, number, known: new Map(), hatches: 0 });
    this.begin(0, 0);
  }

  /** Start an empty drawing. */
  begin(width, height) {
    this.group = svg("g");
    Object.assign(this, { width, height, fillStyle: "#000", globalAlpha: 1, font: "11px sans-serif", textAlign: "left", textBaseline: "middle" });
    return this;
  }

  get part() {
    return { group: this.group, height: this.height };
  }

  fillRect(x, y, width, height) {
    if (width > 0 && height > 0) this.group.append(svg("rect", { ...rounded({ x, y, width, height }), ...this.looks() }));
  }

  fillText(text, x, y) {
    const [, size, family] = this.font.match(/([\d.]+)px\s+(.+)/);
    const anchor = this.textAlign === "center" ? "middle" : "start";
    const lowered = y + Number(size) * 0.35; // from the middle of the letters to their base line
    this.group.append(svg("text", { ...rounded({ x, y: lowered }), "font-size": size, "font-family": family, "text-anchor": anchor, ...this.looks() }, text));
  }

  /** Slanted lines on a ground, as a fill. */
  hatched(line, ground) {
    const id = `hatch-${this.number}-${this.hatches++}`;
    const tile = svg("pattern", { id, width: TILE, height: TILE, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    tile.append(svg("rect", { width: TILE, height: TILE, fill: this.ink(ground).colour }), svg("rect", { width: TILE / 3, height: TILE, fill: this.ink(line).colour }));
    this.group.append(tile);
    return { url: `url(#${id})` };
  }

  looks() {
    if (this.fillStyle.url) return { fill: this.fillStyle.url };
    if (!this.known.has(this.fillStyle)) this.known.set(this.fillStyle, this.ink(this.fillStyle));
    const { colour, alpha } = this.known.get(this.fillStyle);
    const opacity = Number((alpha * this.globalAlpha).toFixed(3));
    return opacity === 1 ? { fill: colour } : { fill: colour, "fill-opacity": opacity };
  }
}

export function rounded(numbers) {
  return Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value.toFixed(2))]));
}

/** Slanted lines in the colour of live slots on the colour of empty ground. */
export function hatch(pen, line, ground) {
  if (pen instanceof VectorPen) return pen.hatched(line, ground);
  const tile = el("canvas");
  tile.width = tile.height = 8;
  const tilePen = tile.getContext("2d");
  tilePen.fillStyle = ground;
  tilePen.fillRect(0, 0, 8, 8);
  tilePen.strokeStyle = line;
  tilePen.lineWidth = 2.4;
  for (const shift of [-8, 0, 8]) {
    tilePen.moveTo(shift, 8);
    tilePen.lineTo(shift + 8, 0);
  }
  tilePen.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.75));
  return pattern;
}
