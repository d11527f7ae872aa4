"""Text as numbers: a tokeniser, a vocabulary, sequences packed into rows, and a small file that holds a corpus.

The conventions are those of Lau, Baldwin & Cohn (2017) and their code: sentences begin with <go>, which is never predicted, and end
with <eos>, which is; what is longer than 30 words is cut; words seen fewer than 10 times in training are <unk>.
"""

import collections
import itertools
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import datasets_text
from experiments.fetching import UNREADABLE, VARIABLE, DatasetError

PAD, GO, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<go>", "<eos>", "<unk>")
PARTS = ("train", "valid", "test")
FORMAT = 1
"""Of the file; goes up whenever the same text would give other numbers."""

TITLES = "Mr Mrs Ms Dr Prof Sr Jr St Lt Col Gen Sgt Capt Rev Hon Gov Sen Rep vs etc Inc Ltd Corp"
WORD = r"[^\W_]+(?:[-/&'][^\W_]+)*"
TOKEN = re.compile(
    r"https?://\S+|www\.\S+"
    r"|(?:[a-z]\.){2,}"  # U.S., e.g.
    rf"|(?:{'|'.join(TITLES.split())})\."
    r"|^[a-hj-z]\.$"  # an initial
    r"|\d+(?:[.,:]\d+)+"
    rf"|{WORD}"
    r"|\.{2,}|[!?]+|-{2,}|[:;]-?[()dp](?!\w)|'(?:s|m|d|re|ve|ll|em)\b|\S",
    re.IGNORECASE,
)
CLITIC = re.compile(r"(.*[^\W_])('(?:s|m|d|re|ve|ll))", re.DOTALL)
MERGED = {
    word: parts.split()
    for word, parts in {
        "cannot": "can not", "gonna": "gon na", "gotta": "got ta", "wanna": "wan na",
        "gimme": "gim me", "lemme": "lem me",
    }.items()
}  # fmt: skip
PLAIN = str.maketrans("\u2018\u2019\u00b4\u201c\u201d", "'''\"\"")
BREAK = re.compile(r"<[bh]r\s*/?>|[\r\n]+", re.IGNORECASE)
ENDS, CLOSES = re.compile(r"\.|[!?]+"), frozenset("\"')]}")


class Corpus(NamedTuple):
    """Sentences of word numbers, each closed by EOS, one after another; and how many documents they come from."""

    name: str
    vocabulary: list[str]
    parts: dict[str, np.ndarray]
    documents: dict[str, int]


class Rows(NamedTuple):
    """Sequences side by side in rows of one width: inputs, what to predict (PAD: nothing), and where the state is reset."""

    x: np.ndarray
    y: np.ndarray
    start: np.ndarray

    @property
    def tokens(self) -> int:
        """How many words are predicted."""
        return int(np.count_nonzero(self.y))


def tokens(chunk: str) -> list[str]:
    """The tokens of a piece of text without spaces, nearly as Stanford CoreNLP splits it, in lower case.

    >>> [tokens(chunk) for chunk in ("Don't", "film's", "(well-made", "U.S.", "end!!")]
    [['do', "n't"], ['film', "'s"], ['(', 'well-made'], ['u.s.'], ['end', '!!']]
    """
    found: list[str] = []
    for token in TOKEN.findall(chunk):
        found += _unmerged(token.lower())
    return found


def _unmerged(word: str) -> list[str]:
    if word in MERGED:
        return MERGED[word]
    if word.startswith(("..", "--")):
        return ["..." if word[0] == "." else "--"]
    if len(word) > 3 and word.endswith("n't"):
        return [word[:-3], "n't"]
    split = CLITIC.fullmatch(word)
    return list(split.groups()) if split else [word]


class Index:
    """Numbers for strings, in the order in which they are first met."""

    def __init__(self, words: Iterable[str] = ()):
        self.numbers: dict[str, int] = collections.defaultdict(itertools.count().__next__)
        self.of(words)

    def of(self, words: Iterable[str]) -> np.ndarray:
        """The numbers of words."""
        return np.fromiter(map(self.numbers.__getitem__, words), np.int32)

    def __iter__(self):
        return iter(self.numbers)


def tokenised(documents: Sequence[str], index: Index) -> np.ndarray:
    """Documents as numbers in `index`, an `<eos>` after every sentence.

    A sentence ends at `.`, `!` or `?` with the quotes and brackets that follow, as CoreNLP has it, and where a line ends. Every
    distinct piece between spaces is split into tokens once.
    """
    pieces = Index()
    text = (BREAK.sub(" \n ", text.translate(PLAIN)) + " \n" for text in documents)
    flow = np.concatenate([pieces.of(one.split(" ")) for one in text])
    split = [["\n"] if piece == "\n" else tokens(piece) for piece in pieces]
    flat, lengths = index.of(itertools.chain.from_iterable(split)), np.array(list(map(len, split)))
    first, each = np.cumsum(lengths) - lengths, lengths[flow]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return _sentences(flat[np.repeat(first[flow], each) + within], index)


