"""Attributes of people and towns in passages: those of `facts.py`, and more.

`QUESTIONS` ask for the value, `STATEMENTS` state it, and `DOES` completes "Who ...?", for questions from the value to
the subject.
"""
from playground.questions.world import facts
from playground.questions.world.names import DAYS, KNOWN_PEOPLE, KNOWN_TOWNS, PEOPLE, TOWNS
from playground.questions.world.wording import Wordings

NUMBERS = [str(n) for n in range(2, 100)]
DRINKS = "tea milk cider cocoa water lemonade coffee".split()
INSTRUMENTS = "flute fiddle drum horn harp whistle trumpet".split()
FEARS = "thunder spiders water heights bees ghosts wolves".split()
RIDES = "cart mule sledge bicycle boat wagon camel".split()
GAMES = "chess cards marbles dice checkers dominoes skittles".split()
SEASONS = "spring summer autumn winter".split()
INNS = ["Red Fox", "Blue Bell", "Golden Key", "White Horse", "Old Bear", "Silver Moon", "Green Man", "Three Crowns"]
CRAFTS = "bells boots clocks candles carpets ropes lamps hats".split()

# Being a friend or rival is mutual. These values are known people and towns, which are never subjects of such passages.
VALUES = facts.VALUES | dict(
    town=TOWNS, ruler=PEOPLE, drink=DRINKS, instrument=INSTRUMENTS, fear=FEARS, ride=RIDES, game=GAMES, season=SEASONS,
    age=NUMBERS, friend=KNOWN_PEOPLE, inn=INNS, wells=NUMBERS, feast=DAYS, rival=KNOWN_TOWNS, craft=CRAFTS,
)
OF_PERSON = facts.OF_PERSON + ("drink", "instrument", "fear", "ride", "game", "season", "age", "friend")
OF_TOWN = facts.OF_TOWN + ("inn", "wells", "feast", "rival", "craft")

QUESTIONS = facts.QUESTIONS | {attribute: Wordings(text) for attribute, text in dict(
    drink="""
What does {x} [like to |]drink?
[What|Which] drink does {x} [like best|prefer|love|order|ask for]?
[Tell me|Name|Give me] the [favourite |]drink of {x}.
What [should I pour|can I offer|shall we serve] {x}[| to drink]?
~ [Do you know|Can you say] what {x} drinks?
""",
    instrument="""
[What|Which] instrument does {x} [play|own|practise|carry]?
What does {x} play?
[Tell me|Name|Give me] the instrument [of {x}|that {x} plays].
On [what|which] instrument does {x} [play|make music]?
With what does {x} make music?
~ [Do you know|Can you say] which instrument {x} plays?
""",
    fear="""
What [is {x} afraid of|does {x} fear|frightens {x}|scares {x}]?
Of what is {x} [afraid|scared|frightened]?
[Tell me|Name|Say] what [{x} fears|frightens {x}|scares {x}].
What [would|does] {x} [run from|run away from|hide from]?
~ [Do you know|Can you say] what {x} is afraid of?
""",
    ride="""
[How|By what|With what] does {x} travel?
What does {x} [travel by|ride|use to travel|come with]?
[What|Which] vehicle or animal [carries|brings] {x}?
[Tell me|Name|Say] what {x} [travels by|rides].
In what or on what does {x} [get about|come to market|travel]?
~ [Do you know|Can you say] how {x} travels?
""",
    game="""
[What|Which] game does {x} [play|like|like best|love|win at]?
What does {x} [play|like to play|play in the evening]?
[Tell me|Name|Give me] the [favourite |]game of {x}.
[At what|At which game] is {x} [good|the best]?
~ [Do you know|Can you say] what {x} likes to play?
""",
    season="""
[What|Which] season does {x} [like|like best|love|prefer|wait for]?
[Tell me|Name|Give me] the [favourite |]season of {x}.
[What|Which] is the favourite season of {x}?
[In|At] which time of the year is {x} [happy|happiest]?
~ [Do you know|Can you say] which season {x} likes?
""",
    age="""
How old is {x}?
What [is the age of {x}|age is {x}|age has {x}]?
How many years old is {x}?
[Tell me|Name|Give me|Say] [the age of {x}|how old {x} is].
How many [years|summers] has {x} [lived|seen]?
~ [Do you know|Can you say] how old {x} is?
""",
    friend="""
Who is [the|the best|a] friend of {x}?
[Whom|Who] does {x} [trust|like best|call a friend|visit]?
[Tell me|Name|Give me] the [best |]friend of {x}.
Which person is [a friend of {x}|close to {x}|dear to {x}]?
With whom is {x} friends?
~ [Do you know|Can you say] who is the friend of {x}?
""",
    inn="""
[What|Which] inn [is there|stands|can one find] in {x}?
What is the [name of the inn|inn] [in|of|at] {x}[| called]?
[Tell me|Name|Give me] the [inn|name of the inn] [of|in] {x}.
Where [can I sleep|does one sleep|can we eat] in {x}?
~ [Do you know|Can you say] how the inn of {x} is called?
""",
    wells="""
How many wells [are there in|are in|does one find in|can you count in] {x}?
How many wells [does {x} have|has {x}|belong to {x}]?
What is the number of wells [in|of] {x}?
[Tell me|Say|Give me] how many wells [there are in {x}|{x} has].
~ [Do you know|Can you say] how many wells {x} has?
""",
    feast="""
On [what|which] day [is the feast of {x}|does {x} feast|is there a feast in {x}|does {x} celebrate]?
When [is the feast of {x}|does {x} feast|is there a feast in {x}|does {x} celebrate]?
[Tell me|Name|Give me] the day of the feast [of|in] {x}.
What [day|day of the week] is the feast [of|in] {x}?
~ [Do you know|Can you say] when {x} feasts?
""",
    rival="""
[What|Which] town [is the rival of|quarrels with|is at odds with|does not like] {x}?
[Tell me|Name|Give me] the rival of {x}.
With [what|which] town does {x} [quarrel|argue]?
Who is the rival of {x}?
Of which town is {x} [the rival|jealous]?
~ [Do you know|Can you say] which town is the rival of {x}?
""",
    craft="""
What do the [people|workshops|craftsmen] of {x} [make|build|produce]?
What is [made|built|produced] [in {x}|by the people of {x}]?
[Tell me|Name|Say] what the people of {x} make.
[What|Which] things come from the workshops of {x}?
~ [Do you know|Can you say] what they make in {x}?
""",
).items()}

