"""The stop-and-exit controller against a loop over the library's modules, with keys and values copied at the exit."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import figures, run
from torch.nn.functional import silu

import playground
from playground.bench.survey.survey import prompt_of
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.session import prepare
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.layer_choices import ComputePass
from playground.errors import Refusal
from playground.events import Figure, Verdict
from playground.questions.questions import ask
from playground.questions.world import TASKS
from playground.training.calibration import CalibrationTexts
from strategies.adaptive_compute.stop_exit import classes_of, untrained
from support.commits import ids
from support.compute_runs import PROMPT, deep, deep_network, policy_lane

StopExit = find("stop_exit")
BRIEF = {"stop_exit": {"weights": "random", "theta_exit": 0.4}}
OFF = {"weights": "random", "theta_exit": 1.01, "theta_stop": 1.01}
COLLAPSES = {"stop_exit": [Collapse(policy_lane("stop_exit", **OFF), LaneConfig("greedy"))]}
DEPTH, WIDTH = 6, 32


def weights(seed: int = 3) -> dict[str, torch.Tensor]:
    """A random controller whose decisions vary, and heads that change the state."""
    found = untrained(DEPTH, WIDTH, seed)
    chance = torch.Generator().manual_seed(seed)
    found["controller"] = found["controller"] * 2
    found["down"] = torch.randn(found["down"].shape, generator=chance) * 0.2
    return found


class Given(StopExit):
    """The policy with these weights instead of fitted ones."""

    def begin(self, parts, fitted):
        super().begin(parts, weights())


def by_hand(tokens: list[int], prompt: int, policy) -> tuple[torch.Tensor, list[int]]:
    """Logits [n, V] token by token, and after how many layers each exited."""
    network, given = deep_network(), {name: tensor.double() for name, tensor in weights().items()}
    keys, values = ([[] for _ in network.model.layers] for _ in range(2))
    rows, exits = [], []
    for position, token in enumerate(tokens):
        x, exited = network.model.embed_tokens(torch.tensor([token])), None
        for number, layer in enumerate(network.model.layers):
            if number and exited is None and position >= prompt and decides(x, given, policy):
                exited = number
            q = states(network, layer, x, position, keys[number], values[number])
            if exited is None:
                a = x + attention(network, layer, q, keys[number], values[number])
                x = a + layer.mlp(layer.post_attention_layernorm(a))
        if exited is not None:
            inner = network.model.layers[-1].post_attention_layernorm(x)
            gate, up, down = (given[name][exited - 1] for name in ("gate", "up", "down"))
            x = x + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        rows.append(network.lm_head(network.model.norm(x)))
        exits.append(exited or DEPTH)
    return torch.cat(rows), exits


def decides(x: torch.Tensor, given: dict, policy) -> bool:
    q = (x[0] @ given["controller"].T).softmax(0)
    return int(q.argmax()) == 1 and float(q[1]) > policy.theta_exit


def states(network, layer, x, position, keys, values) -> torch.Tensor:
    """The rotated queries; keys and values are appended, computed from the state that enters the layer."""
    own, d, h = layer.self_attn, network.config.head_dim, layer.input_layernorm(x)
    q, k, v = (getattr(own, name)(h).view(-1, d) for name in ("q_proj", "k_proj", "v_proj"))
    cos, sin = (t[0, 0] for t in network.model.rotary_emb(h[None], torch.tensor([[position]])))
    turned = [rows * cos + torch.cat([-rows[:, d // 2:], rows[:, :d // 2]], 1) * sin for rows in (q, k)]
    keys.append(turned[1])
    values.append(v)
    return turned[0]


def attention(network, layer, q, keys, values) -> torch.Tensor:
    config = network.config
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = (torch.stack(rows, 1).repeat_interleave(group, 0) for rows in (keys, values))
    shares = ((q[:, None] @ k.transpose(1, 2)) / math.sqrt(config.head_dim)).softmax(-1)
    return layer.self_attn.o_proj((shares @ v).reshape(1, -1))


def compared(cls: type) -> tuple[float, list[int]]:
    """Largest difference of the log-probabilities of a lane's tokens from those by hand, and the exits by hand."""
    policy = cls(theta_exit=0.4, theta_stop=1.01)
    lane, _ = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, 14)
    with torch.inference_mode():
        rows, exits = by_hand(lane.tokens[:-1], len(PROMPT), policy)
    found = rows[len(PROMPT) - 1:].log_softmax(-1)
    expected = found.gather(1, torch.tensor(lane.main.written)[:, None])[:, 0]
    difference = (expected - torch.tensor(lane.main.logprobs, dtype=torch.float64)).abs().nan_to_num(math.inf)
    return float(difference.max()), exits[len(PROMPT):]


@pytest.mark.oracle("stop_exit")
def test_tokens_exit_where_the_loop_over_the_librarys_modules_does_and_leave_their_keys_and_values():
    difference, exits = compared(Given)
    assert difference < 1e-4
    assert len(set(exits)) > 1 and min(exits) < DEPTH, "some tokens exit, and at different layers"


class EarlierHead(Given):
    """Wrong: the state at the exit is read by the head of another layer."""

    def begin(self, parts, fitted):
        super().begin(parts, fitted)
        self.heads = self.heads[-1:] + self.heads[:-1]


class LeavesHoles(Given):
    """Wrong: skipped layers get the keys and values of nothing."""

    def choices(self, positions, prompt):
        made = super().choices(positions, prompt)
        made.stores = lambda layer, hidden: False
        return made


