// The votes of a class as bars: behind each choice of a question, or under each other for numbers. The presenter's lesson and the followers'
// question share it. All text enters as textContent.

import { el } from "../components/elements.js";

/** Draw how many chose each of the given nodes, in proportion to all votes; nothing while no votes are known. */
export function drawShares(nodes, votes) {
  const all = votes.reduce((sum, { count }) => sum + count, 0);
  nodes.forEach((node, i) => {
    const given = votes[i]?.count ?? 0;
    node.style.setProperty("--share", `${all ? (100 * given) / all : 0}%`);
    const count = node.querySelector(".class-count") || node.appendChild(el("b", "class-count"));
    count.textContent = votes.length ? String(given) : "";
  });
}

/** A chart of the numbers that were given: a row with a bar for each. */
export function numberChart(votes) {
  const said = votes.map(({ label, count }) => `${label}: ${count}`).join("; ");
  const rows = votes.map(({ label }) => el("span", "class-row", label));
  drawShares(rows, votes);
  return el("div", { class: "class-bars", role: "img", "aria-label": `Votes: ${said}` }, ...rows);
}
