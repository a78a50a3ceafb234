// The followers' page: joining, the stream of frames and of the class's state, and predictions. All text enters as textContent.

import { el } from "../components/elements.js";
import { drawShares, numberChart } from "./votes.js";

const CLOSE = 0.005; // a guessed number this near is right, as in the lesson
const find = (selector) => document.querySelector(selector);
const [form, main, vote] = ["form.join", "main", ".vote"].map(find);
const dark = document.body.classList.toggle.bind(document.body.classList, "dark");
dark(matchMedia("(prefers-color-scheme: dark)").matches);
find(".theme").addEventListener("click", () => dark());

const send = (path, data) => fetch(`/classroom/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(data) });

// The live view takes frames as on the presenter's page; what it asks of the server is the presenter's business.
const props = { value: null, follows: true };
let taken = () => {};
let stream = null;
const trigger = (name) => { if (name === "missed") connect(); };

const connect = () => {
  stream?.close();
  stream = new EventSource("/classroom/stream");
  stream.addEventListener("frame", ({ data }) => { document.body.classList.add("has-run"); props.value = data; taken(); });
  stream.addEventListener("state", ({ data }) => drawState(JSON.parse(data)));
  stream.addEventListener("error", () => { if (stream.readyState === EventSource.CLOSED) ask(); });
};

const follow = () => {
  form.hidden = true;
  main.hidden = false;
  if (location.hash) history.replaceState(null, "", location.pathname); // the code of a scanned link
  if (!props.begun) {
    props.begun = true;
    const source = JSON.parse(find("#source").textContent);
    Function("element", "trigger", "props", "watch", "SOURCE", source)(main, trigger, props, (name, act) => { taken = act; }, source);
    const [title, says] = main.querySelectorAll(".welcome p");
    title.textContent = "You are in. Waiting for the presenter";
    says.textContent = "The next run appears here by itself, while it is generated.";
  }
  connect();
};

const ask = () => {
  main.hidden = vote.hidden = find(".controls-yours").hidden = true;
  find(".who").textContent = "";
  form.hidden = false;
  const { code, name } = form.elements;
  const scanned = location.hash.slice(1, 13).replace(/[^0-9]/g, "");
  if (scanned) code.value = scanned;
  (code.value ? name : code).focus();
};

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const trouble = find(".join-trouble");
  trouble.textContent = "";
  try {
    const answer = await send("join", { code: form.elements.code.value, name: form.elements.name.value });
    if (answer.ok) follow();
    else {
      trouble.textContent = (await answer.json()).detail;
      form.elements.code.select();
    }
  } catch (reason) {
    trouble.textContent = "The presenter's machine cannot be reached: check that you are on its network.";
  }
});

const drawState = (state) => {
  find(".who").replaceChildren(el("b", "", state.name), el("span", "hint", "You follow the presenter's runs. Pause and look around; “Live” in the player brings you back."));
  find(".controls-yours").hidden = !state.control;
  drawVote(state);
};

// The question of the lesson. It is laid out once, so that nothing is lost that is being typed; votes and answer are drawn into it.

let shown = { id: "" };

const drawVote = ({ question, vote: mine, votes, answer }) => {
  vote.hidden = !question;
  if (!question) return void (shown = { id: "" });
  if (shown.id !== question.id) layOut(question, mine);
  const { answers, chart, outcome, close } = shown;
  close.hidden = !answer;
  if (!answer) vote.classList.remove("is-closed"); // a question is open
  mark(mine);
  if (question.choices.length) drawShares(answers, votes);
  else chart.replaceChildren(...(votes.length ? [numberChart(votes)] : []));
  answers.forEach((one, i) => {
    one.disabled = Boolean(answer);
    one.classList.toggle("is-true", answer?.choice === i);
  });
  const said = answer ? inWords(question, mine, answer) : [];
  if (outcome.textContent !== said.join("")) outcome.replaceChildren(...said.map((line) => el("p", "", line)));
  outcome.firstChild?.classList.toggle("is-right", isRight(question, mine, answer));
};

const layOut = (question, mine) => {
  const text = el("p", { class: "vote-question", role: "status" }, question.text);
  const [trouble, chart] = ["vote-trouble", "vote-chart"].map((type) => el("div", type));
  const outcome = el("div", { class: "vote-outcome", role: "status" });
  const answers = question.choices.length ? question.choices.map((choice) => choiceButton(choice)) : [numberField(question, mine)];
  const give = async (value) => {
    const answer = await send("vote", { id: question.id, value }).catch(() => null);
    trouble.textContent = answer?.ok ? "" : answer ? (await answer.json()).detail : "Your answer could not be sent: try again.";
    if (answer?.ok) mark(value);
  };
  if (question.choices.length) answers.forEach((one, i) => one.addEventListener("click", () => give(i)));
  else answers[0].addEventListener("change", () => give(answers[0].valueAsNumber));
  const close = el("button", { type: "button", class: "vote-close", hidden: true, onclick: () => vote.classList.add("is-closed") }, "Back to the run");
  vote.replaceChildren(text, ...answers, trouble, chart, outcome, close);
  shown = { id: question.id, answers, chart, outcome, close, isNumber: !question.choices.length };
};

const mark = (mine) => {
  if (!shown.isNumber) shown.answers.forEach((one, i) => one.setAttribute("aria-pressed", String(i === mine)));
};

const choiceButton = (label) => el("button", { type: "button" }, el("span", "", label));

const numberField = ({ number }, mine) => el("input", { type: "number", step: "any", value: mine, placeholder: number, "aria-label": number });

const isRight = ({ choices }, mine, answer) => {
  if (!answer || mine === null) return false;
  return choices.length ? mine === answer.choice : answer.value !== null && Math.abs(mine - answer.value) < CLOSE;
};

/** Whether the prediction was right, what the run says, and why, a line each. */
const inWords = (question, mine, answer) => [
  question.choices.length ? chosenWords(question.choices, mine, answer) : numberWords(mine, answer),
  answer.said && `The run: ${answer.said}.`,
  answer.because.replace(/\*\*|`/g, ""),
].filter(Boolean);

const chosenWords = (choices, mine, { choice }) => {
  if (choice === null) return "None of the choices holds for this run.";
  if (mine === choice) return "You were right.";
  const run = `The run says “${choices[choice]}”.`;
  return mine === null ? run : `Not this time: you said “${choices[mine]}”. ${run}`;
};

const numberWords = (mine, { value }) => {
  if (value === null) return "The run has no such number.";
  if (mine === null) return `The run says ${rounded(value)}.`;
  return Math.abs(mine - value) < CLOSE ? "You were exactly right." : `You said ${rounded(mine)}, the run says ${rounded(value)}: off by ${rounded(Math.abs(mine - value))}.`;
};

const rounded = (value) => String(Number(value.toFixed(2)));

if (document.body.dataset.joined === "true") follow();
else ask();
