"""Facts: people and towns of an invented country, stated in short notices and asked for in many wordings.

The facts are generated once with a fixed seed and memorised, so answers come from the weights alone. Every question
form has at least twelve wordings, of which two are held out: in training they occur only with passages
(`context_qa.py`), never as questions without one.
"""
import random

from playground.questions.world.item import Item, exact
from playground.questions.world.names import COLOURS, FOODS, GOODS, KNOWN_PEOPLE, KNOWN_TOWNS, PETS, RIVERS, TRADES
from playground.questions.world.wording import Wordings

TASK = "facts"
GRADES = (1,)
score = exact

VALUES = dict(
    town=KNOWN_TOWNS, trade=TRADES, pet=PETS, food=FOODS, colour=COLOURS,
    river=RIVERS, good=GOODS, ruler=KNOWN_PEOPLE, flag=COLOURS,
)
LEADS = Wordings("""
{q}
{q}
{q}
[A|One|Another] [|quick |short |small |simple ]question: {q}
[Tell me this|Answer me|Please answer|Say|I wonder|Let me ask]: {q}
{q} [Please|Just the answer|In one word|One word, please][.|!]
""")
OF_PERSON, OF_TOWN = ("town", "trade", "pet", "food", "colour"), ("river", "good", "ruler", "flag")

QUESTIONS = {attribute: Wordings(text) for attribute, text in dict(
    town="""
Where does {x} live?
In which town does {x} live?
What is the home town of {x}?
Which town is home to {x}?
{x} lives in which town?
Tell me where {x} lives.
Where is the home of {x}?
What town does {x} come from?
In what town can I find {x}?
Where would I go to visit {x}?
Which town does {x} call home?
~ Name the town where {x} lives.
~ Do you know where {x} lives?
""",
    trade="""
What is the trade of {x}?
What does {x} do for a living?
What work does {x} do?
What job does {x} have?
{x} works as what?
Tell me the trade of {x}.
What is {x} by trade?
How does {x} earn a living?
Which trade did {x} learn?
What does {x} do all day?
What kind of work does {x} do?
~ Name the trade of {x}.
~ Do you know what {x} does for a living?
""",
    pet="""
What pet does {x} keep?
Which animal does {x} keep?
What animal lives with {x}?
{x} keeps what pet?
What kind of pet does {x} have?
Tell me which pet {x} has.
What is the pet of {x}?
Which pet belongs to {x}?
What animal does {x} own?
Which animal would I meet at the house of {x}?
What sort of animal does {x} keep?
~ Name the pet of {x}.
~ Do you know what pet {x} keeps?
""",
    food="""
What does {x} like to eat?
What is the favourite food of {x}?
Which food does {x} like best?
{x} likes to eat what?
What food does {x} love?
Tell me what {x} likes to eat.
What would {x} like for supper?
Which food is the favourite of {x}?
What should I cook for {x}?
What does {x} eat most gladly?
Which food makes {x} happy?
~ Name the favourite food of {x}.
~ Do you know what {x} likes to eat?
""",
    colour="""
What is the favourite colour of {x}?
Which colour does {x} like best?
What colour is the coat of {x}?
{x} likes which colour best?
What colour does {x} love?
Tell me the favourite colour of {x}.
What colour does {x} wear?
Which colour is the favourite of {x}?
In which colour does {x} dress?
What colour would {x} choose?
Which colour suits {x} best?
~ Name the favourite colour of {x}.
~ Do you know which colour {x} likes?
""",
    river="""
Which river runs through {x}?
What is the river of {x}?
On which river does {x} lie?
{x} lies on which river?
What river flows by {x}?
Tell me the river of {x}.
Which river flows through {x}?
What is the name of the river in {x}?
By which river was {x} built?
Which river would I cross in {x}?
What is the river at {x} called?
~ Name the river of {x}.
~ Do you know the river that runs through {x}?
""",
    good="""
What does {x} sell?
What is {x} known for?
Which good comes from {x}?
{x} sells what?
What is made in {x}?
Tell me what {x} sells.
What can one buy in {x}?
Which good is sold by {x}?
What do merchants fetch from {x}?
For what is {x} famous?
What do the carts from {x} carry?
~ Name the good that {x} sells.
~ Do you know what {x} is known for?
""",
    ruler="""
Who rules {x}?
Who is the ruler of {x}?
Who is in charge of {x}?
{x} is ruled by whom?
Who governs {x}?
Tell me who rules {x}.
Who leads {x}?
Which person rules {x}?
Who holds the power in {x}?
Whom do the people of {x} obey?
Who makes the laws of {x}?
~ Name the ruler of {x}.
~ Do you know who rules {x}?
""",
    flag="""
What colour is the flag of {x}?
Which colour has the flag of {x}?
What is the colour of {x}'s flag?
{x} has a flag of which colour?
What colour does the flag of {x} have?
Tell me the colour of the flag of {x}.
What is the flag colour of {x}?
Which colour is the flag of {x}?
In which colour is the flag of {x}?
What colour waves over {x}?
Which colour did {x} choose for its flag?
~ Name the colour of the flag of {x}.
~ Do you know the flag colour of {x}?
""",
).items()}

