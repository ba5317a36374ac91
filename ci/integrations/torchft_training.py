"""Train as one of torchft's replicas: python torchft_training.py manager|ddp REPLICA REPLICAS PORT LIGHTHOUSE

With `manager` the last replica dies in a step; with `ddp` all use torchft's DistributedDataParallel. Each step is that
of all samples of a batch, whatever the number of replicas is, so it has the result of one process. PORT is that of a
TCPStore by which the replicas wait for each other once."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from regression import BATCH, STEPS, check_training, make_data, make_model, make_optimizer
from torch.nn.functional import mse_loss
from torchft import Manager
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupWrapper
from torchft.work import _DummyWork

TIMEOUT = timedelta(seconds=60)

LAST_STEP = 2
"""Step in which the last replica dies."""


class ProcessGroupMpicoll(ProcessGroupWrapper):
    """A group of mpicoll for each quorum, which is the default group of the process."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        dist.init_process_group("mpicoll", store=store, rank=rank, world_size=world_size, timeout=self._timeout)
        return dist.group.WORLD

    def abort(self, errored: bool = True) -> None:
        if self._pg is not None:
            self._pg = None
            dist.destroy_process_group()

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
        return _DummyWork(work.result())


kind, replica, replicas, port, lighthouse = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
dies = kind == "manager"
module, data = make_model(), make_data()
own_store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupMpicoll(timeout=TIMEOUT),
    load_state_dict=module.load_state_dict,
    state_dict=module.state_dict,
    min_replica_size=replicas - 1,
    use_async_quorum=False,
    init_sync=False,
    timeout=TIMEOUT,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=own_store.port,
    lighthouse_addr=lighthouse,
    replica_id=f"replica_{replica}",
    hostname="localhost",
)
model = module if dies else DistributedDataParallel(manager, module)
optimizer = OptimizerWrapper(manager, make_optimizer(module))
store = dist.TCPStore("localhost", port, is_master=False)
store.set(str(replica), "")
store.wait([str(one) for one in range(replicas)], TIMEOUT)
losses, sizes = [], []
while (step := manager.current_step()) < STEPS:
    optimizer.zero_grad()
    rank, size = manager.participating_rank(), manager.num_participants()
    inputs, targets = data[step * BATCH + rank : (step + 1) * BATCH : size]
    loss = mse_loss(model(inputs), targets)
    if dies and replica == replicas - 1 and step == LAST_STEP:
        os._exit(0)
    loss.backward()
    mean = loss.detach().clone()
    for tensor in [mean, *(parameter.grad for parameter in module.parameters() if dies)]:
        manager.allreduce(tensor).wait()
    assert dist.get_backend() == "mpicoll"
    optimizer.step()
    if manager.current_step() > step:  # otherwise the step is tried again, by the replicas that are left
        losses.append(mean.item())
        sizes.append(size)
assert sizes == [replicas] * LAST_STEP + [replicas - dies] * (STEPS - LAST_STEP)
check_training(losses, module)
print(f"replica {rank} of {size}")
# The others may still be in their last step.
store.set(f"{replica} is done", "")
store.wait([f"{one} is done" for one in range(replicas - dies)], TIMEOUT)
manager.shutdown(wait=False)
dist.destroy_process_group()
