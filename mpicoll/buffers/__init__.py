"""Memory: arrays of any library as buffers, the dtype policy, and the kernels that reduce."""
