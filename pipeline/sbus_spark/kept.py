"""Kept: the pieces of a task, so that only its first job reads the trace.

They are in a file in the folder of Spark's own blocks, which goes at the end
of a session.  An executor that lacks the file reads the trace once more.
"""

from __future__ import annotations

import collections
import functools
import gc
import os
import pickle
import secrets
import tempfile
from collections.abc import Iterable, Iterator

from .events import Piece, read_pieces

Element = tuple[str, Iterable[bytes]]  # a file, and texts of it


def pieces_of(
    name: str, task: int, elements: Iterable[Element]
) -> Iterator[tuple[str, Piece]]:
    """Yield (file, piece) for all that a task of an audit is to read."""
    freeze()
    folders = os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir())
    path = os.path.join(folders.partition(",")[0], f"{name}-{task}")
    if not os.path.exists(path):
        keep(path, elements)
    collections.deque(elements, 0)  # who leaves any is not used again
    with open(path, "rb") as kept:
        while kept.peek(1):
            yield pickle.load(kept)


@functools.cache
def freeze() -> None:
    """Have Spark look for less garbage after each task of this process."""
    gc.freeze()


def keep(path: str, elements: Iterable[Element]) -> None:
    """Write (file, piece) for all that a task is to read, at once or not."""
    draft = f"{path}-{secrets.token_hex(8)}"
    with open(draft, "xb") as made:
        for file, texts in elements:
            for piece in read_pieces(texts):
                pickle.dump((file, piece), made, pickle.HIGHEST_PROTOCOL)
    os.replace(draft, path)
