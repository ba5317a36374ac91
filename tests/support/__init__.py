"""Shared modules of the tests. They contain no tests; test_*.py here test the modules themselves.

Running tests
    agree               the ranks of ``mpirun ... pytest --with-mpi`` agree on the outcome of each test
    launch              start a program on several ranks: ``mpirun(size, ...)``
    process_group       the fixture with torch's default process group; differences between versions of torch
    scripts             several scripts in one job
    stand_in            the process that mpirun starts as a rank that is forked
    warm                ranks that are forked from a process that has imported torch: ``mpirun(..., warm=True)``

Values and oracles
    attention           attention over a whole sequence in one process
    data                arrays of each library, dtype and layout; expected results of reductions
    exercise            one body for all collectives, called as a row of choices describes
    parallel_layers     comparison of parallel layers with the plain ones of torch.nn in one process
    machines            random programs on a simulated machine, and which of its ranks can never continue
    rank_states         states of ranks, as snapshots of them would be
    stage_values        values that pipeline stages send, and their comparison
    traces              traces made by hand, and a strict reader of the Chrome trace format
    watchdogs           watchdogs without other ranks, and queues whose operations are set by a test

Devices
    cuda_tensors        torch tensors on the fake device, for a torch without CUDA
    device_bodies       bodies of tests for device memory, real (tests/gpu) or fake
    device_memory       fill arrays of a device, and read them back
    fake_cuda           install and remove the fake cupy
    fakecuda/           the fake device (package ``fakecuda``) and its ``cupy``, in a folder that is added to the path
    torch_cases         torch.distributed's collectives on device tensors

Generated programs and programs of their own
    apart               jobs on two hosts of ci/hosts.py; also run by ci/partition.py
    dying               jobs in which one rank dies; also run by ci/deaths.py
    mismatches          calls that differ between ranks; also run by ci/mismatches.py
    observables         a training script that doesn't import mpicoll
    random_programs     long random programs on the native API; also run by ci/random_operations.py
    random_torch        the same on torch.distributed
"""
