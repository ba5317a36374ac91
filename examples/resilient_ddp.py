"""Train with torch's DistributedDataParallel, and go on when ranks die.

    mpirun --with-ft ulfm -np 4 python examples/resilient_ddp.py --kill 0 --at 100

Besides mpicoll this needs Open MPI 5 and ``pip install torch scikit-learn``. With ``--kill 0 --at 100``, rank 0 kills
itself in step 100, between the gradients and the optimizer. The others make a process group of those that are left, and
a new DistributedDataParallel on it, go back to the last step that one of them has completed, and go on. It prints
something like

    rank 0 of the job has died; 3 ranks go on with step 100
    4 ranks began, 3 were left after 440 steps on 26940 samples
    test accuracy 97.6% of 450 samples

A rank's loss is the sum over its own samples, scaled so that the average over the ranks, which is what
DistributedDataParallel makes of the gradients, is the mean over the batch: so each sample counts alike, also where 3
ranks can't share a batch evenly, and the parameters are those of a run without a death, except for rounding.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll.torch as dist

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as error:
    raise SystemExit(f"resilient_ddp.py needs {error.name}: pip install torch scikit-learn") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data (default: 20)")
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005)")
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="ranks that kill themselves")
    parser.add_argument("--at", type=int, nargs="*", default=[], help="and in which step each of them does")
    parser.add_argument("--save", metavar="FILE", help="where to write the trained parameters")
    options = parser.parse_args()
    if options.epochs < 1 or options.batch < 1 or len(options.kill) != len(options.at):
        parser.error("--epochs and --batch must be at least 1, and --at tell a step for each rank of --kill")

    dist.init_process_group()
    began = dist.get_world_size()
    doomed = dict(zip(options.kill, options.at, strict=True)).get(dist.get_rank())
    torch.set_num_threads(1)  # the ranks are the parallelism here
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.25, random_state=0, stratify=digits)
    train_images, test_images, train_digits, test_digits = map(torch.from_numpy, parts)
    per_epoch = -(-len(train_digits) // options.batch)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    def step(state, number, parallel):
        # The batch follows from the number of the step, and this rank's share of it from who is there now.
        epoch, index = divmod(number, per_epoch)
        order = torch.randperm(len(train_digits), generator=torch.Generator().manual_seed(epoch))
        batch = order[index * options.batch : (index + 1) * options.batch]
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = batch[rank::size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(train_images[mine]), train_digits[mine], reduction="sum")
        (loss * size / len(batch)).backward()  # averages the gradients
        if number == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        state["samples"] += samples.item()
        state["steps"] += 1

    state = {"model": model, "optimizer": optimizer, "samples": 0, "steps": 0}
    steps = options.epochs * per_epoch
    dist.resilient(step, state, steps, setup=lambda comm: DistributedDataParallel(model))

    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        correct = (model(test_images[rank::size]).argmax(dim=1) == test_digits[rank::size]).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"{began} ranks began, {size} were left after {state['steps']} steps on {state['samples']} samples")
        print(f"test accuracy {correct.item() / len(test_digits):.1%} of {len(test_digits)} samples")
        if options.save:
            torch.save(model.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
