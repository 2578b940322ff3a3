"""The closed vocabulary of the bundled model's tasks: everything a template may be filled with."""

from __future__ import annotations

from typing import Final

Words = tuple[str, ...]


def _words(text: str) -> Words:
    return tuple(text.replace("_", " ").split("|") if "|" in text else text.replace("_", " ").split())


NAMES: Final = _words(
    "Anna|Ben|Clara|David|Elena|Felix|Grace|Hugo|Ines|Jonas|Karin|Leo|Mara|Nils|Olga|Paul|Rosa|Simon|Tara|Viktor|"
    "Wanda|Yusuf|Zoe|Adam|Bella|Carlos|Dora|Emil|Fatima|George|Hanna|Ivan|Julia|Kenji|Lena|Marco|Nina|Oscar|Petra|"
    "Ravi|Sara|Tom|Uma|Vera|Will|Maya|Amir|Chloe|Dario|Edith|Frank|Gina|Henry|Iris|Jack|Kira|Lukas|Mia|Noah|Omar"
)
CITIES: Final = _words(
    "Oslo|Lisbon|Vienna|Prague|Dublin|Athens|Madrid|Berlin|Paris|Rome|Warsaw|Geneva|Bergen|Porto|Turin|Ghent|Kyoto|"
    "Lima|Quito|Cairo|Tunis|Delhi|Perth|Boston"
)
JOBS: Final = _words(
    "baker|nurse|pilot|teacher|farmer|lawyer|painter|singer|plumber|dentist|writer|tailor|chemist|gardener|judge|"
    "sailor|barber|florist|miner|driver"
)
PETS: Final = _words("cat|dog|parrot|rabbit|turtle|hamster|goat|pony|canary|lizard|duck|ferret")
COLOURS: Final = _words("red|blue|green|yellow|black|white|grey|brown|orange|purple|pink|silver")
HOBBIES: Final = _words(
    "chess|tennis|knitting|fishing|cycling|hiking|dancing|pottery|sailing|skiing|rowing|photography|swimming|golf"
)
DRINKS: Final = _words("tea|coffee|milk|cocoa|lemonade|juice|cider|water")
INSTRUMENTS: Final = _words("piano|violin|flute|guitar|cello|trumpet|drum|harp|clarinet|organ")
DAYS: Final = _words("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
DAY_PARTS: Final = _words("morning|afternoon|evening")
COUNTS: Final = _words("two|three|four|five|six|seven|eight|nine")
OBJECTS: Final = _words(
    "lamp|chair|table|sofa|mirror|clock|kettle|carpet|bicycle|camera|radio|suitcase|guitar|printer|heater|desk|"
    "basket|blanket|ladder|tent|drill|telescope|backpack|umbrella"
)
VEHICLES: Final = _words("car|truck|bus|train|tram|boat|ferry|van|scooter|tractor")
#: From least to most.
SIZES: Final = _words("tiny|small|large|huge")
SPEEDS: Final = _words("sluggish|slow|quick|rapid")
TEAMS: Final = _words("Falcons|Tigers|Sharks|Wolves|Eagles|Bears|Lions|Ravens|Hornets|Bulls|Comets|Giants")
SPORTS: Final = _words("football|hockey|handball|rugby|basketball|volleyball")
SUBJECTS: Final = _words(
    "budget|schedule|website|contract|hiring_plan|survey|warehouse|newsletter|training|roof_repair|audit|logo|"
    "sales_report|safety_rules|parking|new_office"
)
GROUPS: Final = _words("sales|design|finance|support|legal|research|kitchen|museum|library|garden|harbour|school")
WEATHERS: Final = _words("rain|snow|fog|sunshine|hail|thunder|drizzle|frost|sleet|storms")
WINDS: Final = _words("north|south|east|west")
GOODS: Final = _words(
    "apples|pears|candles|notebooks|pencils|cups|plates|towels|lemons|onions|roses|batteries|buttons|envelopes|"
    "cushions|spoons"
)
SHOP_PLACES: Final = _words("front door|back door|garage|reception|warehouse gate|kitchen|neighbour|office")
TRANSPORTS: Final = _words("by train|by bus|by car|by boat|by plane|by bicycle")
SIGHTS: Final = _words(
    "the castle|the harbour|the cathedral|the museum|the old bridge|the market|the zoo|the opera|the lighthouse|"
    "the gardens"
)

REVIEWED: Final = _words(
    "soup|pizza|cake|salad|coffee|waiter|room|bed|pool|view|film|actor|plot|music|book|phone|screen|battery|service|"
    "garden|staff|breakfast|tour|guide|seat|driver"
)
GOOD: Final = _words(
    "good|great|excellent|lovely|wonderful|pleasant|superb|perfect|delightful|charming|brilliant|impressive|"
    "splendid|fantastic"
)
BAD: Final = _words(
    "bad|awful|terrible|poor|dreadful|horrible|disappointing|boring|nasty|weak|annoying|miserable|unpleasant|shabby"
)
DEGREES: Final = _words("really|very|quite|simply|truly|rather")

#: topic -> (who, did, what): every triple of one topic makes a headline.
TOPICS: Final[dict[str, tuple[Words, Words, Words]]] = {
    "sports": (
        _words("The striker|The goalkeeper|The coach|The home team|A young runner|The champion|The referee"),
        _words("wins|loses|misses|celebrates|remembers|prepares for"),
        _words("the final|the cup|the marathon|the second match|the league title|the penalty"),
    ),
    "business": (
        _words("The bank|The investor|The carmaker|A start-up|The airline|The retailer|The insurer"),
        _words("raises|cuts|reports|doubles|expects|announces"),
        _words("its prices|its profits|lower sales|new shares|the dividend|a merger"),
    ),
    "science": (
        _words("The laboratory|An astronomer|The biologist|A physicist|The telescope team|The university"),
        _words("discovers|measures|observes|studies|explains|names"),
        _words("a new planet|a rare fossil|a virus|the comet|an enzyme|a distant galaxy"),
    ),
    "weather": (
        _words("Heavy rain|A cold front|Thick fog|The storm|Strong wind|A heat wave|Early snow"),
        _words("reaches|leaves|covers|crosses|surprises|cools"),
        _words("the coast|the valley|the islands|the mountains|the northern hills|the plains"),
    ),
    "politics": (
        _words("The minister|The parliament|The mayor|The senate|The president|The opposition|The council"),
        _words("debates|rejects|signs|delays|defends|proposes"),
        _words("the new law|the tax reform|the treaty|the election date|the vote|a school act"),
    ),
    "culture": (
        _words("The orchestra|The novelist|The gallery|A film maker|The theatre|The choir|A sculptor"),
        _words("presents|opens|rehearses|finishes|performs|shows"),
        _words("a symphony|a new novel|an exhibition|a comedy|a ballet|old portraits"),
    ),
}
