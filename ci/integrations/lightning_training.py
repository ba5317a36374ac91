"""Train with Lightning: python lightning_training.py fabric|trainer RANKS"""

from __future__ import annotations

import logging
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from regression import BATCH, check_training, make_data, make_model, make_optimizer
from torch.nn.functional import mse_loss

logging.getLogger("lightning").setLevel(logging.ERROR)


def train_with_fabric(size: int) -> None:
    strategy = FabricDDPStrategy(process_group_backend="mpicoll")
    fabric = lightning.Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank) == (size, dist.get_rank(), dist.get_rank())
    module = make_model()
    model, optimizer = fabric.setup(module, make_optimizer(module))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(make_data(), batch_size=BATCH // size))
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    check_training(losses, module, clip=0.5)
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == list(range(size))
    assert fabric.broadcast({"from": fabric.global_rank}) == {"from": 0}
    fabric.barrier()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = mse_loss(self.model(inputs), targets)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def train_with_trainer(size: int) -> None:
    strategy = DDPStrategy(process_group_backend="mpicoll")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,  # which would shuffle the samples
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    data = make_data()
    sampler = torch.utils.data.DistributedSampler(data, size, trainer.global_rank, shuffle=False)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH // size, sampler=sampler))
    assert trainer.world_size == size
    check_training(module.losses, module.model, clip=0.5)
    mean = sum(module.losses) / len(module.losses)
    torch.testing.assert_close(trainer.callback_metrics["loss_epoch"].item(), mean, rtol=1e-5, atol=0)


size = int(sys.argv[2])
{"fabric": train_with_fabric, "trainer": train_with_trainer}[sys.argv[1]](size)
assert dist.get_backend() == "mpicoll"
if dist.get_rank() == 0:
    print(f"{size} ranks")
