// The presenter's panel: the class's link and code, who follows, the votes as bars, and the controls. All text enters as textContent.
const ADDRESS = "/classroom";
const EVERY = 1000; // ms between two looks at the class
const node = (name, type, text = "") => Object.assign(document.createElement(name), { className: type, textContent: text });

class ClassPanel {
  constructor(root) {
    this.look = "";
    this.fold = node("details", "class-fold");
    this.summary = node("summary", "", "Class");
    this.body = node("div", "class-body");
    this.fold.append(this.summary, this.body);
    root.append(this.fold);
    document.addEventListener("lesson-step", ({ detail }) => this.post("question", detail));
    this.trouble = node("p", "class-trouble");
    this.trouble.setAttribute("role", "alert");
    root.append(this.trouble);
    document.addEventListener("trace-opened", async ({ detail: packed }) => this.showTrace(await packed()));
    document.addEventListener("run-begun", () => { this.trouble.textContent = ""; });
    this.watch();
  }

  /** Show the class a trace file that was opened here. */
  async showTrace(kept) {
    const answer = await this.post("trace", { kept });
    const reason = answer && !answer.ok ? ((await answer.json().catch(() => ({}))).detail || "it could not be sent.") : "";
    this.trouble.textContent = answer?.ok ? "" : `The class does not see this trace. ${reason}`;
  }

  post(path, data) {
    return fetch(`${ADDRESS}/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(data) }).catch(() => null);
  }

  async watch() {
    const answer = await fetch(`${ADDRESS}/state`).catch(() => null);
    if (answer && answer.status === 403) location.href = ADDRESS; // the controls were taken back
    else if (answer && answer.ok) this.draw(await answer.json());
    setTimeout(() => this.watch(), EVERY);
  }

  draw(state) {
    const look = JSON.stringify(state);
    if (look === this.look) return;
    this.look = look;
    if (state.controls) {
      this.summary.textContent = "You have the controls of this class";
      return;
    }
    const votes = state.votes.reduce((sum, { count }) => sum + count, 0);
    this.summary.textContent = `Class: ${state.followers.length} following, code ${state.code}${state.question ? `, ${votes} vote${votes === 1 ? "" : "s"}` : ""}`;
    this.body.replaceChildren(...this.chart(state, votes), ...this.list(state));
  }

  chart({ question, votes }, all) {
    if (!question) return [node("p", "", "The predictions of a lesson are asked here: open one.")];
    const bars = node("div", "class-bars");
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", `Votes: ${votes.map(({ label, count }) => `${label}: ${count}`).join("; ")}`);
    for (const { label, count } of votes) {
      const bar = node("span", "class-bar");
      bar.style.width = `${all ? (100 * count) / all : 0}%`;
      const track = node("span", "class-track");
      track.append(bar);
      bars.append(node("span", "class-label", label), track, node("span", "class-count", String(count)));
    }
    return [node("p", "", question.text), bars];
  }

  list({ followers, control }) {
    const back = node("button", "class-back", "Take the controls back");
    back.addEventListener("click", () => this.post("control", { follower: null }));
    const rows = followers.map(({ number, name }) => {
      const row = node("li", "", name);
      const give = node("button", "", number === control ? "has the controls" : "Hand over");
      give.disabled = number === control;
      give.addEventListener("click", () => this.post("control", { follower: number }));
      row.append(" ", give);
      return row;
    });
    const list = node("ul", "class-followers");
    list.append(...rows);
    return control === null ? [list] : [back, list];
  }
}

new ClassPanel(element);
