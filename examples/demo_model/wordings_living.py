"""Wordings of facts about persons, pets and companies, for training only.

The notation is that of ``wordings.py``.
"""

# Kind of subject -> first field name of a fact -> sentences, questions.
Grammar = dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]]

LIVING: Grammar = {
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
                "{s} [gives work to|pays|keeps|relies on|counts] {v} [people|workers].",
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
}
