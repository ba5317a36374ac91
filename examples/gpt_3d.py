"""Train a small GPT that is divided in three ways at once, on the texts that Python's own help() shows.

    mpirun -np 4 python examples/gpt_3d.py --tp 2 --pp 2
    mpirun -np 4 python examples/gpt_3d.py --tp 2 --dp 2 --sp --plot loss.png
    mpirun -np 4 python examples/gpt_3d.py --pp 4 --timeline pipe.svg
    mpirun -np 4 python examples/gpt_3d.py --pp 2 --cp 2 --schedule interleaved --chunks 2
    mpirun -np 4 python examples/gpt_3d.py --tp 4 --checkpoint gpt     # keeps it in the folder gpt at the end
    mpirun -np 2 python examples/gpt_3d.py --pp 2 --resume gpt         # and goes on in another layout

Besides mpicoll this needs ``pip install torch rich``, and matplotlib for --plot and --timeline. It prints something
like

    4 ranks: pp=2 dp=1 cp=1 tp=2, 1f1b, a rank holds 58688 to 62656 parameters
    300 steps, 20,187 tokens/s, loss 6.02232 -> 1.77110

    The sucction the can containg the a for are the stric class and "__getattributer__()" "The sualt be expression ...

How the model is divided:

- **tp**, tensor parallel: the matrices of each layer, among neighbours, which add up their parts twice per layer. With
  ``--sp`` the parts of the sequence between the matrices are divided among the same ranks, too.
- **pp**, pipeline parallel: the layers. Batches go through in micro-batches, so that all stages are at work. The
  embedding, which is needed at the beginning and at the end, is tied: both stages keep a copy.
- **dp**, data parallel: not the model, but the batch. What is left of the ranks goes here.
- **cp**, context parallel: the sequence. Attention passes keys and values round a ring of ranks.

Each layer draws its first parameters from a seed of its own, all of them on every rank, which then keeps its part. So
any layout begins with the same model and takes the same steps, except for rounding.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from screen import on_screen
from torch import nn
from torch.nn import functional

from mpicoll import ArgumentError, parallel

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    raise SystemExit(f"gpt_3d.py needs {error.name}: pip install torch rich") from None

VALUES = 256  # of a byte, which is what the model reads and writes
PROMPT = "The "


class Block(nn.Module):
    """Attention to what came before, then two layers for each place by itself. Tensors are (places, sequences, width).

    A rank has some of the heads: the rows of ``attend`` are ordered by head, and within a head by query, key, value.
    """

    def __init__(self, options):
        super().__init__()
        width, sp = options.width, {"sequence_parallel": options.sp}
        self.size = width // options.heads
        self.norms = nn.ModuleList([parallel.LayerNorm(width, **sp), parallel.LayerNorm(width, **sp)])
        self.attend = parallel.ColumnParallelLinear(width, 3 * width, **sp)
        self.merge = parallel.RowParallelLinear(width, width, input_is_parallel=True, **sp)
        self.widen = parallel.ColumnParallelLinear(width, 4 * width, **sp)
        self.narrow = parallel.RowParallelLinear(4 * width, width, input_is_parallel=True, **sp)

    def forward(self, x):
        heads = self.attend(self.norms[0](x)).unflatten(-1, (-1, 3, self.size)).permute(3, 1, 2, 0, 4)
        seen = parallel.ring_attention(*heads, causal=True, layout="zigzag")
        x = x + self.merge(seen.permute(2, 0, 1, 3).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class Part(nn.Module):
    """Some consecutive layers of the GPT. The first part takes bytes, (sequences, places); the last one gives this
    rank's part of the scores of what follows each of them, (places, sequences, VALUES / tp)."""

    def __init__(self, blocks, options, first, last, embedding=None):
        super().__init__()
        self.options = options
        self.first, self.last = first, last
        # Named by their number in the whole model, and made from a seed of their own.
        self.blocks = nn.ModuleDict({str(number): seeded(options, number + 1, Block, options) for number in blocks})
        if first or last:
            self.embedding = embedding or seeded(
                options, 0, parallel.VocabParallelEmbedding, VALUES, options.width, init_method=narrow_normal
            )
        if first:
            self.place = seeded(options, -1, nn.Embedding, options.context, options.width)
            narrow_normal(self.place.weight)
        if last:
            self.norm = parallel.LayerNorm(options.width, sequence_parallel=options.sp)

    def forward(self, x):
        if self.first:
            x = self.enter(x)
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = self.norm(x)
            x = parallel.column_parallel_linear(x, self.embedding.weight, sequence_parallel=self.options.sp)
        return x

    def enter(self, text):
        places = self.place(parallel.position_ids(text.shape[1], layout="zigzag"))
        x = self.embedding(text.T) + places[:, None]
        return parallel.scatter_to_sequence_parallel_region(x) if self.options.sp else x


