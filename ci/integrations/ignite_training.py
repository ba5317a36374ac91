"""Train with Ignite: python ignite_training.py [--first]

With --first the program makes the process group; otherwise Ignite does, under the name "mpi"."""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from regression import BATCH, STEPS, check_training, make_data, make_model, make_optimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    size = idist.get_world_size()
    assert dist.get_backend() == "mpicoll"
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    assert idist.get_rank() == rank
    module = make_model()
    # Ignite does so for the backends that it knows by name only.
    assert not isinstance(idist.auto_model(make_model()), DistributedDataParallel)
    model = DistributedDataParallel(module)
    optimizer = idist.auto_optim(make_optimizer(module))
    loader = idist.auto_dataloader(make_data(), batch_size=BATCH, shuffle=False)
    losses = []

    def step(engine: Engine, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        predicted = model(batch[0])
        loss = mse_loss(predicted, batch[1])
        loss.backward()
        optimizer.step()
        losses.append(idist.all_reduce(loss.detach(), "SUM").item() / size)
        return predicted.detach(), batch[1]

    trainer = Engine(step)
    MeanSquaredError().attach(trainer, "mse")
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.iteration))
    trainer.run(loader, max_epochs=1)
    check_training(losses, module)
    assert seen == list(range(1, STEPS + 1))
    torch.testing.assert_close(trainer.state.metrics["mse"], sum(losses) / STEPS, rtol=1e-6, atol=0)
    assert idist.all_gather(rank) == list(range(size))
    assert idist.broadcast("text" if rank == size - 1 else None, src=size - 1, safe_mode=True) == "text"
    idist.barrier()
    if rank == 0:
        print(f"{size} ranks")


if "--first" in sys.argv:
    dist.init_process_group("mpicoll")
    train(idist.get_rank())
    dist.destroy_process_group()
else:
    with idist.Parallel(backend="mpi") as parallel:
        parallel.run(lambda local_rank: train(dist.get_rank()))
