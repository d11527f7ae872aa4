"""Data sets: right parsing on tiny files, an error that helps for every way a file can be wrong."""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from experiments import datasets, datasets_text, fetching
from experiments.fetching import DatasetError, Published

REAL = os.environ.get(fetching.VARIABLE)
IDX = "mnist/t10k-labels-idx1-ubyte.gz"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(fetching.VARIABLE, raising=False)


@pytest.fixture
def expect(monkeypatch):
    """Make some bytes the expected ones of a content."""

    def expect(content, data):
        monkeypatch.setitem(fetching.CONTENTS, content, hashlib.sha256(data).hexdigest())

    return expect


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def tar(files, target):
    """A tar.gz with the given files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


# MNIST


def idx(array, kind=8):
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def digits(tmp_path, expect):
    """Tiny MNIST files in a folder, with their arrays."""
    random = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": random.integers(0, 256, (300, 28, 28)),
        "train-labels-idx1-ubyte": random.integers(0, 10, 300),
        "t10k-images-idx3-ubyte": random.integers(0, 256, (4, 28, 28)),
        "t10k-labels-idx1-ubyte": random.integers(0, 10, 4),
    }
    for name, array in arrays.items():
        write(tmp_path / "mnist" / f"{name}.gz", gzip.compress(idx(array)))
        expect(f"mnist/{name}", idx(array))
    return tmp_path, list(arrays.values())


def test_mnist(digits):
    folder, arrays = digits
    for found, array in zip(datasets.mnist(folder), arrays, strict=True):
        assert found.dtype == np.uint8
        assert np.array_equal(found, array)
        assert found.flags.writeable


def test_one_part_of_fashion_mnist_is_enough(digits, expect):
    folder, arrays = digits
    (folder / "mnist").rename(folder / "fashion_mnist")
    for file in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        expect(f"fashion_mnist/{file}", idx(arrays[2 + ("labels" in file)]))
    (folder / "fashion_mnist" / "train-images-idx3-ubyte.gz").unlink()
    images, labels = datasets.mnist_part("test", folder, name="fashion_mnist")
    assert np.array_equal(images, arrays[2])
    assert np.array_equal(labels, arrays[3])
    with pytest.raises(DatasetError, match=r"fashion_mnist: no such file.*26,421,880 bytes"):
        datasets.fashion_mnist(folder)


def test_a_folder_may_be_flat_or_named_by_the_variable(digits, monkeypatch):
    folder, arrays = digits
    assert len(datasets.mnist(folder / "mnist").test_labels) == 4
    monkeypatch.setenv(fetching.VARIABLE, str(folder))
    assert np.array_equal(datasets.mnist().train_labels, arrays[1])
    with pytest.raises(DatasetError, match="elsewhere"):
        datasets.mnist(folder / "elsewhere")


def test_a_missing_file_is_named_with_its_home_size_and_sum(tmp_path):
    with pytest.raises(DatasetError) as caught:
        datasets.mnist_part("test", tmp_path)
    message = str(caught.value)
    for part in (
        str(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"),
        str(tmp_path / "t10k-images-idx3-ubyte.gz"),
        "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz",
        "1,648,877 bytes",
        fetching.PUBLISHED["mnist/t10k-images-idx3-ubyte.gz"].sha256,
        fetching.VARIABLE,
    ):
        assert part in message


def test_a_repacked_file_is_fine_and_an_altered_one_is_not(digits):
    folder, arrays = digits
    write(folder / IDX, gzip.compress(idx(arrays[3]), compresslevel=1, mtime=1))
    datasets.mnist(folder)
    altered = idx(arrays[3] ^ 1)
    write(folder / IDX, gzip.compress(altered))
    with pytest.raises(DatasetError, match="altered") as caught:
        datasets.mnist(folder)
    found, known = hashlib.sha256(altered).hexdigest(), hashlib.sha256(idx(arrays[3])).hexdigest()
    for part in (str(folder / IDX), f"sha256 {found}, expected {known}", "https://", "4,542"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<html>not found</html>", "BadGzipFile"),
        (b"", "starts with 0 0 8"),
        (gzip.compress(b"\0\0\x0d\1" + bytes(8)), "starts with 0 0 8"),
        (gzip.compress(idx(np.zeros(5))[:-1]), r"cannot reshape array of size 4 into shape \(5,\)"),
        (gzip.compress(b"\0\0\x08\3\0"), "ValueError"),
    ],
    ids=["html", "empty", "type", "short", "header"],
)
def test_malformed_idx(digits, data, reason):
    folder, _ = digits
    write(folder / IDX, data)
    with pytest.raises(DatasetError, match=f"t10k-labels.*cannot be read.*{reason}.*4,542 bytes"):
        datasets.mnist(folder)


def test_truncated_gzip(digits):
    folder, _ = digits
    truncate(folder / "mnist" / "train-images-idx3-ubyte.gz")
    with pytest.raises(DatasetError, match=r"train-images.*EOFError.*9,912,422 bytes, sha256"):
        datasets.mnist(folder)


# Covertype


@pytest.fixture
def forest(tmp_path, expect):
    """A tiny covtype.data.gz, with its rows."""
    random = np.random.default_rng(1)
    rows = np.c_[random.integers(-173, 7174, (7, 54)), np.arange(1, 8)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows.tolist()).encode()
    write(tmp_path / "covtype" / "covtype.data.gz", gzip.compress(text))
    expect("covtype/covtype.data", text)
    return tmp_path, rows


def test_covertype(forest):
    folder, rows = forest
    table = datasets.covertype(folder)
    assert (table.x.dtype, table.y.dtype) == (np.int16, np.uint8)
    assert np.array_equal(table.x, rows[:, :54])
    assert np.array_equal(table.y, rows[:, 54])


def test_wrong_covertype(forest, expect):
    folder, _ = forest
    path = folder / "covtype" / "covtype.data.gz"
    truncate(path)
    with pytest.raises(DatasetError, match=r"covtype.data.gz cannot be read.*11,240,707 bytes"):
        datasets.covertype(folder)
    write(path, gzip.compress(b"1,2,3\n"))
    with pytest.raises(DatasetError, match=r"covtype.data.gz is altered.*archive.ics.uci.edu"):
        datasets.covertype(folder)
    expect("covtype/covtype.data", b"1,2,3\n")
    with pytest.raises(DatasetError, match="cannot reshape"):
        datasets.covertype(folder)


# CIFAR-10


class Python2(pickle._Pickler):
    """Writes pickles as Python 2 did: every string is a byte string."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value if isinstance(value, bytes) else value.encode()
        short = len(data) < 256
        head = pickle.SHORT_BINSTRING if short else pickle.BINSTRING
        self.write(head + struct.pack("<B" if short else "<i", len(data)) + data)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_string


