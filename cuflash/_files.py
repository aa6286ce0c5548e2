"""Array files for the command line: errors name the file, and no output is half written."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of an ``.npz`` file; ValueError if that is not possible."""
    content = _read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a single array (.npy); an .npz file is needed")
    return content


def read_npy(path: Path) -> NDArray[Any]:
    """Read the array of an ``.npy`` file; ValueError if that is not possible."""
    content = _read(path)
    if isinstance(content, dict):
        raise ValueError(f"{path} holds named arrays (.npz); an .npy file is needed")
    return content


def _read(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    try:
        # Opened here: numpy.load leaves a damaged file open.
        with open(path, "rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, NpzFile):
                return {name: _typed(content[name]) for name in content.files}
            return _typed(content)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file raises any of a dozen kinds
        raise ValueError(f"{path} is not a readable .npy or .npz file: {error}") from error


def _typed(array: NDArray[Any]) -> NDArray[Any]:
    """Give bfloat16 back its type: NumPy's file format keeps of it only that it has two bytes."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when all has gone well, and else leaves no trace.

    It lies in the folder of `path`, so that the last step is a rename, which cannot stop halfway.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is not a regular file")
    # Not made of the target's name, which may be as long as names can be.
    temporary = target.with_name(f".cuflash-{secrets.token_hex(8)}")
    try:
        file = open(temporary, "xb")  # noqa: SIM115 - closed before the rename
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink()
        raise
