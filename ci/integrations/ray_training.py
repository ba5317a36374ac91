"""Train in Ray's actors or by Ray Train: python ray_training.py actors|trainer RANKS FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import ray.train
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from regression import BATCH, check_training, make_data, make_model, make_optimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import mpicoll


def train(model: DistributedDataParallel) -> list[float]:
    """Return the mean losses of the ranks, after a comparison with one process."""
    rank, size, data = dist.get_rank(), dist.get_world_size(), make_data()
    assert dist.get_backend() == "mpicoll"
    assert (mpicoll.world().rank, mpicoll.world().size) == (rank, size)
    optimizer = make_optimizer(model)
    losses = []
    for start in range(0, len(data), BATCH):
        inputs, targets = data[start + rank : start + BATCH : size]
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(mpicoll.allreduce(loss.detach(), "avg").item())
    check_training(losses, model.module)
    return losses


@ray.remote(num_cpus=1)
class Rank:
    """Process of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def make_store(self) -> tuple[str, int]:
        """Create the store, and return its address."""
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def train(self, address: tuple[str, int]) -> list[float]:
        store = self.store if self.rank == 0 else dist.TCPStore(*address, self.size)
        dist.init_process_group("mpicoll", store=store, rank=self.rank, world_size=self.size)
        losses = train(DistributedDataParallel(make_model()))
        dist.destroy_process_group()
        return losses


def train_with_actors(size: int) -> None:
    ranks = [Rank.remote(rank, size) for rank in range(size)]
    address = ray.get(ranks[0].make_store.remote())
    for _ in range(2):  # the actors may make a further group
        first, *others = ray.get([rank.train.remote(address) for rank in ranks])
        assert others == [first] * (size - 1)


def train_in_worker(settings: dict[str, str]) -> None:
    """Train, and write the last loss to a file of this rank."""
    model = prepare_model(make_model(), move_to_device=False)
    assert isinstance(model, DistributedDataParallel)
    Path(settings["folder"], f"rank-{dist.get_rank()}").write_text(str(train(model)[-1]))


def train_with_trainer(size: int) -> None:
    folder = sys.argv[3]
    torch_config = TorchConfig(backend="mpicoll")
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"folder": folder},
        torch_config=torch_config,
        scaling_config=ray.train.ScalingConfig(num_workers=size),
        run_config=ray.train.RunConfig(storage_path=folder),
    )
    trainer.fit()
    first, *others = [Path(folder, f"rank-{rank}").read_text() for rank in range(size)]
    assert others == [first] * (size - 1)


size = int(sys.argv[2])
ray.init(
    num_cpus=size + 1,
    include_dashboard=False,
    log_to_driver=False,
    object_store_memory=80 << 20,
    _node_ip_address="127.0.0.1",
    runtime_env={"env_vars": {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"}},
)
{"actors": train_with_actors, "trainer": train_with_trainer}[sys.argv[1]](size)
print(f"{size} ranks")
ray.shutdown()
