// Export of a view under its title, with its key: SVG with all styles written out, so that it looks the same without the page, or PNG
// rendered from that SVG at twice its size. What the page paints on a canvas is drawn once more by a pen that writes SVG, and a view
// without a drawing is saved with its text and tables.

import { boxOf, button, colourOf, el, SVG, svg } from "../components/elements.js";
import { download } from "../components/files.js";
import { pieceLabel } from "../components/pieces.js";
import { VectorPen } from "../components/vector.js";
import { shortName } from "../run/headers.js";
import { LETTER } from "../views/chart.js";
import { nameOfCurve } from "../views/entropy.js";
import { DRAWN } from "../views/panel.js";
import { PageText } from "./page_text.js";
import { fileStem } from "./saving.js";

const WORDS = ".chart-key, .history-title";
const PICTURE = { margin: 14, gap: 8, line: 19, sample: 16, title: 15, slack: 1.15, scale: 2, widest: 16_384 }; // px; `slack`: where the file is opened the font may be wider; `widest`: the largest canvas browsers paint
const INHERITED = ["fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
  "font-family", "font-size", "font-weight", "font-style", "text-anchor"];
const OWN = { opacity: "1", "text-decoration-line": "none", "stop-color": "rgb(0, 0, 0)" }; // not inherited, with their defaults
const UNSEEN = ["title", "desc", "defs", "pattern", "linearGradient", "clipPath", "mask"]; // needed, but not drawn themselves
const OF_THE_PAGE = ["class", "style", "role", "tabindex", "aria-label", "aria-hidden"];

export function pictureButtons(panel, app) {
  const host = el("span", "picture");
  host.append(...["svg", "png"].map((kind) => {
    const name = kind.toUpperCase();
    const save = button(`as-${kind}`, name, `Save this view as ${name}`, () => savePicture(panel, app, kind));
    save.setAttribute("aria-label", `${panel.title}: save as ${name}`);
    return save;
  }));
  return host;
}

/** The view that the run is shown by, to be saved from elsewhere on the page; null before it has anything to draw. */
export function shownView(app) {
  const panel = app.cards.length ? app.inspector.chosen : null;
  if (!panel || !panel.has(panel.leading(app))) return null;
  return { title: panel.title, save: (kind) => { panel.updateUnseen(app); savePicture(panel, app, kind); } };
}

function savePicture(panel, app, kind) {
  saved(panel, app, kind).catch((reason) => app.say(`This view cannot be saved: ${reason.message}`, true));
}

async function saved(panel, app, kind) {
  const card = panel.leading(app);
  const drawing = new Picture(panel).of(card, app);
  const blob = kind === "svg" ? new Blob([svgText(drawing)], { type: "image/svg+xml" }) : await painted(drawing);
  download(blob, `${fileStem(app.trace)}-${panel.name}.${kind}`);
}

