"""The built distributions, as a user gets them: away from the checkout."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from cuflash._sources import kernel_root, kernel_source
from cuflash._version import __version__

CHECKOUT = Path(__file__).resolve().parent.parent
KERNELS = CHECKOUT / "kernels"


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the text of every kernel source in the checkout by its relative path."""
    paths = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh")]
    return {path.relative_to(KERNELS).as_posix(): path.read_text("utf-8") for path in paths}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source archive from the checkout and the wheel from that archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT),
        cwd=folder,
    )
    (archive,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


def test_checkout_has_kernel_sources(sources: dict[str, str]) -> None:
    assert sources


def test_source_archive_holds_every_kernel(
    distributions: tuple[Path, Path], sources: dict[str, str]
) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = set(archive.getnames())
    assert {f"cuflash-{__version__}/kernels/{path}" for path in sources} <= names


def test_wheel_holds_the_package_and_its_kernels_only(
    distributions: tuple[Path, Path], sources: dict[str, str]
) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = set(wheel.namelist())
    kernels = {name for name in names if name.startswith("cuflash/_kernels/")}
    assert kernels == {f"cuflash/_kernels/{path}" for path in sources}
    assert {"cuflash/py.typed", "cuflash/analysis/page.js"} <= names
    assert {name.split("/")[0] for name in names} == {
        "cuflash",
        f"cuflash-{__version__}.dist-info",
    }


def test_installed_wheel_reads_its_kernels(
    distributions: tuple[Path, Path], sources: dict[str, str], tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", distributions[1]),
        cwd=tmp_path,
    )
    # NumPy and the other dependencies come from this environment: a path line in a .pth file
    # lets them be imported, and leaves the editable install of cuflash there out.
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    code = f"""
import json
import cuflash
from cuflash._sources import kernel_source
texts = {{path: kernel_source(path) for path in {sorted(sources)!r}}}
print(json.dumps([cuflash.__file__, cuflash.__version__, texts]))
"""
    file, version, texts = json.loads(run(python, "-I", "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(environment)
    assert version == __version__
    assert texts == sources


def test_checkout_reads_the_folder_beside_the_package(sources: dict[str, str]) -> None:
    assert kernel_root() == KERNELS
    assert {path: kernel_source(path) for path in sources} == sources


def test_kernel_source_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"softmax/none\.cu"):
        kernel_source("softmax/none.cu")


@pytest.mark.parametrize("path", ["../pyproject.toml", "/etc/hosts", "lib/../../LICENSE"])
def test_kernel_source_outside_the_folder(path: str) -> None:
    with pytest.raises(ValueError, match="inside the kernel folder"):
        kernel_source(path)
