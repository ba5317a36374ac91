"""Settings from the environment, and the tuned table."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpicoll.cli.doctor.findings import Finding


def check_settings() -> Iterator[Finding]:
    """Yield the value of each setting, unknown variables with the prefix of mpicoll, and the tuned table."""
    from mpicoll.config import Config, find_unknown_settings
    from mpicoll.errors import SetupError
    from mpicoll.transport.control.interfaces import select_addresses

    names = {one: f"MPICOLL_{one.upper()}" for one in Config._fields}
    for field, name in names.items():
        try:
            # One variable at a time, so that an invalid one does not hide the others.
            value = getattr(Config.read({key: os.environ[key] for key in (name,) if key in os.environ}), field)
            if field == "interface" and value:
                select_addresses(value)
        except (SetupError, ValueError) as error:
            yield Finding("settings", name, "problem", str(error), f"unset {name}")
            continue
        text = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if field == "timeout" else value
        where = "environment" if name in os.environ else "default"
        yield Finding("settings", name, "ok", f"{text or '(none)'}, {where}")
    for name, similar in find_unknown_settings(os.environ).items():
        remedy = f"is {similar} meant?" if similar else "unset it"
        yield Finding("settings", name, "problem", "there is no such setting", remedy)
    yield check_tuned_table()


def check_tuned_table() -> Finding:
    """Return the finding on the table of ``mpicoll tune`` in its default place."""
    from mpicoll.engine.selection import tuned_table

    path = tuned_table.get_default_path()
    if path is None or not path.exists():
        return Finding("settings", "tuned table", "not there", f"{path or 'no home directory'}", "made by mpicoll tune")
    try:
        entries = tuned_table.load(path)
    except tuned_table.InvalidTable as error:
        return Finding("settings", "tuned table", "problem", f"{path}: it {error}", "remove it, or run mpicoll tune")
    mine = sum(one["machine"] == tuned_table.describe_machine() for one in entries)
    return Finding(
        "settings", "tuned table", "ok", f"{path}: {len(entries)} entries, {mine} of them for such a machine"
    )
