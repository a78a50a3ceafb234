"""Lists: copy, reverse, sort, shuffle, replace, swap, insert, drop, first, last, smallest, largest, count, unique.

Short answers whose order matters, to show which positions a model can fill in parallel and which depend on their
neighbours. Grades: 1 two or three items, numbers below ten; 2 four or five; 3 six to eight; 4 nine to twelve, larger
numbers and words. `smallest` and `largest` are drills for sorting, and sorting is more frequent than the rest.
"""
from playground.questions.world.item import Item, exact, on_side
from playground.questions.world.names import COUNTED, FOODS, PETS, THINGS
from playground.questions.world.wording import Wordings

TASK = "lists"
GRADES = (1, 2, 3, 4)
SIZES = {1: (2, 3), 2: (4, 5), 3: (6, 8), 4: (9, 12)}
WORDS = THINGS + FOODS + PETS + COUNTED
ASK = {kind: Wordings(text) for kind, text in dict(
    copy="""
[Copy|Repeat|Write again|Say once more|Echo]: {s}
[Copy|Repeat|Write down] [this list|the list|these][| once more]: {s}
[The same list|The same again|That once more], please: {s}
[Do not change anything|Leave it as it is|Change nothing]: {s}
{s} [- copy it|- the same again|- repeat]
[Give|Hand|Tell|Show] me [the same|what is here|this list] [back|again]: {s}
[What you got|What you see|What is here], [once more|again|back to me]: {s}
[No change|Just copy|Only repeat]: {s}
[Once more, please|Again, please|Say it again]: {s}
[Repeat|Copy|Echo] [after me|what I say|what I write]: {s}
~ [Give back|Hand back] what you got: {s}
""",
    reverse="""
[Reverse|Write backwards|Turn around|Mirror]: {s}
[Reverse|Turn around|Flip] [this list|the list|these]: {s}
[From last to first|Last one first|Back to front|In opposite order]: {s}
Put the last one first[| and so on]: {s}
{s} [- backwards|- in reverse|- from the end]
[Start|Begin|Go] [from the end|from the back|at the back]: {s}
[The end first|Last first|End to start]: {s}
Give {s} [with the last at the start|from its end|the other way round]
[The other way round|The wrong way round|Upside down]: {s}
[Read|Say|List] [this|these|them] [from the end|from behind|from last to first]: {s}
~ [Begin at the end|Start with the last]: {s}
""",
    sort="""
[Sort|Put in order|Arrange|Order]: {s}
[Sort|Arrange|Order] [this list|the list|these]: {s}
[From small to large|Smallest first|In rising order|Bring into order]: {s}
[Sort|Put] these [from small to large|upwards|in order]: {s}
{s} [- sorted|- in order|- smallest first]
[Begin|Start] with the smallest: {s}
[From the least|From the smallest up|Rising|Up the ranks]: {s}
[Line these up|List these] [in order|from small to large]: {s}
[Bring|Get] [these|them|this list] into [rising |]order: {s}
[Small ones first|Low to high|Ascending|Upwards]: {s}
~ [Line up|Rank] from the smallest: {s}
""",
    downwards="""
[Sort downwards|Put in falling order|Largest first]: {s}
[Sort|Arrange|Order] [this list|the list|these] [downwards|from large to small]: {s}
[From large to small|In falling order|Biggest first]: {s}
[Sort|Put] these [from large to small|downwards]: {s}
{s} [- largest first|- from large to small|- downwards]
[Begin|Start] with the largest: {s}
[From the greatest|From the largest down|Falling|Down the ranks]: {s}
[Line these up|List these] [downwards|from large to small]: {s}
[Bring|Get] [these|them|this list] into falling order: {s}
[Large ones first|High to low|Descending|Downwards]: {s}
~ [Line up|Rank] from the largest: {s}
""",
    shuffle="""
[Shuffle|Mix up|Stir|Jumble]: {s}
[Shuffle|Mix|Stir] [this list|the list|these]: {s}
[Any other order|In random order|In some other order]: {s}
Put [these|them] in [random|another|a mixed] order: {s}
{s} [- shuffled|- mixed up|- in any order]
[Throw|Put] [these|them] in [any|some] order: {s}
[Mess up|Change|Lose] the order of {s}
[About|Around] they go: mix {s}
~ [Throw about|Scramble]: {s}
""",
    first="""
[First item|The first one|Start|Head]: {s}
[What|Which] [comes|is|stands] first in {s}
[Give me|Tell me|Take] the first of {s}
[With what|How] does the list start: {s}
{s} [- the first|- first one only]
[What|Which] is [the head|the start|number one] of the list {s}
[Who|What] [leads|begins|heads]: {s}
[Open|Start] with [one|the first]: {s}
[Where does|With what does] [it|this] [start|begin]: {s}
[Only|Just] the first[, please| one]: {s}
~ What [opens|leads] the list {s}
""",
    last="""
[Last item|The last one|End|Tail]: {s}
[What|Which] [comes|is|stands] last in {s}
[Give me|Tell me|Take] the last of {s}
[With what|How] does the list end: {s}
{s} [- the last|- last one only]
[What|Which] is [the tail|the end|the final one] of the list {s}
[Who|What] [ends|finishes|closes it]: {s}
[Close|End] with [one|the last]: {s}
[Where does|With what does] [it|this] [end|stop]: {s}
[Only|Just] the last[, please| one]: {s}
~ What [closes|ends] the list {s}
""",
    smallest="""
[Smallest|Least|The smallest one|Minimum]: {s}
[What|Which] is the smallest [of|in|among] {s}
[Give me|Tell me|Find] the smallest of {s}
[Which comes first|What is first] in order: {s}
{s} [- the smallest|- smallest one only]
[What|Which] [number |]is [less than the rest|below all others|smaller than the others]: {s}
[The least of all|Less than all|The lowest]: {s}
[Only|Just] the smallest[, please| one]: {s}
[Pick|Take|Say] [the smallest|the least] [out of|from] {s}
~ What is less than all the others: {s}
""",
    largest="""
[Largest|Greatest|The largest one|Maximum]: {s}
[What|Which] is the largest [of|in|among] {s}
[Give me|Tell me|Find] the largest of {s}
[Which comes last|What is last] in order: {s}
{s} [- the largest|- largest one only]
[What|Which] [number |]is [more than the rest|above all others|greater than the others]: {s}
[The most of all|More than all|The highest]: {s}
[Only|Just] the largest[, please| one]: {s}
[Pick|Take|Say] [the largest|the greatest] [out of|from] {s}
~ What is more than all the others: {s}
""",
    count="""
[How many|Count|Number of items|Length]: {s}
How many [items|entries|things] are [there |]in {s}
[Count|Find the number of] the [items|entries|things] of {s}
How long is the list {s}
{s} [- how many?|- count them]
[What is the|Tell me the] [length|number of items] of {s}
[The size|How big|How long]: {s}
How many [are there|make up the list|stand] in {s}
[Say|Give] [the length|how many]: {s}
[How many do you see|How many did I write|How many come]: {s}
~ [What is the size of|How large is] {s}
""",
    replace="""
[Replace|Exchange] {x} [by|with] {y}: {s}
In [the list|these:] {s} put {y} for {x}
[Change|Turn] {x} [to|into] {y} in {s}
{y} [instead of|in place of|for] {x}: {s}
[Where it says|For every] {x} write {y}: {s}
[Make|Have|Write] {y} [from|out of|over] {x} in {s}
{x} [becomes|shall be|is to be|is now] {y}: {s}
[Let|Make] [each|every] {x} [turn into|become] {y} in {s}
[Wherever|Whenever] [you see|there is] {x}, [write|put] {y}: {s}
[No|Not|Never] {x} but {y}: {s}
~ [Make|Let] {x} be {y}: {s}
""",
    swap="""
[Swap|Exchange|Switch] the first and the last: {s}
[Swap|Switch] [both ends|the ends] of {s}
First and last [change places|trade places]: {s}
[Let|Make] the first and the last change places in {s}
{s} [- ends swapped|- first and last exchanged]
[Exchange|Change] only the [ends|outer two]: {s}
The two ends [trade|flip|swap][| places]: {s}
[The last to the front and the first to the back|Ends swapped], the rest [stays|as it is]: {s}
[Put|Set] the first where the last is[ and the last where the first is|, and the other way round]: {s}
[Turn|Switch] round only the [ends|first and the last]: {s}
~ [Trade|Flip] only the two ends: {s}
""",
    insert="""
[Put|Write|Set] {y} [before|in front of] {x}: {s}
[Insert|Add] {y} before {x} in {s}
{y} [goes|comes|belongs] before {x}: {s}
[In|Into] {s} put {y} before {x}
{s} [- with|- plus] {y} before {x}
[Bring|Get|Push] {y} into {s} [before|just before|in front of] {x}
[Before|In front of|Just before] {x} [comes|goes|put|add] {y}: {s}
[Let|Have] {y} [in|stand] before {x}: {s}
~ [Squeeze|Push] {y} in before {x}: {s}
""",
    drop="""
[Without|Except|All but|Everything but] {x}: {s}
[Drop|Remove|Delete|Cut] {x} from {s}
[Leave out|Skip|Forget] {x}: {s}
[Remove|Delete] {x} from [the list|these:] {s}
{s} [- without|- but not] {x}
[Throw|Take|Get] {x} [away|out] [from|of]: {s}
[No|No more|Away with] {x}: {s}
{x} [goes|has to go|is out|is not wanted]: {s}
~ [Throw out|Get rid of] {x}: {s}
""",
    unique="""
[Each only once|Without repeats|No doubles]: {s}
[Remove|Drop|Delete] the [repeats|doubles] from {s}
[Write|Name|List] each [item|one] only once: {s}
[Keep|Leave] one of each: {s}
{s} [- each once|- no repeats]
[Take out|Throw out|Clear away] [repeats|what comes twice]: {s}
The doubles [go|have to go|are not wanted]: {s}
[Only once each|One of each|Nothing twice]: {s}
~ [Thin out|Clear] the doubles: {s}
""",
).items()}
OFTEN = ("sort", "sort", "downwards", "smallest", "largest")

