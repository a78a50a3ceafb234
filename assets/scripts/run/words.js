// Word-level diff of two texts.

/** Stretches in reading order, each {kind, text} with kind "same", "mine" or "theirs". A word includes the blanks before it. */
export function diffWords(mine, theirs) {
  const [a, b] = [wordsOf(mine), wordsOf(theirs)];
  const head = sharedHead(a, b);
  const tail = sharedHead(a.slice(head).reverse(), b.slice(head).reverse());
  const middle = alignment(a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  const same = (words) => words.map((text) => ({ kind: "same", text }));
  return merged([...same(a.slice(0, head)), ...middle, ...same(a.slice(a.length - tail))]);
}

function wordsOf(text) {
  return text.match(/\s*\S+|\s+$/g) || [];
}

function sharedHead(a, b) {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a[length] === b[length]) length += 1;
  return length;
}

/** The longest common subsequence, walked from the front; on a tie, "mine" comes first. */
function alignment(a, b) {
  const longest = commonLengths(a, b);
  const stride = b.length + 1;
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      parts.push({ kind: "same", text: a[i++] });
      j += 1;
    } else if (j >= b.length || (i < a.length && longest[(i + 1) * stride + j] >= longest[i * stride + j + 1])) parts.push({ kind: "mine", text: a[i++] });
    else parts.push({ kind: "theirs", text: b[j++] });
  }
  return parts;
}

/** Length of the longest common subsequence of a[i:] and b[j:], at [i * (b.length + 1) + j]. */
function commonLengths(a, b) {
  const stride = b.length + 1;
  const table = new Uint16Array((a.length + 1) * stride);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const at = i * stride + j;
      table[at] = a[i] === b[j] ? table[at + stride + 1] + 1 : Math.max(table[at + stride], table[at + 1]);
    }
  }
  return table;
}

/** Merge neighbours of one kind. Within a run of differences, "mine" comes before "theirs". */
function merged(parts) {
  const stretches = [];
  let run = { mine: "", theirs: "" };
  const flush = () => {
    for (const kind of ["mine", "theirs"]) if (run[kind]) stretches.push({ kind, text: run[kind] });
    run = { mine: "", theirs: "" };
  };
  for (const { kind, text } of parts) {
    if (kind !== "same") {
      run[kind] += text;
      continue;
    }
    flush();
    const last = stretches[stretches.length - 1];
    if (last?.kind === "same") last.text += text;
    else stretches.push({ kind, text });
  }
  flush();
  return stretches;
}
