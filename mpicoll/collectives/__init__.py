"""Operations of the native API, one file each. They check arguments, allocate memory and call the engine."""
