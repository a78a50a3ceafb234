// The text of a lesson as elements.

import { el } from "../components/elements.js";
import { playground } from "../components/playground.js";

export function heading(text) {
  const node = el("h3", "", text);
  node.setAttribute("aria-level", 2); // the panel follows the page's name
  node.tabIndex = -1;
  return node;
}

/** A paragraph with **terms** and `names` marked up. */
export function paragraph(text) {
  const node = el("p");
  for (const part of text.split(/(\*\*[^*]+\*\*|`[^`]+`)/)) {
    if (part.startsWith("**")) node.append(term(part.slice(2, -2)));
    else if (part.startsWith("`")) node.append(el("code", "", part.slice(1, -1)));
    else node.append(part);
  }
  return node;
}

/** A term in bold; the glossary explains it. */
function term(text) {
  const node = el("strong", "", text);
  if (playground.glossary?.explains(node)) node.dataset.term = text;
  return node;
}
