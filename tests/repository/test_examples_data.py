"""The examples' data: what the embedded subset holds, and one line for each way a file can be wrong."""

import functools
import gzip
import hashlib
import http.server
import importlib
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
CURE = "delete it and run again with --download"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("_mnist_data")


@pytest.fixture
def folder(tmp_path: Path, data) -> Path:
    """A copy of the embedded files, for a test to spoil."""
    for name in data.SUBSET:
        (tmp_path / f"{name}.gz").write_bytes((EXAMPLES / "data" / f"{name}.gz").read_bytes())
    return tmp_path


@pytest.fixture
def mirror(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A mirror on this machine: its address, and the folder that it serves."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = tmp_path_factory.mktemp("mirror")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=served)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", served
        server.shutdown()
        thread.join()


def test_embedded_subset_is_the_first_rows(data) -> None:
    digits = data.load(data.EMBEDDED)
    assert digits.train_images.shape == (10_000, 28, 28) and digits.train_images.dtype == np.uint8
    assert digits.test_images.shape == (2_000, 28, 28)
    # The first labels of MNIST are known by heart.
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert digits.train_labels.dtype == np.int32 and set(digits.train_labels.tolist()) == set(range(10))


def test_the_cut_is_the_header_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "data"))
    cut = importlib.import_module("cut_subset").cut
    raw = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (3, 2, 2)) + bytes(range(12))
    assert cut(raw, 2) == bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (2, 2, 2)) + bytes(range(8))


def test_gzipped_plain_and_wrongly_named_files_read_alike(folder: Path, data) -> None:
    gzipped = data.load(folder)
    for name in (IMAGES, LABELS):
        (folder / name).write_bytes(gzip.decompress((folder / f"{name}.gz").read_bytes()))
        (folder / f"{name}.gz").unlink()
    unpacked = folder / "t10k-labels-idx1-ubyte.gz"
    unpacked.write_bytes(gzip.decompress(unpacked.read_bytes()))
    for one, other in zip(gzipped, data.load(folder), strict=True):
        np.testing.assert_array_equal(one, other)


def test_batches_are_whole_and_each_row_comes_once(data) -> None:
    digits = data.MNIST(np.zeros((10, 28, 28), np.uint8), np.arange(10, dtype=np.int32), *[np.zeros(0)] * 2)
    batches = [labels for _, labels in digits.batches(3, np.random.default_rng(0))]
    assert [len(labels) for labels in batches] == [3, 3, 3]
    assert len(set(np.concatenate(batches).tolist())) == 9


def _missing(path: Path) -> None:
    path.unlink()


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncated_inside(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-7]))


def _longer(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"x"))


def _one_pixel(path: Path) -> None:
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.write_bytes(gzip.compress(raw))


def _one_stored_byte(path: Path) -> None:
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    path.write_bytes(stored)


def _web_page(path: Path) -> None:
    path.write_bytes(b"<html><body>Please sign in</body></html>")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (_missing, f"{IMAGES}.gz is missing, and so is the file without .gz; add --download to fetch it"),
        (_truncated, f"{IMAGES}.gz is truncated: the gzip stream stops after 1,609,426 bytes; {CURE}"),
        (_empty, f"{IMAGES}.gz is truncated: it has 0 bytes, fewer than its header of 16; {CURE}"),
        (
            _truncated_inside,
            f"{IMAGES}.gz is truncated: it has 7,840,009 bytes where its header promises 7,840,016",
        ),
        (
            _longer,
            f"{IMAGES}.gz is altered: it has 7,840,017 bytes where its header promises 7,840,016; {CURE}",
        ),
        (_one_pixel, f"{IMAGES}.gz is altered: SHA-256 "),
        (_one_stored_byte, f"{IMAGES}.gz is altered: the gzip stream is damaged"),
        (_web_page, f"{IMAGES}.gz is no MNIST file: it begins with 3c68746d"),
    ],
)
def test_a_spoilt_file_is_one_line_that_names_it_and_the_cure(folder: Path, data, spoil, fact: str) -> None:
    spoil(folder / f"{IMAGES}.gz")
    with pytest.raises(data.DataError) as error:
        data.load(folder)
    assert fact in str(error.value) and "--download" in str(error.value)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_an_unreadable_file_is_one_line(folder: Path, data) -> None:
    (folder / f"{LABELS}.gz").unlink()
    (folder / f"{LABELS}.gz").mkdir()
    with pytest.raises(data.DataError, match=f"{LABELS}.gz cannot be read \\(Is a directory\\); delete it"):
        data.load(folder)