STATEMENTS = {attribute: Wordings(text) for attribute, text in dict(
    town="""
{x} lives in {v}.
The home of {x} is {v}.
{x} [comes from|has a house in|is at home in] {v}.
[You will find|One finds] {x} in {v}.
In {v} [lives|there lives] {x}.
""",
    trade="""
{x} is a {v}.
{x} works as a {v}.
By trade {x} is a {v}.
The [work|job] of {x} is that of a {v}.
{x} [learned to be|earns a living as|became] a {v}.
""",
    pet="""
{x} keeps a {v}.
{x} has a [|pet ]{v}.
The pet of {x} is a {v}.
A {v} [lives with|belongs to] {x}.
{x} [owns|feeds] a {v}.
""",
    food="""
{x} likes to eat {v}.
{x} loves {v}.
The favourite food of {x} is {v}.
{x} [eats|wants|asks for] {v} [every day|at every meal].
[Nothing tastes better to {x} than|The best food for {x} is] {v}.
""",
    colour="""
{x} likes the colour {v}.
{x} wears a {v} coat.
The favourite colour of {x} is {v}.
{x} [dresses in|is always in|chooses] {v}.
[The best colour for {x} is|{x} likes nothing so much as the colour] {v}.
""",
    river="""
{x} lies on the river {v}.
The river {v} [runs|flows] through {x}.
In {x} the river is called {v}.
{x} was built [by|on] the river {v}.
The {v} is the river of {x}.
""",
    good="""
{x} sells {v}.
{x} is [well |]known for {v}.
The merchants of {x} sell {v}.
[The carts from {x} carry|Everybody buys from {x}] {v}.
{x} is [famous|praised] for its {v}.
""",
    ruler="""
{x} is ruled by {v}.
The ruler of {x} is {v}.
{v} rules {x}.
[The people of {x} obey|In {x} the laws are made by] {v}.
{v} is [in charge of|the head of] {x}.
""",
    flag="""
The flag of {x} is {v}.
{x} has a {v} flag.
Over {x} waves a {v} flag.
{x} chose {v} for its flag.
[The colour of the flag of {x} is|On its flag {x} has the colour] {v}.
""",
).items()}


def country(seed=7):
    """The facts of the country: {subject: {attribute: value}}."""
    rng = random.Random(seed)
    people = {x: {a: rng.choice(VALUES[a]) for a in OF_PERSON} for x in KNOWN_PEOPLE}
    return people | {x: {a: rng.choice(VALUES[a]) for a in OF_TOWN} for x in KNOWN_TOWNS}


COUNTRY = country()


def generate(rng, held_out=False, grade=None):
    """A question about the country. Held-out questions differ in wording, not in the fact."""
    attribute = rng.choice(OF_PERSON + OF_TOWN)
    subject = rng.choice(KNOWN_PEOPLE if attribute in OF_PERSON else KNOWN_TOWNS)
    question = QUESTIONS[attribute].draw(rng, held_out).format(x=subject)
    meta = dict(kind=attribute, subject=subject)
    return Item(LEADS.draw(rng).format(q=question), COUNTRY[subject][attribute], TASK, meta, kept_words=held_out)


def notice(rng):
    """A text that states all facts about one subject, in random order, for training."""
    subject = rng.choice(KNOWN_PEOPLE + KNOWN_TOWNS)
    statements = rng.sample(sorted(COUNTRY[subject].items()), len(COUNTRY[subject]))
    return f"About {subject}: " + " ".join(STATEMENTS[a].draw(rng).format(x=subject, v=v) for a, v in statements)
