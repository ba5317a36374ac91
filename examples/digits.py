"""Train a small network on handwritten digits, on several ranks at once.

    mpirun -np 4 python examples/digits.py

Besides mpicoll this needs ``pip install scikit-learn rich``.

Data-parallel training: every rank holds the same parameters. Of each batch it takes its share of the samples and
computes their gradient. `mpicoll.allreduce` adds up the gradients of all ranks. So every rank takes the same step, and
the parameters stay the same everywhere.

The sum over the ranks is the sum over the batch, however the batch is divided. So 1, 2, 3 or 4 ranks give the same
parameters, except for the rounding of sums that are added in another order. More ranks are not faster here: this
network is so small that a message takes longer than the work it saves.
"""

import argparse
import time

import numpy as np
from screen import on_screen

import mpicoll

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as error:
    raise SystemExit(f"digits.py needs {error.name}: pip install scikit-learn rich") from None

HIDDEN = 64
SHAPES = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
COUNT = sum(int(np.prod(shape)) for shape in SHAPES.values())
MOMENTUM = 0.9


def layers(flat):
    """The network's arrays, as views of one flat array: a single message then carries all of them."""
    views, start = [], 0
    for shape in SHAPES.values():
        end = start + int(np.prod(shape))
        views.append(flat[start:end].reshape(shape))
        start = end
    return views


def initial(seed):
    """Random weights, scaled by the number of inputs, and zero biases."""
    parameters = np.zeros(COUNT)
    w1, _, w2, _ = layers(parameters)
    random = np.random.default_rng(seed)
    for weights in (w1, w2):
        weights[...] = random.standard_normal(weights.shape) / np.sqrt(weights.shape[0])
    return parameters


def forward(parameters, images):
    """The hidden layer, and the logarithms of the probabilities of the ten digits."""
    w1, b1, w2, b2 = layers(parameters)
    hidden = np.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def backward(parameters, images, digits, gradient):
    """Write the gradient of the loss, summed over these samples, into `gradient`; return that loss."""
    hidden, logs = forward(parameters, images)
    rows = np.arange(len(digits))
    error = np.exp(logs)
    error[rows, digits] -= 1
    w1, b1, w2, b2 = layers(gradient)
    hidden_error = error @ layers(parameters)[2].T * (1 - hidden**2)
    w1[...], b1[...] = images.T @ hidden_error, hidden_error.sum(axis=0)
    w2[...], b2[...] = hidden.T @ error, error.sum(axis=0)
    return -logs[rows, digits].sum()


def share(samples, world):
    """This rank's part of `samples`; the parts differ by at most one sample, and may be empty."""
    return np.array_split(samples, world.size)[world.rank]


def train(world, images, digits, options):
    """Returns the parameters and the mean loss of the last epoch."""
    # Rank 0 chooses the initial values, and all ranks get a copy. What the others pass only gives shape and dtype.
    parameters = mpicoll.bcast(initial(options.seed) if world.rank == 0 else np.empty(COUNT), root=0)
    velocity = np.zeros(COUNT)
    buffer = np.empty(COUNT + 1)  # the gradient, and behind it the loss
    order = np.random.default_rng(options.seed)  # the same seed, hence the same batches, on every rank
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=world.rank != 0 or not on_screen()) as progress:
        task = progress.add_task("training", total=options.epochs)
        for epoch in range(options.epochs):
            shuffled = order.permutation(len(digits))
            loss = 0.0
            for start in range(0, len(digits), options.batch):
                batch = shuffled[start : start + options.batch]
                mine = share(batch, world)
                buffer[-1] = backward(parameters, images[mine], digits[mine], buffer[:-1])
                mpicoll.allreduce(buffer, "sum", out=buffer)
                # Dividing by the size of the whole batch weights every sample alike, even if shares are uneven.
                velocity = MOMENTUM * velocity - options.lr * buffer[:-1] / len(batch)
                parameters += velocity
                loss += buffer[-1]
            loss /= len(digits)
            progress.update(task, completed=epoch + 1, description=f"loss {loss:.4f}")
    return parameters, loss


def accuracy(world, parameters, images, digits):
    """The part of these samples that is recognised. Each rank looks at its share only."""
    mine = share(np.arange(len(digits)), world)
    guesses = forward(parameters, images[mine])[1].argmax(axis=1)
    return mpicoll.allreduce(int((guesses == digits[mine]).sum()), "sum") / len(digits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data (default: 30)")
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and the batches (default: 0)")
    parser.add_argument("--save", metavar="FILE.npz", help="where to write the trained parameters")
    options = parser.parse_args()
    if options.epochs < 1 or options.batch < 1:
        parser.error("--epochs and --batch must be at least 1")

    world = mpicoll.world()
    images, digits = load_digits(return_X_y=True)
    # The same split on every rank and for every --seed, so that results can be compared.
    train_images, test_images, train_digits, test_digits = train_test_split(
        images / 16, digits, test_size=0.25, random_state=0, stratify=digits
    )

    begin = time.perf_counter()
    parameters, loss = train(world, train_images, train_digits, options)
    seconds = time.perf_counter() - begin
    correct = accuracy(world, parameters, test_images, test_digits)
    if world.rank == 0:
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
        print(f"{ranks}, {options.epochs} epochs of {len(train_digits)} samples in {seconds:.1f} s")
        print(f"training loss {loss:.4f}, test accuracy {correct:.1%} of {len(test_digits)} samples")
        if options.save:
            np.savez(options.save, **dict(zip(SHAPES, layers(parameters), strict=True)))


if __name__ == "__main__":
    main()