def test_images_of_one_source_and_labels_of_another(folder: Path, data, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytes([0, 0, 8, 1]) + (5).to_bytes(4, "big") + bytes(5)
    monkeypatch.setitem(data.ORIGINAL, LABELS, hashlib.sha256(raw).hexdigest())
    (folder / f"{LABELS}.gz").write_bytes(raw)
    with pytest.raises(data.DataError, match="10,000 train images but 5 labels: .* take all four from one source"):
        data.load(folder)


def _small_originals(data, monkeypatch: pytest.MonkeyPatch, served: Path) -> dict[str, bytes]:
    """Stand-ins for the four originals, on the mirror and in the table of sums."""
    packed = {}
    for name in data.ORIGINAL:
        shape = (2, 28, 28) if "images" in name else (2,)
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        raw = header + np.random.default_rng(0).bytes(int(np.prod(shape)))
        monkeypatch.setitem(data.ORIGINAL, name, hashlib.sha256(raw).hexdigest())
        packed[name] = gzip.compress(raw)
        (served / f"{name}.gz").write_bytes(packed[name])
    return packed


def test_download_writes_the_files_checked_and_leaves_nothing_else(data, monkeypatch, mirror, tmp_path) -> None:
    url, served = mirror
    packed = _small_originals(data, monkeypatch, served)
    folder = tmp_path / "new" / "folder"
    data.download(folder, [url])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {f"{n}.gz": b for n, b in packed.items()}
    assert data.load(folder).train_images.shape == (2, 28, 28)
    data.download(folder, ["http://127.0.0.1:1"])  # everything is there: nobody is asked


@pytest.mark.one_case
@pytest.mark.parametrize("spoil", [_missing, _truncated, _one_pixel, _web_page])
def test_the_second_mirror_serves_where_the_first_fails(data, monkeypatch, mirror, tmp_path, spoil, capsys) -> None:
    url, served = mirror
    packed = _small_originals(data, monkeypatch, served)
    good = served / "good"
    good.mkdir()
    for name, content in packed.items():
        (good / f"{name}.gz").write_bytes(content)
    spoil(served / f"{IMAGES}.gz")
    data.download(tmp_path, [url, f"{url}/good"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {f"{n}.gz": b for n, b in packed.items()}
    assert f"{url}/good/{IMAGES}.gz" in capsys.readouterr().out


def test_a_download_that_fails_everywhere_is_one_line_and_no_file(data, monkeypatch, mirror, tmp_path) -> None:
    url, served = mirror
    _small_originals(data, monkeypatch, served)
    _one_pixel(served / f"{IMAGES}.gz")
    with pytest.raises(data.DataError) as error:
        data.download(tmp_path, [url, "http://127.0.0.1:1"])
    text = str(error.value)
    assert f"{IMAGES}.gz could not be fetched" in text and "is altered: SHA-256" in text
    assert "refused" in text and f"put it into {tmp_path} by hand" in text and "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(data, monkeypatch, mirror, tmp_path) -> None:
    url, served = mirror
    _small_originals(data, monkeypatch, served)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(data.DataError, match="could not be written .*; name another folder with --data-dir"):
        data.download(tmp_path / "file", [url])


def test_the_command_line_ends_in_one_line(data, tmp_path) -> None:
    args = Namespace(data_dir=tmp_path, download=False, train_rows=None, batch_size=128)
    with pytest.raises(SystemExit, match=f"^mnist: .*{IMAGES}.gz is missing"):
        data.from_arguments(args)
    with pytest.raises(SystemExit, match="^mnist: --download needs a folder to write to; name one with --data-dir$"):
        data.from_arguments(Namespace(data_dir=None, download=True, train_rows=None, batch_size=128))
    with pytest.raises(SystemExit, match="^mnist: a batch of 128 is larger than the 64 training rows; lower"):
        data.from_arguments(Namespace(data_dir=None, download=False, train_rows=64, batch_size=128))


@pytest.mark.full
@pytest.mark.parametrize("script", ["mnist.py", "mnist_nnx.py"])
def test_the_scripts_exit_with_1_and_one_line(script: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / script, "--data-dir", tmp_path, "--picture", tmp_path / "picture.png"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    (before_jax,) = run.stdout.splitlines()  # said before JAX is imported, and nothing after it
    assert before_jax.startswith(f"{script.removesuffix('.py')}: JAX is started")
    assert run.stderr.count("\n") == 1 and f"{IMAGES}.gz is missing" in run.stderr
