"""The heat equation on a square plate, which a grid of ranks divides.

    mpirun -np 4 python examples/heat.py

Each rank has a part of the plate with a halo of one layer. A step of the explicit scheme reads the halo, which one call
of mpicoll.exchange_halo fills. With mpi4py, that call is these lines, since columns are not contiguous in memory:

    def exchange(part, grid):
        rows, columns = part.shape
        column = MPI.DOUBLE.Create_vector(rows, 1, columns).Commit()
        up, down = grid.Shift(0, 1)
        left, right = grid.Shift(1, 1)
        grid.Sendrecv(part[1], up, recvbuf=part[-1], source=down)
        grid.Sendrecv(part[-2], down, recvbuf=part[0], source=up)
        flat = part.reshape(-1)
        grid.Sendrecv([flat[1:], 1, column], left, recvbuf=[flat[columns - 1 :], 1, column], source=right)
        grid.Sendrecv([flat[columns - 2 :], 1, column], right, recvbuf=[flat, 1, column], source=left)
        column.Free()
"""

import argparse
import time

import numpy as np

import mpicoll

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--points", type=int, default=120, help="points of the plate along each side")
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()
points, steps = arguments.points, arguments.steps

world = mpicoll.world()
grid = world.cart(2)  # as square as the number of ranks allows


def divide(axis):
    """Return the first and the last row (or column) of this rank's part, which may have one more than others."""
    at, parts = grid.coords[axis], grid.dims[axis]
    return at * points // parts, (at + 1) * points // parts


(top, bottom), (left, right) = divide(0), divide(1)
if min(bottom - top, right - left) < 1:
    raise SystemExit(f"{points} points can't be divided by a grid of {grid.dims[0]} x {grid.dims[1]} ranks")

# The halo at the border of the plate is the border itself: hot at the top, and cold elsewhere.
part = np.zeros((bottom - top + 2, right - left + 2))
if top == 0:
    part[0] = 100.0

begin = time.perf_counter()
for _ in range(steps):
    mpicoll.exchange_halo(part, corners=False, out=part, comm=grid)
    part[1:-1, 1:-1] += 0.2 * (
        part[:-2, 1:-1] + part[2:, 1:-1] + part[1:-1, :-2] + part[1:-1, 2:] - 4 * part[1:-1, 1:-1]
    )
seconds = time.perf_counter() - begin

heat = mpicoll.allreduce(part[1:-1, 1:-1].sum(), comm=grid)
hottest = mpicoll.allreduce(part[1:-1, 1:-1].max(), "max", comm=grid)
if grid.rank == 0:
    print(f"{points} x {points} points on {grid.dims[0]} x {grid.dims[1]} ranks, {steps} steps")
    print(f"mean {heat / points**2:.9f}, highest {hottest:.9f}")
    print(f"{1e6 * seconds / steps:.0f} us per step")