def python2(value):
    file = io.BytesIO()
    Python2(file, 2).dump(value)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture
def batches(expect):
    """Six tiny batches of the binary version: labels and planes."""
    random = np.random.default_rng(2)
    records = {}
    for name in datasets.BATCHES:
        records[name] = np.c_[random.integers(0, 10, 3), random.integers(0, 256, (3, 3072))]
        expect(f"cifar10/{name}", records[name].astype(np.uint8).tobytes())
    return {name: array.astype(np.uint8) for name, array in records.items()}


def binary_files(batches):
    return {f"cifar-10-batches-bin/{name}.bin": a.tobytes() for name, a in batches.items()}


def python_files(batches, order="C", dumps=python2):
    files = {}
    for name, a in batches.items():
        data = np.asarray(a[:, 1:], order=order)
        batch = {b"labels": a[:, 0].tolist(), b"data": data, b"filenames": [b"a.png"]}
        files[f"cifar-10-batches-py/{name}"] = dumps(batch)
    return files


def unpacked(files, folder):
    for name, data in files.items():
        write(folder / name, data)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar10(tmp_path, batches, version, packed):
    files = (binary_files if version == "binary" else python_files)(batches)
    if packed:
        tar(files, tmp_path / "cifar10" / f"cifar-10-{version}.tar.gz")
    else:
        unpacked(files, tmp_path / "cifar10")
    found = datasets.cifar10(tmp_path)
    assert [a.shape for a in found] == [(15, 32, 32, 3), (15,), (3, 32, 32, 3), (3,)]
    assert {a.dtype for a in found} == {np.dtype(np.uint8)}
    record = batches["data_batch_2"][1]
    assert found.train_labels[4] == record[0]
    for channel, row, column in [(0, 0, 0), (0, 0, 1), (0, 5, 0), (1, 0, 0), (2, 31, 30)]:
        pixel = record[1 + channel * 1024 + row * 32 + column]
        assert found.train_images[4, row, column, channel] == pixel
    assert np.array_equal(found.test_labels, batches["test_batch"][:, 0])


