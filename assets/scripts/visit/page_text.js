// What a view writes as text, bars and tables, as SVG: every word, ground and border where the page has it. Saved pictures are made of it
// where a view has no drawing.

import { svg, zoomOf } from "../components/elements.js";
import { rounded } from "../components/vector.js";

const ON_PAPER_IDLE = "select, input, textarea, label:has(select, input), .quiet, .requests, .vacancy, .onward"; // controls and invitations
const SIDES = ["Top", "Right", "Bottom", "Left"];

export class PageText {
  /** `picture` gives inks and draws keys and drawings inside of the text. */
  constructor(host, picture) {
    Object.assign(this, { host, picture, group: svg("g"), frame: host.getBoundingClientRect(), bottom: 0 });
    this.range = document.createRange();
    for (const child of host.childNodes) this.draw(child);
  }

  get part() {
    return { group: this.group, height: this.bottom };
  }

  /** A box of the window in the lengths of the picture. */
  placed(box) {
    const zoom = zoomOf(this.host);
    return { x: (box.left - this.frame.left) / zoom, y: (box.top - this.frame.top) / zoom, width: box.width / zoom, height: box.height / zoom };
  }

  add(node, { y, height }) {
    this.group.append(node);
    this.bottom = Math.max(this.bottom, y + height);
  }

  draw(node) {
    if (node.nodeType === Node.TEXT_NODE) return this.write(node);
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches(ON_PAPER_IDLE) || !node.checkVisibility({ visibilityProperty: true })) return;
    if (node.matches(`.chart-key, svg[role="img"]`)) return this.insert(node);
    const style = getComputedStyle(node);
    for (const box of node.getClientRects()) this.paper(this.placed(box), style);
    for (const child of node.childNodes) this.draw(child);
  }

  /** A key or a drawing among the text. */
  insert(node) {
    const { x, y, width } = this.placed(node.getBoundingClientRect());
    const { group, height } = this.picture.part(node, width);
    group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    this.add(group, { y, height });
  }

  /** The ground of a box and its borders. */
  paper(box, style) {
    if (!box.width || !box.height) return;
    const ground = this.picture.filled(style.backgroundColor);
    const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.height / 2);
    if (ground.fill !== "none") this.add(svg("rect", { ...rounded(box), ...(rx ? { rx } : {}), ...ground }), box);
    for (const side of SIDES) this.edge(side, box, style);
  }

  edge(side, { x, y, width, height }, style) {
    const thick = style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`]);
    const { colour, alpha } = this.picture.ink(style[`border${side}Color`]);
    if (!thick || !alpha) return;
    const [x1, y1, x2, y2] = { Top: [x, y, x + width, y], Right: [x + width, y, x + width, y + height],
      Bottom: [x, y + height, x + width, y + height], Left: [x, y, x, y + height] }[side];
    const dashes = ["dashed", "dotted"].includes(style[`border${side}Style`]) ? { "stroke-dasharray": "3 2" } : {};
    this.add(svg("line", { ...rounded({ x1, y1, x2, y2 }), stroke: colour, "stroke-width": thick, ...(alpha < 1 ? { "stroke-opacity": alpha } : {}), ...dashes }), { y, height });
  }

  write(node) {
    const style = getComputedStyle(node.parentElement);
    for (const { text, box } of this.linesOf(node, /^(pre|break)/.test(style.whiteSpace))) this.line(text, this.placed(box), style, node.parentElement);
  }

  /** The lines of a text as the page breaks them: [{text, box}]. */
  linesOf(node, isKept) {
    const lines = [];
    for (const { index, 0: word } of node.data.matchAll(/\s*\S+\s*|\s+/g)) {
      for (const { text, box } of this.pieces(node, index, word)) {
        const last = lines.at(-1);
        if (last && Math.abs(last.box.top - box.top) < box.height / 2) last.text += text;
        else lines.push({ text, box });
      }
    }
    const written = (text) => (isKept ? text.replace(/\n/g, "") : text.replace(/\s+/g, " "));
    return lines.map(({ text, box }) => ({ text: written(text), box })).filter(({ text }) => text.trim());
  }

  /** A word, or its characters where it goes over several lines. */
  pieces(node, from, word) {
    const boxes = this.boxes(node, from, from + word.length);
    if (boxes.length <= 1) return boxes.map((box) => ({ text: word, box }));
    return [...word].reduce(({ at, found }, letter) => {
      const [box] = this.boxes(node, at, at + letter.length);
      return { at: at + letter.length, found: box ? [...found, { text: letter, box }] : found };
    }, { at: from, found: [] }).found;
  }

  boxes(node, from, to) {
    this.range.setStart(node, from);
    this.range.setEnd(node, to);
    return [...this.range.getClientRects()].filter(({ width }) => width);
  }

  /** The line through or under a text, which its own style does not have from the elements around it. */
  decoration(node) {
    const line = getComputedStyle(node).textDecorationLine;
    if (line !== "none") return { "text-decoration": line };
    return node === this.host ? {} : this.decoration(node.parentElement);
  }

  /** One line of text on its base line. */
  line(text, box, style, parent) {
    const { pen } = this.picture;
    pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = pen.measureText(text);
    const { colour, alpha } = this.picture.ink(style.color);
    const looks = { "font-family": style.fontFamily, "font-size": parseFloat(style.fontSize), "font-weight": style.fontWeight, fill: colour,
      ...(style.fontStyle === "italic" ? { "font-style": "italic" } : {}), ...(alpha < 1 ? { "fill-opacity": alpha } : {}), ...this.decoration(parent) };
    const base = box.y + (box.height - above - below) / 2 + above;
    this.add(svg("text", { x: box.x.toFixed(1), y: base.toFixed(1), "xml:space": "preserve", ...looks }, style.textTransform === "uppercase" ? text.toUpperCase() : text), box);
  }
}
