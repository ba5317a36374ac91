"""Execution of collectives: schedules of messages, shared memory, phases by nodes, and devices."""
