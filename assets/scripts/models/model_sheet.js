// The chip in the header that names the model, and the sheet of models it opens. All texts come from Python and are inserted as text.

import { element, props, trigger, watch } from "component";
import { KNOWN } from "python";
import { button, el, setText } from "../components/elements.js";
import { playground } from "../components/playground.js";

const { own, typed, titles } = KNOWN;

class ModelSheet {
  constructor(root) {
    this.chip = root.querySelector(".model-chip");
    this.dialog = root.querySelector("dialog");
    this.list = this.proposal = this.busy = null;
    this.said = "";
    this.chip.addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => { this.dialog.hidden = true; });
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    document.addEventListener("settings-chosen", () => this.drawChip());
    playground.openModels = () => this.open();
    playground.useModel = (name) => { this.open(); this.take(name); };
    this.build();
    this.drawChip();
  }

  /** The model of the next run, by name. */
  get used() {
    const chosen = playground.settingsNow?.().model;
    return !chosen || chosen === "default" ? own : chosen;
  }

  build() {
    const title = el("h2", "", "Which model writes?");
    title.id = "models-title";
    title.tabIndex = -1;
    const close = button("icon close", "×", "Close (Escape)", () => this.dialog.close());
    close.setAttribute("aria-label", "Close");
    this.notice = el("p", "models-notice");
    this.notice.setAttribute("role", "status");
    this.progress = el("div", "models-progress");
    this.rows = el("div", "models-rows");
    this.foot = el("div", "models-foot");
    this.dialog.append(title, close, this.notice, this.progress, this.rows, ...(typed ? [this.typing()] : []), this.foot);
  }

  /** A field for any other model. */
  typing() {
    const form = el("form", "models-typed");
    const field = el("input");
    Object.assign(field, { type: "text", placeholder: "Another: a hub id, or a folder", spellcheck: false, autocomplete: "off" });
    field.setAttribute("aria-label", "Another model: a hub id, or a folder");
    const go = button("models-load", "Load");
    go.type = "submit";
    form.append(field, go);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.take(field.value.trim());
    });
    return form;
  }

  open() {
    if (this.dialog.open) return;
    this.dialog.hidden = false; // hidden while closed, so that Escape does not reach it
    this.dialog.showModal();
    this.dialog.querySelector("h2").focus({ preventScroll: true });
    this.say(this.busy ? this.said : "");
    this.draw();
    trigger("offer", {});
  }

  take(name) {
    if (this.busy) return this.say("Another model is being loaded: cancel that first.");
    this.say("");
    this.busy = { name, share: 0, text: "waiting" };
    this.dialog.scrollTo({ top: 0 }); // to what is said of it
    this.draw();
    trigger("take", { name });
  }

  hear(news) {
    if (!news) return;
    if (news.list) this.list = news.list;
    if (news.proposal) this.proposal = news.proposal;
    if (news.busy && this.busy) this.busy = news.busy;
    if ("refused" in news || news.taken) this.busy = null;
    if ("refused" in news) this.say(news.refused);
    if (news.taken) this.close(news.taken);
    this.draw();
  }

  /** A model is in use: the sheet has done its work. */
  close(name) {
    this.say(`${titleOf(name)} is loaded.`);
    if (!this.dialog.open) return;
    this.dialog.close();
    document.querySelector("#run")?.focus({ preventScroll: true });
  }

  say(text) {
    this.said = text;
    setText(this.notice, text);
  }

  draw() {
    this.drawChip();
    if (!this.dialog.open) return;
    this.drawProgress();
    const { groups = [], hub = "", memory = "", derived = "", quantising = "" } = this.list || {};
    const proposed = groups.flatMap(({ rows }) => rows).filter(({ name }) => name === this.proposal?.name);
    const others = groups.map((group) => ({ ...group, rows: group.rows.filter((row) => !proposed.includes(row)) }));
    const all = [...(proposed.length ? [{ title: "Proposed", rows: proposed }] : []), ...others];
    this.rows.replaceChildren(...(this.list ? [] : [el("p", "models-wait", "Looking at this machine…")]), ...all.map((group) => this.group(group, hub)));
    const limits = document.querySelector(".status .bounds p")?.textContent; // in the header of a page without this sheet
    const inUse = limits && `The models in use: ${limits.charAt(0).toLowerCase()}${limits.slice(1)}`;
    this.foot.replaceChildren(...[memory, derived, quantising, inUse].filter(Boolean).map((text) => el("p", "", text)));
  }

  drawChip() {
    const [name, more] = this.chip.children;
    setText(name, titleOf(this.used));
    setText(more, this.more);
    this.chip.title = `${this.used}: choose another model`;
  }

  /** Beside the name: a load in progress, or a real model in place of a toy. */
  get more() {
    if (this.busy) return `loading ${titleOf(this.busy.name)}, ${Math.round(100 * this.busy.share)} %`;
    return this.proposal && this.used === own ? `real: ${this.proposal.title}` : "";
  }

  drawProgress() {
    const { busy } = this;
    this.progress.hidden = !busy;
    if (!busy) return;
    if (!this.bar) {
      this.bar = el("progress");
      this.bar.max = 1;
      this.doing = el("p");
      this.stop = button("models-cancel", "Cancel", "", () => this.cancel());
      this.progress.append(this.bar, this.doing, this.stop);
    }
    this.bar.value = busy.share;
    setText(this.doing, `${titleOf(busy.name)}: ${busy.text}`);
    this.stop.disabled = Boolean(busy.ends);
  }

  cancel() {
    this.busy = { ...this.busy, text: "cancelling", ends: true };
    this.drawProgress();
    trigger("cancel", {});
  }

  group({ title, rows }, hub) {
    const section = el("section");
    section.append(el("h3", "", title));
    if (title === "From the hub" && hub) section.append(el("p", "models-hub", hub));
    const list = el("ul");
    list.append(...rows.map((row) => this.row(row)));
    section.append(list);
    return section;
  }

  row({ name, title, note, parameters, download, memory, speed, why, loads }) {
    const item = el("li");
    item.dataset.model = name;
    const head = el("b", "", title);
    const facts = el("p", "models-facts");
    facts.append(...[parameters, download, memory, speed].filter(Boolean).map((fact) => el("span", "", fact)));
    item.append(head, facts, el("p", "models-note", why || note), this.act(name, title, loads));
    item.classList.toggle("is-out", !loads);
    return item;
  }

  act(name, title, loads) {
    if (name === this.used) return el("span", "models-used", "in use");
    const load = button("models-load", "Load", `Load ${title} and use it`, () => this.take(name));
    load.disabled = !loads || Boolean(this.busy);
    return load;
  }
}

function titleOf(name) {
  return titles[name] || name.split(/[\\/]/).filter(Boolean).pop() || name;
}

const sheet = new ModelSheet(element);
watch("value", () => sheet.hear(props.value));