STATEMENTS = facts.STATEMENTS | {attribute: Wordings(text) for attribute, text in dict(
    drink="""
{x} [drinks|likes to drink|always orders] {v}.
The [favourite |]drink of {x} is {v}.
[In the cup of {x} there is always|For {x} they pour] {v}.
""",
    instrument="""
{x} plays the {v}.
{x} [owns|carries|practises on] a {v}.
The instrument of {x} is the {v}.
[In the evening|On Sundays] one hears the {v} of {x}.
""",
    fear="""
{x} is [afraid of|scared of|frightened by] {v}.
{x} fears {v}[| more than anything].
[What frightens {x} is|{x} hides from] {v}.
""",
    ride="""
{x} travels by {v}.
{x} [comes|goes] to market with a {v}.
A {v} [carries|takes] {x} [from place to place|everywhere].
""",
    game="""
{x} [plays|likes to play|is good at|loves] {v}.
The [favourite |]game of {x} is {v}.
[In the evening|After work] {x} plays {v}.
""",
    season="""
{x} [likes|loves|waits for] the {v}.
The [favourite |]season of {x} is {v}.
[In no season is {x} so happy as in|{x} is happiest in] {v}.
""",
    age="""
{x} is {v} years old.
{x} is {v}.
The age of {x} is {v}.
{x} has [lived|seen] {v} [years|summers].
""",
    friend="""
{x} is a friend of {v}.
The [best |]friend of {x} is {v}.
{x} [trusts|visits] {v}.
""",
    inn="""
The inn [in|of] {x} is [called |]the {v}.
In {x} [one sleeps|one eats|they drink] at the {v}.
{x} has an inn called the {v}.
""",
    wells="""
{x} has {v} wells.
There are {v} wells in {x}.
In {x} one counts {v} wells.
""",
    feast="""
{x} [feasts|celebrates] on {v}.
The feast of {x} is on {v}.
In {x} there is a feast every {v}.
""",
    rival="""
{x} is the rival of {v}.
{x} [quarrels|argues] with {v}.
The rival of {x} is {v}.
""",
    craft="""
The people of {x} make {v}.
In {x} they [make|build] {v}.
The workshops of {x} [make|send out] {v}.
""",
).items()}

DOES = {attribute: Wordings(text) for attribute, text in dict(
    town="[lives in|has a home in|comes from] {v}", trade="[works as a|is a|is by trade a] {v}",
    pet="[keeps|has|owns] a {v}", food="[likes to eat|loves|likes best] {v}",
    colour="[likes the colour|likes best the colour|prefers the colour] {v}",
    river="[lies on|was built on|stands by] the river {v}", good="[sells|is known for|trades in] {v}",
    ruler="[is ruled by|obeys|is led by] {v}", flag="[has a|waves a|owns a] {v} flag",
    drink="[drinks|orders|likes to drink] {v}", instrument="[plays|owns|practises] the {v}",
    fear="[is afraid of|fears|is scared of] {v}", ride="[travels by|rides a|comes with a] {v}",
    game="[plays|is good at|likes to play] {v}", season="[likes|loves|waits for] the {v}",
    age="[is {v}|is {v} years old|has lived {v} years]", friend="[is a friend of|trusts|visits] {v}",
    inn="has [the inn|an inn called] the {v}", wells="has {v} wells", feast="[feasts|celebrates] on {v}",
    rival="[is the rival of|quarrels with] {v}", craft="[makes|produces] {v}",
).items()}
