"""Where the CUDA C++ source lies: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath


@cache
def kernel_root() -> Traversable:
    """Return the folder of the CUDA C++ sources.

    Returns
    -------
    Traversable
        ``cuflash/_kernels`` of an installed wheel, else ``kernels/`` of the checkout.

    Raises
    ------
    FileNotFoundError
        If neither exists.
    """
    packaged = files("cuflash") / "_kernels"
    if packaged.is_dir():
        return packaged
    # The build file tells a checkout from site-packages, where a folder named "kernels"
    # would belong to some other distribution.
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "kernels").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "kernels"
    raise FileNotFoundError(
        f"the CUDA sources of cuflash are missing: neither {packaged} nor a checkout's "
        f"{checkout / 'kernels'} exists; reinstall cuflash"
    )


def kernel_source(relative_path: str) -> str:
    """Return the text of one CUDA C++ source file.

    Parameters
    ----------
    relative_path : str
        Path below the kernel folder with forward slashes, such as ``"lib/numeric.cuh"``.

    Returns
    -------
    str
        The file's text.

    Raises
    ------
    ValueError
        If the path is absolute or leaves the kernel folder.
    FileNotFoundError
        If there is no such file.
    """
    path = PurePosixPath(relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"relative_path must stay inside the kernel folder, got {relative_path!r}")
    source = kernel_root().joinpath(*path.parts)
    if not source.is_file():
        raise FileNotFoundError(f"no kernel source {relative_path!r} in {kernel_root()}")
    return source.read_text(encoding="utf-8")
