"""Stories: short, coherent stories, each generated from one of several hundred plots in `plots/`.

A plot file consists of paragraphs, one per plot. The first line is `# subject of the story`, lines like
`fruit: pear, plum` define slots of that plot, the rest is the story. `{n}` and the other slots of `cast` are filled
once per story, so that it stays consistent; `[one turn|another]` are choices (`wording.py`). A story has about 60 to
170 words.
"""
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from playground.questions.world.item import Item, on_side
from playground.questions.world.names import BOYS, COLOURS, DAYS, FOODS, GIRLS, PETS, PLACES, TOWNS, TRADES
from playground.questions.world.wording import Wordings, expand

TASK = "stories"
GRADES = (1,)
OWN_SLOT = re.compile(r"^([a-z_]+): (.+)$")
SLOT = re.compile(r"{(\w+)}")
OF_NAME = Wordings("""
[Tell me|Tell us|Write|Write me] a [|short |little |new ][story|tale] about {n} and {about}.
[I would like|I want to hear|I wish for|Please give me] a [|short |good ][story|tale] with {n} in it. \
It is about {about}.
[Make up|Invent|Think of] a [|little |bedtime ]story: {about}. The hero is [called |named |]{n}.
[Can you|Could you|Will you] tell [me|us] [about|a story of|the tale of] {n} and {about}?
A [|short |bedtime ][story|tale] [about|of|with] {n}, please. [It should be about|Let it tell of|The theme is] {about}.
The [title|story|tale] is: {about}. [Tell it of|It happens to|Let it be the story of] {n}.
[How does|How did] the [story|tale] of {n} and {about} go?
[Story time|Bedtime|Once upon a time]! {n} and {about}.
[Do you know|Have you heard] the [story|tale] of {n} and {about}? Tell it.
[Write down|Put on paper|Let us hear] [what happened to|how it went with] {n}: {about}.
[The children|My friends|The guests] want a [story|tale] about {about}. [Call the hero|The hero is] {n}.
[Something|Anything] about {n}, [please|if you can]. [Perhaps|Maybe] with {about}.
[Tell|Read] me to sleep[| tonight]. {n}, {about}.
~ [We need|Let us have] a story for {n}. It [tells of|speaks of] {about}.
~ [Entertain|Cheer up] {n} with a tale of {about}.
""")
NAMELESS = Wordings("""
[Tell me|Tell us|Write|Write me] a [|short |little |new ][story|tale|fable] about {about}.
[I would like|I want to hear|I wish for|Please give me] the [|short |old ][story|tale|fable] of {about}.
[Make up|Invent|Think of] a [|little |bedtime ]story: {about}.
[Can you|Could you|Will you] tell [me|us] [about|a story of|the tale of] {about}?
A [|short |bedtime ][story|tale|fable] [about|of] {about}, please.
The [title|story|tale] is: {about}. [Tell it|Go on|How does it go?]
[How does|How did] the [story|tale] of {about} go?
[Story time|Bedtime|Once upon a time]! {about}.
[Do you know|Have you heard] the [story|tale] of {about}? Tell it.
[Write down|Put on paper|Let us hear] [what happened|how it went]: {about}.
[The children|My friends|The guests] want a [story|tale|fable] about {about}.
[Tell|Read] me to sleep[| tonight] with {about}.
~ [We need|Let us have] a story. It [tells of|speaks of] {about}.
~ [Entertain|Cheer up] the children with a tale of {about}.
""")

BARE = Wordings("""
[Tell me|Tell us|Write|Write me] a [|short |little |new ][story|tale] [about|with|of] {n}.
A [|short |bedtime ][story|tale] [about|of|with] {n}[|, please].
[Can you|Could you|Will you] tell [me|us] [about|a story of|the tale of] {n}?
[Make up|Invent|Think of] a [|little |bedtime ]story with {n}.
[Story time|Bedtime]! [Something|A story] about {n}.
[{n}|Something about {n}], [a story, please|and let it be a story].
~ [Let us have|We need] a tale of {n}.
""")
ANY = Wordings("""
[Tell me|Tell us|Write|Write me] a [|short |little |new |bedtime ][story|tale].
[I would like|I want to hear|I wish for|Please give me] a [|short |good |little ][story|tale].
[Can you|Could you|Will you] tell [me|us] a [|short |little ][story|tale]?
[Story time|Bedtime|A story, please]!
[Make up|Invent|Think of] a [|little |bedtime ][story|tale].
~ [Let us have|We need] a [story|tale].
""")
SHORT_WISHES = 0.2      # share of prompts that leave the plot open, as people's first prompts often do