AIMED = ("replace", "insert", "drop")       # operations on, or before, one item of the list


def generate(rng, held_out=False, grade=None):
    """A list and an operation; the held-out split hashes both."""
    return on_side(lambda voice: _list(voice, grade or voice.rng.choice(GRADES)), rng, held_out)


def score(item, text):
    """Exact match; for `shuffle`, the items may be in any order."""
    if item.meta["kind"] != "shuffle":
        return exact(item, text)
    return float(sorted(text.strip().split(", ")) == sorted(item.answer.split(", ")))


def _list(voice, grade):
    rng = voice.rng
    kind, size = rng.choice(sorted(ASK) + list(OFTEN)), rng.randint(*SIZES[grade])
    pool = _pool(rng, kind, grade)
    items = rng.sample(pool, size)
    if kind == "unique":
        items[rng.randrange(1, size)] = items[0]
    x, y = rng.choice(items), rng.choice([z for z in pool if z not in items] or pool)
    question, answer = voice.say(ASK[kind], s=written(items), x=x, y=y), written(_done(rng, kind, items, (x, y)))
    return Item(
        question,
        answer,
        TASK,
        dict(kind=kind, length=size),
        grade,
        key=f"{kind} {items} {(x, y) if kind in AIMED else ''}",
    )


def _pool(rng, kind, grade):
    """The candidates for items: numbers for operations that compare by size, otherwise numbers or words."""
    numbers = range(1, (10, 30, 100, 300)[grade - 1])
    by_size = kind in ("smallest", "largest", "downwards")
    return numbers if by_size or rng.random() < 0.5 else WORDS


def written(items):
    """'a, b, c'."""
    return ", ".join(map(str, items))


def _done(rng, kind, items, pair):
    """The list after the operation; `pair` is the item to find, and the one to replace it with or insert before it."""
    x, y = pair
    at = items.index(x)
    return dict(
        copy=items, reverse=items[::-1], sort=sorted(items), downwards=sorted(items, reverse=True),
        shuffle=rng.sample(items, len(items)), first=items[:1], last=items[-1:],
        smallest=[min(items)], largest=[max(items)], count=[len(items)], replace=[y if z == x else z for z in items],
        swap=[items[-1], *items[1:-1], items[0]], insert=[*items[:at], y, *items[at:]],
        drop=[z for z in items if z != x], unique=list(dict.fromkeys(items)),
    )[kind]
