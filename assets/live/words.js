// Two texts held against each other word by word: what both have, and what only one of them has.

/** Stretches in reading order, each {kind, text}: "same", or of "mine" or "theirs" alone. A word keeps the blanks before it. */
function diffWords(mine, theirs) {
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

/** The longest common subsequence, walked from the front; where either could go first, mine does. */
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

/** Words that the rests of both texts share in order, for every pair of places, [i * (b.length + 1) + j]. */
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

/** Neighbours of one kind as one stretch. Within a run of differences, what is mine comes before what is theirs. */
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
