"""Numbers of bytes in rules: ``512``, ``64k``, ``1m``, ``inf``."""

from __future__ import annotations

import re

from mpicoll.errors import AlgorithmError


def parse_bytes(text: str) -> float:
    """Return the number of bytes that `text` names; infinity for ``inf``. Raises AlgorithmError if it names none."""
    if text == "inf":
        return float("inf")
    match = re.fullmatch(r"([0-9]{1,18})([kmg]?)", text.lower())
    if match is None:
        raise AlgorithmError(f"{text!r} is not a number of bytes; write for example 0, 512, 64k, 1m, 2g or inf")
    return float(int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]])


def format_bytes(number: float) -> str:
    """Return the text from which :func:`parse_bytes` reads `number`."""
    if number == float("inf"):
        return "inf"
    for unit, shift in (("g", 30), ("m", 20), ("k", 10)):
        if number and number % (1 << shift) == 0:
            return f"{int(number) >> shift}{unit}"
    return str(int(number))
