"""Stories: short and coherent, told beat by beat from plots with several ways to say every beat.

A plot is a chain of beats, a beat a choice of sentences; names, things, places and feelings fill the slots and stay the
same throughout, so a story keeps its thread. One story has 50 to 120 words.
"""
import string

from playground.pocket.world.item import Item, on_side
from playground.pocket.world.names import BOYS, COLOURS, FOODS, GIRLS, PETS, THINGS

TASK = "stories"
PLACES = "forest village garden castle valley hill farm island mill harbour".split()
TRAITS = "brave kind clever shy curious lazy gentle proud quiet merry".split()
OPENINGS = """
Once upon a time there was a {trait} {child} named {n} who lived near a {place}.
In a little house by the {place} lived {n}, a {trait} {child}.
There was once a {trait} {child} called {n}.
Long ago a {trait} {child} named {n} lived by a {place}.
{n} was a {trait} {child} who lived with a {pet}.
Not far from the {place} there lived a {trait} {child}. The name of the {child} was {n}.
""".strip().splitlines()
CLOSINGS = """
That night {n} slept very well.
From that day on they were the best of friends.
And {n} never forgot that day.
And if they have not gone away, they are still there.
{n} went home and told everybody the story.
So it all ended well.
Then they sat down and ate {food} together.
{n} smiled all the way home.
""".strip().splitlines()
PLOTS = {name: [beat.splitlines() for beat in plot.strip().split("\n\n")] for name, plot in dict(
    lost="""
One morning {n} could not find the {colour} {x}.
One day the {colour} {x} was gone.
{n} had a {colour} {x}, but one day it was lost.

{He} looked under the bed and behind the door, but it was not there.
{n} looked in every corner and found nothing.
{He} asked everybody, but nobody had seen it.

Then {he} met a {pet} at the {place}.
At the {place} a {pet} came along the path.
A {pet} sat by the road and listened.

"I saw something {colour} in the grass," said the {pet}.
"Follow me," said the {pet}, "I know where it is."
"Look up into the tree," said the {pet}.

And there it was! {n} thanked the {pet} and took the {x} home.
Soon {n} held the {x} in {his} hands again.
{n} was so happy that {he} gave the {pet} some {food}.
""",
    hungry="""
{n} came upon a hungry {pet} near the {place}.
A thin {pet} sat at the gate and looked sad.
One cold day a {pet} knocked at the door of {n}.

"I have not eaten for two days," it said.
"Please give me something to eat," said the {pet}.
It was too weak to walk.

{n} had only a little {food}, but {he} shared it.
{n} ran home and brought some {food}.
{He} gave the {pet} half of {his} {food}.

The {pet} ate and grew strong again.
The {pet} ate it all and felt much better.
When the {pet} had eaten, it began to dance.

A year later {n} was lost in the snow, and the {pet} showed {him} the way.
Later it brought {n} a {colour} {x} to say thank you.
Ever since, the {pet} watches over the house.
""",
    river="""
{n} wanted to cross the river to see the {place}.
On the other side of the river stood a {colour} house.
One day {n} had to cross the river.

But the bridge was broken.
But the water was deep and there was no bridge.
But the boat was gone.

{He} tried to jump and fell into the mud.
{He} sat down on a stone and thought.
{He} called, but nobody came.

Then {he} took a {x} and some wood and built a small raft.
A {pet} came and said, "Sit on my back."
An old man came by and lent {him} a {x}.

Slowly, slowly, {n} came to the other side.
In a short time {he} stood on the other bank, wet but glad.
So {n} crossed the river after all.
""",
    contest="""
The king promised a {colour} {x} to the fastest runner.
There was a great race at the {place}.
Every year there was a race around the {place}.

{n} wanted to win, and so did {m}.
{m} laughed at {n} and said, "You will never win."
{m} was faster than everybody else.

{m} ran ahead and lay down to sleep under a tree.
Half of the way {m} stopped to eat {food}.
{m} ran so fast that {he} took the wrong path.

{n} did not stop and ran on.
{n} ran slowly, but {he} never stopped.
Step by step {n} came nearer.

In the end {n} won, and {m} was ashamed.
So {n} came in first and shared the prize with {m}.
{n} won the {x} and everybody cheered.
""",
    storm="""
One night a great storm came over the {place}.
The wind grew strong and the sky turned black.
It rained for three days and three nights.

{n} was afraid and hid under the blanket.
The roof of the house flew away.
All the lamps went out.

Then {he} heard a small voice outside. It was a {pet}.
A {pet} cried in the dark.
Something scratched at the door. It was a {pet}.

{n} opened the door and let it in.
"Come in," said {n}, "it is warm here."
{He} took a {x} and went out to help.

They kept each other warm until the morning.
When the sun came up, they were both safe.
In the morning the storm was over and the sky was {colour}.
""",
    wish="""
{n} found a {colour} {x} in the {place}.
An old woman gave {n} a {colour} {x}.
Under a stone lay a {colour} {x}.

"You may make one wish," said a voice.
When {he} touched it, a small man jumped out and said, "Make a wish!"
It was magic and could grant one wish.

{n} thought of gold and thought of {food}.
{n} thought for a long time.
"I could wish for a castle," thought {n}.

Then {he} saw that {m} was ill and sad.
But then {n} remembered poor {m}, who could not walk.
Just then {m} came by, crying.

"I wish that {m} is well," said {n}, and so it was.
{He} gave the wish away, and {m} laughed again.
So {n} used the wish for {m} and was never sorry.
""",
    lie="""
{n} watched the sheep near the {place}.
{n} was bored on the hill with the sheep.
Every day {n} sat with the sheep and wished for some fun.

"A wolf! A wolf!" {he} cried, and all the people came running.
For fun {he} cried, "Help, a wolf is here!"
{He} blew the horn as if a wolf had come.

But there was no wolf, and {n} laughed at them.
The people found no wolf and went home angry.
"That was a joke," said {n}.

The next day a real wolf came.
Then, one evening, the wolf really came.
A week later two {colour} eyes shone in the dark: the wolf.

{n} cried for help, but nobody believed {him}. {He} never lied again.
Nobody came this time, and {n} learned to tell the truth.
Only the {pet} came to help, and after that {n} told no more lies.
""",
    friend="""
{n} had no friends and played alone.
When {n} came to the {place}, {he} knew nobody.
{n} often sat alone by the {place}.

One day {he} saw {m} with a {colour} {x}.
Then {m} moved into the house next door.
{m} sat on the wall and ate {food}.

{n} was too shy to speak.
"May I play too?" asked {n}.
{n} waved, and {m} waved back.

{m} held out the {x} and said, "Let us share it."
"Of course," said {m}, "come here."
{m} gave {n} half of the {food}.

They played until it was dark.
Soon they did everything together.
After that {n} was not alone any more.
""",
    proud="""
A {pet} at the {place} was very proud of its {colour} coat.
The {pet} of {n} thought it was the most beautiful in the world.
Near the {place} lived a proud {pet}.

"Nobody is as fine as I am," it said all day.
It would not talk to the other animals.
It looked at itself in the water from morning to night.

One day it fell into the well.
Then its foot was caught in a rope.
One day it got lost in the fog.

The mice it had laughed at came to help.
{n} heard it cry and came with a {x}.
Only a little frog came and showed the way out.

From then on the {pet} was kind to all.
"Thank you," it said, and it was not proud any more.
It had learned that friends are worth more than beauty.
""",
    gift="""
Tomorrow was the birthday of {m}, and {n} had no gift.
{n} wanted to make {m} happy.
{m} was turning ten, and {n} had only one coin.

{He} went to the market, but everything cost too much.
{He} wanted to buy a {x}, but it was too dear.
In the shop there was a {colour} {x}, but {n} could not pay for it.

So {he} worked for the miller all day.
So {he} took wood and made one.
So {he} helped an old woman to carry her {food}.

In the evening the {x} was ready, {colour} and beautiful.
By night {he} had a {colour} {x} in {his} hands.
And for that {he} got a {colour} {x}.

{m} laughed with joy and hugged {n}.
"This is the best gift of all," said {m}.
{m} kept it for a hundred years.
""",
).items()}
ASK = """
Tell me a story about {n} and a {colour} {x}.
Write a short story about a {child} named {n}.
Tell a story about {n}.
I would like a story with {n} and a {pet} in it.
Tell me a tale about {n} and {m}.
A story about {n}, please.
Write about {n}, who lives near a {place}.
Make up a story about the {child} {n}.
Can you tell me about {n}?
Tell a bedtime story. The hero is {n}.
Tell me what happened to {n}.
Invent a little tale of {n}.
""".strip().splitlines()


