"""Train a small network on handwritten digits with a parameter server.

    mpirun -np 4 python examples/parameter_server.py                              1 server and 3 workers
    mpirun -np 4 python examples/parameter_server.py --servers 2                  each server holds half of the weights
    mpirun -np 4 python examples/parameter_server.py --mode async --slow 3        no worker waits for another one
    mpirun --with-ft ulfm -np 4 python examples/parameter_server.py --mode async --kill 3 --at 20

Besides mpicoll this needs ``pip install scikit-learn rich``. The network and its gradients are those of ``digits.py``.

The first ranks are servers: they hold the weights, and update them with the gradients that arrive. The others are
workers: they pull the weights, compute a gradient, and push it. In mode "sync" a worker has a share of each batch, and
the weights are those of ``digits.py``, except for rounding. In mode "async" each worker has batches of its own, and its
gradients are applied at once; so a slow worker, or one that dies, does not stop the others.
"""

import argparse
import os
import signal
import time

import numpy as np
from digits import MOMENTUM, SHAPES, backward, forward, initial, layers

import mpicoll
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as error:
    raise SystemExit(f"parameter_server.py needs {error.name}: pip install scikit-learn rich") from None


def work(worker, flat, number, workers, data, options):
    """Train as one of the workers. `flat` has the weights, of which the worker's model are views."""
    images, digits = data
    gradient = np.empty_like(flat)
    gradients = dict(zip(SHAPES, layers(gradient), strict=True))
    step = 0
    random = np.random.default_rng(0)  # the same seed, hence the same batches, on every worker
    for _ in range(options.epochs):
        order = random.permutation(len(digits))
        for index, start in enumerate(range(0, len(digits), options.batch)):
            batch = order[start : start + options.batch]
            if options.mode == "sync":
                mine = np.array_split(batch, workers)[number]
            elif index % workers == number:
                mine = batch
            else:
                continue
            begin = time.perf_counter()
            worker.pull_weights()
            backward(flat, images[mine], digits[mine], gradient)
            gradient /= len(batch)
            if worker.rank == options.slow:
                time.sleep(9 * (time.perf_counter() - begin))
            if worker.rank == options.kill and step == options.at:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.push_gradients(gradients)
            step += 1
    worker.pull_weights()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1, help="number of servers (default: 1)")
    parser.add_argument("--mode", choices=("sync", "async", "ssp"), default="sync", help="default: sync")
    parser.add_argument("--staleness", type=int, default=0, help="the bound of mode ssp (default: 0)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data (default: 30)")
    parser.add_argument("--batch", type=int, default=64, help="samples per gradient (default: 64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--slow", type=int, help="a rank that takes ten times as long")
    parser.add_argument("--kill", type=int, help="a rank that kills itself")
    parser.add_argument("--at", type=int, default=0, help="and in which of its steps (default: 0)")
    parser.add_argument("--save", metavar="FILE.npz", help="where to write the trained parameters")
    options = parser.parse_args()

    world = mpicoll.world()
    if not 0 < options.servers < world.size:
        parser.error(f"--servers must be at least 1 and less than the number of ranks, {world.size}")
    if world.rank < options.servers:
        rule = SGD(options.lr, momentum=MOMENTUM)
        # The gradients of the shares of a batch are added up; each was divided by the size of the whole batch.
        server = ParameterServer(rule, mode=options.mode, staleness=options.staleness, reduction="sum")
        server.run()
        print(f"server {world.rank} has made {server.updates} updates")
        return

    images, digits = load_digits(return_X_y=True)
    train_images, test_images, train_digits, test_digits = train_test_split(
        images / 16, digits, test_size=0.25, random_state=0, stratify=digits
    )
    flat = initial(0)
    number, workers = world.rank - options.servers, world.size - options.servers
    with Worker(dict(zip(SHAPES, layers(flat), strict=True))) as worker:
        work(worker, flat, number, workers, (train_images, train_digits), options)
    if number == 0:
        correct = (forward(flat, test_images)[1].argmax(axis=1) == test_digits).mean()
        print(f"{options.servers} servers and {workers} workers, mode {options.mode}")
        print(f"test accuracy {correct:.1%} of {len(test_digits)} samples")
        if options.save:
            np.savez(options.save, **dict(zip(SHAPES, layers(flat), strict=True)))


if __name__ == "__main__":
    main()
