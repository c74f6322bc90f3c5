"""The MNIST digits as numpy arrays: the embedded subset, four IDX files in a folder, or a download.

Every file is checked before it is used: the sizes that its header promises, and the SHA-256 of its raw (that
is, decompressed) bytes, so that one sum serves the gzipped and the plain file. A file that fails a check ends
the program with one line that names it and says what to do.
"""

import argparse
import gzip
import hashlib
import os
import sys
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np

EMBEDDED = Path(__file__).resolve().parent / "data"
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)

# SHA-256 of the raw IDX bytes. `data/cut_subset.py` prints both tables.
ORIGINAL = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
SUBSET = {
    "train-images-idx3-ubyte": "2889698e6bc3614913e76901316712919d1998fc2b44512451bfe65bc1e668b1",
    "train-labels-idx1-ubyte": "651e38e2ac0632f5113ec18f1df4977117f953197819034009971a6675a0df78",
    "t10k-images-idx3-ubyte": "3f6bd66dee48df299584c67669bceee490faa25f931496bd7473b42106d7daed",
    "t10k-labels-idx1-ubyte": "7b098e5f6a3065807cebeabf36fb1724a8aff19f2673ac08b4923e0e8c715bce",
}

# On purpose: of 2,000 rows it leaves 497 to the last batch, of 10,000 481: uneven over 2 to 6 and 8 devices.
TEST_BATCH = 501


class DataError(Exception):
    """A file of the data set is missing, truncated or altered, or cannot be fetched. One line."""


class MNIST(NamedTuple):
    """Images are `(rows, 28, 28)` uint8, labels `(rows,)` int32."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One epoch of the training rows, shuffled by `rng`, in whole batches: the rest sits it out."""
        order = rng.permutation(len(self.train_labels))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield self.train_images[rows], self.train_labels[rows]

    def test_batches(self) -> Iterator[np.ndarray]:
        """All test images, in order; the last batch has the rows that are left."""
        for start in range(0, len(self.test_images), TEST_BATCH):
            yield self.test_images[start : start + TEST_BATCH]


def positive(text: str) -> int:
    """The type of a command line's counts."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder of the four IDX files, gzipped or not (default: the embedded subset)",
    )
    parser.add_argument("--download", action="store_true", help="fetch into --data-dir the files that are not there")
    parser.add_argument("--train-rows", type=positive, metavar="N", help="train on the first N rows only")


def from_arguments(args: argparse.Namespace) -> MNIST:
    """The data that the command line asks for; what is wrong with it ends the program in one line."""
    try:
        if args.download:
            if args.data_dir is None:
                raise DataError("--download needs a folder to write to; name one with --data-dir")
            download(args.data_dir)
        data = load(args.data_dir or EMBEDDED)
        rows = len(data.train_labels[: args.train_rows])
        if args.batch_size > rows:
            raise DataError(f"a batch of {args.batch_size} is larger than the {rows} training rows; lower --batch-size")
    except DataError as error:
        sys.exit(f"mnist: {error}")
    return data._replace(train_images=data.train_images[:rows], train_labels=data.train_labels[:rows])


def load(folder: Path) -> MNIST:
    """The four standard files of `folder`, each gzipped or not. `DataError` if one is not as it should be."""
    arrays = []
    for split in ("train", "t10k"):
        images = _read(folder, f"{split}-images-idx3-ubyte").reshape(-1, 28, 28)
        labels = _read(folder, f"{split}-labels-idx1-ubyte").astype(np.int32)
        if len(images) != len(labels):
            raise DataError(
                f"{folder} holds {len(images):,} {split} images but {len(labels):,} labels: "
                "one file is the original and the other the subset; take all four from one source"
            )
        arrays += [images, labels]
    return MNIST(*arrays)


def download(folder: Path, mirrors: Sequence[str] = MIRRORS) -> None:
    """Fetch the originals that `folder` lacks. A file appears there whole and checked, or not at all."""
    for name, digest in ORIGINAL.items():
        if _find(folder, name) is not None:
            continue
        packed, failures = None, []
        for mirror in mirrors:
            url = f"{mirror}/{name}.gz"
            print(f"fetching {url}", flush=True)
            try:
                with urllib.request.urlopen(url, timeout=60) as response:
                    packed = response.read()
                _check(url, name, packed, {digest})
                break
            except (OSError, HTTPException, DataError) as error:
                packed = None
                failures.append(str(error) if isinstance(error, DataError) else f"{url}: {error!r}")
        if packed is None:
            raise DataError(
                f"{name}.gz could not be fetched ({'; '.join(failures)}); try again, or put it into {folder} by hand"
            )
        _write(folder / f"{name}.gz", packed)


def _write(path: Path, packed: bytes) -> None:
    # The same folder, for a rename is atomic within one file system only.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(packed)
        os.replace(part, path)
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror}); name another folder with --data-dir"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.exists()), None)


def _read(folder: Path, name: str) -> np.ndarray:
    path = _find(folder, name)
    if folder.resolve() == EMBEDDED:
        cure = "restore it from the repository"
    elif path is None:
        cure = "add --download to fetch it, or leave --data-dir out for the embedded subset"
    else:
        cure = "delete it and run again with --download"
    if path is None:
        raise DataError(f"{folder / name}.gz is missing, and so is the file without .gz; {cure}")
    try:
        raw = _check(str(path), name, path.read_bytes(), {ORIGINAL[name], SUBSET[name]})
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {cure}") from error
    except DataError as error:
        raise DataError(f"{error}; {cure}") from None
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])


def _check(where: str, name: str, stored: bytes, digests: set[str]) -> bytes:
    """The raw IDX bytes of a file, stored gzipped or plain; `DataError` says what is wrong with them."""
    try:
        # By its first bytes, not by its name: a browser may unpack a download and keep the `.gz`.
        raw = gzip.decompress(stored) if stored[:2] == b"\x1f\x8b" else stored
    except EOFError:
        raise DataError(f"{where} is truncated: the gzip stream stops after {len(stored):,} bytes") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where} is altered: the gzip stream is damaged ({error})") from None
    kind = bytes([0, 0, 8, 3 if "images" in name else 1])  # unsigned bytes, and the number of dimensions
    header = 4 + 4 * kind[3]
    if len(raw) < header:
        raise DataError(f"{where} is truncated: it has {len(raw):,} bytes, fewer than its header of {header}")
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    if raw[:4] != kind or shape[1:] not in ([], [28, 28]):
        raise DataError(f"{where} is no MNIST file: it begins with {raw[:header].hex(' ', 4)}")
    promised = header + shape[0] * (784 if shape[1:] else 1)
    if len(raw) != promised:
        state = "truncated" if len(raw) < promised else "altered"
        raise DataError(f"{where} is {state}: it has {len(raw):,} bytes where its header promises {promised:,}")
    digest = hashlib.sha256(raw).hexdigest()
    if digest not in digests:
        raise DataError(f"{where} is altered: SHA-256 {digest} of its raw bytes is not that of MNIST's file")
    return raw
