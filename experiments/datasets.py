"""Public data sets as NumPy arrays, from a folder or downloaded; every content is checked.

`folder` is where the files lie, as they were published or unpacked: FOLDER/file or FOLDER/set/file.
Without it the variable PARTICLAX_DATA says so, and without that they are downloaded into a cache.
"""

import codecs
import difflib
import gzip
import io
import pickle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.datasets_text import Reviews, Words, documents, imdb, wikitext2
from experiments.fetching import UCI, DatasetError, Folder, broken, check, locate, members, reading

__all__ = [
    "DatasetError",
    "Images",
    "Regression",
    "Reviews",
    "Table",
    "Words",
    "cifar10",
    "covertype",
    "documents",
    "fashion_mnist",
    "imdb",
    "mnist",
    "mnist_part",
    "uci",
    "wikitext2",
]

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
COLUMNS = 55  # of Covertype: 54 features and the class
PIXELS = 3 * 32 * 32
Digits = Literal["mnist", "fashion_mnist"]


class Images(NamedTuple):
    """Pictures, uint8 (n, height, width) or (n, height, width, 3), with a uint8 class each."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


class Table(NamedTuple):
    """Rows of integers, int16, with a uint8 class each."""

    x: np.ndarray
    y: np.ndarray


class Regression(NamedTuple):
    """Inputs (n, d) and targets (n,), float64; row k of `test_index` is the test part of split k."""

    x: np.ndarray
    y: np.ndarray
    test_index: np.ndarray


def mnist(folder: Folder = None, *, name: Digits = "mnist") -> Images:
    """MNIST, 60,000 + 10,000 digits; or, by `name`, Fashion-MNIST, which has the same form."""
    return Images(*mnist_part("train", folder, name=name), *mnist_part("test", folder, name=name))


def fashion_mnist(folder: Folder = None) -> Images:
    """Fashion-MNIST, both parts; `mnist_part("test", name="fashion_mnist")` reads one alone."""
    return mnist(folder, name="fashion_mnist")


def mnist_part(
    part: Literal["train", "test"], folder: Folder = None, *, name: Digits = "mnist"
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part of MNIST or, by `name`, of Fashion-MNIST."""
    start = {"train": "train", "test": "t10k"}[part]
    images = _idx(name, f"{start}-images-idx3-ubyte", folder)
    return images, _idx(name, f"{start}-labels-idx1-ubyte", folder)


def _idx(dataset: str, name: str, folder: Folder) -> np.ndarray:
    """An idx file: two zero bytes, type, number of axes, big-endian sizes, then the bytes."""
    path, key = locate(dataset, [f"{name}.gz"], folder), f"{dataset}/{name}.gz"
    with reading(path, key):
        data = gzip.decompress(path.read_bytes())
        if data[:3] != b"\0\0\x08":
            raise ValueError(f"an idx file of bytes starts with 0 0 8, this one with {data[:3]!r}")
        shape = np.frombuffer(data, ">u4", data[3], offset=4)
        array = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy()
    check(data, f"{dataset}/{name}", path, key)
    return array


def covertype(folder: Folder = None) -> Table:
    """Covertype, 581,012 rows of 54 unscaled features with classes 1..7, in the original order."""
    key = "covtype/covtype.data.gz"
    path = locate("covtype", ["covtype.data.gz"], folder)
    with reading(path, key):
        text = gzip.decompress(path.read_bytes())
        check(text, "covtype/covtype.data", path, key)
        values = np.fromstring(text.replace(b"\n", b","), np.int16, sep=",").reshape(-1, COLUMNS)
    return Table(values[:, :-1].copy(), values[:, -1].astype(np.uint8))


