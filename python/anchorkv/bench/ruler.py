# SPDX-License-Identifier: Apache-2.0
"""The 13 tasks of RULER for any tokenizer and length: its constructions, counts, scoring and token limits.

What RULER takes from elsewhere is replaced, so results are RULER-like, not comparable with published ones: prose is
made up (or --prose FILE) where RULER has essays; qa_1 and qa_2 ask about made-up documents where RULER has
SQuAD and HotpotQA; words are made up where a task needs thousands.
"""

import functools
import random
import re
from dataclasses import dataclass

from . import words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * i / 39) for i in range(40)]


@dataclass
class Sample:
    context: str
    question: str
    prefix: str  # how the answer begins
    answers: list
    new_tokens: int
    part: bool = False  # any answer counts, instead of the share of all

    def score(self, prediction):
        low = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
        hits = [a.lower() in low for a in self.answers]
        return float(any(hits)) if self.part else sum(hits) / len(hits)

    def settled(self, prediction):
        """Everything was found: more text cannot take it away."""
        return self.score(prediction) == 1.0


def listing(items):
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def niah(haystack, key_kind="words", value_kind="numbers", keys=1, values=1, asked=1):
    make = {"words": words.key, "numbers": words.number, "uuids": words.identifier}

    def build(rng, n, prose):
        used, pairs = set(), []
        while len(pairs) < keys:
            k = make[key_kind](rng)
            if k not in used:
                used.add(k)
                pairs.append((k, [make[value_kind](rng) for _ in range(values)]))
        needle = f"One of the special magic {value_kind} for {{}} is: {{}}.".format
        needles = [needle(k, v) for k, vs in pairs for v in vs]
        random.Random(42).shuffle(needles)
        if haystack == "prose":
            lines, glue = prose(rng, n), " "
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            at = [len(lines) * d // 100 for d in depths]
        else:
            lines = (
                [NOISE] * n
                if haystack == "noise"
                else [needle(make[key_kind](rng), make[value_kind](rng)) for _ in range(n)]
            )
            glue = "\n"
            at = sorted(rng.sample(range(n + 1), len(needles)))
        for i, sentence in reversed(list(zip(at, needles))):
            lines.insert(i, sentence)
        chosen = pairs[:asked]
        answers = [v for _, vs in chosen for v in vs]
        names = listing([k for k, _ in chosen])
        kind, verb, some = (value_kind, "are", "Some") if len(answers) > 1 else (value_kind[:-1], "is", "A")
        whole = "all the special magic" if len(answers) > 1 else "the special magic"
        context = (
            f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n" + glue.join(lines) + "\n"
        )
        ask = f"What {verb} {whole} {kind} for {names} mentioned in the provided text?"
        opening = f" {whole[0].upper()}{whole[1:]} {kind} for {names} mentioned in the provided text {verb}"
        return Sample(context, ask, opening, answers, 128)

    return build


def chain(rng, length, lines, names, used):
    value = str(rng.randint(10000, 99999))
    names = [words.capitals(rng, used, names) for _ in range(5)]
    statements = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:])]
    text = [NOISE] * max(lines, 5)
    for i, s in reversed(list(zip(sorted(rng.sample(range(len(text) + 1), 5)), statements))):
        text.insert(i, s + ".")
    ask = f"Question: Find all variables that are assigned the value {value} in the text above."
    opening = " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned "
    opening += f"the value {value}, they are:"
    return "\n".join(text), ask, opening, names


def variable_tracking(rng, n, prose):
    used = set()
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    text, ask, opening, names = chain(rng, 5, 12, 3, used)
    example = f"{head}{text}\n{ask}{opening} {' '.join(names)}\n\n"
    text, ask, opening, names = chain(rng, 5, n, 5, used)
    return Sample(f"{example}{head}{text}\n", ask, opening, names, 30)


def word_list(rng, common, others, often, seldom):
    items = [w for w in common for _ in range(often)] + [w for w in others for _ in range(seldom)]
    rng.shuffle(items)
    return " ".join(f"{i}. {w}" for i, w in enumerate(items, 1))


def common_words(rng, n, prose, small=False):
    used = set()
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    )
    head += "appear most often.\n"
    ask = "Question: What are the 10 most common words in the above list?"
    opening = " Answer: The top 10 words that appear most often in the list are:"
    pick = [words.made_up(rng, used) for _ in range(40)]
    example = f"{head}{word_list(rng, pick[:10], pick[10:], 3 if small else 10, 1 if small else 3)}\n{ask}{opening} "
    example += " ".join(f"{i}. {w}" for i, w in enumerate(pick[:10], 1)) + "\n\n"
    common = [words.made_up(rng, used) for _ in range(10)]
    others = [words.made_up(rng, used) for _ in range(n)]
    text = word_list(rng, common, others, 6 if small else 30, 1 if small else 3)
    return Sample(f"{example}{head}{text}\n", ask, opening, common, 120)


def frequent_words(rng, n, prose):
    zeta = 1.6449340668482264
    items, ranks = [], []
    for rank in range(1, n + 1):
        count = int(n * rank**-2 / zeta)
        if count < 1:
            break
        word = "..." if rank == 1 else "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))
        ranks.append(word)
        items += [word] * count
    rng.shuffle(items)
    context = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(items)}\n"
    )
    ask = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Sample(context, ask, opening, ranks[1:4], 50)


