"""Single sentences about the small world, for the texts of `edit` and the passages of `needle`."""
from playground.questions.world.names import BOYS, COLOURS, COUNTED, FOODS, GIRLS, PEOPLE, PETS, THINGS, TOWNS, TRADES
from playground.questions.world.wording import Wordings

FORMS = Wordings("""
{n} [walked|rode|hurried|came|travelled] to {t} with a {p}.
The {c} {x} [stood|lay|was left|leaned] near the [door|gate|stove|wall].
{n} [sold|bought|found|counted] {k} {o} at the [market|fair|harbour].
In {t} the {w} [made|mended|sold|broke] a {x}.
A {p} [ate|stole|smelled] the {f}.
{n} [found|lost|hid|drew] a {c} {x}.
It [rained|snowed] in {t} for {k} [days|hours].
{n} [gave|sold|brought] the {w} some {f}.
Nobody [saw|heard|noticed] the {p} behind the {x}.
{n} wrote a [letter|card|long letter] to the {w}.
The {p} [slept|sat|waited] under the {x}.
[Every morning|Every evening|On Sundays] {n} [ate|cooked|asked for] {f}.
The [road|path|bridge] to {t} was [long|steep|closed|muddy].
{n} [lost|forgot|left] a {x} in {t}.
The {w} painted the {x} {c}.
{k} {o} [lay|stood|were] on the [table|floor|cart].
{n} and the {w} [talked|argued|laughed] about {f}.
A {c} {p} [ran|walked] through {t}.
The {w} of {t} [owns|keeps|wants] a {p}.
{n} [painted|cleaned|carried] the {x} [for|with] the {w}.
[Last year|In spring|In winter] {t} had {k} [visitors|storms|feasts].
The {p} of {n} [likes|dislikes] {f}.
""")


def sentence(rng, name=None):
    """One random sentence; if it mentions a person, `name` is used."""
    words = dict(n=name or rng.choice(PEOPLE + GIRLS + BOYS), t=rng.choice(TOWNS), p=rng.choice(PETS))
    words |= dict(c=rng.choice(COLOURS), x=rng.choice(THINGS), k=rng.randint(2, 40))
    words |= dict(o=rng.choice(COUNTED), w=rng.choice(TRADES), f=rng.choice(FOODS))
    return FORMS.draw(rng).format(**words)
