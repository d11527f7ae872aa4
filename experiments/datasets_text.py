"""Public corpora: movie reviews, WikiText-2, and files with one document per line."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.fetching import (
    DatasetError,
    Folder,
    broken,
    check,
    is_published,
    locate,
    members,
    reading,
    tar_files,
)

REVIEWS = {
    "train/pos": 12_500,
    "train/neg": 12_500,
    "train/unsup": 50_000,
    "test/pos": 12_500,
    "test/neg": 12_500,
}
REVIEW = re.compile(r"(?:^|/)((?:train|test)/(?:pos|neg|unsup))/(\d+)_(\d+)\.txt$")
BREAKS = bytes.maketrans(b"\r\n", b"  ")


class Reviews(NamedTuple):
    """Texts, positive before negative before unlabelled, by number; ratings uint8, 0 if unlabelled."""

    train: list[str]
    train_ratings: np.ndarray
    test: list[str]
    test_ratings: np.ndarray


class Words(NamedTuple):
    """Tokens of each part, in the order of the text."""

    train: list[str]
    valid: list[str]
    test: list[str]


def imdb(folder: Folder = None) -> Reviews:
    """The 100,000 reviews of the Large Movie Review Dataset, from aclImdb or its archive.

    The archive is read in place. Texts are as published, `<br />` and all.
    """
    key = "imdb/aclImdb_v1.tar.gz"
    path = locate("imdb", ["aclImdb", "aclImdb_v1.tar.gz"], folder)
    parts: dict[str, list[tuple[int, int, bytes]]] = {part: [] for part in REVIEWS}
    with reading(path, key):
        for name, text in _review_files(path) if path.is_dir() else tar_files(path):
            match = REVIEW.search(name)
            if match and match[1] in parts:
                parts[match[1]].append((int(match[2]), int(match[3]), text))
    # the sums of the parts come from a repacked copy, so the original is taken on its own sum
    original = path.is_file() and is_published(path, key)
    for part, reviews in parts.items():
        reviews.sort(key=lambda review: review[0])
        if len(reviews) != REVIEWS[part]:
            why = f"has {len(reviews):,} reviews, expected {REVIEWS[part]:,}"
            raise broken(path / part, why, key)
        if not original:
            lines = (b"%d %s" % (rating, text.translate(BREAKS)) for _, rating, text in reviews)
            check(b"\n".join(lines), f"imdb/{part}", path / part, key)
    with reading(path, key):
        train, test = _side(parts, "train"), _side(parts, "test")
    return Reviews(*train, *test)


def _review_files(path: Path) -> Iterator[tuple[str, bytes]]:
    for part in REVIEWS:
        with os.scandir(path / part) as entries:
            for entry in entries:
                if entry.name.endswith(".txt"):
                    yield f"{part}/{entry.name}", Path(entry).read_bytes()


def _side(
    parts: dict[str, list[tuple[int, int, bytes]]], side: str
) -> tuple[list[str], np.ndarray]:
    reviews = [review for part in parts if part.startswith(side) for review in parts[part]]
    texts = [text.decode() for _, _, text in reviews]
    return texts, np.array([rating for _, rating, _ in reviews], np.uint8)


def wikitext2(folder: Folder = None) -> Words:
    """WikiText-2, word level: 2,088,628 / 217,646 / 245,569 tokens, `<eos>` at each line's end."""
    key, names = "wikitext2/wikitext-2-v1.zip", [f"wiki.{part}.tokens" for part in Words._fields]
    path = locate("wikitext2", [f"wikitext-2/{names[0]}", names[0], "wikitext-2-v1.zip"], folder)
    path = path if path.suffix == ".zip" else path.parent
    parts = []
    for name, data in zip(names, members(path, names, key), strict=True):
        check(data, f"wikitext2/{name}", path / name, key)
        with reading(path / name, key):
            parts.append(data.decode().replace("\n", " <eos> ").split())
    return Words(*parts)


def documents(path: str | Path) -> list[str]:
    """The documents of a UTF-8 text file that holds one on each line; empty lines are left out."""
    path = Path(path).expanduser()
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error}. Expected a text file, one document per line"
        ) from error
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not UTF-8: {error}. Expected a UTF-8 text file, one document per line"
        ) from error
    return [text for line in lines if (text := line.strip())]
