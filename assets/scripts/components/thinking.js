// The thinking parts of a text: what stands between the tags that the header names, tags included. The rule, which looks at the pieces of
// tokens, is that of playground/trace/thinking.py.

const OPEN = new WeakMap(); // by header: whether its prompt ends inside a part

/** {from, to, closed} of each part, in tokens. */
export function thinkingParts(header, tokens) {
  const [start, end] = header.thinking?.length === 2 ? header.thinking : ["", ""];
  if (!end || !tokens.length) return [];
  const text = tokens.map(({ piece }) => piece).join("");
  if (!(start ? text.includes(start) || leavesOpen(header) : text.includes(end))) return [];
  const tokenAt = tokenFinder(tokens);
  const found = [];
  let [begun, inside] = !start || leavesOpen(header) ? [0, 0] : next(text, start, 0);
  while (begun >= 0 && begun < text.length) {
    const at = text.indexOf(end, inside);
    const from = Math.max(tokenAt(begun), found.length ? found.at(-1).to : 0);
    if (at < 0) return start ? [...found, { from, to: tokens.length, closed: false }] : found;
    const after = at + end.length;
    found.push({ from, to: tokenAt(after - 1) + 1, closed: true });
    [begun, inside] = start ? next(text, start, after) : [-1, -1];
  }
  return found;
}

/** Tokens of thinking and of the answer; null for a text without a thinking part. */
export function thinkingCounts(header, tokens) {
  const parts = thinkingParts(header, tokens);
  const thinking = parts.reduce((sum, { from, to }) => sum + to - from, 0);
  return parts.length ? { thinking, answer: tokens.length - thinking } : { thinking: null, answer: null };
}

function next(text, start, place) {
  const at = text.indexOf(start, place);
  return at < 0 ? [-1, -1] : [at, at + start.length];
}

/** Whether the prompt ends inside a thinking part, as some chat templates let it. */
function leavesOpen(header) {
  if (!OPEN.has(header)) {
    const [[start, end], prompt] = [header.thinking, header.prompt_pieces.join("")];
    OPEN.set(header, prompt.lastIndexOf(start) > prompt.lastIndexOf(end));
  }
  return OPEN.get(header);
}

/** The index of the token that a character belongs to. Places are asked for in ascending order. */
function tokenFinder(tokens) {
  let [at, end] = [0, tokens[0].piece.length];
  return (place) => {
    while (end <= place) end += tokens[++at].piece.length;
    return at;
  };
}
