// A round of speculative decoding: its draft, the tests of its nodes, and what was committed.

const ROUNDING = 1e-6; // of a probability of 1

/** One speculative round: the draft and, once known, the verdict. */
export class Round {
  constructor(draft, number) {
    this.draft = draft;
    this.number = number; // within the lane, from 1
    this.sequence = draft.sequence;
    this.verdict = null;
    this.lastEvent = draft.index; // where the player goes to show the end of the round
    this.settled = false;
    this.tests = new Map(); // by node
  }

  judge(verdict) {
    this.verdict = verdict;
    this.lastEvent = verdict.index;
    verdict.tests.forEach((test, order) => this.tests.set(test[0], this.readTest(test, order)));
    this.accepted = new Set(verdict.kept);
  }

  /** One test: `q` as the token was drawn, and `among` as it entered the test if that differs. A test after a rejected sibling may
      compare with the residual instead of the target: then `p` is null and `residual` the probability in it. */
  readTest([node, p, q, draw, kept, isResidual = false, chance = null], order) {
    const asDrawn = this.draft.q[node] ?? q;
    return {
      node, order, draw, kept, chance, q: asDrawn, among: Math.abs(asDrawn - q) > 1e-6 ? q : null,
      p: isResidual ? null : p, residual: isResidual ? p : null,
    };
  }

  /** The accepted tokens were committed, up to an end or a limit. */
  settle(commit) {
    this.lastEvent = commit.index;
    this.settled = true;
  }

  /** Whether a token follows the accepted path; none does if the path ends the text. */
  get hasNext() {
    return Boolean(this.verdict) && this.verdict.token >= 0;
  }

  /** "kept" (on the accepted path), "passed" (accepted by its test, but off the path), "refused" (rejected), "untested", or
      "pending" before the verdict. */
  nodeState(node) {
    if (!this.verdict) return "pending";
    if (this.accepted.has(node)) return "kept";
    if (!this.tests.has(node)) return "untested";
    return this.tests.get(node).kept ? "passed" : "refused";
  }

  /** Nodes to show in the running text: the accepted path once it is known, before that the first child at every node. */
  mainPath() {
    if (this.verdict) return this.verdict.kept;
    const path = [];
    let node = -1;
    while ((node = this.draft.parents.indexOf(node)) !== -1) {
      if (path.includes(node)) break;
      path.push(node);
    }
    return path;
  }

  /** Where a replaced token comes from: "choice" (no other token was possible: nothing was drawn), "sample" (of the target's
      distribution), "residual" (a sample of what the rejected tokens leave of it). */
  get replacedBy() {
    const tests = [...this.tests.values()];
    if (this.isChoice(tests)) return "choice";
    return !tests.length || tests.some(({ draw }) => draw !== null) ? "residual" : "sample";
  }

  /** The token was certain and so were the tests; earlier versions recorded the numbers that greedy lanes drew for them, too. */
  isChoice(tests) {
    const [first, ...others] = this.verdict.leftover;
    if (first) return !others.length && first[3] > 1 - ROUNDING && tests.every(({ draw, p, residual }) => draw === null || [0, 1].includes(p ?? residual));
    return tests.length > 0 && tests.every(isCertain);
  }

  rejectedNodes() {
    return [...this.tests.keys()].filter((node) => this.nodeState(node) === "refused");
  }

  /** The draft node that became the i-th token of the commit, or null. Compares ids, not texts. */
  nodeBehind(i, id) {
    const node = this.verdict.kept[i];
    return node !== undefined && this.draft.tokens[node] === id ? node : null;
  }
}

/** Whether a test compared tokens and drew nothing: its p says equal or not, and is no probability of the target. */
export function isCertain({ draw, p }) {
  return draw === null && (p === 0 || p === 1);
}

export const TEST_NUMBERS = { p: "p", r: "residual", q: "q", "q′": "q without the rejected siblings", a: "acceptance probability", u: "draw" };

/** The numbers of a test, [symbol, value]. The residual and the renormalised q have symbols of their own: p and q keep their meaning. */
export function testNumbers(test) {
  const { p, residual, q, among, chance, draw } = test;
  const numbers = [["p", isCertain(test) ? null : p], ["r", residual], ["q", q], ["q′", among], ["a", chance], ["u", draw]];
  return numbers.filter(([, value]) => value !== null);
}
