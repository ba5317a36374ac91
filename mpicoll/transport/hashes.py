"""BLAKE2b, and the comparison of digests in constant time.

The modules hashlib and hmac load OpenSSL, which takes longer than any other import at the start of a job, and megabytes
in each rank. What is here is compiled into Python.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
    from _operator import _compare_digest as compare_digest
except ImportError:  # these names are not part of the language
    from hashlib import blake2b
    from hmac import compare_digest  # type: ignore[no-redef]

__all__ = ["blake2b", "compare_digest"]
