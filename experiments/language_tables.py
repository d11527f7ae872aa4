"""The tables of the language study, from its records."""

from typing import Any

import numpy as np

from experiments import report
from experiments.language_text import EOS, PARTS, UNK, Corpus

TITLES = {
    "imdb": "Perplexity, IMDB",
    "wikitext2": "Perplexity, WikiText-2",
    "apnews": "Perplexity, APNEWS",
    "bnc": "Perplexity, BNC",
}
"""Corpora that have a table of their own."""
PAPER = {
    "apnews": {"SGD": 64.13, "SGLD": 63.01, "SVGD": 61.64, "w-SGLD": 61.22, "pi-SGLD": 59.83},
    "imdb": {"SGD": 72.14, "SGLD": 68.12, "SVGD": 69.25, "w-SGLD": 67.41, "pi-SGLD": 67.04},
    "bnc": {"SGD": 102.89, "SGLD": 95.13, "SVGD": 94.99, "w-SGLD": 93.68, "pi-SGLD": 92.33},
}
POINT = ("SGD", "RMSprop", "Adam")
OWN = {"SGLD": {"sgld": "rate", "floor": "floor"}, "SGLD, cold": {"cold": "temperature", "rmsprop": "rate", "floor": "floor"}}  # fmt: skip
"""By method, settings that it has for itself: named where records differ in them."""


def facts(corpus: Corpus) -> dict[str, Any]:
    """How large a corpus is: words of the vocabulary; by part documents, sequences that end, words to predict, share of <unk>."""
    count = lambda number: [int(np.count_nonzero(corpus.parts[part] == number)) for part in PARTS]
    sizes = [len(corpus.parts[part]) for part in PARTS]
    return {
        "vocabulary": len(corpus.vocabulary), "documents": [corpus.documents[part] for part in PARTS],
        "sentences": count(EOS), "words": sizes,
        "unknown": [round(some / size, 4) for some, size in zip(count(UNK), sizes, strict=True)],
    }  # fmt: skip


def corpora(found: list[dict]) -> report.Rows:
    """By corpus: what `facts` says."""
    table = [
        ["corpus", "vocabulary", "part", "documents", "sentences", "words, with eos", "unknown, %"]
    ]
    seen = {r["config"]["corpus"]: r["corpus"] for r in found if "corpus" in r}
    for name, about in seen.items():
        for place, part in enumerate(PARTS):
            numbers = [f"{about[what][place]:,}" for what in ("documents", "sentences", "words")]
            share = f"{100 * about['unknown'][place]:.1f}"
            table.append([name, f"{about['vocabulary']:,}", part, *numbers, share])
    return table


def _sampled(r: dict) -> bool:
    """Whether the softmax's denominator was estimated while the networks learnt."""
    few = r["config"].get("head", 0) + r["config"].get("samples", 0)
    return r["config"].get("samples", 0) > 0 and few < r["corpus"]["vocabulary"]


def _titles(found: list[dict], name: str) -> dict[int, str]:
    """By record: its method, after the corpus if the table is not of one, and before those of its own settings in which records differ."""
    said = {}
    for r in found:
        method = r["config"]["method"]
        mine = [other["config"] for other in found if other["config"]["method"] == method]
        varied = [
            f"{word} {r['config'].get(key):g}"
            for key, word in OWN.get(method, {}).items()
            if len({config.get(key) for config in mine}) > 1
        ]
        corpus = "" if name else f"{r['config']['corpus']}: "
        said[id(r)] = corpus + ", ".join([method, *varied])
    return said


def table(found: list[dict], name: str) -> report.Rows:
    """By method and how it was trained: the paper's test perplexity, ours for the mixture and for single networks, and validation's.

    Without a name, of all corpora that have no table of their own.
    """
    rows = [[
        "method", "epochs", "embeddings from", "denominator", "seeds", "paper", "mixture", "single networks", "validation, mixture", "validation, single",
    ]]  # fmt: skip
    fits = lambda corpus: corpus == name if name else corpus not in TITLES
    here = [
        r for r in found if fits(r["config"]["corpus"]) and r["evaluation"][0] == r["evaluation"][1]
    ]
    titles = _titles(here, name)
    label = lambda r: (
        titles[id(r)], r["config"]["epochs"], r["config"].get("vectors", False), _sampled(r)
    )  # fmt: skip
    groups = sorted(dict.fromkeys(map(label, here)), key=lambda group: group[1])
    for group in groups:
        mine, (title, epochs, vectors, some) = [r for r in here if label(r) == group], group
        method = mine[0]["config"]["method"]
        seen = [r["metrics"] for r in mine]
        mean = {key: np.mean([m[key] for m in seen]) for key in seen[0]}
        spread = f" ±{np.std([m['test'] for m in seen]):.2f}" if len(seen) > 1 else ""
        paper = PAPER.get(name, {}).get(method.removesuffix(", cold"))
        what = " (ensemble)" if method in POINT else ""
        early = f" (best {mean['epoch']:.1f})" if mean["epoch"] < 0.99 * epochs else ""
        rows.append([
            title, f"{epochs:g}{early}", "the text" if vectors else "noise", "sampled" if some else "whole", str(len(seen)), "-" if paper is None else f"{paper:.2f}", f"{mean['test']:.2f}{spread}{what}",
            f"{mean['single_test']:.2f} ±{mean['single_test_sd']:.2f}", f"{mean['valid']:.2f}", f"{mean['single_valid']:.2f}",
        ])  # fmt: skip
    return rows
