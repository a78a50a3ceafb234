// One bar per round: accepted and rejected draft tokens, and the token that follows them.

class RoundsPanel extends Panel {
  constructor() {
    super({
      name: "rounds", title: "Accepted per round", kinds: ["verdict"], expects: (header) => hasPart(header, "verifier"),
      empty: "Shows accepted, rejected and added tokens, one bar per round.",
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
    const mean = rounds.length ? `${fixed(accepted / rounds.length, 2)} accepted per round, ${count(rounds.length, "round")}` : "no verdict yet";
    setText(this.readout, mean);
    this.body.replaceChildren(this.bars(rounds, card, app), this.legend(), this.depths(card.state.costs.depths));
  }

  bars(rounds, card, app) {
    const height = 150;
    const room = Math.max(12, roundsIn(card.record));
    const tallest = Math.max(4, ...rounds.map((round) => round.verdict.kept.length + round.hasNext + rejectedIn(round)));
    const scale = new Scale(this.width, height, room, tallest);
    const drawing = surface(this.width, height, `Draft tokens accepted in ${count(rounds.length, "round")}`);
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
    for (const [name, size] of [["kept", round.verdict.kept.length], [round.verdict.origin, Number(round.hasNext)], ["refused", rejectedIn(round)]]) {
      if (!size) continue;
      const top = scale.y(level + size);
      bar.append(svg("rect", { class: name, x, y: top, width, height: Math.max(0, scale.y(level) - top - 0.5) }));
      level += size;
    }
    const words = `round ${round.number}: ${round.verdict.kept.length} accepted, ${rejectedIn(round)} rejected of ${count(round.draft.tokens.length, "draft token")}`;
    bar.append(svg("title", {}, words), svg("rect", { class: "touch", x: x - 2, y: CHART.top, width: width + 4, height: scale.height - CHART.bottom - CHART.top }));
    bar.addEventListener("click", go);
    return bar;
  }

  legend() {
    const legend = el("p", "chart-key");
    legend.append(el("span", "key-node kept", "accepted"), el("span", "key-node bonus", "bonus"), el("span", "key-node redraw", "resampled"), el("span", "key-node refused", "rejected"));
    return legend;
  }

  /** Acceptance rate by depth in the draft. */
  depths(depths) {
    const table = el("div", "depths");
    if (!depths.length) return table;
    table.append(el("p", "depths-title", "Accepted by draft position"));
    depths.slice(0, 12).forEach((depth, i) => {
      const { tested, accepted } = depth || { tested: 0, accepted: 0 };
      const row = el("div", "depth");
      row.title = tested ? `${accepted} of ${tested} tested draft tokens at position ${i + 1}` : "";
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

function rejectedIn(round) {
  return round.rejectedNodes().length;
}