@pytest.mark.parametrize("order", ["C", "F"])
def test_python_batches_saved_again_by_python_3(tmp_path, batches, order):
    files = python_files(batches, order, lambda batch: pickle.dumps(batch, 2))
    unpacked(files, tmp_path)
    assert np.array_equal(
        datasets.cifar10(tmp_path).test_images[:, 0, 1, 2], batches["test_batch"][:, 2050]
    )


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.system, eval, getattr])
def test_a_pickle_cannot_run_code(tmp_path, batches, function, protocol):
    unpacked(python_files(batches), tmp_path)
    mark = tmp_path / "was-run"
    attack = Malicious(function, f"touch {mark}")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({b"data": attack}, protocol))
    with pytest.raises(
        DatasetError, match=r"data_batch_3 .*asks for \w+\.\w+, which is refused.*170,498,071"
    ):
        datasets.cifar10(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        python2({b"labels": [1, 2], b"data": np.zeros((3, 3072), np.uint8)}),
        python2({b"labels": [300], b"data": np.zeros((1, 3072), np.uint8)}),
        python2({b"labels": [1], b"data": np.zeros((1, 3072), np.float64)}),
        python2({b"labels": [1], b"data": np.zeros((1, 2), object)}),
    ],
)
def test_malformed_pickles(tmp_path, batches, batch):
    unpacked(python_files(batches) | {"cifar-10-batches-py/test_batch": batch}, tmp_path)
    with pytest.raises(
        DatasetError, match=r"cifar-10-batches-py/test_batch cannot be read.*cs.toronto.edu"
    ):
        datasets.cifar10(tmp_path)


def test_wrong_cifar10(tmp_path, batches, expect):
    files = binary_files(batches)
    unpacked(files, tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=r"bin/data_batch_4.bin is altered.*have sha256"):
        datasets.cifar10(tmp_path)
    expect("cifar10/data_batch_4", path.read_bytes())
    with pytest.raises(DatasetError, match="cannot reshape"):
        datasets.cifar10(tmp_path)
    path.unlink()
    with pytest.raises(DatasetError, match=r"cifar-10-batches-bin has no data_batch_4.bin"):
        datasets.cifar10(tmp_path)


def test_truncated_tar(tmp_path, batches):
    truncate(tar(binary_files(batches), tmp_path / "cifar-10-binary.tar.gz"))
    with pytest.raises(DatasetError, match=r"binary.tar.gz cannot be read.*170,052,171 bytes"):
        datasets.cifar10(tmp_path)


# IMDB


@pytest.fixture
def reviews(monkeypatch, expect):
    """Twelve reviews in each part: file names and texts, the sums of their parts expected."""
    files = {}
    for part in datasets_text.REVIEWS:
        monkeypatch.setitem(datasets_text.REVIEWS, part, 12)
        lines = []
        for number in range(12):
            rating = {"pos": 7, "neg": 1, "unsup": 0}[part.partition("/")[2]] + number % 2
            text = f"{part} {number}: très\x85 <br />bien"
            files[f"aclImdb/{part}/{number}_{rating}.txt"] = text.encode()
            lines.append(f"{rating} {text}")
        expect(f"imdb/{part}", "\n".join(lines).encode())
    extra = {"aclImdb/README": b"x", "aclImdb/train/labeledBow.feat": b"9 0:9", "../evil": b"!"}
    return files, extra