def generate(rng, held_out=False):
    """A wish for a story and one story; split by a hash of the story."""
    return on_side(_story, rng, held_out, key=lambda item: item.answer)


def score(item, text):
    """A modest check: the hero is in it, it ends on a full stop, has forty words or more and repeats no six of them."""
    words = text.split()
    runs = [tuple(words[i:i + 6]) for i in range(len(words) - 5)]
    checks = [item.meta["hero"] in text, text.strip()[-1:] in ".!\"", len(words) >= 40, len(set(runs)) == len(runs)]
    return sum(checks) / len(checks)


def _story(rng):
    plot, words = rng.choice(sorted(PLOTS)), _cast(rng)
    beats = [rng.choice(OPENINGS)] + [rng.choice(beat) for beat in PLOTS[plot]] + [rng.choice(CLOSINGS)]
    story = " ".join(beats).format(**words)
    asks = [ask for ask in ASK if all(words[slot] in story for slot in _slots(ask))]
    return Item(rng.choice(asks).format(**words), story, TASK, dict(kind=plot, hero=words["n"]))


def _slots(template):
    """The names of the slots of a template, so that a wish only asks for what the story has."""
    return [slot for _, slot, _, _ in string.Formatter().parse(template) if slot]


def _cast(rng):
    """Who and what the story is about: every slot a sentence may have."""
    girl = rng.random() < 0.5
    hero, friend = rng.sample(GIRLS if girl else BOYS, 2)
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    words = dict(n=hero, m=friend, child="girl" if girl else "boy", he=he, him=him, his=his, He=he.capitalize())
    words |= dict(trait=rng.choice(TRAITS), place=rng.choice(PLACES), pet=rng.choice(PETS))
    return words | dict(x=rng.choice(THINGS), food=rng.choice(FOODS), colour=rng.choice(COLOURS))
