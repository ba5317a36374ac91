"""Train a small network on handwritten digits with DistributedOptimizer: no process group, and ranks may die.

    mpirun -np 4 python examples/data_parallel.py --compression bf16
    mpirun --with-ft ulfm -np 3 python examples/data_parallel.py --kill 1 --at 4    # with Open MPI 5

Besides mpicoll this needs ``pip install torch scikit-learn``. It prints something like

    4 ranks, compression bf16, 9,630 bytes of gradients per step, epoch 10: loss 0.0571
    test accuracy 96.7% of 450 samples

Rank r has every sample whose number leaves r when it is divided by the number of ranks, so some ranks have one more
batch than others: `join` lets those without a batch contribute zeros. With ``--kill 1 --at 4``, rank 1 kills itself in
the fourth epoch; the others begin that epoch again, with all samples divided among them.
"""

import argparse
import os
import signal

import torch
from torch import nn

import mpicoll
from mpicoll import parallel

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as error:
    raise SystemExit(f"data_parallel.py needs {error.name}: pip install torch scikit-learn") from None

COMPRESSIONS = {
    "none": parallel.Compression.none,
    "fp16": parallel.Compression.fp16,
    "bf16": parallel.Compression.bf16,
    "top-k": parallel.Compression.top_k(0.1),
    "power-sgd": parallel.Compression.power_sgd(4),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data (default: 10)")
    parser.add_argument("--batch", type=int, default=16, help="samples per step of each rank (default: 16)")
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="of gradients (default: none)")
    parser.add_argument("--kill", type=int, help="a rank that kills itself")
    parser.add_argument("--at", type=int, default=1, help="and in which epoch (default: 1)")
    options = parser.parse_args()
    if options.epochs < 1 or options.batch < 1:
        parser.error("--epochs and --batch must be at least 1")

    torch.set_num_threads(1)  # the ranks are the parallelism here
    doomed = mpicoll.world().rank == options.kill
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.25, random_state=0, stratify=digits)
    train_images, test_images, train_digits, test_digits = map(torch.from_numpy, parts)
    train_images, test_images = train_images.float(), test_images.float()

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = parallel.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=COMPRESSIONS[options.compression]
    )

    @parallel.elastic.run  # all ranks begin with the model of rank 0, or, after a death, that of the last commit
    def train(state):
        world = mpicoll.world()  # of those that are left
        while state.epoch < options.epochs:
            state.epoch += 1
            order = torch.randperm(len(train_digits), generator=torch.Generator().manual_seed(state.epoch))
            total = 0.0
            mine = order[world.rank :: world.size]
            for batch in mine.split(options.batch):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(train_images[batch]), train_digits[batch])
                loss.backward()  # begins to average the gradients
                if doomed and state.epoch == options.at:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                total += loss.item() * len(batch)
            optimizer.join()  # until all ranks have used all of their batches
            state.loss = parallel.metric_average(total / len(mine), weight=len(mine))
            state.commit()

    state = parallel.elastic.TorchState(model, optimizer, epoch=0, loss=0.0)
    train(state)

    world = mpicoll.world()
    with torch.no_grad():
        correct = model(test_images).argmax(dim=1) == test_digits
    share = correct[world.rank :: world.size].float()
    accuracy = parallel.metric_average(share.mean(), weight=len(share)).item()
    if world.rank == 0:
        size = "1 rank" if world.size == 1 else f"{world.size} ranks"
        sent = f"{optimizer.bytes_per_step:,} bytes of gradients per step"
        print(f"{size}, compression {options.compression}, {sent}, epoch {state.epoch}: loss {state.loss:.4f}")
        print(f"test accuracy {accuracy:.1%} of {len(test_digits)} samples")


if __name__ == "__main__":
    main()
