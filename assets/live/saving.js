// Saving a run as a trace, as CSV, or as a page that plays without a server (filled in as in playground/player/standalone.py).

const LONGEST_NAME = 80; // characters of a file name for the lanes; half of it for the prompt

const SAVES = {
  trace: { ending: "jsonl", type: "application/x-ndjson", write: (trace) => trace.toLines() },
  csv: { ending: "csv", type: "text/csv", write: toCsv },
  page: { ending: "html", type: "text/html", write: toPage },
};

async function saveRun(trace, kind) {
  const { ending, type, write } = SAVES[kind];
  download(new Blob([await write(trace)], { type }), `${fileStem(trace)}.${ending}`);
}

/** One HTML file: the page frame, the view's styles, its script packed, and the trace. */
async function toPage(trace) {
  const whole = { format: FORMAT, version: VERSION, lanes: trace.headers, events: trace.inOrder().map((event) => event.raw) };
  const parts = { styles: document.querySelector("style[data-live]").textContent, trace: inert(whole), source: await packed(SOURCE) };
  return STANDALONE.replace(/\{\{(\w+)\}\}/g, (blank, name) => parts[name]);
}

/** JSON that cannot close the script element around it. */
function inert(value) {
  return JSON.stringify(value).replaceAll("<", "\\u003c");
}

/** A text as gzip in Base64, a third of its size; DecompressionStream reads it. */
async function packed(text) {
  return toBase64(await piped(text, new CompressionStream("gzip")).arrayBuffer());
}

function download(blob, name) {
  const link = el("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A file name without its ending that says lanes and prompt: "greedy-vs-eagle-tell-me-a-story". */
function fileStem({ headers, run }) {
  const lanes = namesOfRun(headers).map(({ name }) => slug(name, LONGEST_NAME / 2)).filter(Boolean).join("-vs-");
  const prompt = headers.length ? slug(headers[0].prompt, LONGEST_NAME / 2) : "";
  return [lanes.slice(0, LONGEST_NAME), prompt].filter(Boolean).join("-") || `run-${slug(run, LONGEST_NAME)}`;
}

/** Letters and digits of any script in lower case, joined by hyphens: nothing that a file system or a shell reads. */
function slug(text, longest) {
  const whole = text.slice(0, 4 * longest).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+/, "");
  return [...whole].slice(0, longest).join("").replace(/-+$/, "");
}

/** A button that opens a menu; a choice, Escape or a click elsewhere closes it. */
class Menu {
  constructor(node) {
    this.node = node;
    this.opener = node.querySelector("button");
    this.box = node.querySelector("[role=dialog]");
    this.opener.addEventListener("click", () => this.show(this.box.hidden));
    this.box.addEventListener("click", ({ target }) => target.closest("button") && this.show(false));
    node.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !node.contains(relatedTarget) && this.show(false));
  }

  show(open) {
    this.box.hidden = !open;
    this.opener.setAttribute("aria-expanded", String(open));
    if (open) this.box.classList.toggle("above", boxOf(this.opener).bottom + this.box.offsetHeight + 12 > innerHeight / zoomOf(this.box));
    if (open) this.box.querySelector("button, select").focus();
  }

  get isOpen() {
    return !this.box.hidden;
  }

  close() {
    this.show(false);
    this.opener.focus();
  }
}