FACTS = (
    "was founded in the year {}",
    "has its library on {} Street",
    "is known for its {}",
    "keeps {} bells in its tower",
)


def town(rng, name):
    facts = (str(rng.randint(1100, 1899)), words.key(rng).title(), words.key(rng), str(rng.randint(11, 98)))
    text = " ".join(f"{name} {f.format(x)}." for f, x in zip(FACTS, facts))
    return f"{text} {words.sentence(rng)} {words.sentence(rng)}", facts


ASK = ("In which year was {} founded?", "On which street is the library of {}?", "What is {} known for?",
       "How many bells does {} keep in its tower?")  # fmt: skip


def documents(rng, texts, question, answers):
    random.Random(42).shuffle(texts)
    body = "\n\n".join(f"Document {i}:\n{t}" for i, t in enumerate(texts, 1))
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    context = f"{rule}\n\nThe following are given documents.\n\n{body}\n\n{rule}\n\n"
    return Sample(context, f"Question: {question}", " Answer:", answers, 32, part=True)


def single_hop(rng, n, prose):
    used = set()
    towns = [town(rng, words.made_up(rng, used).title()) for _ in range(n)]
    which = rng.randrange(len(ASK))
    name = towns[0][0].split()[0]
    return documents(rng, [t for t, _ in towns], ASK[which].format(name), [towns[0][1][which]])


def two_hops(rng, n, prose):
    used, texts, first = set(), [], None
    for i in range(max(1, n // 2)):
        bridge, builder, place = (words.made_up(rng, used).title() for _ in range(3))
        trade = rng.choice(words.NOUNS)
        texts.append(
            f"{bridge}\n{bridge} is a bridge over the {rng.choice(words.NOUNS)}. It was designed by {builder}."
        )
        texts.append(f"{builder}\n{builder} grew up in {place} and collected every {trade}. {words.sentence(rng)}")
        first = first or (bridge, place)
    return documents(rng, texts, f"In which town did the designer of {first[0]} grow up?", [first[1]])


TASKS = {
    "niah_single_1": niah("noise"),
    "niah_single_2": niah("prose"),
    "niah_single_3": niah("prose", value_kind="uuids"),
    "niah_multikey_1": niah("prose", keys=4),
    "niah_multikey_2": niah("needle"),
    "niah_multikey_3": niah("needle", "uuids", "uuids"),
    "niah_multivalue": niah("prose", values=4),
    "niah_multiquery": niah("prose", keys=4, asked=4),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": single_hop,
    "qa_2": two_hops,
}


def prose_source(text=None):
    """(rng, n) -> n sentences: of the text, from a random place and round again, or made up."""
    if text is None:
        return lambda rng, n: [words.sentence(rng) for _ in range(n)]
    sentences = [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", re.sub(r"\s+", " ", text)) if s]

    def take(rng, n):
        start = rng.randrange(len(sentences))
        return [sentences[(start + i) % len(sentences)] for i in range(n)]

    return take


def make(task, tokens, count, seed, sample, prose):
    """The largest sample whose prompt and answer stay within `tokens`. count(text) -> tokens."""
    build = TASKS[task]
    if task == "cwe" and tokens < 4096:
        build = functools.partial(build, small=True)

    def size(n):
        s = build(random.Random(f"{seed}/{task}/{sample}"), n, prose)
        return count(s.context + s.question + s.prefix) + s.new_tokens, s

    low, best = 8, size(8)
    if best[0] > tokens:
        raise ValueError(f"{task} does not fit {tokens} tokens; its smallest form takes {best[0]}")
    high = 16
    while (now := size(high))[0] <= tokens:
        low, best, high = high, now, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        now = size(middle)
        if now[0] <= tokens:
            low, best = middle, now
        else:
            high = middle
    return best[1]


def passkey(tokens, depth, count, seed, sample, prose):
    """Needle in a haystack: a key of 64 digits, stated twice, at depth 0..1; common_run scores it."""
    rng = random.Random(f"{seed}/passkey/{tokens}/{depth:.3f}/{sample}")
    digits = "".join(rng.choice("0123456789") for _ in range(64))
    needle = f"The pass key is {digits}. Remember it. {digits} is the pass key."
    head = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
    )
    head += "about it.\n"
    ask, opening = "What is the pass key?", " The pass key is"
    body, n = prose(rng, max(8, tokens // 8)), None
    n = len(body)
    while True:
        lines = body[:n]
        lines.insert(int(depth * len(lines)), needle)
        context = head + " ".join(lines) + "\n"
        over = count(context + ask + opening) + 160 - tokens
        if over <= 0:
            return Sample(context, ask, opening, [digits], 160)
        if n == 0:
            raise ValueError(f"a pass key does not fit {tokens} tokens")
        n = max(0, n - max(1, over // 24))


def common_run(key, text):
    """Length of the longest substring of `key` in `text`, as a share of the key."""
    best = 0
    for start in range(len(key)):
        while start + best < len(key) and key[start : start + best + 1] in text:
            best += 1
    return best / len(key)
