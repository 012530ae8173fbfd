"""Many more wordings of each fact, for training only, written as small grammars.

``[a|b|]`` stands for any one of its alternatives; the other braces are those of ``passages.py``.
Evaluation never draws from here.  No wording is used that contains all content words (by their
first five letters) of a wording kept for evaluation of the same fact: see :func:`too_close`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .pools import Source

# Kind of subject -> first field name of a fact -> sentences, questions.
Grammar = dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]]

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_STOP = frozenset(
    "a an the is are was were be been has have had do does did of in on at to for by from with "
    "and it its this that who whom what which when where how many much will there s order "
    "flight".split()
)


def expand(source: Source, grammar: str) -> str:
    """One wording of the grammar, its inner choices first."""
    while "[" in grammar:
        grammar = _CHOICE.sub(lambda match: source.pick(match.group(1).split("|")), grammar)
    return grammar


def _words(wording: str) -> list[str]:
    return re.findall(r"[a-z]+|\{\w+\}", wording.lower())


def too_close(wording: str, kept: Sequence[str], keys: Sequence[str] = ()) -> bool:
    """Whether a wording says no more than one of those ``kept`` for evaluation.

    That is: it has all content words of a kept wording (words of the field's name do not count),
    or, where that has none, the same words in the same order.
    """
    plain = _STOP | {part for key in keys for part in key.split("_")}
    mine = _words(wording)
    stems = {word[:5] for word in mine}
    for other in kept:
        theirs = _words(other)
        content = {word[:5] for word in theirs if word not in plain and word[0] != "{"}
        if content <= stems if content else theirs == mine:
            return True
    return False


GENERIC_SAYS = (
    "The {k} of {n} [is|is listed as|is given as|was noted as|reads] {v}.",
    "{n}'s {k} [is|was given as|is noted as|remains] {v}.",
    "[As to|As for|Regarding|Concerning|On] the {k} of {n}: {v}.",
    "[The|Its|Listed|Known|Current] {k}: {v}.",
    "[The|This] {k} [is|is said to be|turned out to be|has been set to|was] {v}.",
    "{n} ({k}: {v}) [is well known|is new here|was mentioned again].",
    "[Records|Our notes|The files|Papers] [give|show|state|have] {v} as the {k} of {n}.",
)
# A verb that does not exist: the kind of the value alone tells which fact it is.
UNKNOWN_SAYS = (
    "{s} {x} [|in |at |with |by |from |for |to |near |the ]{v}.",
    "{s} [has|will|can|did|was|is] {x} [|in |with |by |for |a |to ]{v}[| today| again| now].",
    "{x} [|in |with |by |of |to ]{s} [is|was] {v}.",
)
COMPOSED_ASKS = (
    "[Say|State|Write|Show|Report|Return|Look up|Read out|Recall|Quote|Spell out] the {k} "
    "[of|for|belonging to|that belongs to] {n}.",
    "[Could|Can|Would|Will] you [say|state|tell me|write|show me|find] the {k} of {n}?",
    "[What|Which] {k} [belongs to|goes with|is linked to|fits|is stated for|is noted for] {n}?",
    "[Looking at|As for|About|Regarding|Concerning|For] {n}, [what is|state|name|say|I need] "
    "the {k}[.|?|]",
    "{n}'s {k}[?|, please.|!|]",
    "{k} of {n}[?|, please|]",
    "[I need|I am after|We look for|My interest is|Let me have|I ask for] the {k} of {n}.",
    "What [might|would|could|should|can] the {k} of {n} be?",
    "[Is there|Do you see|Did you read] a {k} for {n}, and [what|which] is it?",
    "The text [names|states|gives|has] a {k} for {n}: [what|which] is it?",
)
WRAPPED_ASKS = (
    "[Please|Kindly|Quickly|Just|Now] [say|answer|reply|respond|state]: {q}",
    "{q} [Reply|Respond|Answer] with [the value|one word|a few words|a short answer|nothing else].",
    "[Going by|Judging from|Based on|Looking at|From|Using] [the text|this text|the lines|what is "
    "written|the note|these sentences], {l}",
    "[I wonder|I was wondering|I ask myself|My boss asks|Somebody asked|A friend asks]: {l}",
    "[Hey|Hi|OK|Right|Well|Fine|Good|Next|And|Also|Then], {l}",
    "[Just|Only] [one|a] [thing|question|detail|point]: {l}",
    "{q} [Be brief|Keep it short|No sentence|One answer|Thanks|Thank you|Look closely][.|!]",
    "[Help me|Solve this|Look it up|Check this|Read on]: {l}",
    "{x}: {q}",
    "{x}, {l}",
    "{q} {x}.",
)

WORDINGS: Grammar = {
    "person": {
        "age": (
            (
                "{s} is [now|already|currently|only|about|exactly|almost] {v}[| years old].",
                "{s} has [seen|lived through|known] {v} [years|summers|winters|springs].",
                "At the age of {v}, {s} [still works hard|feels young|runs every day].",
                "{s} [will be|became|has reached|reached|hit] {v} [this week|in May|on Sunday].",
                "[Though|Although] {v}, {s} [seems younger|sleeps little|travels a lot].",
                "{v} years [of life lie behind|have passed for] {s}.",
                "{s} admits to [being|having reached] {v}.",
            ),
            (
                "How [many years|long] has {n} [lived|been alive]?",
                "How many years old is {n}[| now| today]?",
                "How old [would you say|might one say] {n} is?",
                "What [number of years|figure] is given for {n}'s [life|years]?",
                "[Say|State|Give] how old {n} is.",
            ),
        ),
        "city": (
            (
                "{s} [stays|settled|dwells|grew roots|rents a room|owns a place] in {v}.",
                "{s} [calls {v} home|made a home in {v}|feels at home in {v}].",
                "[Home|The home] for {s} is {v}.",
                "{s} [is from|hails from|is a native of|is a citizen of|belongs in] {v}.",
                "{s} has [an apartment|a cottage|a room|an address|a garden] in {v}.",
                "[In|Near the center of|Close to the station of] {v}, {s} has a house.",
                "{s} [went to live|found a place|put down roots|settled down] in {v}.",
                "{s} [walks the streets|knows every corner|wakes up each day] of {v}.",
            ),
            (
                "[What|Which] [place|city|town] does {n} call home?",
                "In [what|which] [place|town|city] [has {n} settled|is {n} at home|does {n} stay]?",
                "Where [has {n} made a home|is the home of {n}|does {n} stay|can {n} be found]?",
                "[Say|State|Tell me] where {n} [lives|stays|is at home].",
                "[What|Which] city [is {n} in|would {n} name as home|houses {n}]?",
            ),
        ),
        "job": (
            (
                "{s} [makes money|gets paid|is busy|serves|is known] as a {v}.",
                "{s} [became|wants to stay|is still|is now|turned into|is proud to be] a {v}.",
                "[For work|For a job|As for work], {s} is a {v}.",
                "{s} [took a job|got a position|started|spent ten years|began] as a {v}.",
                "{s} [is a skilled|is a respected|is a busy|is a young] {v}.",
                "[Everyone knows|People praise|Many call on] {s} as a {v}.",
                "Being a {v}, {s} [rises early|works late|has full days].",
            ),
            (
                "[What|Which] [kind of|sort of|] work does {n} do?",
                "[What|Which] [job|role|trade|line of work] does {n} [have|hold|follow]?",
                "How does {n} [make money|make a living|earn money|fill the working day]?",
                "As what [is {n} employed|does {n} serve|is {n} paid]?",
                "[Say|State|Tell me] what {n} [does for work|is by trade].",
            ),
        ),
        "company": (
            (
                "{s} [has a job|serves|earns a wage|spends the day|is on the staff] at {v}.",
                "{s} [gets paid by|was hired by|draws a salary from|signed with] {v}.",
                "{v} [hired|pays|took on|counts on|relies on] {s}.",
                "[Since May|For years|Since last year] {s} has been [with|at] {v}.",
                "{s} [started|began|found a post] at {v}.",
            ),
            (
                "[What|Which] [firm|business|company] [pays|hired|took on] {n}?",
                "[For|At] [what|which] [firm|company|business] is {n} [active|busy|hired]?",
                "[Who|Which firm] [pays|hired] {n}?",
                "[Name|Say] the [firm|company] [that pays|that hired|behind] {n}.",
            ),
        ),
        "hobby": (
            (
                "{s} [likes|adores|is keen on|is crazy about|goes in for|cares for] {v}.",
                "[After work|At weekends|On Sundays|In summer] {s} [turns to|does|takes up] {v}.",
                "{s} [never tires of|lives for|dreams of|relaxes with|is good at] {v}.",
                "{s}'s [great love|free time|passion] [is|goes to|belongs to] {v}.",
                "[Nothing makes|What makes] {s} happy [but|is] {v}.",
            ),
            (
                "What does {n} [like to do|do after work|do for fun|do in free time]?",
                "How does {n} [relax|spend free time|pass the weekend]?",
                "[What|Which] [pastime|sport or art|activity] [pleases|suits|attracts] {n}?",
                "What is {n} [keen on|good at|crazy about]?",
            ),
        ),
        "pet": (
            (
                "{s} [cares for|feeds|walks|adopted|rescued|raised|bought|has] a {v}.",
                "At home {s} [has|keeps|feeds] a {v}.",
                "A {v} [lives with|sleeps beside|waits at home for|belongs to|follows] {s}.",
                "{s} [got|was given|found|takes in] a {v} [last year|in spring|as a child].",
            ),
            (
                "What [animal|creature|pet] [lives with|belongs to|waits for|sleeps beside] {n}?",
                "[What|Which] animal [did {n} adopt|is at home with {n}|does {n} feed]?",
                "What does {n} [have as a pet|keep at home|feed every day]?",
            ),
        ),
        "food": (
            (
                "{s} [loves to eat|prefers|cooks|never refuses|dreams of|adores] {v}.",
                "[For dinner|At lunch|On Sundays] {s} [has|wants|cooks|asks for] {v}.",
                "Nothing [tastes better to {s}|pleases {s} more] than {v}.",
                "{s}'s [plate is full of|kitchen smells of|table is set for] {v}.",
            ),
            (
                "What [does {n} eat most|meal does {n} prefer|would {n} eat|does {n} cook]?",
                "[What|Which] [meal|food|dish] [pleases|suits|is loved by|does] {n}[| most]?",
                "What [is on|fills] {n}'s plate?",
            ),
        ),
        "partner": (
            (
                "{s} [wed|married|lives with|is close to|is engaged to|is dating] {v}.",
                "{v} [is the partner of|is the friend of|is dear to|stands by|lives with] {s}.",
                "{s} and {v} are [a couple|close friends|a pair|together].",
                "{s} [spends much time|often meets|is happy] with {v}.",
            ),
            (
                "[Who|Which person] [is married to|is dear to|stands by|lives with] {n}?",
                "With whom [does {n} live|is {n} close|is {n} together]?",
                "Who is {n}'s [friend|partner|companion]?",
                "[Who is|Name] the [companion|partner|best friend] of {n}[.|?]",
            ),
        ),
        "birth_year": (
            (
                "{s} [saw the light of day|first cried|was a baby] in {v}.",
                "{s}'s [birth|first day] was in {v}.",
                "{s} [has a passport that says|was born back in|is a child of] {v}.",
                "In {v} {s} was [born|a newborn].",
            ),
            (
                "[What|Which] year [saw the birth of {n}|did {n} enter the world]?",
                "[Since what year has|From which year is] {n}[| been alive]?",
                "In [what|which] year did [the life of {n} begin|{n}'s mother give birth]?",
            ),
        ),
        "country": (
            (
                "{s} [went to school|studied|worked once|served] in {v}.",
                "{s} [has relatives in|knows well|loves|misses|flew to|visited|toured] {v}.",
                "[Every summer|Once a year|Last year] {s} [goes to|visits|drives to] {v}.",
                "{s} has [ties to|friends in|a passport of] {v}.",
            ),
            (
                "[What|Which] country [has {n} seen|does {n} know|is tied to {n}]?",
                "[What|Which] [land|country] [matters to|is named for|goes with] {n}?",
                "To [what|which] country does {n} have ties?",
            ),
        ),
        "phone": (
            (
                "{s} [has the number|uses the number|is listed under|picks up at|is on] {v}.",
                "[Dial|Ring|Text|Use] {v} [for|to talk to|to reach|to get hold of] {n}.",
                "{s} [left|gave|wrote down] the number {v}.",
                "[For|To speak with] {n} dial {v}.",
            ),
            (
                "[What|Which] number [reaches|belongs to|is right for|rings at] {n}?",
                "[What|Which number] should [I|we] dial [for|to reach|to talk to] {n}?",
                "[On|Under] [what|which] number [is {n} listed|does {n} pick up]?",
            ),
        ),
    },
    "order": {
        "customer": (
            (
                "{s} [belongs to|goes back to|was requested by|was made by|was sent in by] {v}.",
                "{v} [asked for|requested|made|sent in|is waiting for|paid for] {s}.",
                "[The buyer|The client|The person behind it] is {v}.",
                "{s} [has the name of|is signed by|lists] {v}.",
            ),
            (
                "[Who|Which person] [made|requested|sent in|is behind|waits for] order {n}?",
                "[To whom does|For whom is] order {n}[| belong]?",
                "Who is the [buyer|client|person] [of|behind] order {n}?",
            ),
        ),
        "item": (
            (
                "{s} [holds|lists|names|asks for|consists of|brings] a {v}.",
                "[In the box|In the parcel|Packed in it] [is|lies|you find] a {v}.",
                "[The product|The article|The thing ordered] is a {v}.",
                "A {v} [was ordered|is on the list|was packed|is what was bought].",
            ),
            (
                "[What|Which thing|Which article] is [inside|part of|listed in|packed for] order {n}?",
                "What [did the buyer get|was bought|was packed] [in|with] order {n}?",
                "[What|Which item] does order {n} [list|hold|name|bring]?",
            ),
        ),
        "quantity": (
            (
                "{s} [lists|counts|has|covers|comes to] {v} [pieces|units|items|of them].",
                "[In all|Altogether|All in all] {v} [pieces|units|items] [are wanted|were bought].",
                "[The number of pieces|The amount ordered|The count] is {v}.",
                "{v} [of them|units|items] [were packed|are needed|will be sent].",
            ),
            (
                "How many [items|units|pieces|things] [does order {n} list|were bought in {n}]?",
                "[What|Which] [number|amount] of [pieces|items|units] [does order {n} have|is in {n}]?",
                "How [large|big] is order {n}[| in pieces]?",
            ),
        ),
        "price": (
            (
                "{s} [is worth|sold for|comes at|was billed at|amounts to] {v} [euros|dollars].",
                "[The sum|The cost|The amount due|The invoice] [is|says|shows] {v} [euros|dollars].",
                "{v} [euros|dollars] [were paid|are due|must be paid|were charged].",
                "[For this|For all that] one pays {v} [euros|dollars].",
            ),
            (
                "How [expensive|dear] is order {n}?",
                "[What|Which] [sum|amount] [was paid|is due|was billed] for order {n}?",
                "How [much money|many euros or dollars] [is|was] [due|paid] for order {n}?",
            ),
        ),
        "city": (
            (
                "{s} [travels to|is on its way to|has to reach|heads to|must get to] {v}.",
                "[The goods|The box|The package|The truck] [goes|is going|travels] to {v}.",
                "{s} [ends up|will be unloaded|is awaited|arrives] in {v}.",
                "[The address|The place of delivery] is in {v}.",
            ),
            (
                "[What|Which] city [receives|awaits|gets|is the goal of] order {n}?",
                "Where [will order {n} end up|is order {n} awaited|does order {n} travel]?",
                "[Where to|To what place] [is|does] order {n} [headed|travel]?",
            ),
        ),
        "date": (
            (
                "{s} [comes|is due|is expected|reaches the door|was made] on {v}.",
                "[The day|The day noted|Delivery] is [on |]{v}.",
                "[On|By] {v} {s} [should be there|will be there|is due].",
            ),
            (
                "When [is order {n} due|does order {n} come|will order {n} be there]?",
                "[For|On] [what|which] [day|date] is order {n} [due|noted|expected]?",
            ),
        ),
        "shop": (
            (
                "{s} [is handled by|comes out of|was filled by|is shipped by|left] {v}.",
                "{v} [sold it|sells this|took care of the sale|packed the goods|sends it].",
                "[The shop|The store|The dealer] [is|was] {v}.",
            ),
            (
                "[What|Which] [dealer|store|firm|shop] [sold|filled|packed|ships|sent] order {n}?",
                "[By whom|By which shop] was order {n} [sold|packed|filled|shipped]?",
                "[From which|At which] [shop|store|dealer] [was|is] order {n}?",
            ),
        ),
    },
    "event": {
        "city": (
            (
                "{s} [comes to|goes to|is organized in|will fill the streets of|is set for] {v}.",
                "[The host city|The town|The location] is {v}.",
                "{v} [welcomes|awaits|celebrates|is proud of] [the guests|everyone|the event].",
                "{s} [is planned|meets|gathers people|runs] in {v}.",
            ),
            (
                "[What|Which] [city|town] [welcomes|awaits|has|is home to] the {n}?",
                "Where [will|can] [one find|people go for|we see] the {n}?",
                "[In|To] [what|which] town [is the {n} planned|does the {n} come]?",
            ),
        ),
        "date": (
            (
                "{s} [is planned for|will be on|happens on|is fixed for|is set for] {v}.",
                "[Mark|Note|Remember|Save] the date: {v}.",
                "[On|From] {v} [it begins|everything starts|the doors are open|people gather].",
            ),
            (
                "[On|For] [what|which] date is the {n} [planned|set|fixed]?",
                "When [will the {n} be|does the {n} happen|is the {n} planned]?",
                "[What|Which] date should [I|one] [note|save|mark] for the {n}?",
            ),
        ),
        "day": (
            (
                "[The day|The weekday] is {v}.",
                "{s} [is held|happens|is planned|begins|takes place] on a {v}.",
                "[Guests come|People meet|It all happens|We meet] on {v}.",
            ),
            (
                "[What|Which] [weekday|day] [does the {n} fall on|is set for the {n}]?",
                "On [what|which] weekday [is|does one go to] the {n}?",
            ),
        ),
        "time": (
            (
                "{s} [kicks off|gets going|gets under way|is due to begin|is set] at {v}.",
                "[The first guests come|The first words are spoken|All begins|Entry is] at {v}.",
                "[From|At] {v} [guests may come in|the hall is open|it goes on].",
            ),
            (
                "[At|From] [what|which] hour [is|does] the {n} [begin|open|start]?",
                "How late does the {n} [begin|get going|kick off]?",
                "[What|Which] time [must one be at|is given for|applies to] the {n}?",
            ),
        ),
        "place": (
            (
                "{s} [takes over|is housed in|uses|has rented|moves into|happens inside] {v}.",
                "[People gather|Everyone comes together|The stage stands|Seats are] at {v}.",
                "[The hall|The room|The house] is {v}.",
            ),
            (
                "[What|Which] [building|hall|house] [houses|is rented for|is used for] the {n}?",
                "In [what|which] [building|hall|house] [is|takes place] the {n}?",
                "[Inside|At] which [hall|building] do people [gather|meet] for the {n}?",
            ),
        ),
        "host": (
            (
                "{s} is [organized|run|presented|opened|moderated|guided] by {v}.",
                "[The organizer|The speaker|The person in charge|The guide] is {v}.",
                "{v} [runs|presents|organized|guides|will speak at|is in charge of] {s}.",
            ),
            (
                "[Who|Which person] [runs|presents|organizes|opens|speaks at|guides] the {n}?",
                "[By whom|By which person] is the {n} [run|presented|organized]?",
                "Who is [in charge of|behind|the speaker at|the organizer of] the {n}?",
            ),
        ),
        "guests": (
            (
                "[There is room for|They hope for|The hall holds] {v} [guests|people|visitors].",
                "{s} [draws|attracts|counts|awaits|hopes for] {v} [people|guests].",
                "{v} [guests|people|seats] [are on the list|signed up|were counted].",
            ),
            (
                "How many [guests|people|visitors] [signed up for|does one count at] the {n}?",
                "[What|Which] number of [people|guests|visitors] does the {n} [draw|have|await]?",
                "How [large|big] is the crowd at the {n}?",
            ),
        ),
        "price": (
            (
                "[A seat|A place|Getting in|Admission|One ticket] [is|costs] {v} [euros|dollars].",
                "[Visitors|Guests] pay {v} [euros|dollars][| at the door| each].",
                "{v} [euros|dollars] [buy a ticket|are asked at the door|is the fee].",
            ),
            (
                "How [much|many euros or dollars] does [admission to|a seat at|a place at] the {n} cost?",
                "What [does one pay|do guests pay|is the fee] [for|at] the {n}?",
                "How [expensive|dear] is [a ticket for|a seat at] the {n}?",
            ),
        ),
    },
    "book": {
        "author": (
            (
                "{s} [comes from the pen of|was penned by|was created by|is a text by] {v}.",
                "[The writer|The person behind it] is {v}.",
                "{v} [penned it|is the writer|spent years on it|created {s}|is its author].",
            ),
            (
                "[Who|Which person] [penned|created|is behind|is the writer of] {n}?",
                "[From whose|From which] pen [is|comes] {n}?",
                "[Whose|Which writer's] [work|text|book] is {n}?",
            ),
        ),
        "year": (
            (
                "{s} [was first sold|was first read|reached the shops|was released] in {v}.",
                "[In|Since] {v} [it reached readers|the first copies were sold|{s} can be bought].",
                "[The year|The first edition] is [from |]{v}.",
            ),
            (
                "[What|Which] year [saw {n} come out|is the first edition of {n} from]?",
                "[Since when|Since what year] can {n} be [bought|read]?",
                "When [did {n} come out|was {n} released|did {n} reach the shops]?",
            ),
        ),
        "pages": (
            (
                "{s} [counts|comes to|takes|spans|offers|needs] {v} pages.",
                "[Readers|You] [turn|get|must read] {v} pages.",
                "[The number of pages|The length in pages] is {v}.",
                "[On|Over] {v} pages [the story unfolds|much happens].",
            ),
            (
                "How many pages [must one read in|does one turn in|make up] {n}?",
                "[What|Which] number of pages [does {n} have|is given for {n}]?",
                "How [thick|big] is {n}?",
            ),
        ),
        "publisher": (
            (
                "{s} [was released by|is sold by|was put out by|came out with|appeared at] {v}.",
                "{v} [released it|put it out|sells it|is behind the edition|made the copies].",
                "[The house behind it|The publishing house] is {v}.",
            ),
            (
                "[What|Which] [house|firm|company] [released|put out|sells|is behind] {n}?",
                "[By|At] [which|what] [house|company] was {n} [released|put out]?",
                "Who [released|put out|prints] {n}?",
            ),
        ),
        "setting": (
            (
                "[The plot|The action|The story|It all] [unfolds|happens|plays|begins] in {v}.",
                "[Readers walk|It leads the reader|The pages take you] [through|to] {v}.",
                "{s} [plays|happens] in {v}.",
                "{v} is [the scene of it all|where it happens].",
            ),
            (
                "[What|Which] city [is the scene of|forms the background of|do we see in] {n}?",
                "Where [does {n} play|does the plot of {n} unfold|does {n} happen]?",
            ),
        ),
        "price": (
            (
                "{s} [can be bought for|is on sale for|is worth|goes for] {v} [euros|dollars].",
                "[A copy|Each copy|The reader] [costs|takes|pays] {v} [euros|dollars].",
                "{v} [euros|dollars] [buy a copy|is what it costs].",
            ),
            (
                "How [expensive|dear] is {n}?",
                "[What|Which sum] does one [pay|give|need] for {n}?",
                "[For|At] how many euros or dollars is {n} [sold|on sale]?",
            ),
        ),
        "hero": (
            (
                "[It is the story of|The text is about|Everything turns around] {v}.",
                "{v} is [the hero|the main figure|whom we follow|the one who wins].",
                "{s} [follows|is about|describes the life of] {v}.",
            ),
            (
                "[Whom|Which person] [do we follow|does one meet] in {n}?",
                "[Who|Which figure] [plays the main part|is the central figure|wins] in {n}?",
                "About whom is {n}?",
            ),
        ),
    },
    "trip": {
        "passenger": (
            (
                "{v} [is flying|has a ticket|will travel|checked in|has a place|sits in it].",
                "[The traveler|The guest|On the list] is {v}.",
                "{s} [carries|takes|brings|is booked for|has room for] {v}.",
            ),
            (
                "[Who|Which person|Which traveler] [flies with|has a ticket for|checked in for] {n}?",
                "[Whom|Which person] does flight {n} [carry|take|bring]?",
                "For whom [is|was] flight {n} [booked|paid]?",
            ),
        ),
        "from": (
            (
                "{s} [sets off|sets out|takes off|begins|lifts off] [from|in] {v}.",
                "[The start|The origin|The airport of departure] is [in |]{v}.",
                "[From|Out of] {v} [the plane rises|it sets out|{s} heads off].",
            ),
            (
                "[From where|Out of which city] does [flight |]{n} [set off|take off|come]?",
                "[What|Which] city does [flight |]{n} [leave|come from|set out from]?",
                "Where [does the journey of {n} begin|does {n} set off|does {n} come from]?",
            ),
        ),
        "to": (
            (
                "{s} [heads for|flies to|arrives in|ends in|touches down in|travels to] {v}.",
                "[The goal|The end of the journey|The airport of arrival] is [in |]{v}.",
                "[In|At] {v} [the journey ends|it touches down|all get off].",
            ),
            (
                "[What|Which] city does [flight |]{n} [head for|fly to|reach]?",
                "Where [does the journey of {n} end|does {n} arrive|does {n} touch down]?",
                "[Where to|To what place] [is|does] [flight |]{n} [headed|fly]?",
            ),
        ),
        "day": (
            (
                "{s} [flies|is planned|goes|is set|takes off|is booked] [on|for] {v}.",
                "[On|Next|This] {v} [everyone flies|the plane goes|they travel].",
                "[The weekday|Travel day] is {v}.",
            ),
            (
                "[What|Which] weekday [is flight {n} planned for|does {n} fly]?",
                "On [what|which] [day|weekday] does [flight |]{n} [fly|go|take off]?",
            ),
        ),
        "time": (
            (
                "{s} [goes|sets off|lifts off|is in the air|rolls] at {v}.",
                "[At|From] {v} [the engines start|the plane rolls|{s} lifts off].",
                "[The hour|Take-off|The time] is [at |]{v}.",
            ),
            (
                "[At|By] [what|which] hour does [flight |]{n} [go|fly|set off|lift off]?",
                "When [is {n} in the air|does {n} set off|does flight {n} go]?",
            ),
        ),
        "seat": (
            (
                "[The traveler has|The ticket shows|One sits in|Your place is] [|seat ]{v}.",
                "[Seat|Place|Chair] {v} [is booked|was given|is taken|is yours].",
            ),
            (
                "[What|Which] [seat|place|chair] [is booked|was given|is taken] [on|for] {n}?",
                "Where does one sit on flight {n}?",
            ),
        ),
        "gate": (
            (
                "[All meet|The crew waits|Passengers wait|The queue is] at gate {v}.",
                "{s} [leaves|goes|departs|is called] [from|at] gate {v}.",
                "[Gate|Look for gate|Walk to gate] {v}[| is open| is the right one].",
            ),
            (
                "[To|From] [what|which] gate [must one walk for|does one go for|leaves] {n}?",
                "Where [do passengers of {n} wait|is {n} called]?",
            ),
        ),
    },
    "company": {
        "founder": (
            (
                "{s} [goes back to|was created by|was built up by|owes its start to] {v}.",
                "{v} [created it|built it up|opened it|had the idea|set the firm up alone].",
                "[The person behind it|It all began with|The creator] [is |was |]{v}.",
            ),
            (
                "[Who|Which person] [created|built up|opened|is behind|had the idea for] {n}?",
                "[By whom|By which person] was {n} [created|opened|built up]?",
                "To whom does {n} owe its start?",
            ),
        ),
        "year": (
            (
                "{s} [started|was created|was set up|was born|opened its doors|dates back] in {v}.",
                "[Since|From] {v} [it has been in business|the firm has been active].",
                "[The year of its start|Its first year] was {v}.",
            ),
            (
                "[What|Which] year [saw the start of|was the first for] {n}?",
                "When [did {n} start|was {n} created|did {n} open its doors]?",
                "How far back does {n} go?",
            ),
        ),
        "city": (
            (
                "{s} [is at home|works|has its home|is found|resides|can be visited] in {v}.",
                "[The firm|The office|The main building] [is in|stands in|overlooks] {v}.",
                "{s} [is run from|operates from|rents a floor in|has rooms in] {v}.",
                "[Its home|Its seat|The address] is [in |]{v}.",
            ),
            (
                "[What|Which] [city|town] is [home to|the seat of|the home of] {n}?",
                "[From|In] [what|which] [city|town] does {n} [work|operate]?",
                "Where [does {n} work|is {n} at home|can {n} be visited|is {n} found]?",
            ),
        ),
        "employees": (
            (
                "{s} [gives work to|pays|keeps|relies on|counts] {v} [people|workers|men and women].",
                "[A team of|A crew of|Some] {v} [works|is busy|people work] [there|for it].",
                "{v} [people|workers] [earn a living|have a job|are busy] there.",
            ),
            (
                "How many [workers|people] [are busy at|have a job at|earn a living at] {n}?",
                "[What|Which] number of [workers|people] does {n} [pay|keep]?",
                "How [big|strong] is the [team|crew] of {n}?",
            ),
        ),
        "product": (
            (
                "{s} [offers|produces|trades in|ships|designs|deals in|turns out] {v}.",
                "[People buy|One gets|Customers want] its {v}.",
                "{s} [earns money|made a name|does business] with {v}.",
            ),
            (
                "What does {n} [offer|produce|trade in|deal in|design|turn out]?",
                "With what does {n} [earn money|do business]?",
                "[What|Which goods] can one [buy from|get from|order at] {n}?",
            ),
        ),
        "ceo": (
            (
                "{s} is [managed|headed|guided|governed] by {v}.",
                "{v} [is at the top|is in charge|heads it|manages it|gives the orders].",
                "[At the top|At the head|In charge] [is|stands] {v}.",
            ),
            (
                "[Who|Which person] [heads|manages|guides|governs|is in charge of] {n}?",
                "Who is [at the top of|at the head of|the chief of] {n}?",
                "[By whom|By which person] is {n} [managed|headed]?",
            ),
        ),
    },
    "pet": {
        "species": (
            (
                "{s} is a [small|big|happy|clever|lazy|shy|brave|quick|sweet|noisy] {v}.",
                "{s} [was born|came into the world] a {v}.",
                "[As|Like] a {v} {s} [sleeps a lot|needs care|likes to run].",
                "[Everyone can see that|One sees at once that] {s} is a {v}.",
            ),
            (
                "[What|Which] [sort of|type of] [animal|creature|pet] is {n}?",
                "[As what|As which animal] was {n} born?",
                "[What|Which] creature is {n}?",
            ),
        ),
        "age": (
            (
                "{s} is [now|already|only|about|almost] {v}[| years old].",
                "{s} has [seen|lived] {v} [summers|winters|years].",
                "{s} [will be|became|has reached|reached] {v} [this week|on Sunday|in spring].",
                "{v} years [ago|back] {s} was born.",
            ),
            (
                "How [many years|long] has {n} [lived|been alive]?",
                "How many years old is {n}[| now| today]?",
                "[Say|State|Give] how old {n} is.",
            ),
        ),
        "color": (
            (
                "{s} [looks|shines|was born|has turned|appears] {v}.",
                "[The coat|The tail|The head|The back] of {n} is {v}.",
                "{s} [wears|shows|has] a {v} [coat|back|tail].",
            ),
            (
                "[In|Of] [what|which] color is {n}?",
                "How is {n} colored?",
                "[What|Which] color [shows|marks|do we see on] {n}?",
            ),
        ),
        "owner": (
            (
                "{s} [is owned by|is fed by|was adopted by|obeys|follows|was bought by] {v}.",
                "{v} [owns|feeds|walks|adopted|keeps|bought|loves] {n}.",
                "[The master|The family|The keeper] of {n} is {v}.",
            ),
            (
                "[Who|Which person] [feeds|walks|adopted|keeps|bought] {n}?",
                "[By whom|By which person] is {n} [owned|fed|kept]?",
                "Whose [animal|pet] is {n}?",
            ),
        ),
        "city": (
            (
                "{s} [stays|sleeps|runs around|was born|grew up|is at home] in {v}.",
                "{s} [roams the streets of|comes from|is from|belongs in] {v}.",
                "[The address|The house] of {n} is in {v}.",
            ),
            (
                "[What|Which] [city|town|place] is {n} [from|at home in]?",
                "Where [is {n} at home|does {n} stay|does {n} sleep|does {n} come from]?",
                "In [what|which] [town|place|city] does {n} [stay|sleep|run around]?",
            ),
        ),
        "weight": (
            (
                "{s} [comes to|tips the scales at|amounts to|reaches|has grown to] {v} kilos.",
                "[The scale|The vet's scale] [shows|says|reads] {v} kilos[| for {n}].",
                "{s} is {v} kilos [heavy|of joy].",
            ),
            (
                "How many kilos [does {n} have|is {n}|does the scale show for {n}]?",
                "What [does the scale show|number of kilos is given] for {n}?",
            ),
        ),
    },
    "building": {
        "city": (
            (
                "{s} [belongs to|is found in|can be seen in|adorns|overlooks|is part of] {v}.",
                "[Visitors travel|One goes|Tourists fly] to {v} [to see it|for it].",
                "[The city around it|Its city|Its location] is {v}.",
                "{s} is [located|situated|placed|built] in {v}.",
            ),
            (
                "[What|Which] [city|town] [has|is home to|owns|surrounds] {n}?",
                "Where [can one see|is one to find|does one visit|was] {n}[| built]?",
                "[To|In] [what|which] town [must one go to see|does one find] {n}?",
            ),
        ),
        "year": (
            (
                "{s} [was put up|was completed|went up|was erected|opened its doors] in {v}.",
                "[Since|From] {v} {s} [has stood there|can be visited].",
                "[Work on it ended|The last stone was laid|The workers left] in {v}.",
            ),
            (
                "[What|Which] year [saw {n} go up|is {n} dated to]?",
                "When [was {n} put up|did {n} go up|was {n} completed]?",
                "Since [when|what year] [does {n} stand|has {n} stood there]?",
            ),
        ),
        "height": (
            (
                "{s} [measures|goes up|stands|climbs|is] {v} meters [tall|up|to the top].",
                "[From bottom to top|Up to the roof|To the top] it is {v} meters.",
                "[The top|The roof] [is|lies] {v} meters [up|above the ground].",
            ),
            (
                "How many meters [does {n} measure|is it to the top of {n}|up is the roof of {n}]?",
                "How far [up does {n} go|is it to the top of {n}]?",
                "How big is {n} in meters?",
            ),
        ),
        "architect": (
            (
                "{s} [was drawn by|was created by|is a work of|was thought up by] {v}.",
                "{v} [created|thought up|had the idea for|drew] {s}.",
                "[The person behind it|The designer|The mind behind it] [was|is] {v}.",
            ),
            (
                "[Who|Which person] [created|thought up|drew|is behind] {n}?",
                "[By whom|By which person] was {n} [drawn|created|thought up]?",
                "Whose [work|idea] is {n}?",
            ),
        ),
        "visitors": (
            (
                "{s} [draws|attracts|counts|sees|receives] {v} [people|guests] [each|every] year.",
                "[In a year|Every year|Per year] {v} [guests|visitors|people] [walk in|are counted].",
                "{v} [guests|visitors|tickets] a year [are counted|is the figure].",
            ),
            (
                "How many [people|guests|visitors] [does {n} draw|walk into {n}|are counted at {n}]?",
                "[What|Which] number of [people|guests|visitors] does {n} [draw|see|receive]?",
            ),
        ),
        "color": (
            (
                "[The door|The walls|The tower|The facade] [is|are|was painted] {v}.",
                "{s} [looks|shines|has turned|appears|glows] {v}.",
                "{s} [wears|shows|has] a {v} [coat of paint|door|roof|front].",
            ),
            (
                "[In|Of] [what|which] color is {n}[| painted]?",
                "How is {n} [painted|colored]?",
                "[What|Which] color [shows|marks|do we see on] {n}?",
            ),
        ),
    },
}
