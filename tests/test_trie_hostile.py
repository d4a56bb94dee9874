"""Compiled look-ups and searches stay inside arrays whose contents are not to be trusted, checked by the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_no_index_leaves_an_array(tmp_path):
    folder = Path(__file__).parent
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(folder.parent)}
    command = [sys.executable, "-W", "ignore", str(folder / "hostile_tries.py"), "7", "400"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr
