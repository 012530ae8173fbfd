"""Wordings of facts about orders, events, books, trips and buildings, for training only.

The notation is that of ``wordings.py``.
"""

from .wordings_living import Grammar

THINGS: Grammar = {
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
                "[What|Which thing|Which article] is [inside|part of|packed for] order {n}?",
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
                "[What|Which] [number|amount] of [pieces|items] [does order {n} have|is in {n}]?",
                "How [large|big] is order {n}[| in pieces]?",
            ),
        ),
        "price": (
            (
                "{s} [is worth|sold for|comes at|was billed at|amounts to] {v} [euros|dollars].",
                "[The sum|The cost|The amount due|The bill] [is|says] {v} [euros|dollars].",
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
                "How [much|many euros or dollars] does [admission to|a seat at] the {n} cost?",
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
                "[Who|Which person|Which traveler] [flies with|has a ticket for] {n}?",
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
                "[In a year|Every year|Per year] {v} [guests|visitors] [walk in|are counted].",
                "{v} [guests|visitors|tickets] a year [are counted|is the figure].",
            ),
            (
                "How many [people|guests|visitors] [does {n} draw|walk into {n}]?",
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