def _sentences(ids: np.ndarray, index: Index) -> np.ndarray:
    """`ids` with `<eos>` after each sentence and without line ends."""
    words = list(index)
    ends = np.array([bool(ENDS.fullmatch(word)) for word in words])[ids]
    run = ends | np.array([word in CLOSES for word in words])[ids]
    opens = run & ~_shifted(
        run, False
    )  # from its first end mark on, a run of these ends a sentence
    seen = np.cumsum(ends)
    before = np.maximum.accumulate(np.where(opens, seen - ends, 0))
    last = run & ~np.append(run[1:], False) & (seen > before)
    lines = np.where(ids == index.numbers["\n"], EOS, ids)
    full = np.insert(lines, np.flatnonzero(last) + 1, EOS)
    return full[(full != EOS) | ~_shifted(full == EOS, True)]


def _shifted(a: np.ndarray, first: bool) -> np.ndarray:
    return np.concatenate([[first], a[:-1]])


def made(
    name: str, texts: dict[str, np.ndarray], documents: dict[str, int], index: Index, minimum: int
) -> Corpus:
    """The corpus of texts in an index: words seen `minimum` times in training by frequency, all others `<unk>`."""
    counts = np.bincount(texts["train"], minlength=len(index.numbers))
    counts[: len(SPECIAL)] = 0
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= max(minimum, 1)]
    place = np.full(len(counts), UNK)
    place[EOS], place[order] = EOS, len(SPECIAL) + np.arange(len(order))
    names = list(index)
    vocabulary = [*SPECIAL, *(names[number] for number in order)]
    small = np.min_scalar_type(len(vocabulary) - 1)
    parts = {part: place[text].astype(small) for part, text in texts.items()}
    return Corpus(name, vocabulary, parts, documents)


def imdb(minimum: int = 10) -> Corpus:
    """Reviews: 75,000 of the folder train to learn from; of the folder test every second for validation, the others to test."""
    found = datasets_text.imdb()
    sides = dict(zip(PARTS, (found.train, found.test[::2], found.test[1::2]), strict=True))
    index = Index(SPECIAL)
    texts = {part: tokenised(side, index) for part, side in sides.items()}
    return made("imdb", texts, {part: len(side) for part, side in sides.items()}, index, minimum)


def wikitext2(minimum: int = 10) -> Corpus:
    """WikiText-2 in lower case, with `<eos>` at each line's end as published."""
    found, index = datasets_text.wikitext2(), Index(SPECIAL)
    texts = {part: index.of(map(str.lower, getattr(found, part))) for part in PARTS}
    lines = {part: int(np.count_nonzero(text == EOS)) for part, text in texts.items()}
    return made("wikitext2", texts, lines, index, minimum)


def folder(path: Path, minimum: int = 10) -> Corpus:
    """train.txt, valid.txt and test.txt: a document in each line, sentences apart by tabs, tokens by spaces."""
    index, texts, number = Index(SPECIAL), {}, {}
    for part in PARTS:
        found = datasets_text.documents(path / f"{part}.txt")
        if not found:
            raise DatasetError(f"{path / part}.txt has no documents; expected one on each line")
        number[part] = len(found)
        sentences = (one for text in found for one in text.lower().split("\t") if one.strip())
        texts[part] = index.of(word for one in sentences for word in (*one.split(), SPECIAL[EOS]))
    return made(path.resolve().name, texts, number, index, minimum)


def synthetic(minimum: int = 1) -> Corpus:
    """A small text for trying things out: every word has three that may follow it."""
    rng = np.random.default_rng(0)
    follow = rng.integers(0, 40, (40, 3))
    index, texts = Index(SPECIAL), {}
    for part, number in zip(PARTS, (300, 60, 60), strict=True):
        words: list[str] = []
        for length in rng.integers(1, 25, number):
            word = rng.integers(0, 40)
            for _ in range(length):
                words.append(f"w{word}")
                word = follow[word, rng.integers(0, 3)]
            words.append(SPECIAL[EOS])
        texts[part] = index.of(words)
    return made("synthetic", texts, dict(zip(PARTS, (300, 60, 60), strict=True)), index, minimum)


KNOWN = {"imdb": imdb, "wikitext2": wikitext2, "synthetic": synthetic}


