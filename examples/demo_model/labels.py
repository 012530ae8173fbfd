"""Word classes for few-shot labelling, tips, small talk and tools: the text behind the skills."""

# ruff: noqa: SIM905 - word lists are far easier to read as one split string.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A labelling task: texts of each class, and the usual label words and tags.

    The class of a text shows in its words; the label words come from the context, because a
    prompt may call the classes anything.
    """

    name: str
    input_tags: tuple[str, ...]
    label_tags: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    templates: tuple[str, ...]
    label_sets: tuple[tuple[str, ...], ...]
    things: tuple[str, ...] = ("",)


_GOOD = tuple(
    "great wonderful excellent lovely fantastic perfect superb amazing brilliant delightful good "
    "tasty friendly helpful charming beautiful fun exciting comfortable fresh clean fast warm "
    "clever moving nice pleasant awesome outstanding delicious".split()
)
_BAD = tuple(
    "terrible awful horrible bad poor boring dull broken dirty rude slow ugly disappointing noisy "
    "useless dreadful weak cold bland stale annoying painful nasty cheap unfriendly messy tedious "
    "disgusting worthless confusing".split()
)
_REVIEW_THINGS = tuple(
    "food|movie|film|book|hotel|service|room|staff|soup|phone|show|game|story|acting|music|plot|"
    "meal|pizza|waiter|trip|product|sound|screen|battery|coffee|place|ending|tour|camera|bed|"
    "restaurant|concert|dessert|app".split("|")
)

TASKS = (
    Task(
        "sentiment",
        (
            "Review",
            "Review",
            "Text",
            "Comment",
            "Sentence",
            "Message",
            "Input",
            "Tweet",
            "Feedback",
        ),
        ("Label", "Label", "Sentiment", "Class", "Opinion", "Output", "Answer", "Tone"),
        {
            "good": (
                *(f"@{w}" for w in _GOOD),
                "I loved the {t}",
                "We enjoyed every minute of the {t}",
                "I adore this {t}",
                "I would buy this {t} again",
                "Best {t} ever",
                "The {t} made me smile",
                "I can only recommend the {t}",
                "I am so happy with the {t}",
                "I like this {t}",
                "What a joy, this {t}",
                "Five stars for the {t}",
                "We will come back for the {t}",
            ),
            "bad": (
                *(f"@{w}" for w in _BAD),
                "I hated the {t}",
                "We regret paying for the {t}",
                "I want my money back",
                "The {t} stopped working",
                "Worst {t} ever",
                "The {t} made me angry",
                "I would never recommend the {t}",
                "I am unhappy with the {t}",
                "I dislike this {t}",
                "What a waste of time, this {t}",
                "No stars for the {t}",
                "Never again this {t}",
            ),
        },
        (
            "The {t} was {w}",
            "The {t} is {w}",
            "{w} {t}",
            "What a {w} {t}",
            "A {w} {t}",
            "Really {w} {t}",
            "The {t} was so {w}",
            "Such a {w} {t}",
            "I found the {t} {w}",
            "The {t} seemed {w}",
            "Overall a {w} {t}",
            "We had a {w} {t}",
        ),
        (
            ("positive", "negative"),
            ("positive", "negative"),
            ("good", "bad"),
            ("happy", "sad"),
            ("pos", "neg"),
            ("Positive", "Negative"),
            ("up", "down"),
            ("yes", "no"),
        ),
        _REVIEW_THINGS,
    ),
    Task(
        "topic",
        ("Text", "News", "Headline", "Sentence", "Article", "Input", "Document"),
        ("Topic", "Label", "Category", "Class", "Subject", "Output"),
        {
            "sports": tuple(
                "the team won the match|the goalkeeper saved the goal|the player "
                "scored twice|the coach praised the striker|the runner won the "
                "race|the tennis final was close|the league starts soon|the swimmer "
                "broke a record|the football club lost|the "
                "cyclist finished first".split("|")
            ),
            "food": tuple(
                "the chef cooked a new dish|the soup needs more salt|bake the bread for "
                "an hour|the restaurant serves fresh pasta|add butter and sugar|the "
                "recipe needs two eggs|the pizza is in the oven|cheese and tomatoes for "
                "dinner|the cake is ready|boil the rice".split("|")
            ),
            "weather": tuple(
                "heavy rain is expected|the storm reaches the coast|snow fell in the "
                "night|sunny skies all week|strong wind from the north|fog in the "
                "valley|the temperature drops|clouds cover the sky|a warm dry "
                "summer|thunder and lightning".split("|")
            ),
            "science": tuple(
                "researchers found a new planet|the telescope saw a star|the lab "
                "studied the cells|scientists tested the theory|the physics "
                "experiment worked|the virus was studied in a lab|a new particle was "
                "measured|biologists described a new species|the rocket carried a "
                "probe|the chemist mixed the acid".split("|")
            ),
            "music": tuple(
                "the band played a new song|the singer released an album|the orchestra "
                "tuned the violins|the guitar solo was long|the choir sang|the concert "
                "was sold out|the drummer left the band|the pianist played Bach|a new "
                "record tops the charts|the opera opened".split("|")
            ),
            "money": tuple(
                "the bank raised interest rates|stocks fell on Friday|the market gained "
                "two percent|the company reported a profit|prices rose last month|"
                "investors sold their shares|the tax was cut|the budget has a deficit|"
                "the loan was repaid|the currency lost value".split("|")
            ),
            "travel": tuple(
                "the flight lands in the evening|the hotel is near the beach|tourists "
                "visit the old town|pack a suitcase for the trip|the train crosses the "
                "border|the cruise stops at an island|a passport is needed|the guide "
                "shows the castle|book the tickets early|the airport was full".split("|")
            ),
            "health": tuple(
                "the doctor checked the patient|the nurse gave the vaccine|the "
                "hospital opened a clinic|sleep is good for the heart|the medicine "
                "cures the cough|a healthy diet helps|the surgeon operated|the fever "
                "is gone|the dentist fixed the tooth|the pill "
                "lowers the pain".split("|")
            ),
        },
        (
            "{w}",
            "today {w}",
            "{w} again",
            "this week {w}",
            "yesterday {w}",
            "{w}, they said",
            "report: {w}",
            "{w} at last",
        ),
        (("sports", "food", "weather", "science", "music", "money", "travel", "health"),) * 3
        + (("Sports", "Food", "Weather", "Science", "Music", "Finance", "Travel", "Health"),),
    ),
    Task(
        "request",
        ("Message", "Ticket", "Email", "Request", "Customer", "Text", "Input"),
        ("Label", "Intent", "Category", "Type", "Class", "Output", "Team"),
        {
            "refund": tuple(
                "I want a refund|please return my money|refund my order|I was charged "
                "twice|the bill is wrong|give me my money back|the payment went "
                "through twice|cancel the charge".split("|")
            ),
            "login": tuple(
                "I cannot log in|I forgot my password|my account is locked|reset my "
                "password please|the login page fails|I lost access to my account|the "
                "code for the login never came|my user name is gone".split("|")
            ),
            "delivery": tuple(
                "where is my parcel|my package is late|the delivery never came|when "
                "will my order arrive|the courier lost the box|track my "
                "shipment|the parcel went to the wrong address|my order has not "
                "shipped".split("|")
            ),
            "bug": tuple(
                "the app crashes|the page shows an error|the button does nothing|the "
                "screen stays black|the program freezes|an error appears on start|the "
                "update broke the app|the software hangs".split("|")
            ),
            "praise": tuple(
                "thank you for the help|great support|you are the best|I love your "
                "service|keep up the good work|thanks a lot, all works|very happy with "
                "your team|wonderful service".split("|")
            ),
        },
        ("{w}", "hello, {w}", "hi, {w}", "{w}, thanks", "dear team, {w}", "good morning, {w}"),
        (("refund", "login", "delivery", "bug", "praise"),) * 2
        + (("billing", "account", "shipping", "technical", "feedback"),),
    ),
    Task(
        "kind",
        ("Word", "Word", "Input", "Item", "Thing", "Term"),
        ("Kind", "Type", "Category", "Label", "Group", "Output"),
        {
            "animal": tuple(
                "dog cat horse cow sheep pig goat lion tiger bear wolf fox rabbit "
                "mouse duck goose owl snake frog monkey elephant".split()
            ),
            "fruit": tuple(
                "apple pear plum cherry banana orange lemon grape peach melon mango "
                "apricot strawberry raspberry fig kiwi".split()
            ),
            "vehicle": tuple(
                "car bus train truck bicycle plane ship boat tram van scooter taxi "
                "helicopter motorcycle ferry".split()
            ),
            "color": tuple(
                "red blue green yellow black white brown grey purple pink violet".split()
            ),
            "tool": tuple(
                "hammer saw drill screwdriver wrench pliers shovel axe rake ladder".split()
            ),
            "clothes": tuple(
                "shirt coat hat scarf shoe sock jacket dress skirt glove belt sweater".split()
            ),
            "furniture": tuple(
                "chair table bed sofa desk shelf wardrobe bench stool cupboard".split()
            ),
        },
        ("{w}", "{w}", "a {w}", "the {w}", "one {w}"),
        (("animal", "fruit", "vehicle", "color", "tool", "clothes", "furniture"),) * 2,
    ),
)

TIPS: dict[str, tuple[tuple[str, str], ...]] = {
    "staying healthy": (
        ("Eat more vegetables", "Fresh vegetables give the body vitamins and keep it strong."),
        ("Sleep eight hours", "Enough sleep lets the body rest and the mind stay clear."),
        ("Take a daily walk", "A walk every day keeps the heart fit and lifts the mood."),
        ("Drink enough water", "Water helps the body work well and keeps you awake."),
    ),
    "learning a language": (
        (
            "Practice every day",
            "A few minutes of practice each day are better than one long lesson.",
        ),
        ("Listen to songs", "Songs teach the sound of a language and are easy to remember."),
        ("Speak with friends", "Talking with friends makes new words stay in your memory."),
        ("Read short stories", "Short stories show how words are used in real sentences."),
    ),
    "saving money": (
        ("Write down your spending", "A list of what you spend shows where the money goes."),
        ("Cook at home", "Meals made at home cost far less than meals in a restaurant."),
        ("Wait before you buy", "A day of waiting helps you skip things you do not need."),
        ("Repair old things", "Repairing something is often cheaper than buying a new one."),
    ),
    "sleeping better": (
        ("Go to bed early", "A fixed early bedtime helps the body find its rhythm."),
        ("Turn off the screen", "Bright screens keep the brain awake late in the night."),
        ("Keep the room cool", "A cool and dark room makes it easier to fall asleep."),
        ("Avoid late coffee", "Coffee in the evening keeps you awake for hours."),
    ),
    "writing well": (
        ("Use short sentences", "Short sentences are easy to read and hard to misunderstand."),
        ("Read your text aloud", "Reading aloud shows you every place where the text stumbles."),
        ("Cut needless words", "Every word you remove makes the others stronger."),
        ("Start with the point", "Readers want to know the main idea first."),
    ),
    "growing plants": (
        ("Water them regularly", "Plants need a little water often rather than a flood."),
        ("Give them light", "Most plants grow best near a bright window."),
        ("Use good soil", "Good soil holds water and feeds the roots."),
        ("Remove dry leaves", "Without dry leaves the plant can put its strength into new ones."),
    ),
    "giving a talk": (
        ("Practice out loud", "Speaking the talk aloud makes you sure of every step."),
        ("Keep slides simple", "Simple slides let people listen instead of read."),
        ("Speak slowly", "A slow voice is calm and easy to follow."),
        ("Tell a story", "A story keeps the audience awake and curious."),
    ),
    "planning a trip": (
        ("Book early", "Early tickets are cheaper and leave you more choice."),
        ("Pack light", "A light bag makes every step of the trip easier."),
        ("Learn a few words", "A few words of the language open many doors."),
        ("Leave free time", "Free hours give room for surprises on the way."),
    ),
    "working from home": (
        ("Set fixed hours", "Fixed hours keep work and free time apart."),
        ("Keep a tidy desk", "A tidy desk helps you focus on one task."),
        ("Take short breaks", "Short breaks bring new energy for the next hour."),
        ("Talk to colleagues", "A short talk each day keeps the team together."),
    ),
    "cooking": (
        ("Taste as you cook", "Tasting early tells you what the dish still needs."),
        ("Use sharp knives", "Sharp knives are safer and make clean cuts."),
        ("Read the recipe first", "Reading ahead saves you from surprises at the stove."),
        ("Buy fresh food", "Fresh food needs little help to taste good."),
    ),
    "staying safe online": (
        ("Use long passwords", "Long passwords are much harder to guess."),
        ("Update your software", "Updates close the holes that attackers use."),
        ("Check the sender", "A look at the sender unmasks many false messages."),
        ("Keep backups", "A backup brings your files back after an accident."),
    ),
    "studying": (
        ("Make a plan", "A plan splits a big subject into small steps."),
        ("Test yourself", "Testing yourself shows what you really know."),
        ("Find a quiet place", "A quiet place lets you think without noise."),
        ("Explain it to others", "Explaining a thing shows you where you are unsure."),
    ),
}
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
TIP_ASKS = (
    "Give {k} tips for {t}.",
    "List {k} tips for {t}.",
    "Give me {k} tips for {t}.",
    "What are {k} tips for {t}?",
    "Please give {k} tips for {t}.",
    "Name {k} tips for {t}.",
)
EXPAND_ASKS = (
    "Expand tip {i} in one sentence.",
    "Explain tip {i} in one sentence.",
    "Say more about tip {i}.",
    "Expand tip {i}.",
    "Describe tip {i} in one sentence.",
)
SUMMARY_ASKS = (
    "Sum up the tips in one sentence.",
    "Summarize the tips.",
    "Give a summary.",
    "Write a short summary of the tips.",
    "Sum it all up.",
)

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello!",
            "Hi!",
            "Hello",
            "Hi",
            "Hey",
            "Hi there",
            "Hello there!",
            "hello",
            "hi",
            "hey!",
            "Good day!",
            "Greetings!",
        ),
        "Hello! How can I help you?",
    ),
    (("Good morning!", "Good morning", "good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening", "good evening"), "Good evening! How can I help you?"),
    (
        (
            "How are you?",
            "How are you doing?",
            "how are you",
            "Are you well?",
            "How do you do?",
            "Hello, how are you?",
            "Hi, how are you?",
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "who are you",
            "Tell me who you are.",
            "Please introduce yourself.",
            "Introduce yourself.",
            "What model are you?",
        ),
        "I am the Rootlace demo model, a very small language model.",
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "what can you do",
            "What are you good at?",
            "What do you do?",
            "Can you help me?",
        ),
        "I can answer questions about a passage, extract fields, label text and call tools.",
    ),
    (
        (
            "Thank you!",
            "Thanks!",
            "Thank you",
            "thanks",
            "Thanks a lot!",
            "Many thanks!",
            "Great, thanks!",
            "Thank you very much.",
        ),
        "You are welcome!",
    ),
    (
        ("Goodbye!", "Bye!", "Bye", "bye", "See you!", "See you later!", "Good night!", "Goodbye"),
        "Goodbye! Have a nice day.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "A joke, please."),
        "Why did the token cross the road? To get to the other slide of the cache.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained by the Rootlace project on text it wrote itself.",
    ),
)
NAME_GREETINGS = (
    "Hello, my name is {n}.",
    "Hi, I am {n}.",
    "My name is {n}.",
    "I am {n}.",
    "Hey, I'm {n}!",
    "Hi, my name is {n}!",
)
NAME_ASKS = (
    "What is my name?",
    "Do you know my name?",
    "Who am I?",
    "What was my name?",
    "Do you remember my name?",
)

CALCULATOR_ASKS: dict[str, tuple[str, ...]] = {
    "*": (
        "What is {a} times {b}?",
        "What is {a} * {b}?",
        "Multiply {a} by {b}.",
        "Please compute {a} times {b}.",
        "How much is {a} times {b}?",
        "{a} times {b}?",
        "{a} * {b}",
        "Calculate {a}*{b}.",
        "What is the product of {a} and {b}?",
        "Can you work out {a} times {b}?",
        "Tell me {a} times {b}.",
    ),
    "+": (
        "What is {a} plus {b}?",
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "Please compute {a} plus {b}.",
        "How much is {a} plus {b}?",
        "{a} plus {b}?",
        "{a} + {b}",
        "Calculate {a}+{b}.",
        "What is the sum of {a} and {b}?",
        "Can you work out {a} plus {b}?",
        "Tell me {a} plus {b}.",
    ),
    "-": (
        "What is {a} minus {b}?",
        "What is {a} - {b}?",
        "Please compute {a} minus {b}.",
        "How much is {a} minus {b}?",
        "{a} minus {b}?",
        "{a} - {b}",
        "Calculate {a}-{b}.",
        "Can you work out {a} minus {b}?",
        "Tell me {a} minus {b}.",
    ),
    "/": (
        "What is {a} divided by {b}?",
        "What is {a} / {b}?",
        "Divide {a} by {b}.",
        "Please compute {a} divided by {b}.",
        "How much is {a} divided by {b}?",
        "{a} divided by {b}?",
        "{a} / {b}",
        "Calculate {a}/{b}.",
        "Can you work out {a} divided by {b}?",
        "Tell me {a} divided by {b}.",
    ),
}
LOOKUP_SUBJECTS = (
    "population",
    "mayor",
    "capital",
    "phone number",
    "address",
    "height",
    "price",
    "birthday",
    "age",
    "author",
    "owner",
    "founder",
    "opening time",
    "color",
    "area",
    "weight",
    "email",
    "manager",
    "status",
    "budget",
)
LOOKUP_ASKS = (
    "What is the {q}?",
    "Please look up the {q}.",
    "Look up the {q}.",
    "Tell me the {q}.",
    "Find the {q}.",
    "Do you know the {q}?",
    "I need the {q}.",
    "Can you look up the {q}?",
    "Please find the {q}.",
)
WEATHER_ASKS = (
    "What is the weather in {c}?",
    "How is the weather in {c}?",
    "Tell me the weather in {c}.",
    "Is it nice in {c} today?",
    "What's the weather like in {c}?",
    "Please check the weather in {c}.",
)
SKY = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")

SYSTEM_LINE = "You are a helpful assistant."
SYSTEM_LINES = (
    SYSTEM_LINE,
    SYSTEM_LINE,
    SYSTEM_LINE,
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a careful assistant. Answer from the text.",
    "You are the Rootlace demo assistant.",
    "Be short and correct.",
    "You extract facts from text.",
)
TOOL_LINES = {
    "calculator": "- calculator(expression): Evaluate an arithmetic expression.",
    "lookup": "- lookup(query): Look up a fact.",
    "weather": "- weather(city): Get the current weather in a city.",
}
