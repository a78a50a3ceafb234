// One bar for each round of guessing: how many guesses stood, how many fell, and the token that came on top.

class RoundsPanel extends Panel {
  constructor() {
    super({
      name: "rounds", title: "Accepted per round", kinds: ["verdict"], expects: (header) => hasPart(header, "verifier"),
      empty: "Fills when guesses get their verdict: one bar a round, with what was accepted, refused and added.",
    });
  }

  look(card) {
    const { rounds } = card.state;
    const last = rounds[rounds.length - 1];
    return `${rounds.length}/${Boolean(last && last.verdict)}/${roundsIn(card.record)}`;
  }

  draw(card, app) {
    const rounds = card.state.rounds.filter((round) => round.verdict);
    const accepted = rounds.reduce((sum, round) => sum + round.verdict.kept.length, 0);
    const mean = rounds.length ? `${fixed(accepted / rounds.length, 2)} accepted a round over ${count(rounds.length, "round")}` : "no verdict yet";
    setText(this.readout, mean);
    this.body.replaceChildren(this.bars(rounds, card, app), this.legend(), this.depths(card.state.costs.depths));
  }

  bars(rounds, card, app) {
    const height = 150;
    const room = Math.max(12, roundsIn(card.record));
    const tallest = Math.max(4, ...rounds.map((round) => round.verdict.kept.length + round.hasNext + refusedIn(round)));
    const scale = new Scale(this.width, height, room, tallest);
    const drawing = surface(this.width, height, `Guesses accepted in ${count(rounds.length, "round")}`);
    drawing.append(...scale.axes("tokens"));
    const width = Math.max(1, Math.min(22, (scale.inner / room) * 0.72));
    const current = card.state.rounds.length - 1;
    for (const round of rounds) drawing.append(this.bar(round, scale, width, round.number - 1 === current, () => app.seekEvent(card.order, round.lastEvent)));
    return drawing;
  }

  bar(round, scale, width, current, go) {
    const bar = svg("g", { class: "bar" + (current ? " current" : ""), "data-round": round.number });
    const x = scale.x(round.number - 1) - width / 2;
    let level = 0;
    for (const [name, size] of [["kept", round.verdict.kept.length], [round.verdict.origin, Number(round.hasNext)], ["refused", refusedIn(round)]]) {
      if (!size) continue;
      const top = scale.y(level + size);
      bar.append(svg("rect", { class: name, x, y: top, width, height: Math.max(0, scale.y(level) - top - 0.5) }));
      level += size;
    }
    const words = `round ${round.number}: ${round.verdict.kept.length} accepted, ${refusedIn(round)} refused, ${round.draft.tokens.length} guessed`;
    bar.append(svg("title", {}, words), svg("rect", { class: "touch", x: x - 2, y: CHART.top, width: width + 4, height: scale.height - CHART.bottom - CHART.top }));
    bar.addEventListener("click", go);
    return bar;
  }

  legend() {
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-node kept", "accepted"), el("span", "key-node bonus", "bonus"), el("span", "key-node redraw", "redrawn"), el("span", "key-node refused", "refused"));
    return legend;
  }

  /** How often a guess stands, by how far ahead it was. */
  depths(depths) {
    const table = el("div", "depths");
    if (!depths.length) return table;
    table.append(el("p", "depths-title", "Accepted by distance ahead"));
    depths.slice(0, 12).forEach((depth, i) => {
      const { tested, accepted } = depth || { tested: 0, accepted: 0 };
      const row = el("div", "depth");
      row.title = tested ? `${accepted} of ${tested} tested guesses at distance ${i + 1}` : "";
      const bar = el("span", "meter");
      const fill = el("i");
      fill.style.width = tested ? (accepted / tested) * 100 + "%" : "0";
      bar.append(fill);
      row.append(el("span", "num", `+${i + 1}`), bar, el("span", "num", tested ? percent(accepted / tested) : DASH), el("span", "num of", `${accepted}/${tested}`));
      table.append(row);
    });
    return table;
  }
}

function refusedIn(round) {
  return round.refusedNodes().length;
}