class Picture {
  constructor(panel) {
    this.panel = panel;
    this.pen = Object.assign(el("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  }

  /** One SVG element: a background, a title and the contents of the panel. */
  of(card, app) {
    const parts = this.parts;
    const width = Math.max(...parts.filter((node) => !node.matches(WORDS)).map((node) => boxOf(node).width));
    const drawing = svg("svg", { xmlns: SVG });
    const paper = svg("rect", { fill: this.ink(getComputedStyle(this.panel.node).backgroundColor).colour });
    drawing.append(svg("title", {}, `${this.panel.title}, lane ${card.order + 1}`), svg("desc", {}, sayPicture(this.panel, card, app.trace.run)), paper);
    const painted = this.painted(parts.filter((node) => node.matches("canvas")), card, app);
    const height = this.stack(drawing, [this.caption(card, app, width), ...parts.map((node) => painted.get(node) || this.part(node, width))]);
    const size = { width: Math.ceil(width) + 2 * PICTURE.margin, height: Math.ceil(height) };
    for (const node of [drawing, paper]) for (const name in size) node.setAttribute(name, size[name]);
    drawing.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    return drawing;
  }

  /** The drawings of the view with their keys; the whole view if it has none. */
  get parts() {
    const { body } = this.panel;
    const drawn = [...body.querySelectorAll(DRAWN)].filter((node) => node.getClientRects().length);
    return drawn.some((node) => !node.matches(WORDS)) ? drawn : [body];
  }

  /** Stack the parts; returns the total height, margins included. */
  stack(drawing, parts) {
    let y = PICTURE.margin;
    for (const { group, height } of parts) {
      group.setAttribute("transform", `translate(${PICTURE.margin} ${y})`);
      drawing.append(group);
      y += height + PICTURE.gap;
    }
    return y - PICTURE.gap + PICTURE.margin;
  }

  /** The lines above the drawing: the view, the lanes it draws, the prompt. */
  caption(card, app, width) {
    const lanes = [card, ...this.panel.besides(card, app)].sort((one, other) => one.order - other.order).map(nameOfCurve);
    const { header } = card.record;
    const most = Math.max(24, Math.floor(width / LETTER));
    const lines = [[this.panel.title, "--ink", 600], ...wrapped(lanes.join(" · "), most).map((line) => [line, "--ink", 400]), [`${shortName(header.model)}: “${header.prompt}”`.replace(/^: /, ""), "--mute", 400]];
    const group = svg("g");
    const font = getComputedStyle(this.panel.node).fontFamily;
    lines.forEach(([text, colour, weight], i) => {
      const size = i ? PICTURE.title - 2 : PICTURE.title;
      const looks = { "font-family": font, "font-size": size, "font-weight": weight, fill: this.ink(colourOf(this.panel.node, colour)).colour };
      group.append(svg("text", { x: 0, y: size + i * PICTURE.line, "xml:space": "preserve", ...looks }, pieceLabel(text, most)));
    });
    return { group, height: lines.length * PICTURE.line };
  }

  /** The canvases of the panel as SVG: {canvas: {group, height}}. */
  painted(canvases, card, app) {
    if (!canvases.length) return new Map();
    const ink = (colour) => this.ink(colour);
    canvases.forEach((canvas, i) => { canvas.vector = new VectorPen(ink, i); });
    try {
      this.panel.repaint(card, app);
      return new Map(canvases.map((canvas) => [canvas, canvas.vector.part]));
    } finally {
      for (const canvas of canvases) delete canvas.vector;
      this.panel.drawn = ""; // the page's own canvas may have missed this drawing
      app.schedule();
    }
  }

  part(node, width) {
    if (node === this.panel.body) return new PageText(node, this).part;
    return node.matches("svg") ? this.drawn(node) : this.words(node, width);
  }

  drawn(node) {
    const group = svg("g");
    const copy = node.cloneNode(true);
    this.writeOut(copy, node, {});
    for (const name of INHERITED) if (copy.hasAttribute(name)) group.setAttribute(name, copy.getAttribute(name));
    group.append(...copy.childNodes);
    return { group, height: boxOf(node).height };
  }

  /** Write the computed style of the original into its copy as attributes; `around` is what it inherits. */
  writeOut(copy, original, around) {
    const style = getComputedStyle(original);
    const unseen = UNSEEN.includes(original.tagName);
    if (style.display === "none" && !unseen) return copy.remove();
    const looks = unseen ? around : this.looksOf(style);
    const children = [...original.children];
    [...copy.children].forEach((child, i) => this.writeOut(child, children[i], looks));
    for (const name of copy.getAttributeNames()) if (OF_THE_PAGE.includes(name) || name.startsWith("data-")) copy.removeAttribute(name);
    for (const name in looks) if (looks[name] !== around[name]) copy.setAttribute(name, looks[name]);
    if (!unseen) writeOwn(copy, style);
  }

  /** The inherited properties of an element, with colours that every SVG program understands. */
  looksOf(style) {
    const looks = Object.fromEntries(INHERITED.map((name) => [name, plain(style.getPropertyValue(name))]));
    for (const name of ["fill", "stroke"]) {
      if (looks[name] === "none" || looks[name].startsWith("url(")) continue;
      const { colour, alpha } = this.ink(looks[name]);
      looks[name] = alpha ? colour : "none";
      looks[`${name}-opacity`] = String(Number((alpha * Number(looks[`${name}-opacity`])).toFixed(3)));
    }
    return looks;
  }

  /** A colour in any CSS notation as {colour: "#rrggbb", alpha: 0 to 1}. */
  ink(colour) {
    this.pen.clearRect(0, 0, 1, 1);
    this.pen.fillStyle = colour;
    this.pen.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = this.pen.getImageData(0, 0, 1, 1).data;
    return { colour: `#${[red, green, blue].map((level) => level.toString(16).padStart(2, "0")).join("")}`, alpha: Number((alpha / 255).toFixed(3)) };
  }

  /** A key with its samples, or a line of text, wrapped at the width. */
  words(node, width) {
    if (!node.children.length) return this.line(node, width);
    const group = svg("g");
    let [x, y] = [0, 0];
    for (const entry of [...node.children].filter((one) => one.getClientRects().length)) {
      const sample = this.sample(entry);
      const { text, long } = this.word(entry);
      const whole = long + (sample ? PICTURE.sample : 0);
      if (x && x + whole > width) [x, y] = [0, y + PICTURE.line];
      const host = svg("g", { transform: `translate(${x} ${y})` });
      if (sample) text.setAttribute("x", PICTURE.sample);
      host.append(...[sample, text].filter(Boolean));
      group.append(host);
      x += whole + PICTURE.sample;
    }
    return { group, height: y + PICTURE.line };
  }

  line(node, width) {
    const { text, long } = this.word(node);
    const lines = wrapped(node.textContent, Math.floor(node.textContent.length * Math.min(1, width / long)));
    const group = svg("g");
    for (const [i, line] of lines.entries()) {
      group.append(Object.assign(text.cloneNode(), { textContent: line }));
      group.lastChild.setAttribute("y", 13 + i * PICTURE.line);
    }
    return { group, height: lines.length * PICTURE.line };
  }

  word(entry) {
    const style = getComputedStyle(entry);
    this.pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const looks = { "font-family": style.fontFamily, "font-size": plain(style.fontSize), "font-weight": style.fontWeight, fill: this.ink(style.color).colour };
    return { text: svg("text", { x: 0, y: 13, ...looks }, entry.textContent), long: PICTURE.slack * this.pen.measureText(entry.textContent).width };
  }

  /** The colour sample before an entry of a key, null if it has none. */
  sample(entry) {
    const style = getComputedStyle(entry, "::before");
    if (style.display === "none" || style.content === "none") return null;
    if (style.content !== '""') return svg("text", { y: 12, "font-size": 13, fill: this.ink(style.color).colour }, style.content.slice(1, -1));
    const [width, height] = [style.width, style.height].map((length) => Math.min(14, parseFloat(length) || 11));
    const top = 9 - height / 2;
    const box = svg("rect", { y: top, width, height, rx: 2, ...this.filled(style.backgroundColor) });
    const rim = rimOf(style);
    if (rim) for (const [name, value] of [["stroke", this.ink(rim).colour], ["stroke-width", 1.2]]) box.setAttribute(name, value);
    const sample = svg("g");
    sample.append(box, ...stripesOf(style, width, height).map(({ colour, ...place }) => svg("rect", { ...place, y: top + place.y, ...this.filled(colour) })));
    return sample;
  }

  filled(colour) {
    const { colour: fill, alpha } = this.ink(colour);
    return alpha ? { fill, "fill-opacity": alpha } : { fill: "none" };
  }
}

/** The properties that are not inherited. */
function writeOwn(copy, style) {
  for (const name in OWN) {
    const value = style.getPropertyValue(name);
    if (value !== OWN[name]) copy.setAttribute(name.replace("-line", ""), plain(value));
  }
  if (copy.tagName === "text") copy.setAttribute("xml:space", "preserve");
}

/** The colour of a border, or of a shadow used as one; "" if there is neither. */
function rimOf(style) {
  if (parseFloat(style.borderTopWidth)) return style.borderTopColor;
  const shadow = style.boxShadow.match(/^[a-z]+\([^)]*\)/);
  return shadow ? shadow[0] : "";
}

const STOP = /((?:[a-z-]+\((?:[^()]|\([^()]*\))*\))|#[0-9a-f]{3,8}|transparent)\s+([\d.]+)px(?:\s+([\d.]+)px)?/g;

/** The stripes of a repeating gradient, or the box that a plain gradient paints in the middle: [{x, y, width, height, colour}]. */
function stripesOf({ backgroundImage, backgroundSize }, width, height) {
  if (backgroundImage.startsWith("linear-gradient(")) return dotOf(backgroundImage, backgroundSize, width, height);
  const stops = [...backgroundImage.matchAll(STOP)].flatMap(([, colour, from, to]) => [from, to].filter(Boolean).map((at) => ({ colour, at: Number(at) })));
  const bands = stops.slice(1).flatMap((stop, i) => (stop.colour === stops[i].colour && stop.at > stops[i].at ? [{ colour: stop.colour, from: stops[i].at, to: stop.at }] : []));
  const period = stops.length ? stops[stops.length - 1].at : 0;
  const times = period ? Math.ceil(width / period) : 0;
  return Array.from({ length: times }, (_, time) => bands.map(({ colour, from, to }) => {
    const x = time * period + from;
    return { x, y: 0, width: Math.min(width, time * period + to) - x, height, colour };
  })).flat().filter((band) => band.width > 0);
}

function dotOf(image, size, width, height) {
  const colour = image.slice("linear-gradient(".length).match(/^[a-z-]+\((?:[^()]|\([^()]*\))*\)/);
  const [wide, high] = size.split(" ").map(parseFloat);
  return colour && wide && high ? [{ x: (width - wide) / 2, y: (height - high) / 2, width: wide, height: high, colour: colour[0] }] : [];
}

function sayPicture(panel, { title, record }, run) {
  const { model, prompt } = record.header;
  const who = model ? `${title}, ${shortName(model)}` : title;
  return `${who}. Prompt: “${pieceLabel(prompt, 80)}”. ${panel.readout.textContent}. Run ${run}.`;
}

/** Lengths without their unit: SVG counts in pixels. */
function plain(value) {
  return value.replace(/(\d)px/g, "$1");
}

function svgText(drawing) {
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(drawing)}\n`;
}

/** PNG of a drawing at twice its size, or at the largest size a browser can paint. */
async function painted(drawing) {
  const size = ["width", "height"].map((name) => Number(drawing.getAttribute(name)));
  const scale = Math.min(PICTURE.scale, PICTURE.widest / Math.max(...size));
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(drawing))}`;
  await image.decode();
  const canvas = el("canvas");
  [canvas.width, canvas.height] = size.map((length) => Math.round(length * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("it is too large for this browser"))), "image/png"));
}

/** The words of a text in lines of at most so many letters. */
function wrapped(text, most) {
  const lines = [];
  for (const word of text.split(" ")) {
    if (lines.length && lines.at(-1).length + 1 + word.length <= most) lines[lines.length - 1] += ` ${word}`;
    else lines.push(word);
  }
  return lines;
}
