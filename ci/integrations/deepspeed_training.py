"""Train with DeepSpeed: python deepspeed_training.py STAGE [PORT]

STAGE is that of ZeRO. DeepSpeed makes the process group, with a store at the TCP port PORT of rank 0; without that the
program makes the group."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from regression import BATCH, check_training, make_data, make_model, make_optimizer
from torch.nn.functional import mse_loss

# DeepSpeed would compile its own all-reduce in shared memory, for minutes, which serves inference only.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

stage = int(sys.argv[1])
if len(sys.argv) > 2:
    port = int(sys.argv[2])
    deepspeed.init_distributed("mpicoll", distributed_port=port)
else:
    dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()
module, data = make_model(torch.float32), make_data(torch.float32)
settings = {
    "train_batch_size": BATCH,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=module, optimizer=make_optimizer(module), config=settings)
assert dist.get_backend() == "mpicoll"
assert engine.zero_optimization_stage() == stage
losses = []
for start in range(0, len(data), BATCH):
    inputs, targets = data[start + rank : start + BATCH : size]
    loss = mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    losses.append(mean.item())
parameters = list(module.parameters())
if stage == 3:
    assert all(parameter.numel() == 0 for parameter in parameters)  # divided among the ranks
with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
    check_training(losses, module, clip=0.5)
if rank == 0:
    print(f"{size} ranks")
dist.destroy_process_group()
