"""How loops are compiled with numba here: without the interpreter lock, kept on disk, IEEE results for bad numbers.

numba's on-disk cache watches only the file of the function that is called, so compiled functions must not call others
across files: an edit of the callee would go unnoticed.
"""

from __future__ import annotations

from numba import njit

compiled = njit(nogil=True, cache=True, error_model="numpy")
