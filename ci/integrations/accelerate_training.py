"""Train with Accelerate: python accelerate_training.py [--first]

Under mpirun Accelerate makes the process group; with --first the program does, before Accelerate looks for one."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from regression import BATCH, check_training, make_data, make_model, make_optimizer

if "--first" in sys.argv:
    dist.init_process_group("mpicoll")
accelerator = Accelerator(cpu=True)
assert dist.get_backend() == "mpicoll"
size, rank = accelerator.num_processes, accelerator.process_index

loader = torch.utils.data.DataLoader(make_data(), batch_size=BATCH // size)
model = make_model()
model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
losses = []
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
check_training(losses, accelerator.unwrap_model(model), clip=0.5)

assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(size))
assert accelerator.gather_for_metrics([f"{rank}"], use_gather_object=True) == [str(one) for one in range(size)]
assert accelerator.pad_across_processes(torch.ones(rank + 1)).tolist() == [1.0] * (rank + 1) + [0.0] * (size - rank - 1)
with accelerator.main_process_first():
    pass
accelerator.wait_for_everyone()
accelerator.print(f"{size} ranks")
accelerator.end_training()
