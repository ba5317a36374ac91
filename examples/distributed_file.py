"""A matrix that a grid of ranks writes to one .npy file, and reads by rows.

    mpirun -np 4 python examples/distributed_file.py --rows 2000

Each rank has a block of the matrix, and no rank all of it. numpy.load reads the file, with mmap_mode="r" only the parts
that are used. With mpi4py, the call of mpicoll.save is these lines:

    def save(path, block, starts, shape, comm):
        header = io.BytesIO()
        fields = {"descr": block.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_WRONLY)
        file.Set_size(0)
        if comm.rank == 0:
            file.Write_at(0, header.getvalue())
        part = MPI.DOUBLE.Create_subarray(shape, block.shape, starts).Commit()
        file.Set_view(header.tell(), MPI.DOUBLE, part)
        file.Write_all(np.ascontiguousarray(block))
        part.Free()
        file.Close()
"""

import argparse
import time

import numpy as np

import mpicoll

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rows", type=int, default=1000, help="rows and columns of the matrix")
parser.add_argument("--path", default="matrix.npy", help="the file, which is replaced")
arguments = parser.parse_args()
rows = arguments.rows

world = mpicoll.world()
grid = world.cart(2)

# The block of this rank: element (i, j) of the matrix is i * rows + j.
(top, bottom), (left, right) = (
    (at * rows // parts, (at + 1) * rows // parts) for at, parts in zip(grid.coords, grid.dims, strict=True)
)
block = np.arange(top, bottom)[:, None] * float(rows) + np.arange(left, right)

begin = time.perf_counter()
mpicoll.save(arguments.path, block, starts=(top, left), comm=grid)
seconds = time.perf_counter() - begin

mine = mpicoll.load(arguments.path)  # these are rows
total = mpicoll.allreduce(mine.sum())
if world.rank == 0:
    matrix = np.load(arguments.path, mmap_mode="r")
    assert matrix[-1, -1] == rows**2 - 1
    print(f"{rows} x {rows} elements by {grid.dims[0]} x {grid.dims[1]} ranks, written in {1e3 * seconds:.1f} ms")
    print(f"rank 0 has read {len(mine)} rows; the mean of all elements is {total / rows**2:.1f}")
