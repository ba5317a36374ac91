"""k-means of points that are distributed over the ranks.

    mpirun -np 4 python examples/kmeans.py --points 100000

Each rank has a part of the points. A step assigns them to the nearest centers, and one all-reduce adds up, for each
center, its points and their number. With mpi4py, the step is these lines:

    def step(points, centers, comm):
        nearest = find_nearest(points, centers)
        sums, total = sum_by_center(points, nearest, len(centers)), np.empty((len(centers), points.shape[1] + 1))
        comm.Allreduce(sums, total, MPI.SUM)
        filled = total[:, -1:] > 0
        return np.where(filled, total[:, :-1] / np.where(filled, total[:, -1:], 1), centers)
"""

import argparse
import time

import numpy as np

import mpicoll


def find_nearest(points, centers):
    """Return for each point the number of the nearest center."""
    # Of the squared distance |p - c|^2, the part that depends on the center.
    return (np.sum(centers**2, axis=1) - 2 * points @ centers.T).argmin(axis=1)


def sum_by_center(points, nearest, count):
    """Return a row for each center: the sum of its points, and their number."""
    columns = [np.bincount(nearest, column, count) for column in points.T]
    return np.stack([*columns, np.bincount(nearest, minlength=count)], axis=1)


def step(points, centers):
    """Return the means of the points that are nearest to each center; a center without points stays."""
    nearest = find_nearest(points, centers)
    total = mpicoll.allreduce(sum_by_center(points, nearest, len(centers)))
    filled = total[:, -1:] > 0
    return np.where(filled, total[:, :-1] / np.where(filled, total[:, -1:], 1), centers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50, help="at most; fewer if no center moves any more")
    parser.add_argument("--path", help="a .npy file with one point per row, instead of random points")
    arguments = parser.parse_args()

    world = mpicoll.world()
    if arguments.path is not None:
        points = mpicoll.load(arguments.path)  # this rank's rows
    else:
        begin, end = (at * arguments.points // world.size for at in (world.rank, world.rank + 1))
        random = np.random.default_rng(0)
        middles = random.normal(0, 10, (arguments.clusters, 3))
        points = (
            middles[np.arange(arguments.points) % arguments.clusters] + random.normal(size=(arguments.points, 3))
        )[begin:end]
    if world.rank == 0 and len(points) < arguments.clusters:
        raise SystemExit(
            f"rank 0 has {len(points)} points, and {arguments.clusters} clusters begin with its first ones"
        )

    centers = (
        np.array(points[: arguments.clusters]) if world.rank == 0 else np.empty((arguments.clusters, points.shape[1]))
    )
    centers = mpicoll.bcast(centers)
    begin = time.perf_counter()
    steps, moves = 0, True
    while moves and steps < arguments.steps:
        before, centers = centers, step(points, centers)  # the same on all ranks
        steps, moves = steps + 1, not np.allclose(before, centers, rtol=0, atol=1e-9)
    seconds = time.perf_counter() - begin

    distances = np.sum((points - centers[find_nearest(points, centers)]) ** 2)
    inertia, count = mpicoll.allreduce(np.array([distances, len(points)]))
    if world.rank == 0:
        print(f"{count:.0f} points, {len(centers)} clusters, {world.size} ranks: {steps} steps")
        print(f"mean squared distance {inertia / count:.9f}")
        print(f"{1e6 * seconds / steps:.0f} us per step")


if __name__ == "__main__":
    main()
