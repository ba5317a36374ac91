"""Train a tiny GPT-2 with random weights by the Trainer of Transformers: python transformers_training.py FILE [--first]

One process writes what it has found to FILE, and the ranks of a job compare theirs with it. With --first the program
makes the process group; otherwise the Trainer does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BATCH = 12

if "--first" in sys.argv:
    dist.init_process_group("mpicoll")
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
set_seed(0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 32, (5 * BATCH, 16), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": one, "labels": one} for one in tokens]

arguments = TrainingArguments(use_cpu=True, output_dir=str(Path(sys.argv[1]).parent / "trainer"), report_to="none")
size = arguments.world_size
arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = BATCH // size
arguments.num_train_epochs, arguments.logging_steps, arguments.save_strategy = 2, 1, "no"
arguments.learning_rate, arguments.disable_tqdm = 1e-2, True
trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
found = {"losses": losses, "evaluated": trainer.evaluate()["eval_loss"], "weights": model.state_dict()}

if size == 1:
    torch.save(found, sys.argv[1])
else:
    assert dist.get_backend() == "mpicoll"
    expected = torch.load(sys.argv[1])
    assert len(losses) == 10
    assert losses[0] > losses[-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
print(f"{size} ranks")
