"""Verification of independent draft tokens by optimal transport, solved exactly."""
from playground.algorithms.speculative.verification import Ruling, match, walk
from playground.contract import Lane, Verifier
from playground.events import Test
from strategies.speculative.exact_transport.draft_labels import DraftLabels
from strategies.speculative.exact_transport.transport_plan import TransportPlan


class ExactTransport(Verifier):
    """Accept one of several independent draft tokens of a position as often as any rule can whose output follows the
    target.

    Which draft token to accept is an optimal transport problem between the k draft tokens and the next token. Its
    linear program has V^k variables, but it need not be solved in that form: some rule accepts each token x with
    probability a(x) if and only if a(B) <= 1 - (1 - q(B))^k for every set B of tokens, so the largest acceptance rate
    is the minimum of p(B) + 1 - q(B)^k, and a = min(p, c q). The rule itself is ours: every draft token gets a random
    label, and the one with the smallest label is accepted below a limit; the labels of a token are chosen such that it
    is accepted with probability a(x). It is exact for any k. `rejection` and `k_seq` never accept more often on the
    same draft tokens, and it helps most where several sequences are drafted by a model that differs from the target.
    With one draft token it is `rejection`. The problem: Sun et al. 2023, arXiv 2310.15141.
    """

    name, title, paper, sheet = "exact_transport", "Optimal transport, exact", "2310.15141", "speculative/spectr"
    guarantee, reconstruction = ("greedy_identical", "distribution_identical"), True
    exact_for = ("independent", "deterministic")

    def judge(self, lm: Lane, tree, rows):
        def rule(node, children):
            p, position = rows.distribution(node), rows.position(node)
            if not lm.chain.draws:
                return match(rows.best(node), children, tree, p)
            if tree.q[children[0]] is None:  # always the same candidates: none can be accepted more often than p says
                return match(lm.draw(p, position, "redraw"), children, tree, p)
            return self._transported(lm, tree, children, p, position)

        return walk(lm, tree, rows, rule)

    def _transported(self, lm: Lane, tree, children, p, position) -> Ruling:
        """Test the distinct children one by one with the probabilities that the plan gives them together."""
        nodes = {tree.tokens[child]: child for child in reversed(children)}
        q = tree.q[children[0]]
        plan = TransportPlan(p, q, len(children))
        drafted = [tree.tokens[child] for child in children]
        chances, left, tests = DraftLabels(plan).accepted_given(drafted), 1.0, []
        for token in dict.fromkeys(drafted):
            chance = min(1.0, chances[token] / left) if left > 0 else 0.0
            accepted, u = lm.flip(chance, position)
            tests.append(Test(nodes[token], float(p[token]), float(q[token]), u, accepted, chance=chance))
            if accepted:
                return Ruling(nodes[token], tests=tests)
            left -= chances[token]
        rest = plan.residual().to(p)
        token = lm.draw(rest, position, "redraw")
        return Ruling(nodes.get(token), token, tests, rest)