def narrow_normal(weight):
    """So narrow that scores, the products of a normalised vector with embeddings, have a variance of one at first."""
    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def seeded(options, number, make, *arguments, **named):
    """What ``make(*arguments)`` makes, with the random numbers of a seed that only `number` depends on."""
    torch.manual_seed(options.seed * 10_000 + number + 1)
    return make(*arguments, **named)


def build(options, grid):
    """This rank's parts of the model; one for each chunk."""
    stages, stage = grid.get_pipe_parallel_world_size(), grid.get_pipe_parallel_rank()
    parts = stages * options.chunks
    bounds = [options.layers * number // parts for number in range(parts + 1)]
    mine, embedding = [], None
    for number in range(stage, parts, stages):
        part = Part(range(bounds[number], bounds[number + 1]), options, number == 0, number == parts - 1, embedding)
        embedding = getattr(part, "embedding", embedding)
        mine.append(part)
    return nn.ModuleList(mine).to(getattr(torch, options.dtype))


def engine_for(model, options):
    embeddings = [part.embedding.weight for part in model if part.first or part.last]
    tied = {"embedding": embeddings[0]} if embeddings else {}
    return parallel.PipelineEngine(
        list(model), cross_entropy, micro_batches=options.micro_batches, schedule=options.schedule, tied=tied
    )


def cross_entropy(scores, targets):
    return parallel.vocab_parallel_cross_entropy(scores, targets.T, reduction="mean")


def batches(text, options, grid, skip=0):
    """For each step, this rank's share of the batch: its sequences, of those its places, and what follows them."""
    random = torch.Generator().manual_seed(options.seed)  # the same seed, hence the same batch, on every rank
    shares, share = grid.get_data_parallel_world_size(), grid.get_data_parallel_rank()
    for step in range(skip + options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=random)
        if step < skip:
            continue
        mine = starts[share * options.batch // shares : (share + 1) * options.batch // shares]
        sequences = text[mine + torch.arange(options.context + 1)].long()
        yield (
            parallel.split_sequence(sequences[:, :-1], 1, layout="zigzag"),
            parallel.split_sequence(sequences[:, 1:], 1, layout="zigzag"),
        )


def train(engine, optimizer, text, options, grid, skip):
    """Returns the loss of every step, over the whole batch, and the tokens per second."""
    losses, speed = [], 0.0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=dist.get_rank() != 0 or not on_screen()) as progress:
        task = progress.add_task("training", total=options.steps)
        begin = time.perf_counter()
        for inputs, targets in batches(text, options, grid, skip):
            optimizer.zero_grad()
            losses.append(engine.train_batch(inputs, targets).item())
            engine.clip_grad_norm_(options.clip)
            optimizer.step()
            speed = len(losses) * options.batch * options.context / (time.perf_counter() - begin)
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
    return losses, speed


def write(engine, options):
    """Text that follows the prompt. All ranks take part, since each holds a piece of the model, and draw the same."""
    random = torch.Generator().manual_seed(options.seed)
    text = list(PROMPT.encode())
    for _ in range(options.length):
        seen = text[-options.context :]
        # Always as long as in training, so that it can be divided; what follows a place has no influence on it.
        padded = torch.tensor([seen + [0] * (options.context - len(seen))])
        part = engine.predict(parallel.split_sequence(padded, 1, layout="zigzag"))
        scores = parallel.gather_sequence(parallel.gather_from_tensor_model_parallel_region(part), 0, layout="zigzag")
        chances = (scores[len(seen) - 1, 0].double() / options.temperature).softmax(dim=0)
        text.append(torch.multinomial(chances, 1, generator=random).item())
    return bytes(text).decode(errors="replace")


def report(model, options, grid):
    """Rank 0 prints the layout, and how many parameters there are and how many of them a rank holds."""
    held = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    held[dist.get_rank()] = sum(parameter.numel() for parameter in model.parameters())
    dist.all_reduce(held)
    if dist.get_rank() == 0:
        sizes = f"pp={grid.get_pipe_parallel_world_size()} dp={grid.get_data_parallel_world_size()}"
        sizes += f" cp={grid.get_context_parallel_world_size()} tp={grid.get_slice_parallel_world_size()}"
        layout = f"{sizes}{' sp' if options.sp else ''}, {options.schedule}"
        ranks = "1 rank" if len(held) == 1 else f"{len(held)} ranks"
        print(f"{ranks}: {layout}, a rank holds {held.min()} to {held.max()} parameters")


def plot(losses, path, skip):
    import matplotlib as mpl

    mpl.use("Agg")  # needs no screen
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(range(skip + 1, skip + len(losses) + 1), losses)
    axes.axhline(math.log(VALUES), color="grey", linestyle=":", label="a guess among all bytes")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="loss", title="A small GPT on Python's help texts")
    axes.legend()
    figure.savefig(path, dpi=150)