def cifar10(folder: Folder = None) -> Images:
    """CIFAR-10, 50,000 + 10,000 colour images, from its binary or its python version."""
    binary = ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    path = locate("cifar10", [*binary, "cifar-10-batches-py", "cifar-10-python.tar.gz"], folder)
    is_binary = path.name in binary
    key = f"cifar10/cifar-10-{'binary' if is_binary else 'python'}.tar.gz"
    names = [f"{batch}.bin" if is_binary else batch for batch in BATCHES]
    batches = []
    for batch, name, data in zip(BATCHES, names, members(path, names, key), strict=True):
        records = data if is_binary else _records(data, path / name, key)
        check(records, f"cifar10/{batch}", path / name, key)
        with reading(path / name, key):
            batches.append(np.frombuffer(records, np.uint8).reshape(-1, 1 + PIXELS))
    train, test = np.concatenate(batches[:-1]), batches[-1]
    return Images(_pictures(train), train[:, 0].copy(), _pictures(test), test[:, 0].copy())


def _pictures(records: np.ndarray) -> np.ndarray:
    """The pixels of records that hold a label and then the red, the green and the blue plane."""
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _records(data: bytes, path: Path, key: str) -> bytes:
    """The records of the binary version from a pickled batch of the python version."""
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        labels = np.asarray(batch[b"labels"], np.uint8)
        _, shape, kind, fortran, raw = batch[b"data"].state
        if kind.arguments[0] not in (b"u1", "u1"):
            raise ValueError(f"the pixels are of type {kind.arguments[0]!r}, expected u1")
        pixels = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
        return np.concatenate([labels[:, None], pixels], axis=1).tobytes()
    except Exception as error:  # a malformed pickle may raise anything
        raise broken(path, f"cannot be read: {type(error).__name__}: {error}", key) from error


class _Stored:
    """Stands in for a pickled array and its dtype: keeps what the pickle says and runs nothing."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


HARMLESS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Stored,
    ("numpy._core.multiarray", "_reconstruct"): _Stored,
    ("numpy", "ndarray"): _Stored,
    ("numpy", "dtype"): _Stored,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    """Reads plain values and stored arrays; anything else a pickle asks for might run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is refused")
        return HARMLESS[module, name]


def uci(name: str, folder: Folder = None) -> Regression:
    """A UCI regression set with the splits of Hernandez-Lobato and Adams (2015), unscaled.

    Read from NAME.npz (X, y, test_index) or from the text files of the repository that publishes
    the splits. The training part of a split is every row that is not in its test part.
    """
    if name not in UCI:
        near = difflib.get_close_matches(name, UCI, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DatasetError(f"no UCI set {name!r}: {hint}Expected one of {', '.join(UCI)}")
    texts = f"UCI_Datasets/{UCI[name][0]}/data"
    key = f"uci/{texts}/data.txt"
    path = locate("uci", [f"{name}.npz", f"{texts}/data.txt"], folder)
    with reading(path, key):
        if path.suffix == ".npz":
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                found = arrays["X"], arrays["y"], arrays["test_index"]
        else:
            path, found = path.parent, _texts(texts, UCI[name][1], folder)
        x, y = (np.ascontiguousarray(array, np.dtype("<f8")) for array in found[:2])
        test_index = np.ascontiguousarray(found[2], np.dtype("<i8"))
        if x.ndim != 2 or y.shape != x.shape[:1] or len(test_index) != UCI[name][1]:
            raise ValueError(f"X, y, test_index are {x.shape}, {y.shape}, {test_index.shape}")
    check(x.tobytes() + y.tobytes() + test_index.tobytes(), f"uci/{name}", path, key)
    return Regression(x, y, test_index)


def _texts(home: str, splits: int, folder: Folder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def table(name: str) -> np.ndarray:
        path = locate("uci", [f"{home}/{name}.txt"], folder)
        with reading(path, f"uci/{home}/{name}.txt"):
            return np.loadtxt(path, ndmin=1)

    def index(name: str) -> np.ndarray:
        return table(f"index_{name}").astype(int)

    data = table("data")
    tests = np.stack([index(f"test_{k}") for k in range(splits)])
    return data[:, index("features")], data[:, index("target")[0]], tests
