"""Passages, questions and tasks that a model is tried with where the user gives none.

All of it was written for this purpose. The places and people don't exist, so that no model knows
the answers from anywhere but the passages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """A short text with a title, one chunk of a prompt."""

    title: str
    text: str

    @property
    def chunk(self) -> str:
        """As it stands in a prompt."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True)
class Question:
    """A question; the answer as the passages word it; which passages (numbers) hold it."""

    text: str
    answer: str
    needs: tuple[int, ...]


PASSAGES = (
    Passage(
        "The Harbour of Tavrin",
        "Tavrin lies where the river Ossel meets a cold grey bay. Its first quay was built in "
        "1843 from blocks of pale stone that were floated down on rafts. For sixty years the town "
        "lived from salted herring; then the shoals moved north and most of the smokehouses "
        "closed. Today the harbour handles timber and glass. The harbour master is Ilse Brandt, "
        "who came to the town as a pilot and still takes the helm when the autumn fog hides the "
        "breakwater. Ships longer than ninety metres have to wait for the tide outside the bar.",
    ),
    Passage(
        "Ilse Brandt",
        "Ilse Brandt was born in the mountain village of Karsten, far from any sea. She learned to "
        "sail on a reservoir, in a boat that her uncle had made from old doors. At nineteen she "
        "joined the pilot service, and eleven years later she was the first woman to be given "
        "its silver whistle. She keeps bees on the roof of the customs house and sends the honey "
        "to her sisters every December. Colleagues say that she never raises her voice, not even "
        "on the radio in a storm.",
    ),
    Passage(
        "The Glassworks",
        "The Merrow glassworks stand on the left bank of the Ossel, two kilometres above the town. "
        "They were founded by the chemist Pavel Dorn, who had found that the white sand of the "
        "upper valley gives a glass almost free of green. The furnace burns day and night and is "
        "rebuilt every seven years. Most of what is made there now is tubing for laboratories; "
        "lamp shades, which made the name of the works, are blown only on request. About two "
        "hundred and thirty people are employed, a third of them in the grinding shop.",
    ),
    Passage(
        "Pavel Dorn",
        "Pavel Dorn studied chemistry in the city of Lindau and wrote his thesis on the colours of "
        "iron. A lung disease made him leave the laboratory for the country. He spent his last "
        "years building a library for the workers of his factory; it opened in 1911 with four "
        "thousand books and a rule that nobody might be asked why he wanted to read one. Dorn "
        "played the cello badly and with great pleasure. He is buried under a plain slab of green "
        "glass, the only piece of it he ever ordered.",
    ),
    Passage(
        "Night Trains to Lindau",
        "The night train from Tavrin to Lindau leaves at 22:40 from platform three and arrives at "
        "half past six. It has two sleeping cars, one carriage with seats and a kitchen no larger "
        "than a cupboard, from which the conductor sells soup. Dogs travel free if they fit under "
        "a bunk. Between November and March the line over the Hellin pass is often closed by snow; "
        "then the train takes the long way round by Sorrow Bridge, and arrives three hours late. "
        "Tickets are cheaper on Tuesdays.",
    ),
    Passage(
        "Sorrow Bridge",
        "Sorrow Bridge has its name from a song, not from an accident. It crosses the gorge of the "
        "Vell on nine arches, the highest of them fifty-one metres above the water. The engineer "
        "Amara Teng drew it in a single winter, after two other designs had proved too heavy for "
        "the soft rock. Iron rods were set into the piers a century later when cracks had begun to "
        "show. Swifts nest in the drain holes, which is why no work may be done on the bridge "
        "between May and August.",
    ),
    Passage(
        "Amara Teng",
        "Amara Teng built fourteen bridges and slept, it is said, under every one of them before "
        "she let a train across. Her father repaired clocks in the port of Quill, and she began by "
        "mending the gears of a drawbridge there. She refused to sign a plan that she had not "
        "walked over on foot. Her notebooks, which are kept in the museum of Lindau, are full of "
        "pressed flowers beside the calculations. In old age she taught geometry to children and "
        "paid those who found mistakes in her proofs.",
    ),
    Passage(
        "The Museum of Lindau",
        "The museum of Lindau occupies a former brewery, and on damp days the cellar still smells "
        "of malt. Its best known piece is a copper globe two metres across on which the rivers are "
        "inlaid with silver. The globe was stolen in 1968 and found nine months later in a barn, "
        "where hens had been laying their eggs in it. Admission is free on the first Sunday of the "
        "month. The director, Joon Haverkamp, would like to build a new wing for the collection of "
        "instruments, but the city has twice refused the money.",
    ),
    Passage(
        "Joon Haverkamp",
        "Before he came to the museum, Joon Haverkamp restored organs in village churches. He can "
        "tell the age of a piece of wood by its smell and has been right, by his own count, four "
        "times out of five. His book on forgotten instruments won the Orlen prize. He goes to work "
        "by rowing boat in summer and on skis when the canal freezes. Visitors who ask for the way "
        "to the toilets are likely to be shown the hydraulic clock as well, since it stands on the "
        "way and he can't pass it without stopping.",
    ),
    Passage(
        "The Lighthouse at Grey Point",
        "The lighthouse at Grey Point was lit for the first time in 1871. Its lens was ground at "
        "the Merrow glassworks and carried to the point by forty men, because no cart could have "
        "kept it from harm. The light turns once in twelve seconds and can be seen for twenty "
        "nautical miles. Since the last keeper retired it has run by itself; a technician comes "
        "every second Thursday to clean the panes. In the storm of 1953 spray broke a window "
        "thirty-eight metres above the sea.",
    ),
    Passage(
        "The Keeper's Garden",
        "Below the lighthouse at Grey Point lies a garden inside a wall of driftwood. The last "
        "keeper, Tomas Ryle, planted it in order to have something to look after that did not "
        "blink. Nothing in it grows higher than a hand: thyme, sea pinks and a pear tree that the "
        "wind has pressed flat against the stones. The pears are small and taste of salt. Ryle "
        "left the garden to the school of Tavrin, on the condition that every child should be "
        "allowed to dig in it wherever he or she liked.",
    ),
    Passage(
        "The School of Tavrin",
        "The school of Tavrin has one hundred and twelve pupils and a ship's bell instead of an "
        "electric one. Lessons begin at a quarter past eight, except on the days after a storm, "
        "when everybody helps to clear the beach first. The headmistress, Nadia Oyelaran, teaches "
        "mathematics and plays the accordion at weddings. A new gymnasium was paid for by the "
        "sale of a stamp collection that a former pupil had left to the school. The oldest class "
        "spends a week each June on board the survey ship Petrel.",
    ),
    Passage(
        "The Survey Ship Petrel",
        "The Petrel was launched as a tug and became a survey ship after her second boiler had "
        "burst. She measures the depth of the channels between Tavrin and Quill, which shift with "
        "every winter. Her crew is eleven, her captain Rasmus Lunde, a tall man who knits during "
        "the long straight legs of a survey. The ship's charts are printed on a cloth that can be "
        "washed. In 1988 she found the wreck of the Aurelia, which had been sought for eighty "
        "years, while looking for a lost anchor.",
    ),
    Passage(
        "The Wreck of the Aurelia",
        "The Aurelia was carrying tin, wine and a circus when she went down in October 1907. All "
        "on board were saved, among them a brown bear who lived for many years afterwards on a "
        "farm near Quill. The wreck lies at a depth of sixty-four metres. Divers have brought up "
        "bottles whose wine was still drinkable, and one was sold for the price of a small car. "
        "The ship's owner, the merchant Cornelis Vane, had insured her for twice her worth, but "
        "the court found no proof of fraud.",
    ),
    Passage(
        "The Port of Quill",
        "Quill is the smallest port on the coast to have a drawbridge. The bridge opens four times "
        "a day, and shopkeepers set their watches by it. Its market is held on Wednesdays and "
        "sells eels, rope, second-hand novels and, in spring, lambs. The town hall burned down in "
        "1932 and was rebuilt from the same plans, with wider stairs. Its mayor, Lucia Perrin, was "
        "a dentist before and still pulls a tooth when nobody else can be found. No building may "
        "be higher than the mast of the old ferry.",
    ),
    Passage(
        "Eel Soup",
        "The cooks of Quill don't agree on much, but all of them begin eel soup on the day before. "
        "The eel is skinned, cut into pieces as long as a thumb and left overnight in buttermilk. "
        "Dried pears, vinegar and a ham bone make the broth. Dill is added at the last moment, "
        "pepper never. Whoever finds the one whole juniper berry in the pot has to wash the "
        "dishes. The oldest written recipe, from 1764, calls for twelve hours of cooking and for "
        "patience.",
    ),
    Passage(
        "The Weather Station",
        "On the Hellin pass a weather station has been kept since 1894. Two observers live there "
        "for a month at a time, and supplies come up on a cable that was meant for ore. The "
        "coldest night so far, in February 1929, had forty-two degrees below zero. The present "
        "senior observer, Birgit Sand, counts the flashes of thunderstorms by hand because she "
        "does not trust the new detector. Her reports end with a line about the marmots, whose "
        "habits foretell the spring better than the barometer does.",
    ),
    Passage(
        "Birgit Sand",
        "Birgit Sand was a lorry driver, then a baker, and came to the weather station in answer "
        "to an advertisement that asked for somebody who did not mind silence. She has spent "
        "twenty-six winters on the pass. The bread she bakes there is carried down by skiers, who "
        "pay for it with newspapers. She holds the record for the longest series of snow "
        "measurements made by one person. She has never owned a telephone, and says that whoever "
        "wants to reach her may climb.",
    ),
    Passage(
        "The Salt Road",
        "Long before the railway the Salt Road led from the bay over the Hellin pass to Lindau. "
        "Mules went in groups of seven, each with a bell of another pitch, so that a driver could "
        "hear in the dark which of them was missing. The journey took nine days. Inns stood at "
        "every stage; the one at Karsten still has the iron rings where the animals were tied. "
        "When the tunnel was opened in 1902 the last mule train was led through it, with flowers "
        "on the harness, as a farewell.",
    ),
    Passage(
        "Karsten",
        "Karsten is a village of eighty houses at the foot of the Hellin pass. Its people were "
        "muleteers, and when the mules were no longer needed they turned to making bells. The "
        "foundry of the Aldous family casts some three thousand of them a year, mainly for cows. "
        "Each bell is tuned by filing the rim, and no two have the same note. The village has no "
        "doctor, but a nurse comes by on Mondays and Fridays. A reservoir was made above the "
        "village in 1961 and drowned the old chapel.",
    ),
    Passage(
        "The Aldous Foundry",
        "The Aldous foundry uses bronze with a fifth of tin, which makes a bell bright and "
        "brittle. Moulds are formed of clay, horsehair and a little sugar. Greta Aldous, who "
        "leads the foundry in the fifth generation, was trained as a singer and tunes by ear. In "
        "2004 she cast the great bell of the museum of Lindau, which weighs as much as a young "
        "elephant and is struck only at noon. Apprentices must file one hundred bells before "
        "they're allowed to pour one.",
    ),
    Passage(
        "The Library of the Works",
        "The library that was built for the workers of the Merrow glassworks has grown to "
        "nineteen thousand books. It is heated by the waste air of the furnace and is therefore "
        "the warmest place in the valley, which explains part of its success. The catalogue is "
        "kept on glass plates. Its librarian, Samuel Okoro, reads aloud on Thursday evenings; "
        "the grinders come straight from the late shift and bring their supper. Once a year all "
        "fines are forgiven, on the birthday of the founder.",
    ),
    Passage(
        "The Ferry of the Ossel",
        "A rope ferry crosses the Ossel below the glassworks. It needs no engine: the current "
        "pushes it over when the rudder is set aslant. The ferry takes twelve people or one cow. "
        "The ferryman, Anton Weiss, keeps a list of everything that has been left on board, and "
        "it includes a set of false teeth, a tuba and a sleeping baby, who was asked for within "
        "the hour. In flood the ferry is tied up and a flag is shown on the left bank. A crossing "
        "costs forty cents.",
    ),
    Passage(
        "The Orlen Prize",
        "The Orlen prize is given every third year for a book on crafts. It was endowed by the "
        "widow of a saddler and consists of a leather case and a sum that would just pay for a "
        "bicycle. The jury of five meets in the dining car of a train, since none of the members "
        "wanted to travel further than the others. Among the winners are a history of knots, a "
        "study of dry stone walls and a book on forgotten instruments. The prize has been refused "
        "once, by an author who said he owned a case.",
    ),
)