@pytest.mark.refuses("stop_exit")
@pytest.mark.parametrize("wrong", [EarlierHead, LeavesHoles])
def test_another_head_and_holes_in_the_cache_are_refused(wrong):
    assert compared(wrong)[0] > 1e-3


class StopsAtOnce(Given):
    """A controller that is always certain that no layer is right."""

    def begin(self, parts, fitted):
        super().begin(parts, fitted)
        self.controller = torch.zeros_like(self.controller)

    def choices(self, positions, prompt):
        made = super().choices(positions, prompt)
        if positions[-1] >= prompt + 3:
            made.asks = [position >= prompt + 3 for position in positions]
            made._decide = lambda layers, hidden: stop_asked(made, layers)
        return made


def stop_asked(made, layers: int) -> None:
    rows = [row for row, asks in enumerate(made.asks) if asks and row not in made.exits]
    made.exits |= dict.fromkeys(rows, layers)
    made.stopped.update(rows)


def test_a_stop_ends_the_text_with_what_was_written_before():
    whole, _ = run(LaneConfig("greedy"), {"target": deep()}, PROMPT, 10)
    policy = StopsAtOnce(theta_exit=1.01, theta_stop=0.5)
    lane, events = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, 10)
    assert lane.reason == "end" and lane.main.written[:-1] == whole.main.written[:4]
    assert lane.ends(lane.main.written[-1]) and lane.main.origins[-1] == "forced"


def test_a_stop_inside_an_accepted_draft_ends_the_text_there():
    """All draft tokens are right, since the draft is the target; so a stop inside a draft must not be skipped."""
    decoder = make("speculative", drafter=make("draft_model", depth=6), verifier=make("greedy_match"))
    models = {"target": deep(), "draft": deep()}
    lanes = [Assembly(each, compute_policy=StopsAtOnce(theta_exit=1.01, theta_stop=0.5))
             for each in (make("greedy"), decoder)]
    (plain, _), (drafted, events) = (run(lane, models, PROMPT, 10) for lane in lanes)
    assert drafted.main.written == plain.main.written and drafted.reason == plain.reason == "end"
    assert max(len(event.kept) for event in events if isinstance(event, Verdict)) > 1, "several drafts were accepted"


def test_stopping_is_refused_where_several_texts_grow():
    with pytest.raises(Refusal, match="may end a text by itself"):
        assemble(LaneConfig("beam_search", {}, [("stop_exit", {"theta_stop": 0.5})]))
    assemble(LaneConfig("beam_search", {}, [("stop_exit", {})]))


def test_rows_of_one_forward_exit_at_layers_of_their_own():
    """Logits and exits of all generated rows in one forward are those of the loop token by token."""
    policy, model, tokens = Given(theta_exit=0.4), deep(), [*PROMPT, 3, 11, 8, 40, 2, 19, 33, 7]
    policy.begin(model.parts, {})
    compute = ComputePass(lambda positions: policy.choices(positions, len(PROMPT)))
    work = ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))
    with torch.inference_mode():
        (logits,), _ = model.forward([work], LayerPlan(compute=compute))
        expected, exits = by_hand(tokens, len(PROMPT), policy)
    assert (logits - expected).abs().max() < 1e-6
    assert [compute.choices.exits.get(row, DEPTH) for row in range(len(tokens))] == exits and len(set(exits)) > 2


def test_the_picture_shows_the_classes_and_the_share_that_ran():
    policy = Given(theta_exit=0.4)
    _, events = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, 8)
    said = figures(events, "what the controller says after each layer")
    assert said and all(abs(sum(row) - 1) < 1e-6 for data in said for row in data["values"])


def test_the_class_of_a_layer_depends_on_the_first_layer_that_is_right():
    hits = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    assert classes_of(hits).T.tolist() == [[2, 1, 1], [1, 1, 1], [0, 0, 0], [2, 2, 1]]


def test_training_lowers_the_loss_of_the_heads_and_returns_what_the_policy_reads():
    chance = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 40, (24,), generator=chance).tolist() for _ in range(16)]
    events, steps = [], StopExit.calibrate(CalibrationTexts(deep(), texts), 0)
    with pytest.raises(StopIteration) as end:
        while True:
            events.append(next(steps))
    found = end.value.value
    losses = [event.data["series"]["head of layer 0"] for event in events if isinstance(event, Figure)]
    assert losses[-1] < losses[0]
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in untrained(DEPTH, WIDTH, 0).items()
    }
    assert all(tensor.dtype == torch.float16 for tensor in found.values())


@pytest.mark.slow
def test_at_its_default_the_bundled_controller_changes_at_most_one_answer_in_twenty_and_some_tokens_exit():
    models, changed, exits = playground.load(draft=playground.NO_DRAFT), 0, []
    questions = [question for task in sorted(TASKS) for question in ask(task, 2, 7)]
    for question in questions:
        prompt = prompt_of(question, models)
        plain, policed = (
            list(prepare(models, [lane], prompt, Limits(0, 32)))
            for lane in (LaneConfig("greedy"), policy_lane("stop_exit"))
        )
        changed += ids(each.event for each in plain) != ids(each.event for each in policed)
        exits += [data["series"]["layers before the exit"] for data in figures([e.event for e in policed], "exit")]
    assert len(questions) == 20 and changed <= 1
    assert sum(layers < models.target.depth for layers in exits) > len(exits) / 20
