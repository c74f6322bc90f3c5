"""The first that an example imports: it says what comes before JAX is imported, and how an interrupt ends the run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAME = Path(sys.argv[0]).stem


def _ends(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print(f"{NAME}: interrupted", file=sys.stderr)
    sys.stdout.flush()
    os._exit(130)  # as a shell calls it; Python would end itself by the signal


def save(path: Path, draw: Callable[[], Any]) -> str:
    """Saves a figure that `draw` makes by matplotlib, and says where; or what brings matplotlib, if it is missing."""
    if missing := no_picture():
        return missing
    draw().savefig(path, dpi=120)
    return f"picture {path}"


def no_picture() -> str | None:
    """What to say where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return 'no picture: matplotlib is not installed. pip install -e ".[examples]" brings it'
    return None


sys.excepthook = _ends
FIRST = os.environ.get("JDP_PROCESS_ID", "0") == "0"  # of those of jdp launch
if (
    NAME in ("mnist", "mnist_nnx", "char_gpt", "resnet", "tensor_parallel")
    and FIRST
    and not {"-h", "--help"} & {*sys.argv}
):
    print(f"{NAME}: JAX is started, then the model is compiled; each takes some seconds", flush=True)