QUESTIONS = (
    Question("When was the first quay of Tavrin built?", "1843", (0,)),
    Question("Who is the harbour master of Tavrin?", "Ilse Brandt", (0,)),
    Question("Who founded the Merrow glassworks?", "Pavel Dorn", (2,)),
    Question("From which platform does the night train to Lindau leave?", "platform three", (4,)),
    Question("What is the name of the director of the museum of Lindau?", "Joon Haverkamp", (7,)),
    Question("When was the lighthouse at Grey Point first lit?", "1871", (9,)),
    Question("Who is the headmistress of the school of Tavrin?", "Nadia Oyelaran", (11,)),
    Question("Who is the captain of the Petrel?", "Rasmus Lunde", (12,)),
    Question("Who owned the Aurelia?", "Cornelis Vane", (13,)),
    Question("Who is the mayor of Quill?", "Lucia Perrin", (14,)),
    Question("Who is the senior observer at the weather station?", "Birgit Sand", (16,)),
    Question("Who leads the Aldous foundry?", "Greta Aldous", (20,)),
    Question("Who is the librarian of the glassworks?", "Samuel Okoro", (21,)),
    Question("Who is the ferryman of the Ossel?", "Anton Weiss", (22,)),
    Question("In which village was the harbour master of Tavrin born?", "Karsten", (0, 1)),
    Question("Where did the founder of the Merrow glassworks study?", "Lindau", (2, 3)),
    Question("What did the father of the engineer of Sorrow Bridge repair?", "clocks", (5, 6)),
    Question("Which prize did the director of the museum win?", "the Orlen prize", (7, 8)),
    Question("Where was the lens of the lighthouse at Grey Point ground?", "Merrow", (9, 2)),
    Question("Who planted the garden that was left to the school?", "Tomas Ryle", (10, 11)),
    Question("Which ship found the wreck of the Aurelia?", "Petrel", (12, 13)),
    Question("Which town's market sells eels on Wednesdays?", "Quill", (14, 15)),
    Question("In what year did the library of the glassworks open?", "1911", (3, 21)),
    Question("What do the people of the village below the pass make?", "bells", (19, 20)),
)

SUMMARY_TASKS = (
    "Summarize the texts above in two sentences.",
    "What are the texts above about? Give a short summary.",
    "Write a brief summary that names the most important facts of each text.",
    "Sum up the documents in one short paragraph.",
)
