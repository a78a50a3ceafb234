// The followers' page: joining, the stream of frames and of the class's state, and predictions. All text enters as textContent.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  const [form, main, vote] = ["form.join", "main", ".vote"].map(find);
  document.body.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);

  const send = (path, data) => fetch(`/classroom/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(data) });

  // The live view takes frames as on the presenter's page; what it asks of the server is the presenter's business.
  const props = { value: null, follows: true };
  let taken = () => {};
  let stream = null;
  const trigger = (name) => { if (name === "missed") connect(); };

  const connect = () => {
    stream?.close();
    stream = new EventSource("/classroom/stream");
    stream.addEventListener("frame", ({ data }) => { props.value = data; taken(); });
    stream.addEventListener("state", ({ data }) => drawState(JSON.parse(data)));
    stream.addEventListener("error", () => { if (stream.readyState === EventSource.CLOSED) ask(); });
  };

  const follow = () => {
    form.hidden = true;
    main.hidden = false;
    if (!props.begun) {
      props.begun = true;
      const source = JSON.parse(find("#source").textContent);
      Function("element", "trigger", "props", "watch", "SOURCE", source)(main, trigger, props, (name, act) => { taken = act; }, source);
      const [title, says] = main.querySelectorAll(".welcome p");
      title.textContent = "Waiting for the presenter";
      says.textContent = "The next run appears here while it is generated. You can open a saved trace meanwhile.";
    }
    connect();
  };

  const ask = () => {
    main.hidden = vote.hidden = find(".controls-yours").hidden = true;
    form.hidden = false;
    form.elements.code.focus();
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const trouble = find(".join-trouble");
    trouble.textContent = "";
    try {
      const answer = await send("join", { code: form.elements.code.value, name: form.elements.name.value });
      if (answer.ok) follow();
      else trouble.textContent = (await answer.json()).detail;
    } catch (reason) {
      trouble.textContent = "The presenter's machine cannot be reached: check that you are on its network.";
    }
  });

  const drawState = ({ question, vote: mine, control, name }) => {
    find(".who").textContent = `${name}: you follow the presenter's runs. Pause and look around; “Live” in the player brings you back.`;
    find(".controls-yours").hidden = !control;
    vote.hidden = !question;
    if (question) drawQuestion(question, mine);
  };

  const drawQuestion = (question, mine) => {
    const text = document.createElement("p");
    text.textContent = question.text;
    const trouble = document.createElement("p");
    trouble.className = "vote-trouble";
    const answers = question.choices.length ? question.choices.map((choice, i) => button(choice, mine === i)) : [number(question, mine)];
    const give = async (value) => {
      const answer = await send("vote", { id: question.id, value }).catch(() => null);
      trouble.textContent = answer?.ok ? "" : answer ? (await answer.json()).detail : "Your answer could not be sent: try again.";
      if (answer?.ok) answers.forEach((one, i) => one.setAttribute("aria-pressed", String(i === value)));
    };
    answers.forEach((one, i) => one.addEventListener(question.choices.length ? "click" : "change", () => give(question.choices.length ? i : Number(one.value))));
    vote.replaceChildren(text, ...answers, trouble);
  };

  const button = (label, pressed) => {
    const node = document.createElement("button");
    Object.assign(node, { type: "button", textContent: label });
    node.setAttribute("aria-pressed", String(pressed));
    return node;
  };

  const number = (question, mine) => {
    const node = document.createElement("input");
    Object.assign(node, { type: "number", value: mine ?? "", placeholder: question.number });
    node.setAttribute("aria-label", question.number);
    return node;
  };

  if (document.body.dataset.joined === "true") follow();
  else ask();
})();
