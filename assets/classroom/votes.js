// The votes of a class as bars: behind each choice of a question, or under each other for numbers. The presenter's lesson and the followers'
// question share it. All text enters as textContent.

/** Draw how many chose each of the given nodes, in proportion to all votes; nothing while no votes are known. */
function drawShares(nodes, votes) {
  const all = votes.reduce((sum, { count }) => sum + count, 0);
  nodes.forEach((node, i) => {
    const given = votes[i]?.count ?? 0;
    node.style.setProperty("--share", `${all ? (100 * given) / all : 0}%`);
    const count = node.querySelector(".class-count") || node.appendChild(Object.assign(document.createElement("b"), { className: "class-count" }));
    count.textContent = votes.length ? String(given) : "";
  });
}

/** A chart of the numbers that were given: a row with a bar for each. */
function numberChart(votes) {
  const chart = Object.assign(document.createElement("div"), { className: "class-bars" });
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `Votes: ${votes.map(({ label, count }) => `${label}: ${count}`).join("; ")}`);
  const rows = votes.map(({ label }) => Object.assign(document.createElement("span"), { className: "class-row", textContent: label }));
  drawShares(rows, votes);
  chart.append(...rows);
  return chart;
}
