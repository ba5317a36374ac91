"""The operations of the native MPI API, one file each: validate, allocate, hand over to the engine."""