@pytest.mark.parametrize("packed", [True, False])
def test_imdb(tmp_path, reviews, packed):
    files, extra = reviews
    if packed:
        tar(extra | files, tmp_path / "data" / "imdb" / "aclImdb_v1.tar.gz")
    else:
        unpacked(extra | files, tmp_path / "data" / "imdb")
    before = sorted(tmp_path.rglob("*"))
    found = datasets.imdb(tmp_path / "data")
    assert sorted(tmp_path.rglob("*")) == before
    assert found.train[:12] == [f"train/pos {i}: très\x85 <br />bien" for i in range(12)]
    assert [text.split(":")[0] for text in found.train[::12]] == [
        f"train/{part} 0" for part in ("pos", "neg", "unsup")
    ]
    assert [text.split(":")[0] for text in found.test[10:14]] == [
        *("test/pos 10", "test/pos 11", "test/neg 0", "test/neg 1")
    ]
    assert (len(found.train), len(found.test)) == (36, 24)
    assert found.train_ratings.tolist() == [7, 8] * 6 + [1, 2] * 6 + [0, 1] * 6
    assert found.test_ratings.tolist() == [7, 8] * 6 + [1, 2] * 6


def test_altered_imdb(tmp_path, reviews):
    files, _ = reviews
    unpacked(files, tmp_path)
    path = tmp_path / "aclImdb" / "test" / "neg" / "11_2.txt"
    text = path.read_bytes()
    path.write_bytes(text.replace(b" ", b"\n"))
    datasets.imdb(tmp_path)
    path.write_bytes(text + b"!")
    with pytest.raises(
        DatasetError, match=r"aclImdb/test/neg is altered: the contents of imdb/test/neg"
    ):
        datasets.imdb(tmp_path)
    path.unlink()
    with pytest.raises(DatasetError, match=r"test/neg has 11 reviews, expected 12.*84,125,825"):
        datasets.imdb(tmp_path)
    path.with_name("11_3.txt").write_bytes(text)
    with pytest.raises(DatasetError, match="altered"):
        datasets.imdb(tmp_path)


