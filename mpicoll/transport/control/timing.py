"""Time limits of the control network, in seconds."""

from __future__ import annotations

OUTAGE = 7.0
"""Duration of an interruption of the network for which no host counts as lost."""

KEEPALIVE_IDLE = 2
KEEPALIVE_INTERVAL = 1
"""Silence after which the kernel probes the other host, and the interval between two probes."""

CONNECT_WITHIN = 2.0
"""Time for a connection to be made."""

PROVE_WITHIN = 5.0
"""Time for the peer of a new connection to prove that it has the token."""

CRASH_WITHIN = 2.0
"""Time for a process to end after a frame with a wrong tag, which may be one that its crash output has cut."""

HUB_DEATH_DELAY = 0.5
"""Delay of the report of a hub's death, within which the next hub can add crash output that only it has received."""

REPORT_WITHIN = 5.0
"""Time for all ranks to connect to a new hub and report the exits that they have seen.

After twice this time the other ranks decide without the hub.
"""

PROBE_AFTER = 1.0
"""Time after which the hub probes the port of a rank that has not connected to it."""

FORWARD_AFTER = 50e-6
"""Time for each connection of a hub after which it forwards a farewell, with those that have arrived meanwhile."""

FORWARD_WITHIN = 0.05
"""Maximum of that time."""

LINGER = 0.5
"""Time after the last farewell that a hub which leaves waits for more, so that not each leaving hub is replaced."""

LINGER_AT_MOST = 1.5
"""Time that it waits in all."""

LOG_MISSING_AFTER = 60.0
"""Time after which it is logged that a rank has not connected. The rank does not count as dead."""

SILENCE_CHECK_INTERVAL = 1.0
"""Interval between two checks of how long a host that owes an acknowledgement has been silent."""
