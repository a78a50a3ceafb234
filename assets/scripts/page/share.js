// What can be given away of a page: its link, a frame of it for another page, a picture of what it shows.

import { el, setText } from "../components/elements.js";
import { Menu } from "../components/menu.js";
import { playground } from "../components/playground.js";
import { sayPosition } from "../player/position.js";

const SAID = 1600; // ms that a button says that something was copied

class ShareMenu extends Menu {
  /** `ask`: by name what asks the server for the settings of a link. */
  constructor(root, ask) {
    super(root.querySelector(".share-menu"), root.querySelector(".share-box"));
    for (const name of ["moment", "picture", "view", "said", "by-hand"]) this[name] = this.node.querySelector(`.share-${name}`);
    const save = (kind) => () => playground.shownView().save(kind);
    this.acts = { ...ask, png: save("png"), svg: save("svg") };
    this.box.addEventListener("click", ({ target }) => this.act(target.closest("[data-share]")?.dataset.share));
    this.byHand = new HandCopy(this.node.querySelector(".share-by-hand"), this.opener);
  }

  act(name) {
    if (!name) return;
    this.acts[name]();
    this.opener.focus();
  }

  show(open) {
    if (open) this.describe();
    this.byHand?.show(false);
    super.show(open);
  }

  /** What is shown just now decides what a link opens and what there is a picture of. */
  describe() {
    setText(this.moment, sayPosition(playground.livePosition?.()));
    const view = playground.shownView?.();
    this.picture.hidden = !view;
    setText(this.view, view ? `of the view “${view.title}”` : "");
  }
}

/** Where the browser forbids to copy, as for a page without HTTPS: the text, selected. */
class HandCopy {
  constructor(node, opener) {
    Object.assign(this, { node, opener, field: node.querySelector("textarea") });
    node.addEventListener("keydown", ({ key }) => key === "Escape" && this.close());
    node.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && this.show(false));
  }

  show(open, text = "") {
    this.node.hidden = !open;
    this.field.value = text;
    if (open) this.field.select();
  }

  close() {
    this.show(false);
    this.opener.focus();
  }
}

let menu = null; // a page for itself may have a button in its place
playground.bindShareMenu = (root, ask) => { menu = new ShareMenu(root, ask); };

// Put the encoded settings into this page's address and copy it.
playground.shareLink = async (code) => {
  if (!code) return;
  const address = new URL(location.href);
  address.search = "";
  address.searchParams.set("s", code);
  const position = playground.livePosition?.();
  if (position) address.searchParams.set("at", position);
  window.history.replaceState(null, "", address);
  await copy(address.href, "Link copied");
};

// Copy a frame for another page: it opens this page with the settings of the last link.
playground.embedCode = async (code) => {
  if (!code) return;
  const address = new URL(location.pathname, location.href);
  address.searchParams.set("s", code);
  const frame = el("iframe", { src: address.href, title: "Decoding playground", width: "100%", height: "900", style: "border: 0", loading: "lazy", allow: "clipboard-write" });
  await copy(frame.outerHTML, "Embed code copied");
};

async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied", done);
  } catch {
    if (menu) menu.byHand.show(true, text);
    else say("Copy it from the address bar", "");
  }
}

/** On the button for a moment, and to a screen reader. */
function say(word, sentence) {
  const button = menu?.opener || document.querySelector("#share");
  const label = button.dataset.label ??= button.textContent;
  button.textContent = word;
  if (menu) setText(menu.said, sentence);
  setTimeout(() => { button.textContent = label; }, SAID);
}
