# SPDX-License-Identifier: Apache-2.0
"""Words, sentences and names made from a seed: haystacks that need no data set."""

import uuid

ADJECTIVES = """
able amber ancient arid bold brave bright brisk broad calm clever cold crisp curious damp dark deep distant
dry eager early empty faint fair fast fierce fine flat fresh gentle glad golden grand green hollow honest
humble icy keen large late lean light little lively lonely long loud mellow mild modest narrow neat noble odd
old pale patient plain polite proud quick quiet rapid rare rough round rural sharp short silent silver simple
slow small smooth soft solid steady steep still strange strong subtle sunny sweet swift tall tame thin tidy
tiny vast vivid warm weary wide wild wise young
""".split()
NOUNS = """acorn alley anchor apple arrow atlas badge bakery barn basket beacon bench bird blanket boat bottle branch
bridge brook bucket button cabin camera candle canoe canyon castle cellar chair chapel cherry circle cliff
clock cloud coast coin copper corner cottage cradle crane creek curtain dagger dairy desk dock door drum eagle
engine falcon farm feather fence ferry field flag flute forest fountain fox garden gate glacier goblet grape
guitar hall hammer harbor hat hedge hill horn house island ivory jar jetty kettle kite ladder lake lamp
lantern leaf lemon letter library lily lock lodge lumber magnet maple market meadow mill mirror mountain
museum needle nest net oak ocean office olive orchard organ otter oven paddle palace paper path pebble pencil
piano pillow pine pipe plank plaza pond pony porch quarry quilt raft ranch raven reef ribbon ring river road
robin rocket roof rope saddle sail sand school shed shell ship shore silo sled snail spoon spring stable star
statue stone stove street studio swan table tailor tent theater tiger timber torch tower tractor trail tray
tree trumpet tunnel vase vault village violin wagon wall walnut water wave well whale wharf wheel willow
window wolf yard
""".split()
VERBS = """admires brings builds carries cleans counts covers crosses draws enters finds follows guards holds keeps
leaves lifts likes moves opens paints passes reaches remembers repairs sees sells shows turns visits watches
""".split()
SYLLABLES = """
ba be bi bo bu da de di do du fa fe fi fo ga go ha he hi ho ja jo ka ke ki ko ku la le li lo lu ma me mi mo mu
na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi za ze zi zo
""".split()


def sentence(rng):
    a = [rng.choice(ADJECTIVES) for _ in range(2)]
    n = [rng.choice(NOUNS) for _ in range(3)]
    return rng.choice(
        (
            f"The {a[0]} {n[0]} {rng.choice(VERBS)} the {n[1]} behind the {a[1]} {n[2]}.",
            f"Near the {n[0]}, a {a[0]} {n[1]} {rng.choice(VERBS)} every {a[1]} {n[2]}.",
            f"Nobody knows why the {n[0]} {rng.choice(VERBS)} the {a[0]} {n[1]} and not the {n[2]}.",
            f"A {a[0]} {n[0]} and a {a[1]} {n[1]} stand beside the {n[2]}.",
            f"When the {n[0]} is {a[0]}, the {n[1]} {rng.choice(VERBS)} the {a[1]} {n[2]}.",
        )
    )


def key(rng):
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng):
    return str(rng.randint(1000000, 9999999))


def identifier(rng):
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def made_up(rng, used, syllables=3):
    """A pronounceable word that is no other one's."""
    while True:
        word = "".join(rng.choice(SYLLABLES) for _ in range(syllables))
        if word not in used:
            used.add(word)
            return word


def capitals(rng, used, length=5):
    while True:
        word = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(length))
        if word not in used:
            used.add(word)
            return word