def test_the_published_archive_needs_no_other_sum(tmp_path, reviews, expect, monkeypatch):
    path = tar(reviews[0], tmp_path / "aclImdb_v1.tar.gz")
    expect("imdb/test/pos", b"other")
    with pytest.raises(DatasetError, match="altered"):
        datasets.imdb(tmp_path)
    own = Published((), sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(fetching.PUBLISHED, "imdb/aclImdb_v1.tar.gz", own)
    assert len(datasets.imdb(tmp_path).test) == 24


def test_missing_or_truncated_imdb(tmp_path, reviews):
    truncate(tar(reviews[0], tmp_path / "aclImdb_v1.tar.gz"))
    with pytest.raises(DatasetError, match=r"aclImdb_v1.tar.gz cannot be read.*84,125,825 bytes"):
        datasets.imdb(tmp_path)
    (tmp_path / "aclImdb" / "train").mkdir(parents=True)
    with pytest.raises(DatasetError, match=r"FileNotFoundError.*train/pos"):
        datasets.imdb(tmp_path)


# WikiText-2


@pytest.fixture
def wiki(expect):
    files = {}
    for part in ("train", "valid", "test"):
        files[f"wiki.{part}.tokens"] = f" \n = {part} = \n \n a <unk> ō . \n".encode()
        expect(f"wikitext2/wiki.{part}.tokens", files[f"wiki.{part}.tokens"])
    return files


def zipped(files, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in reversed(files.items()):
            archive.writestr(f"wikitext-2/{name}", data)
    return path


@pytest.mark.parametrize("place", ["wikitext2/wikitext-2", "wikitext-2", ".", "zip"])
def test_wikitext2(tmp_path, wiki, place):
    if place == "zip":
        zipped(wiki, tmp_path / "wikitext-2-v1.zip")
    else:
        unpacked(wiki, tmp_path / place)
    words = datasets.wikitext2(tmp_path)
    for part, tokens in words._asdict().items():
        assert tokens == f"<eos> = {part} = <eos> <eos> a <unk> ō . <eos>".split()


def test_wrong_wikitext2(tmp_path, wiki):
    path = zipped(wiki, tmp_path / "wikitext-2-v1.zip")
    truncate(path)
    with pytest.raises(DatasetError, match=r"zip cannot be read.*BadZipFile.*wikitext-2-v1.zip"):
        datasets.wikitext2(tmp_path)
    zipped({name: data for name, data in wiki.items() if "test" not in name}, path)
    with pytest.raises(DatasetError, match=r"has no wiki.test.tokens"):
        datasets.wikitext2(tmp_path)
    zipped(wiki | {"wiki.valid.tokens": b"raw"}, path)
    with pytest.raises(DatasetError, match=r"wiki.valid.tokens have sha256.*expected"):
        datasets.wikitext2(tmp_path)


# UCI


@pytest.fixture
def yacht(monkeypatch, expect):
    """Five rows of four columns, the target in column 2, and two splits."""
    monkeypatch.setitem(fetching.UCI, "yacht", ("yacht", 2))
    data = np.random.default_rng(3).normal(size=(5, 4))
    x, y, test_index = data[:, [0, 1]], data[:, 2], np.array([[4, 0], [1, 3]], np.uint16)
    expect("uci/yacht", x.tobytes() + y.tobytes() + test_index.astype(np.int64).tobytes())
    return data, {"X": np.asfortranarray(x), "y": y, "test_index": test_index}


def yacht_texts(data):
    lines = "\n".join("   ".join(map(repr, row)) for row in data.tolist())
    home = "UCI_Datasets/yacht/data"
    return {
        f"{home}/data.txt": f" {lines}\n".encode(),
        f"{home}/index_features.txt": b"0\n1\n\n",
        f"{home}/index_target.txt": b"2\n",
        f"{home}/index_test_0.txt": b"4\n0\n",
        f"{home}/index_test_1.txt": b"1\n3\n",
    }


@pytest.mark.parametrize("texts", [True, False])
def test_uci(tmp_path, yacht, texts):
    data, arrays = yacht
    if texts:
        unpacked(yacht_texts(data), tmp_path)
    else:
        np.savez(tmp_path / "yacht.npz", **arrays)
    found = datasets.uci("yacht", tmp_path)
    assert [a.dtype for a in found] == [np.float64, np.float64, np.int64]
    for array, expected in zip(found, arrays.values(), strict=True):
        assert np.array_equal(array, expected)


def test_wrong_uci_npz(tmp_path, yacht):
    _, arrays = yacht
    path = tmp_path / "yacht.npz"
    with pytest.raises(DatasetError, match=r"yacht.npz.*github.com/yaringal.*UCI_Datasets/yacht"):
        datasets.uci("yacht", tmp_path)
    np.savez(path, **arrays | {"y": arrays["y"] + 1})
    with pytest.raises(DatasetError, match=r"yacht.npz is altered.*uci/yacht have sha256"):
        datasets.uci("yacht", tmp_path)
    np.savez(path, **arrays | {"X": arrays["X"].T})
    with pytest.raises(DatasetError, match=r"X, y, test_index are \(2, 5\), \(5,\), \(2, 2\)"):
        datasets.uci("yacht", tmp_path)
    np.savez(path, X=arrays["X"])
    with pytest.raises(DatasetError, match=r"yacht.npz cannot be read.*y"):
        datasets.uci("yacht", tmp_path)
    np.savez(path, **arrays | {"y": np.array([Malicious(os.getcwd)], object)})
    with pytest.raises(DatasetError, match=r"Object arrays cannot be loaded"):
        datasets.uci("yacht", tmp_path)
    np.savez(path, **arrays)
    truncate(path)
    with pytest.raises(DatasetError, match=r"yacht.npz cannot be read"):
        datasets.uci("yacht", tmp_path)


def test_wrong_uci_texts(tmp_path, yacht):
    files = yacht_texts(yacht[0])
    home = tmp_path / "UCI_Datasets" / "yacht" / "data"
    unpacked(files, tmp_path)
    (home / "index_test_1.txt").write_text("1\nthree\n")
    with pytest.raises(DatasetError, match=r"index_test_1.txt cannot be read.*three"):
        datasets.uci("yacht", tmp_path)
    (home / "index_test_1.txt").unlink()
    with pytest.raises(DatasetError, match=r"no such file, tried .*index_test_1.txt"):
        datasets.uci("yacht", tmp_path)
    unpacked(files, tmp_path)
    (home / "index_target.txt").write_text("9\n")
    with pytest.raises(DatasetError, match=r"IndexError"):
        datasets.uci("yacht", tmp_path)
    (home / "index_target.txt").write_text("3\n")
    with pytest.raises(DatasetError, match=r"yacht/data is altered"):
        datasets.uci("yacht", tmp_path)


def test_unknown_uci_set(tmp_path):
    with pytest.raises(DatasetError, match=r"'bostn': did you mean 'boston'\? .*wine_red, yacht"):
        datasets.uci("bostn", tmp_path)


# one document per line


def test_documents(tmp_path):
    path = write(tmp_path / "train.txt", "première ligne\tphrase\x85deux\r\n\n seconde \n".encode())
    assert datasets.documents(path) == ["première ligne\tphrase\x85deux", "seconde"]
    assert datasets.documents(str(path)) == datasets.documents(path)


def test_wrong_documents(tmp_path):
    with pytest.raises(DatasetError, match=r"none.txt cannot be read.*one document per line"):
        datasets.documents(tmp_path / "none.txt")
    path = write(tmp_path / "latin.txt", "première".encode("latin-1"))
    with pytest.raises(DatasetError, match=r"latin.txt is not UTF-8"):
        datasets.documents(path)


# downloads


class Files(http.server.BaseHTTPRequestHandler):
    """Serves `files`; a file with a longer `sizes` entry breaks off early."""

    files: ClassVar[dict[str, bytes]] = {}
    sizes: ClassVar[dict[str, int]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        name = self.path.lstrip("/")
        self.asked.append(name)
        if name not in self.files:
            self.send_error(404)
            return
        data = self.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(self.sizes.get(name, len(data))))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of files on this machine, and an empty cache."""
    pooch = pytest.importorskip("pooch", reason="downloads need pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Handler", (Files,), {"files": {}, "sizes": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        handler.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield handler
        running.shutdown()
        thread.join()


def publish(monkeypatch, server, key, data, homes=("{name}",)):
    homes = tuple(f"{server.url}/{home}" for home in homes)
    sha256 = hashlib.sha256(data).hexdigest()
    monkeypatch.setitem(fetching.PUBLISHED, key, Published(homes, len(data), sha256))


def test_download_once(tmp_path, forest, server, monkeypatch):
    folder, rows = forest
    data = (folder / "covtype" / "covtype.data.gz").read_bytes()
    publish(monkeypatch, server, "covtype/covtype.data.gz", data)
    server.files["covtype.data.gz"] = data
    for _ in range(2):
        assert np.array_equal(datasets.covertype().y, rows[:, 54])
    assert server.asked == ["covtype.data.gz"]
    cached = tmp_path / "cache" / "particlax" / "covtype" / "covtype.data.gz"
    assert cached.read_bytes() == data
    truncate(cached)
    datasets.covertype()
    assert len(server.asked) == 2
    assert [path.name for path in cached.parent.iterdir()] == ["covtype.data.gz"]


def test_a_mirror_is_tried_when_the_home_fails(forest, server, monkeypatch):
    folder, rows = forest
    data = (folder / "covtype" / "covtype.data.gz").read_bytes()
    homes = ("gone/{name}", "moved.html", "mirror/file")
    publish(monkeypatch, server, "covtype/covtype.data.gz", data, homes)
    server.files |= {"moved.html": b"<html>", "mirror/file": data}
    assert np.array_equal(datasets.covertype().y, rows[:, 54])
    assert server.asked == ["gone/covtype.data.gz", "moved.html", "mirror/file"]


@pytest.mark.parametrize("fault", ["missing", "altered", "truncated", "unreachable"])
def test_failed_download(tmp_path, server, monkeypatch, fault):
    key, data = "wikitext2/wikitext-2-v1.zip", bytes(range(256)) * 4
    publish(monkeypatch, server, key, data)
    url = f"{server.url}/wikitext-2-v1.zip"
    if fault == "altered":
        server.files["wikitext-2-v1.zip"] = data[:-1] + b"!"
    if fault == "truncated":
        server.files["wikitext-2-v1.zip"] = data[:-9]
        server.sizes["wikitext-2-v1.zip"] = len(data)
    if fault == "unreachable":
        home = Published(("http://127.0.0.1:9/{name}",), len(data), "0" * 64)
        monkeypatch.setitem(fetching.PUBLISHED, key, home)
        url = "http://127.0.0.1:9/wikitext-2-v1.zip"
    with pytest.raises(DatasetError) as caught:
        datasets.wikitext2()
    reason = {"missing": "404", "altered": "does not match", "truncated": "", "unreachable": ""}
    for part in (
        f"could not download {key}",
        f"{url}: ",
        reason[fault],
        "1,024 bytes, sha256 ",
        f"to FOLDER/{key} and set {fetching.VARIABLE}=FOLDER",
    ):
        assert part in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_download_of_uci_texts(tmp_path, yacht, server, monkeypatch):
    data, arrays = yacht
    server.files |= yacht_texts(data)
    for name in server.files:
        page = f"{server.url}/yacht"
        home = Published((f"{server.url}/{{name}}",), page=page)
        monkeypatch.setitem(fetching.PUBLISHED, f"uci/{name}", home)
    assert np.array_equal(datasets.uci("yacht").test_index, arrays["test_index"])
    assert sorted(set(server.asked)) == sorted(server.files)
    cached = tmp_path / "cache" / "particlax" / "uci" / "UCI_Datasets" / "yacht" / "data"
    (cached / "index_test_0.txt").write_text("4\n1\n")
    with pytest.raises(DatasetError, match=f"{cached} is altered.*Delete it and get {page}"):
        datasets.uci("yacht")


def test_downloads_need_pooch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DatasetError, match=r"pip install 'particlax\[data\]'.*FOLDER/mnist"):
        datasets.mnist()


def test_progress_bar_counts(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = fetching.Bar("file")
    bar.total = 100
    bar.update(30)
    assert bar._progress.tasks[0].percentage == 30
    bar.reset()
    bar.update(100)
    assert bar._progress.finished
    bar.close()
    bar.close()
    assert bar.total == 100


# the registry and the real files


def test_registry_is_sound():
    for key, published in fetching.PUBLISHED.items():
        assert all(url.startswith(("https://", "http://")) for url in published.homes)
        assert bool(published.page) == key.startswith("uci/") == (published.sha256 is None)
    sums = [*fetching.CONTENTS.values(), *(p.sha256 for p in fetching.PUBLISHED.values())]
    sums = [value for value in sums if value]
    assert len(set(sums)) == len(sums) == 32 + 13
    assert all(len(value) == 64 and int(value, 16) for value in sums)


def real(*names):
    """The folder with the real files, if one of `names` is there."""
    if not REAL:
        pytest.skip(f"{fetching.VARIABLE} names no folder with the real files")
    if not any(any((Path(REAL) / name).glob("*")) for name in names):
        pytest.skip(f"no {' or '.join(names)} in {fetching.VARIABLE}")
    return REAL


def test_real_mnist():
    found = datasets.mnist(real("mnist"))
    assert [len(a) for a in found] == [60_000, 60_000, 10_000, 10_000]
    assert found.train_images.shape[1:] == (28, 28)
    assert found.train_labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_fashion_mnist():
    images, labels = datasets.mnist_part("test", real("fashion_mnist"), name="fashion_mnist")
    assert images.shape == (10_000, 28, 28)
    assert np.bincount(labels).tolist() == [1000] * 10


def test_real_covertype():
    x, y = datasets.covertype(real("covtype"))
    assert x.shape == (581_012, 54)
    assert np.bincount(y).tolist() == [0, 211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert set(np.unique(x[:, 10:14].sum(1))) == {1}
    assert x[0, :4].tolist() == [2596, 51, 3, 258]


def test_real_cifar10():
    found = datasets.cifar10(real("cifar10"))
    assert found.train_images.shape == (50_000, 32, 32, 3)
    mean = found.train_images.mean((0, 1, 2)) / 255
    assert np.allclose(mean, [0.49139968, 0.48215841, 0.44653091], atol=1e-8)
    assert np.bincount(found.test_labels).tolist() == [1000] * 10


def test_real_imdb():
    found = datasets.imdb(real("imdb"))
    assert (len(found.train), len(found.test)) == (75_000, 25_000)
    assert np.bincount(found.train_ratings)[0] == 50_000
    assert found.train[0].startswith("Bromwell High is a cartoon comedy.")


def test_real_wikitext2():
    words = datasets.wikitext2(real("wikitext2"))
    assert [len(part) for part in words] == [2_088_628, 217_646, 245_569]


@pytest.mark.parametrize("name", list(fetching.UCI))
def test_real_uci(name):
    x, y, test_index = datasets.uci(name, real("uci"))
    assert len(x) == len(y)
    assert len(test_index) == fetching.UCI[name][1]
    assert all(len(set(rows)) == round(len(y) / 10) for rows in test_index.tolist())
    assert test_index.max() < len(y)