class Parser(argparse.ArgumentParser):
    """All ranks read the same arguments and draw the same conclusions. So one rank prints for all, and all end: by an
    exception, since mpicoll ends the other ranks when one calls sys.exit with a status."""

    def _print_message(self, message, file=None):
        if dist.get_rank() == 0:
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        self._print_message(message, sys.stderr)
        raise SystemExit(status)


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def options_of(arguments=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tp", type=positive, default=1, help="ranks that share each matrix (default: 1)")
    layout.add_argument("--pp", type=positive, default=1, help="stages of the pipeline (default: 1)")
    layout.add_argument("--cp", type=positive, default=1, help="ranks that share a sequence (default: 1)")
    layout.add_argument("--dp", type=positive, help="ranks that share the batch (default: what is left)")
    layout.add_argument("--sp", action="store_true", help="divide the sequence among the tp ranks between matrices")
    layout.add_argument(
        "--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zero_bubble, looped_bfs (default: 1f1b)"
    )
    layout.add_argument("--chunks", type=positive, default=1, help="parts of the model on each stage (default: 1)")
    layout.add_argument("--micro-batches", type=positive, default=4, help="per batch (default: 4)")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive, default=4, help="(default: 4)")
    model.add_argument("--width", type=positive, default=64, help="(default: 64)")
    model.add_argument("--heads", type=positive, default=4, help="(default: 4)")
    model.add_argument("--context", type=positive, default=64, help="bytes in a sequence (default: 64)")
    model.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=300, help="(default: 300)")
    training.add_argument("--batch", type=positive, default=32, help="sequences per step, over all ranks (default: 32)")
    training.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005)")
    training.add_argument("--clip", type=float, default=1.0, help="norm of the gradients at most (default: 1)")
    training.add_argument("--seed", type=int, default=0, help="of the parameters, batches and text (default: 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--length", type=int, default=200, help="of the text to write, in bytes (default: 200)")
    output.add_argument("--temperature", type=float, default=0.5, help="how daring the text is (default: 0.5)")
    output.add_argument("--plot", metavar="FILE.png", help="where to draw the loss")
    output.add_argument("--timeline", metavar="FILE.svg", help="where to draw what the stages did in the last step")
    output.add_argument("--losses", metavar="FILE.json", type=Path, help="where to write the loss of each step")
    output.add_argument("--checkpoint", metavar="FOLDER", type=Path, help="where to keep the model at the end")
    output.add_argument("--resume", metavar="FOLDER", type=Path, help="what to begin with, kept in any layout")
    options = parser.parse_args(arguments)
    if options.temperature <= 0:
        parser.error("--temperature must be more than 0")
    return options, parser


def check(options, grid):
    """What the layers don't check before the first batch comes."""
    shares, parts = grid.get_data_parallel_world_size(), options.pp * options.chunks
    if options.dp not in (None, shares):
        raise ArgumentError(
            f"--tp, --pp and --cp leave {shares} of {dist.get_world_size()} ranks for --dp {options.dp}"
        )
    if options.layers < parts:
        raise ArgumentError(f"--layers {options.layers} can't be divided into {parts} parts, --chunks for each of --pp")
    if options.width % options.heads or options.heads % options.tp:
        raise ArgumentError("--heads must divide --width, and --tp must divide --heads")
    if options.context % (2 * options.cp * options.tp):
        raise ArgumentError("--context must be a multiple of 2 * cp * tp")
    if options.batch % shares or options.batch // shares < options.micro_batches:
        raise ArgumentError(f"--batch must be {shares} equal shares of at least --micro-batches sequences")


def main():
    dist.init_process_group("mpicoll")
    torch.set_num_threads(1)  # the ranks are the parallelism here
    options, parser = options_of()
    try:
        grid = parallel.initialize_model_parallel(options.tp, options.pp, options.cp)
        check(options, grid)
        model = build(options, grid)
        engine = engine_for(model, options)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=options.lr)
        step = 0
        if options.resume:
            step = parallel.checkpoint.load(options.resume, model, optimizer, names=global_name)["step"]
    except ArgumentError as error:  # all ranks get it alike
        parser.error(str(error))
    report(model, options, grid)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    text = torch.tensor(list(" ".join(words).encode()), dtype=torch.uint8)
    losses, speed = train(engine, optimizer, text, options, grid, step)
    timeline = engine.timeline()  # of the last batch of training; writing sends other ones through the pipeline
    sample = write(engine, options)
    if options.checkpoint:
        extra = {"step": step + options.steps}
        parallel.checkpoint.save(options.checkpoint, model, optimizer, extra=extra, names=global_name, overwrite=True)
    if dist.get_rank() == 0:
        print(f"{options.steps} steps, {speed:,.0f} tokens/s, loss {losses[0]:.5f} -> {losses[-1]:.5f}")
        print(f"\n{sample}")
        if options.plot:
            plot(losses, options.plot, step)
        if options.timeline:
            print(f"\n{parallel.pipeline.draw(timeline, file=options.timeline)}")
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    engine.free()
    grid.free()
    dist.destroy_process_group()


def global_name(name):
    """Parameters are named in their part; blocks have numbers of the whole model, so leaving out the part's will do."""
    return name.partition(".")[2]


if __name__ == "__main__":
    main()
