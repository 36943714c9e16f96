# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks in RULER's manner (its task families, our own wording), sized in tokens. Standard library only.

A context is prose with fact sentences placed at random sentence ends. Questions come with the opening of their answer,
so that a model continues with the values. Every task has its own kind of fact: one context can carry all seven tasks
(layout "shared": one document, many later questions) or one each (layout "separate").
"""

import random
import re
import uuid
from dataclasses import dataclass, field

ADJECTIVES = (
    """able ample arid bold brief bright broad cheap civil clean clear close crisp deep dense double dry empty equal
exact fair fast fine firm fixed flat fluid formal free fresh full glad global green heavy high hollow ideal large late
lean level light local long lucid major mild minor mobile modest moist mute native neat new novel open oval pale patient
plump polite prime pure quick rare raw ready red regular remote rich rigid ripe round royal rural safe secure senior
short simple slim slow small smooth sober soft solar solid spare stable steep still strict strong subtle sunny super
sweet swift thin tidy tiny top total true useful vague vast vital warm weak wet white whole wide wise""".split()
)
NOUNS = """acorn album alley apron arrow atlas badge bakery barge barrel beacon bench blanket boat bottle branch brick
brush bucket button cabin cable camera canal canvas carpet cedar cellar chain chapel cherry circle clock cloud coast
coffee comet copper corner cotton cradle crater curtain dagger dairy depot dock door drum eagle easel elbow engine
falcon farm fence ferry flag flute fountain frame galaxy garage gate goblet grape guitar gull hall hangar hat hedge
helmet hill horn hut inlet iron ivory jar jetty kiln kite lake lamp lawn leaf lemon lens library lily lock lodge loom
magnet maple mast meteor mill mirror moat mountain museum nest net oar oak office olive organ otter oven paddle palace
panel paper path pebble pepper piano pier pillow pine pipe plank plaza pond porch prism pump quilt raft rail ranch
raven reef ring road robin rocket roof rope sail salt sand scarf school shed shell ship shore silo skate sled snail
spoon spring stable stairs star statue stone stove studio swan table tailor tent tiger timber torch tower tractor trail
tray tree trumpet tulip turbine vase vault velvet violin wagon walnut wave well whale wheel willow wolf yacht""".split()

PREFACE = (
    "The text below is a collection of notes. Some of its sentences state facts about named things; they may be "
    "asked for later.\n\n"
)


@dataclass
class Question:
    task: str
    ask: str  # what is asked
    opening: str  # how the answer begins; the values follow
    answers: list


@dataclass
class Context:
    text: str
    questions: list = field(default_factory=list)


def name(rng, used):
    while True:
        word = rng.choice(ADJECTIVES) + "-" + rng.choice(NOUNS)
        if word not in used:
            used.add(word)
            return word


def number(rng):
    return str(rng.randrange(1000000, 10000000))


def identifier(rng):
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def one(task, thing, value):
    """One key, one value."""

    def make(rng, used):
        key, answer = name(rng, used), value(rng, used)
        return (
            [f"The {thing} of the {key} is {answer}."],
            Question(task, f"What is the {thing} of the {key}?", f"The {thing} of the {key} is", [answer]),
        )

    return make


def multi_key(rng, used):
    pairs = [(name(rng, used), number(rng)) for _ in range(4)]
    key, answer = rng.choice(pairs)
    return (
        [f"The room code of the {k} is {v}." for k, v in pairs],
        Question("multi_key", f"What is the room code of the {key}?", f"The room code of the {key} is", [answer]),
    )


def multi_value(rng, used):
    key, values = name(rng, used), [number(rng) for _ in range(4)]
    return (
        [f"One of the part numbers of the {key} is {v}." for v in values],
        Question(
            "multi_value",
            f"What are all four part numbers of the {key}?",
            f"The four part numbers of the {key} are",
            values,
        ),
    )


def multi_query(rng, used):
    pairs = [(name(rng, used), number(rng)) for _ in range(4)]
    sentences = [f"The meter reading of the {k} is {v}." for k, v in pairs]
    keys = ", ".join(f"the {k}" for k, _ in pairs[:-1]) + f" and the {pairs[-1][0]}"
    return sentences, Question(
        "multi_query",
        f"What are the meter readings of {keys}?",
        f"The meter readings of {keys}, in this order, are",
        [v for _, v in pairs],
    )


def tracking(rng, used):
    names = []
    while len(names) < 5:
        word = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))
        if word not in used:
            used.add(word)
            names.append(word)
    value = rng.randrange(10000, 100000)
    sentences = [f"VAR {names[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:])]
    return sentences, Question(
        "tracking",
        "Some notes assign a value to a variable, or the value of one variable to another. (If they were "
        "VAR KKKKK = 11111, VAR LLLLL = VAR KKKKK and VAR MMMMM = VAR LLLLL, then KKKKK, LLLLL and MMMMM would hold 11111.) "
        f"Which five variables hold the value {value}?",
        f"The five variables that hold the value {value} are",
        names,
    )


MAKERS = {
    "word": one("word", "password", name),
    "number": one("number", "access number", lambda rng, used: number(rng)),
    "uuid": one("uuid", "ticket identifier", lambda rng, used: identifier(rng)),
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "tracking": tracking,
}
TASKS = list(MAKERS)
ORDERED = ("tracking",)  # their sentences refer to earlier ones and keep their order


def sentences_of(text):
    return [s for s in re.split(r"(?<=[.!?])\s+|\n", text) if s]


def build_context(tasks, rng, tokens, prose, encode, decode):
    """Context of about `tokens` tokens (never more) carrying the given tasks; encode/decode: text <-> token ids."""
    used, facts, questions = set(), [], []
    for task in tasks:
        sentences, question = MAKERS[task](rng, used)
        questions.append(question)
        facts.append((task, sentences))
    cost = sum(len(encode(" " + s)) + 1 for _, ss in facts for s in ss)
    room = tokens - len(encode(PREFACE)) - cost
    if room < 64:
        raise ValueError(f"{tokens} tokens cannot hold {cost} tokens of facts and some prose")
    chars = room * 8  # more than any prose needs per token
    start = rng.randrange(0, max(1, len(prose) - chars))
    while True:
        body = sentences_of(decode(encode(prose[start : start + chars])[:room]))[1:]  # the first is cut in its middle
        slots = len(body) + 1
        inserts = []
        for task, sentences in facts:
            depths = rng.sample(range(slots), len(sentences))
            if task in ORDERED:
                depths.sort()
            inserts += list(zip(depths, sentences))
        inserts.sort(key=lambda x: x[0])
        out, at = [], 0
        for depth, sentence in inserts:
            out += body[at:depth] + [sentence]
            at = depth
        text = PREFACE + " ".join(out + body[at:])
        over = len(encode(text)) - tokens
        if over <= 0:
            break
        room -= over + 8
    for question in questions:
        if (
            question.task == "multi_value"
        ):  # any order is right; the order of the text is the one to score token by token
            question.answers.sort(key=text.index)
    return Context(text, questions)


def build_contexts(layout, tasks, samples, seed, tokens, prose, encode, decode):
    """[Context]: `samples` of each task. Sample i of a task depends on (seed, layout, i, task) alone."""
    groups = [tasks] if layout == "shared" else [[t] for t in tasks]
    return [
        build_context(group, random.Random(f"{seed}/{layout}/{i}/{'+'.join(group)}"), tokens, prose, encode, decode)
        for i in range(samples)
        for group in groups
    ]
