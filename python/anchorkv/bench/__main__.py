# SPDX-License-Identifier: Apache-2.0
"""python -m anchorkv.bench ruler|niah|longbench|ppl|ablation|calibrate|report"""

import argparse
import os
import sys

from . import methods as method_names


def sizes(text):
    out = []
    for part in text.split(","):
        part = part.strip().lower()
        try:
            out.append(int(part[:-1]) * 1024 if part.endswith("k") else int(part))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no length; 4096 or 4k is") from None
    return out


def methods(text):
    names = []
    for piece in text.split(","):  # a comma also separates an ablation's fields
        if "=" in piece and ":" not in piece and names:
            names[-1] += "," + piece
        else:
            names.append(piece.strip())
    return names


def parser():
    p = argparse.ArgumentParser(
        prog="python -m anchorkv.bench",
        description="Quality of compressed caches.\n\nMethods:\n" + method_names.__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = p.add_subparsers(dest="benchmark", required=True)
    for name, words in (
        ("ruler", "the 13 tasks of RULER, generated"),
        ("niah", "a 64-digit pass key over depth and length"),
        ("longbench", "LongBench from a local folder"),
        ("ppl", "perplexity, KL divergence and top-1 on a text"),
        ("ablation", "what each part of the codec is worth, on a text"),
    ):
        s = sub.add_parser(name, help=words)
        s.add_argument("--model", required=True, help="folder that transformers reads, or a GGUF file")
        if name != "ablation":
            s.add_argument("--methods", type=methods, default=["dense", "default@10", "paper@10", "evict@10"])
        s.add_argument("--out", required=True, help="log, JSON lines; a run goes on where it stopped")
        s.add_argument("--seed", type=int, default=1000)
        if name != "ablation":
            s.add_argument("--device", default="cpu")
        s.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
        s.add_argument("--html", help="also write the report of this log")
        s.add_argument("--png", metavar="FOLDER", help="also write its plots (matplotlib)")
        s.add_argument("--shares", help="file of calibrate, for methods with +shares")
        if name != "longbench":
            s.add_argument("--ctx", type=sizes, default=[4096], help="4k,8k,16k")
            s.add_argument("--samples", type=int, default=2, help="a task, or a cell")
        if name not in ("ppl", "ablation"):
            s.add_argument("--aware", action="store_true", help="the question is part of what is compressed")
            s.add_argument("--plain", action="store_true", help="no chat template")
            s.add_argument(
                "--claims",
                metavar="FOLDER",
                help="for several processes, each with its own --out: who makes a record notes it there; report reads all",
            )
        if name in ("ruler", "niah"):
            s.add_argument("--prose", help="text file for haystacks; made up without one")
        if name == "ruler":
            s.add_argument("--tasks")
        if name == "niah":
            s.add_argument("--depths", type=int, default=10)
        if name == "longbench":
            s.add_argument("--data", required=True, help="folder of TASK.jsonl")
            s.add_argument("--tasks")
            s.add_argument("--limit", type=int, help="samples a task")
            s.add_argument("--max-tokens", type=int, default=31500, help="longer prompts lose their middle")
        if name == "ablation":
            s.add_argument("--ratio", type=float, default=10.0)
        if name in ("ppl", "ablation"):
            s.add_argument("--text", required=True)
            s.add_argument("--length", type=int, default=256, help="tokens that are predicted")
    s = sub.add_parser("calibrate", help="measure once how a model's layers best share a budget")
    s.add_argument("--model", required=True, help="folder that transformers reads, or a GGUF file")
    s.add_argument("--text", required=True, help="such as you will compress")
    s.add_argument("--out", required=True, help="file for --shares and AnchorKVCache(..., shares=)")
    s.add_argument("--ctx", type=sizes, default=[4096], help="tokens that are compressed")
    s.add_argument("--length", type=int, default=256, help="tokens that look back at them")
    s.add_argument("--pieces", type=int, default=2, help="of the text, which do not overlap")
    s.add_argument("--profile", default="default", choices=("default", "paper"))
    s.add_argument("--seed", type=int, default=1)
    s.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    s = sub.add_parser("report", help="Markdown on the standard output, HTML into a file")
    s.add_argument("logs", nargs="+")
    s.add_argument("--methods", help="only these, in this order, on the samples that all of them have")
    s.add_argument("--html")
    s.add_argument("--png", metavar="FOLDER", help="plots as PNG files (matplotlib)")
    s.add_argument("--markdown", metavar="FILE", help="a short table for a README: no column a task; with the settings")
    return p


def read_text(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


class LongBenchSample:
    def __init__(self, task, record, context, question):
        from . import longbench

        self.task, self.record, self.context, self.question, self.prefix = task, record, context, question, ""
        self.answers, (_, self.new_tokens, self.chat, _) = record["answers"], longbench.TASKS[task]

    def score(self, text):
        from . import longbench

        return longbench.score(self.task, text, self.answers, self.record.get("all_classes"))


def without_middle(bench, text, tokens):
    ids = bench.encode(text)
    if len(ids) <= tokens:
        return text
    half = tokens // 2
    return "".join(bench.tokenizer.decode(x, skip_special_tokens=True) for x in (ids[:half], ids[-half:]))


def samples_of(a, bench):
    if a.benchmark == "longbench":
        from . import longbench

        out = []
        for task, number, record, context, question in longbench.load(a.data, a.tasks.split(",") if a.tasks else None):
            if a.limit is None or number < a.limit:
                context = without_middle(bench, context, a.max_tokens - bench.count(question))
                fields = {"task": task, "ctx": a.max_tokens, "sample": number}
                out.append((fields, LongBenchSample(task, record, context, question)))
        return out
    from . import ruler

    prose = ruler.prose_source(read_text(a.prose) if a.prose else None)
    if a.benchmark == "niah":
        out = []
        for ctx in a.ctx:
            for d in range(a.depths):
                depth = d / max(1, a.depths - 1)
                for i in range(a.samples):
                    sample = ruler.passkey(ctx, depth, bench.count, a.seed, i, prose)
                    digits = sample.answers[0]
                    sample.score = lambda text, digits=digits: ruler.common_run(digits, text)  # its settled() asks this
                    out.append(({"task": "passkey", "ctx": ctx, "sample": i, "depth": round(depth, 3)}, sample))
        return out
    tasks = a.tasks.split(",") if a.tasks else list(ruler.TASKS)
    unknown = [t for t in tasks if t not in ruler.TASKS]
    if unknown:
        raise SystemExit(f"unknown tasks: {', '.join(unknown)}; there are {', '.join(ruler.TASKS)}")
    return [
        ({"task": t, "ctx": ctx, "sample": i}, ruler.make(t, ctx, bench.count, a.seed, i, prose))
        for ctx in a.ctx
        for i in range(a.samples)
        for t in tasks
    ]


def calibrate(a):
    from . import calibrate as program
    from . import runner

    if len(a.ctx) != 1 or a.pieces < 1 or a.length < 1:
        raise SystemExit("one --ctx is measured, with at least one piece and one token of --length")
    bench = runner.Bench(a.model, "cpu", a.dtype)
    try:
        errors = program.calibrate(bench, read_text(a.text), a.ctx[0], a.length, a.pieces, a.seed, a.profile)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    errors.save(a.out)
    print(program.table(errors))


def main(arguments=None):
    a = parser().parse_args(arguments)
    if a.benchmark == "calibrate":
        return calibrate(a)
    from . import report

    if a.benchmark == "report":
        logs, only = a.logs, a.methods.split(",") if a.methods else None
        print(report.markdown(logs, only))
    else:
        from . import runner

        try:
            chosen = [] if a.benchmark == "ablation" else runner.available(a.methods, a.shares)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        fixed = (
            "benchmark",
            "model",
            "seed",
            "dtype",
            "aware",
            "plain",
            "prose",
            "data",
            "text",
            "length",
            "max_tokens",
            "ratio",
        )
        settings = {k: getattr(a, k) for k in fixed if hasattr(a, k)}
        log = runner.Log(a.out, settings | ({"shares": a.shares} if a.shares else {}))
        bench = runner.Bench(a.model, getattr(a, "device", "cpu"), a.dtype, getattr(a, "plain", False))
        try:
            for method in chosen:
                method.check(bench.model)
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from None
        if a.benchmark == "ablation":
            from . import ablation

            try:
                for ctx in a.ctx:
                    ablation.run(bench, log, read_text(a.text), ctx, a.samples, a.seed, a.length, a.ratio, a.shares)
            except (ValueError, RuntimeError) as error:
                raise SystemExit(str(error)) from None
        elif a.benchmark == "ppl":
            for ctx in a.ctx:
                runner.continuations(bench, log, chosen, read_text(a.text), ctx, a.samples, a.seed, a.length)
        else:
            try:
                samples = samples_of(a, bench)
            except ValueError as error:
                raise SystemExit(str(error)) from None
            if a.claims:
                os.makedirs(a.claims, exist_ok=True)
            runner.answers(bench, log, chosen, samples, a.aware, a.claims)
        logs, only = [a.out], None
        print(report.markdown(logs))
    if a.html:
        with open(a.html, "w", encoding="utf-8") as file:
            file.write(report.page(logs, only))
    if a.png:
        from . import plots

        for path in plots.write(logs, a.png, only):
            print(path, file=sys.stderr)
    if getattr(a, "markdown", None):
        with open(a.markdown, "w", encoding="utf-8") as file:
            file.write(report.short(logs, only))


if __name__ == "__main__":
    sys.exit(main())
