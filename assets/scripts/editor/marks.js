// Icons, and the marks beside the name of a part.

import { props } from "component";
import { el, svg } from "../components/elements.js";
import { unfit } from "./fit.js";

const ICONS = { earlier: "M8.5 3 4.5 7l4 4", later: "m5.5 3 4 4-4 4", copy: "M5 5V2.8c0-.5.3-.8.8-.8h5.4c.5 0 .8.3.8.8v5.4c0 .5-.3.8-.8.8H9M2.8 5h5.4c.5 0 .8.3.8.8v5.4c0 .5-.3.8-.8.8H2.8a.8.8 0 0 1-.8-.8V5.8c0-.5.3-.8.8-.8Z", cross: "m3 3 8 8m0-8-8 8" };

export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 14 14" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

export function marks(part) {
  return [part.paper && part.paper !== "baseline" ? paper(part.paper) : null,
    part.needs.includes("context") ? el("span", { class: "mark need", title: "Answers from a passage: enter one as the context, in the settings." }, "needs a context") : null,
    unfit(part) ? el("span", { class: "mark", title: unfit(part) }, part.kind !== "canvas_decoder" ? "needs a text model" : props.attention ? "needs another denoiser" : "needs a denoiser") : null,
    part.reconstruction ? el("span", { class: "mark", title: "The paper leaves details open; the authors' implementation may differ." }, "reconstruction") : null];
}

function paper(reference) {
  const first = reference.split(/[,\s]+/)[0];
  if (!/^\d{4}\.\d{4,5}$/.test(first)) return el("span", "paper", reference);
  return el("a", { class: "paper", href: `https://arxiv.org/abs/${first}`, target: "_blank", rel: "noopener", title: "The paper, on arXiv" }, `arXiv ${first}`);
}
