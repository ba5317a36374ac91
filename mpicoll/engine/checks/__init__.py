"""Checks of the program: calls that differ among ranks, values that are not finite, and messages without a match."""