@dataclass(frozen=True)
class Plot:
    """Subject of a story, its own slots with their values, and its text with slots and choices."""
    about: str
    own: Mapping[str, list[str]]
    text: str


def read(path):
    """The plots of one file. Raises ValueError for a paragraph without its `#` line."""
    return [_plot(paragraph) for paragraph in path.read_text(encoding="utf-8").strip().split("\n\n")]


def _plot(paragraph):
    title, *lines = paragraph.strip().splitlines()
    if not title.startswith("# "):
        raise ValueError(f"A plot begins with a line '# what it is about', not with: {title}")
    heads = [OWN_SLOT.match(line) for line in lines]
    own = {head[1]: head[2].split(", ") for head in heads if head}
    return Plot(title[2:], own, " ".join(line for line, head in zip(lines, heads) if not head))


PLOTS = [plot for path in sorted((Path(__file__).parent / "plots").glob("*.txt")) for plot in read(path)]


def generate(rng, held_out=False, grade=None):
    """A request for a story, and the story; the held-out split hashes the story."""
    return on_side(_story, rng, held_out)


def score(item, text):
    """Share of simple checks passed: it names the hero, ends with punctuation, has 40 words, repeats no 6-gram."""
    words = text.split()
    runs = [tuple(words[i:i + 6]) for i in range(len(words) - 5)]
    ends = text.strip().rstrip('"')[-1:] in (".", "!", "?")
    checks = [item.meta["hero"] in text, ends, len(words) >= 40, len(set(runs)) == len(runs)]
    return sum(checks) / len(checks)


def _story(voice):
    plot = voice.rng.choice(PLOTS)
    words = cast(voice.rng) | {slot: voice.rng.choice(values) for slot, values in plot.own.items()}
    text = expand(voice.rng, plot.text)
    story, about, named = text.format(**words), plot.about.format(**words), "{n}" in text
    wish = _wish(voice.rng, named)
    prompt = voice.say(wish, n=words["n"], about=about)
    hero = "" if wish is ANY else words["n"] if named else _longest_shared(about, story)
    return Item(
        prompt[0].upper() + prompt[1:], story, TASK, dict(kind="stories", plot=plot.about, hero=hero), key=story
    )


def _wish(rng, named):
    """Wordings of the request: with the plot, with only the hero, or with neither."""
    if rng.random() < SHORT_WISHES:
        return BARE if named and rng.random() < 0.6 else ANY
    return OF_NAME if named else NAMELESS


def _longest_shared(about, story):
    """The longest word of the title that also occurs in the story: its hero if no character has a name."""
    return max((word for word in re.findall(r"\w+", about) if word in story), key=len)


def cast(rng):
    """Values of all common slots. `he` is the pronoun of the hero {n}, `mhe` that of the friend {m}."""
    girl, friend_girl = rng.random() < 0.5, rng.random() < 0.5
    hero = rng.choice(GIRLS if girl else BOYS)
    friend = rng.choice([name for name in (GIRLS if friend_girl else BOYS) if name != hero])
    words = dict(n=hero, m=friend, child="girl" if girl else "boy") | _pronouns(girl)
    words |= {f"m{slot}": word for slot, word in _pronouns(friend_girl).items()} | dict(
        Mhe="She" if friend_girl else "He"
    )
    words |= {
        who: rng.choice([x for x in named if x not in (hero, friend)])
        for who, named in dict(woman=GIRLS, man=BOYS).items()
    }
    words |= dict(place=rng.choice(PLACES), pet=rng.choice(PETS), food=rng.choice(FOODS), colour=rng.choice(COLOURS))
    return words | dict(town=rng.choice(TOWNS), trade=rng.choice(TRADES), day=rng.choice(DAYS))


def _pronouns(girl):
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    return dict(he=he, him=him, his=his, self=f"{him}self", He=he.capitalize(), His=his.capitalize())
