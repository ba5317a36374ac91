"""Optional checks of collectives: all arguments of the calls, values that are not finite, and results that differ."""
