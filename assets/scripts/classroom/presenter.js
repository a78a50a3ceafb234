// The presenter's side of a class: the slide that shows how to join, who follows, the votes in the open lesson, and the controls. All text
// enters as textContent.

import { element } from "component";
import { button, el } from "../components/elements.js";
import { count } from "../components/numbers.js";
import { drawShares, numberChart } from "./votes.js";

const ADDRESS = "/classroom";
const EVERY = 1000; // ms between two looks at the class
const LOOPBACK = /^http:\/\/(127\.|localhost[:/]|\[::1\])/;
const spaced = (code) => `${code.slice(0, 3)} ${code.slice(3)}`;

class ClassPanel {
  constructor(root) {
    this.look = "";
    this.shown = ""; // the answer that the class has
    this.sent = Promise.resolve(); // questions and answers are sent one after the other
    this.fold = el("details", "class-fold");
    this.summary = el("summary", "", "Class");
    this.body = el("div", "class-body");
    this.fold.append(this.summary, this.body);
    this.slide = new JoinSlide();
    this.opener = button("class-show", "Join slide", "Show the class how to join, in large type", () => this.slide.show());
    this.opener.hidden = true;
    this.trouble = el("p", "class-trouble");
    this.trouble.setAttribute("role", "alert");
    const line = el("div", "class-line");
    line.append(this.fold, this.opener);
    root.append(line, this.trouble, this.slide.node);
    this.listen();
    this.watch();
  }

  listen() {
    document.addEventListener("lesson-step", ({ detail }) => {
      this.shown = "";
      this.inTurn("question", detail);
    });
    document.addEventListener("lesson-answer", ({ detail }) => {
      const said = JSON.stringify(detail);
      if (said !== this.shown) this.inTurn("answer", detail);
      this.shown = said;
    });
    document.addEventListener("trace-opened", async ({ detail: packed }) => this.showTrace(await packed()));
    document.addEventListener("run-begun", () => { this.trouble.textContent = ""; });
  }

  inTurn(path, data) {
    this.sent = this.sent.then(() => this.post(path, data));
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
    if (!state.controls) this.drawVotes(state);
    const look = JSON.stringify(state);
    if (look === this.look) return;
    const isFirst = !this.look;
    this.look = look;
    if (state.controls) {
      this.summary.textContent = "You have the controls of this class";
      return;
    }
    const votes = state.votes.reduce((sum, vote) => sum + vote.count, 0);
    this.summary.textContent = `Class: ${state.followers.length} following, code ${spaced(state.code)}${state.question ? `, ${count(votes, "vote")}` : ""}`;
    this.body.replaceChildren(...this.list(state));
    this.slide.draw(state);
    this.opener.hidden = false;
    if (isFirst && location.hash === "#join") {
      history.replaceState(history.state, "", location.pathname + location.search);
      this.slide.show();
    }
  }

  /** Draw the votes into the open lesson, if it asks this question. */
  drawVotes({ question, votes }) {
    const field = question && document.querySelector(`.lesson-question[data-question="${CSS.escape(question.id)}"]`);
    const look = JSON.stringify(votes);
    if (!field || field.dataset.votes === look) return;
    field.dataset.votes = look;
    if (question.choices.length) return drawShares([...field.querySelectorAll("label")], votes);
    field.querySelector(".class-bars")?.remove();
    field.append(numberChart(votes));
  }

  list({ followers, control }) {
    const back = button("class-back", "Take the controls back", "", () => this.post("control", { follower: null }));
    const rows = followers.map(({ number, name }) => {
      const row = el("li", "", name);
      const give = button("", number === control ? "has the controls" : "Hand over", "", () => this.post("control", { follower: number }));
      give.disabled = number === control;
      row.append(" ", give);
      return row;
    });
    const list = el("ul", "class-followers");
    list.append(...rows);
    const asks = el("p", "", followers.length ? "Your runs and the questions of a lesson appear on their pages." : "Nobody follows yet: show the join slide.");
    return control === null ? [asks, list] : [asks, back, list];
  }
}

/** A full screen that says how to join: the QR code, the link, the code in large type, and how many follow. */
class JoinSlide {
  constructor() {
    this.node = el("dialog", "class-slide");
    this.node.setAttribute("aria-label", "How to join the class");
    this.image = el("img", { class: "class-qr", alt: "QR code of the link with the code" });
    this.link = el("p", "class-link");
    this.code = el("p", "class-code");
    this.following = el("p", "class-following");
    this.following.setAttribute("role", "status");
    this.alone = el("p", "class-alone", "This machine is on no network, so no other one can open this link: connect it, or open a hotspot, and start again.");
    const close = button("class-start", "Start", "", () => this.node.close());
    const words = el("div", "class-words");
    words.append(el("p", "class-way", "Scan, or open"), this.link, el("p", "class-way", "and enter the code"), this.code, this.alone);
    const parts = el("div", "class-parts");
    parts.append(this.image, words);
    const foot = el("div", "class-foot");
    foot.append(this.following, close);
    this.node.append(el("h2", "", "Join the class"), parts, foot);
    this.node.addEventListener("close", () => this.node.removeAttribute("role"));
  }

  show() {
    if (this.node.open) return;
    if (!this.image.src) this.image.src = `${ADDRESS}/qr`;
    this.node.setAttribute("role", "dialog"); // while it is open, keys of the page look for it
    this.node.showModal();
    this.node.querySelector(".class-start").focus();
  }

  draw({ link, code, followers }) {
    this.link.textContent = link.replace("http://", "");
    this.code.textContent = spaced(code);
    this.alone.hidden = !LOOPBACK.test(link);
    const number = followers.length;
    if (this.following.dataset.number === String(number)) return;
    this.following.dataset.number = number;
    this.following.replaceChildren(el("b", "", String(number)), number === 1 ? " is following" : " are following");
  }
}

new ClassPanel(element);
