// The player's bar: what its buttons, slider and clock show.

class PlayerBar {
  constructor(root) {
    this.node = root.querySelector(".player");
    for (const name of ["scrub", "marks", "clock", "follow", "play"]) this[name] = this.node.querySelector("." + name);
  }

  draw(player, trace) {
    const end = player.end();
    const value = player.value();
    this.play.classList.toggle("playing", player.playing);
    setAttribute(this.play, "aria-label", player.playing ? "Pause" : "Play");
    this.scrub.max = end || 1;
    this.scrub.step = player.mode === "time" ? "any" : "1";
    if (document.activeElement !== this.scrub || player.playing) this.scrub.value = value;
    this.scrub.style.setProperty("--done", end ? (value / end) * 100 + "%" : "0%");
    const label = player.mode === "time" ? `${value.toFixed(2)} of ${end.toFixed(2)} s` : `${value} of ${count(end, "token")}`;
    setText(this.clock, label);
    setAttribute(this.scrub, "aria-valuetext", label);
    this.follow.hidden = trace.over;
    setAttribute(this.follow, "aria-pressed", player.following);
    setText(this.follow, trace.state === "held" && !player.following ? "Held" : "Live");
    this.drawMarks(player, trace, end);
  }

  /** Marks above the slider: where each lane ended. */
  drawMarks(player, trace, end) {
    const ends = trace.lanes.map((lane) => (lane.over ? (player.mode === "time" ? lane.end : lane.tokens) : null));
    const look = JSON.stringify([ends, end]);
    if (look === this.marksLook) return;
    this.marksLook = look;
    this.marks.replaceChildren();
    const places = new Map();
    ends.forEach((at, lane) => {
      if (at === null || !end) return;
      const key = Math.round((at / end) * 60);
      places.set(key, [...(places.get(key) || []), lane + 1]);
    });
    for (const [key, lanes] of places) {
      const mark = el("span", "", lanes.join(" "));
      mark.style.left = `calc(8px + (100% - 16px) * ${key / 60})`;
      this.marks.append(mark);
    }
  }
}
