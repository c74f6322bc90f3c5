"""Cut the embedded MNIST subset: the first 10,000 training and the first 2,000 test rows, in order.

    python cut_subset.py FOLDER_OF_THE_ORIGINALS

The folder holds the four standard IDX files, gzipped or not. The gzip headers carry no time and no name, so
the same zlib packs the same bytes again. Prints the SHA-256 of each file's raw IDX bytes, before and after
the cut; `_mnist_data.py` keeps both.
"""

import gzip
import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = {"train": 10_000, "t10k": 2_000}


def cut(raw: bytes, rows: int) -> bytes:
    """`rows` rows of an IDX file: the same header with a smaller first dimension, then that many rows."""
    ndim = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim)]
    row_bytes = 1
    for size in shape[1:]:
        row_bytes *= size
    start = 4 + 4 * ndim
    return raw[:4] + rows.to_bytes(4, "big") + raw[8 : start + rows * row_bytes]


def main(originals: Path) -> None:
    for split, rows in ROWS.items():
        for name in (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"):
            plain = originals / name
            raw = plain.read_bytes() if plain.exists() else gzip.decompress((originals / f"{name}.gz").read_bytes())
            subset = cut(raw, rows)
            packed = gzip.compress(subset, compresslevel=9, mtime=0)
            (HERE / f"{name}.gz").write_bytes(packed)
            print(f"{name}.gz: {rows:,} rows, {len(packed):,} bytes")
            print(f"  original {hashlib.sha256(raw).hexdigest()}")
            print(f"  subset   {hashlib.sha256(subset).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
