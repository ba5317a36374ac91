"""Train a small GPT with FSDP2, on the texts that Python's own help() shows, and let it write something.

    mpirun -np 2 python examples/fsdp_gpt.py
    mpirun -np 2 python examples/fsdp_gpt.py --steps 1000 --plot loss.png

Besides mpicoll this needs ``pip install torch rich``, and matplotlib for --plot. It prints something like

    137216 parameters, of which the ranks hold 68608, 68608
    2 ranks, 300 steps, 25,864 tokens/s, loss 5.64498 -> 2.04269

    The styprinGomefI whh The a ode ate nonlowss is it ...

What each rank holds:

- Of every parameter, of its gradient and of the two averages that Adam keeps of it: a P-th part on each of P ranks,
  namely rows. No rank holds the whole network, except for a moment
  at the beginning.
- While a block computes, in the forward and again in the backward pass: all parameters of that block, gathered from all
  ranks just before and freed right after. Its gradients are added up and cut in pieces again as soon as they are there
  (reduce-scatter). What belongs to no block, the embeddings and the last layer, stays whole from the forward pass to
  the end of the backward pass.
- Of the batch: its share of the sequences.
- The text: all of it. A model that needs FSDP would come with a text that is read in pieces, too.

Every rank's loss is divided by the size of the whole batch, however the batch was shared out. So any number of ranks
takes the same steps, except for rounding.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from screen import on_screen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    raise SystemExit(f"fsdp_gpt.py needs {error.name}: pip install torch rich") from None

LAYERS, WIDTH, HEADS, CONTEXT = 2, 64, 4, 64
VALUES = 256  # of a byte, which is what the model reads and writes
PROMPT = "The "


class Block(nn.Module):
    """Attention to what came before, then two layers for each place by itself."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.attend(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class GPT(nn.Module):
    """From bytes, (sequences, places), to the scores of what follows each of them, (sequences * places, VALUES)."""

    def __init__(self):
        super().__init__()
        self.meaning, self.place = nn.Embedding(VALUES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES)
        for embedding in (self.meaning, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text):
        x = self.meaning(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x).flatten(0, 1))


def sharded_model(options):
    torch.manual_seed(options.seed)  # all ranks begin with the same parameters, of which each keeps its rows
    model = GPT()
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if options.bf16 else {}
    shared_out = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": MixedPrecisionPolicy(**low)}
    for block in model.blocks:
        fully_shard(block, **shared_out)
    return fully_shard(model, **shared_out)


def report(model):
    """Rank 0 prints how many parameters there are, and how many of them each rank holds."""
    held = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    held[dist.get_rank()] = sum(parameter.to_local().numel() for parameter in model.parameters())
    dist.all_reduce(held)
    if dist.get_rank() == 0:
        total = sum(parameter.numel() for parameter in model.parameters())  # a DTensor tells the size of the whole
        print(f"{total} parameters, of which the ranks hold {', '.join(map(str, held.tolist()))}")


def sequences(text, options):
    """For each step, this rank's share of the batch, one byte longer than what the model reads."""
    random = torch.Generator().manual_seed(options.seed)  # the same seed, hence the same batch, on every rank
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT, (options.batch, 1), generator=random)
        mine = starts.tensor_split(dist.get_world_size())[dist.get_rank()]
        yield text[mine + torch.arange(CONTEXT + 1)].long()


def train(model, text, options):
    """Returns the loss of every step, over the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=dist.get_rank() != 0 or not on_screen()) as progress:
        task = progress.add_task("training", total=options.steps)
        begin = time.perf_counter()
        for mine in sequences(text, options):
            optimizer.zero_grad()
            scores = model(mine[:, :-1]).float()
            loss = functional.cross_entropy(scores, mine[:, 1:].flatten(), reduction="sum") / (options.batch * CONTEXT)
            # FSDP takes the mean of the ranks' gradients; what is wanted is their sum.
            (loss * dist.get_world_size()).backward()
            optimizer.step()
            whole = loss.detach()
            dist.all_reduce(whole)
            losses.append(whole.item())
            speed = len(losses) * options.batch * CONTEXT / (time.perf_counter() - begin)
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
    return losses, speed


def write(model, length, seed):
    """Text that follows the prompt. All ranks take part, since each holds a piece of the model, and draw the same."""
    random = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        for _ in range(length):
            chances = model(text[:, -CONTEXT:])[-1].float().softmax(dim=0)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=random)[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def plot(losses, path):
    import matplotlib as mpl

    mpl.use("Agg")  # needs no screen
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.axhline(math.log(VALUES), color="grey", linestyle=":", label="a guess among all bytes")
    axes.set(xlabel="step", ylabel="loss", title="A small GPT on Python's help texts")
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all ranks (default: 32)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, batches and text (default: 0)")
    parser.add_argument("--length", type=int, default=200, help="of the text to write, in bytes (default: 200)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, and send parameters in it")
    parser.add_argument("--plot", metavar="FILE.png", help="where to draw the loss")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or options.length < 0:
        parser.error("--steps and --batch must be at least 1, --length at least 0")

    dist.init_process_group("mpicoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # the ranks are the parallelism here
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    model = sharded_model(options)
    report(model)
    losses, speed = train(model, text, options)
    sample = write(model, options.length, options.seed)
    if rank == 0:
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        print(f"{ranks}, {options.steps} steps, {speed:,.0f} tokens/s, loss {losses[0]:.5f} -> {losses[-1]:.5f}")
        print(f"\n{sample}")
        if options.plot:
            plot(losses, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