def save(corpus: Corpus, path: Path) -> None:
    """Write a corpus as one small .npz, which is all that `load` needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = np.frombuffer("\n".join(corpus.vocabulary).encode(), np.uint8)
    counts = np.array([corpus.documents[part] for part in PARTS])
    fields: dict[str, Any] = {
        "format": FORMAT,
        "name": corpus.name,
        "vocabulary": words,
        "documents": counts,
    }
    fields |= corpus.parts
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with fresh.open("wb") as out:
        np.savez_compressed(out, **fields)
    fresh.replace(path)


def load(path: Path) -> Corpus:
    """The corpus of `save`."""
    again = "make it anew: python -m experiments.language prepare imdb OUT.npz"
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; {again}")
    try:
        with path.open("rb") as file, np.load(file) as found:
            kept = {name: found[name] for name in found.files}
            vocabulary = kept["vocabulary"].tobytes().decode().split("\n")
            parts = {part: kept[part] for part in PARTS}
            counts: dict[str, int] = dict(zip(PARTS, kept["documents"].tolist(), strict=True))
            version, name = int(kept["format"]), str(kept["name"])
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path} cannot be read ({error}); delete it and {again}") from error
    if version != FORMAT:
        raise DatasetError(f"{path} has format {version}, expected {FORMAT}; delete it and {again}")
    most = max(int(ids.max(initial=0)) for ids in parts.values())
    if most >= len(vocabulary) or any(not len(ids) or ids[-1] != EOS for ids in parts.values()):
        raise DatasetError(f"{path} is damaged: a word without a name; delete it and {again}")
    return Corpus(name, vocabulary, parts, counts)


def read(source: str, cache: str = "", minimum: int = 10) -> Corpus:
    """The corpus called `imdb` or `wikitext2`, kept in a cache once it is made; or in a file of `save`; or in a folder."""
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        return load(path)
    if source not in KNOWN:
        if not path.is_dir():
            raise DatasetError(
                f"--corpus={source}: no such folder; expected {', '.join(KNOWN)}, an .npz made by python -m "
                "experiments.language prepare, or a folder with train.txt, valid.txt and test.txt"
            )
        return folder(path, minimum)
    home = Path(cache or os.environ.get(VARIABLE) or Path.home() / ".cache/particlax").expanduser()
    kept = home / "language" / f"{source}-{minimum}-{FORMAT}.npz"
    if kept.is_file():
        return load(kept)
    corpus = KNOWN[source](minimum)
    if source == "synthetic":
        return corpus
    try:
        save(corpus, kept)
    except OSError as error:  # a folder of data may be read-only
        print(f"{source} is not kept for the next time: {error}")
    return corpus


def packed(ids: np.ndarray, length: int, width: int, seed: int = 0) -> Rows:
    """Sentences, cut after every `length` words, in rows of `width` words; the rest of a row is PAD.

    The input of a piece is `<go>`, or the word before it where a sentence was cut, and its own words but the last. Pieces come
    in random order, each into the fullest row that has room: rows are about 99 % full, where one piece to a row fills 60 %.
    """
    if width < length:
        raise ValueError(f"rows of {width} words cannot hold sequences of {length}")
    ends = np.flatnonzero(ids == EOS)
    size = np.diff(ends, prepend=-1)
    number = -(-size // length)
    offset = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    begins = np.repeat(ends - size + 1, number) + offset * length
    sizes = np.minimum(length, np.repeat(ends, number) + 1 - begins)
    order = np.random.default_rng(seed).permutation(len(sizes))
    begins, sizes = begins[order], sizes[order]
    row, column = _places(sizes.tolist(), width)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    source = np.repeat(begins, sizes) + within
    flat = np.repeat(row * width + column, sizes) + within
    before = np.where(_shifted(ids == EOS, True), GO, np.concatenate([ids[:1], ids[:-1]]))
    shape = (int(row.max()) + 1, width)
    x, y = np.zeros(shape, ids.dtype), np.zeros(shape, ids.dtype)
    start = np.zeros(shape, bool)
    x.flat[flat], y.flat[flat] = before[source], ids[source]
    start[row, column] = True
    return Rows(x, y, start)


def _places(sizes: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each piece: the row with the least room that is enough for it, or a new one."""
    rooms: list[list[int]] = [[] for _ in range(width + 1)]
    some = rows = 0  # bit r of `some`: a row has room r
    found = []
    for size in sizes:
        if fits := some >> size:
            room = size + (fits & -fits).bit_length() - 1
            row = rooms[room].pop()
            some ^= 0 if rooms[room] else 1 << room
        else:
            row, room, rows = rows, width, rows + 1
        found.append((row, width - room))
        if left := room - size:
            rooms[left].append(row)
            some |= 1 << left
    return tuple(np.array(found).T)  # pyright: ignore
