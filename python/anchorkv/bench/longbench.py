# SPDX-License-Identifier: Apache-2.0
"""LongBench (English subset) from a local folder of <task>.jsonl, with its metrics. Nothing is fetched.

Prompts: the folder's own config/dataset2prompt.json (of LongBench's repository) when it is there; otherwise ours, which
ask the same in other words, so that scores are then not comparable with published ones.
"""

import collections
import difflib
import json
import os
import re
import string

# task: (metric, new tokens, chat template, only the first line counts)
TASKS = {
    "narrativeqa": ("f1", 128, True, False),
    "qasper": ("f1", 128, True, False),
    "multifieldqa_en": ("f1", 64, True, False),
    "hotpotqa": ("f1", 32, True, False),
    "2wikimqa": ("f1", 32, True, False),
    "musique": ("f1", 32, True, False),
    "gov_report": ("rouge", 512, True, False),
    "qmsum": ("rouge", 512, True, False),
    "multi_news": ("rouge", 512, True, False),
    "trec": ("classification", 64, False, True),
    "triviaqa": ("f1", 32, False, True),
    "samsum": ("rouge", 128, False, True),
    "passage_count": ("count", 32, True, False),
    "passage_retrieval_en": ("retrieval", 32, True, False),
    "lcc": ("edit", 64, False, False),
    "repobench-p": ("edit", 64, False, False),
}
QA = "Answer the question about the text as briefly as you can.\n\n{context}\n\nQuestion: {input}\nAnswer:"
PROMPTS = {
    "f1": QA,
    "rouge": "Write a one-page summary of the text. {input}\n\n{context}\n\nSummary:",
    "classification": "Classify the question.\n\n{context}\n{input}",
    "count": "How many different paragraphs are there, not counting repetitions?\n\n{context}\n\nThe number is:",
    "retrieval": "Which paragraph is this summary of?\n\n{context}\n\nSummary: {input}\n\nThe answer is Paragraph",
    "edit": "Complete the code.\n{context}{input}Next line of code:\n",
}


def words_of(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(prediction, answer, classes=None):
    p, a = words_of(prediction), words_of(answer)
    same = sum((collections.Counter(p) & collections.Counter(a)).values())
    return 2 * same / (len(p) + len(a)) if same else 0.0


def _lcs(a, b):
    """Words of `a` in one longest common subsequence with `b`."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    out, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            out.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] >= table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return out


def rouge(prediction, answer, classes=None):
    """ROUGE-L over sentences; like the package LongBench uses, words are counted once."""
    p, a = ([s.split() for s in t.split(".") if s.split()] for t in (prediction, answer))
    if not p or not a:
        return 0.0
    hit = set()
    for sentence in a:
        for other in p:
            hit.update(_lcs(sentence, other))
    m, n = len({w for s in a for w in s}), len({w for s in p for w in s})
    precision, recall = len(hit) / n, len(hit) / m
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction, answer, classes=None):
    found = [c for c in classes or [] if c in prediction]
    found = [c for c in found if not (c in answer and c != answer)]
    return 1 / len(found) if answer in found else 0.0


def _numbers(prediction, wanted):
    found = re.findall(r"\d+", prediction)
    return sum(x == wanted for x in found) / len(found) if found else 0.0


def retrieval(prediction, answer, classes=None):
    return _numbers(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def count(prediction, answer, classes=None):
    return _numbers(prediction, str(answer))


def edit(prediction, answer, classes=None):
    lines = [x for x in prediction.lstrip("\n").split("\n") if "`" not in x and "#" not in x and "//" not in x]
    return round(100 * difflib.SequenceMatcher(None, lines[0], answer).ratio()) / 100 if lines and lines[0] else 0.0


METRICS = {x.__name__: x for x in (f1, rouge, classification, retrieval, count, edit)}


def score(task, prediction, answers, classes=None):
    metric, _, _, first_line = TASKS[task]
    if first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max(METRICS[metric](prediction, a, classes) for a in answers)


def load(folder, tasks=None):
    """Yields (task, number, record, prompt with the context, rest of the prompt). Missing tasks are skipped."""
    templates = {}
    path = os.path.join(folder, "config", "dataset2prompt.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            templates = json.load(file)
    missing = []
    for task in tasks or TASKS:
        if task not in TASKS:
            raise ValueError(f"LongBench task {task!r} is unknown; there are {', '.join(TASKS)}")
        path = os.path.join(folder, f"{task}.jsonl")
        if not os.path.exists(path):
            missing.append(task)
            continue
        template = templates.get(task) or PROMPTS[TASKS[task][0]]
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file):
                try:
                    record = json.loads(line)
                    context, question = record["context"], record["input"]
                    record["answers"]
                except (ValueError, KeyError) as error:
                    raise ValueError(f"{path}, line {number + 1}: {type(error).__name__} {error}") from None
                # The context ends where the passage does; what follows it is the question.
                before, after = template.split("{context}", 1)
                yield (
                    task,
                    number,
                    record,
                    before.replace("{input}", question) + context,
                    after.replace("{input}", question),
                )
    if len(missing) == len(list(tasks or TASKS)):
        raise ValueError(f"{folder} holds none of the tasks as TASK.jsonl: {', '.join(missing)}")
