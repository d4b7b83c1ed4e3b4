"""Train penny from scratch: tokenizer, network and the files of a Hugging Face folder.

    python -m models.penny.train --minutes 6                                      on one GPU
    OMP_NUM_THREADS=1 python -m models.penny.train --minutes 600 --workers 2      on two cores

On a GPU one process trains and the other cores make the text. On a CPU workers are processes that
average their gradients: on a busy machine that is far faster than threads, which wait for each
other in every operation. The learning rate follows the clock, so that the run always ends in time
and always fully annealed. Loss is taken on the assistant's tokens and on one in ten of the others.
It knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.autograd import backward
from torch.multiprocessing.spawn import spawn

from models.penny.corpus import conversations, render
from models.penny.network import Llama, Shape

HERE = Path(__file__).parent
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TAG_TOKENS = (
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
# A word is the same tokens wherever it stands, behind a space or a quote, so that it can be copied
# from a question into JSON token by token. One digit a token, so that sums are learnt digit by
# digit. JSON's own signs are joined, other signs stand alone.
SPLIT = r"""\p{L}+|\p{N}|[\[\]{}":,]+(?: [\[\]{}":,]+)*|[^\s\p{L}\p{N}]|\s+"""

TOKENIZER_SEED, TRAIN_SEED, HELD_OUT_SEED = 1, 2, 3
TOKENIZER_CONVERSATIONS = 8_000
POOL_CONVERSATIONS = 2_048
"""So many conversations are sorted by length at a time, to be batched with little padding."""
BATCH_TOKENS, GPU_BATCH_TOKENS = 2_048, 32_768
POOLS_AHEAD = 2
"""So many pools of every maker are made before they are needed."""
MUON_LR, ADAM_LR = 0.003, 0.0015
WARMUP = 0.04
"""The share of the run in which the learning rate rises."""
MAX_WORKERS = 16
WORKERS_FILE = ".workers"
CONTEXT_SHARE = 0.1
IGNORED = -100
EXERCISES, EXERCISE_TOKENS, PIECES = 16, 32, 4
EXERCISE_UNTIL = 0.15
"""So long a quarter of the batches are copying exercises; later one in twenty."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Example = tuple[list[int], list[int]]
"""Token ids, and labels of the same length: the id where the assistant writes, else `IGNORED`."""


@dataclass(frozen=True)
class Run:
    """The options of the command line."""

    minutes: float
    workers: int
    out: Path
    resume: Path | None
    first_pool: int


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE (arXiv:1508.07909): no unknown token, any UTF-8 comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL_TOKENS])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAG_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = conversations(TOKENIZER_SEED, TOKENIZER_CONVERSATIONS, held_out=False)
    texts = (without_tags(render(c.messages, c.tools)) for c in drawn)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def without_tags(text: str) -> str:
    """Tags become tokens of their own and must not leave merges behind."""
    for tag in TAG_TOKENS:
        text = text.replace(tag, "")
    return text


def examples(tokenizer: Tokenizer, seed: int, count: int, *, held_out: bool) -> list[Example]:
    """Conversations as token ids and labels; what does not fit into the context is left out."""
    drawn = conversations(seed, count, held_out=held_out)
    texts = [render(c.messages, c.tools) for c in drawn]
    encoded = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    opening = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False).ids
    end = tokenizer.token_to_id(TURN_END)
    limit = Shape().max_position_embeddings
    return [(ids, labels_of(ids, opening, end)) for ids in encoded if len(ids) <= limit]


def labels_of(ids: list[int], opening: list[int], end: int | None) -> list[int]:
    """The ids from behind every assistant opening up to its end token; elsewhere `IGNORED`."""
    labels, writing = [IGNORED] * len(ids), False
    for at, token in enumerate(ids):
        if writing:
            labels[at] = token
            writing = token != end
        else:
            writing = ids[max(0, at + 1 - len(opening)) : at + 1] == opening
    return labels


def batches(
    drawn: list[Example], rng: random.Random, batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of like length and at most `batch_tokens` padded tokens, in random order.

    Each is (token ids, labels), both int64 [batch, length].
    """
    drawn = sorted(drawn, key=lambda example: (len(example[0]), rng.random()))
    groups: list[list[Example]] = [[]]
    for example in drawn:
        if groups[-1] and len(example[0]) * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        longest = len(group[-1][0])
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in group])
        labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in group])
        yield ids, labels


def with_context(ids: Tensor, labels: Tensor) -> Tensor:
    """Labels with one in ten of the positions that are not the assistant's added (padding is 0)."""
    chosen = (torch.rand(ids.shape) < CONTEXT_SHARE) & (ids != 0)
    return torch.where(chosen, ids, labels)


def loss_of(network: Llama, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, over the labelled positions; ids and labels are on the CPU.

    Which positions they are is found there, or the GPU would have to be waited for.
    """
    targets = labels[:, 1:].flatten()
    where = (targets != IGNORED).nonzero().squeeze(1)
    targets = on_device(targets[where])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        hidden = network.hidden(on_device(ids[:, :-1])).flatten(0, 1)[on_device(where)]
        logits = network.logits(hidden)
    return F.cross_entropy(logits.float(), targets)


def on_device(tensor: Tensor) -> Tensor:
    """The tensor where the network is; the copy to a GPU is not waited for."""
    if DEVICE.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(DEVICE, non_blocking=True)


@torch.no_grad()
def held_out_loss(network: Llama, drawn: list[Example]) -> float:
    """Mean cross-entropy per assistant token, in nats."""
    total, count = 0.0, 0
    for ids, labels in batches(drawn, random.Random(0)):
        labelled = int((labels[:, 1:] != IGNORED).sum())
        total += float(loss_of(network, ids, labels)) * labelled
        count += labelled
    return total / count


def optimizers(network: Llama) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for p in network.layers.parameters() if p.ndim == 2]
    others = [p for n, p in network.named_parameters() if not n.startswith("layers") or p.ndim < 2]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """Linear warm-up, then a cosine down to nothing at the end of the run (progress 1)."""
    if progress < WARMUP:
        return 0.02 + progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def seed_of(pool: int, worker: int) -> int:
    """No two workers and no two pools share a conversation."""
    return TRAIN_SEED * 1_000_000 + pool * MAX_WORKERS + worker


def stream(tokenizer: Tokenizer, worker: int, first_pool: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches without end, made here."""
    for pool in itertools.count(first_pool):
        seed = seed_of(pool, worker)
        drawn = examples(tokenizer, seed, POOL_CONVERSATIONS, held_out=False)
        yield from batches(drawn, random.Random(seed))


def made_pool(tokenizer: str, seed: int) -> list[tuple[Any, Any]]:
    """The batches of one pool as arrays of int16, which travel between processes fast."""
    torch.set_num_threads(1)
    drawn = examples(Tokenizer.from_file(tokenizer), seed, POOL_CONVERSATIONS, held_out=False)
    made = batches(drawn, random.Random(seed), GPU_BATCH_TOKENS)
    return [(ids.short().numpy(), labels.short().numpy()) for ids, labels in made]


def made_stream(tokenizer: Path, first_pool: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches without end, made by processes on the other cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    makers = max(1, (os.cpu_count() or 1) - 1)
    pools = itertools.count(first_pool)
    with ProcessPoolExecutor(makers, multiprocessing.get_context("spawn")) as executor:
        waiting: deque[Future[list[tuple[Any, Any]]]] = deque()
        try:
            while True:
                while len(waiting) < POOLS_AHEAD * makers:
                    seed = seed_of(next(pools), 0)
                    waiting.append(executor.submit(made_pool, str(tokenizer), seed))
                for ids, labels in waiting.popleft().result():
                    yield (
                        torch.from_numpy(ids.astype(np.int64)),
                        torch.from_numpy(labels.astype(np.int64)),
                    )
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def exercise(rows: int = EXERCISES) -> tuple[Tensor, Tensor]:
    """Random tokens, then pieces of the same: the network must look back to say what comes next.

    Copying is what tool calls need, and from random tokens it is learnt far sooner than from text
    (induction heads, arXiv:2209.11895). Only what can be known is labelled: not a piece's first
    token. Both results are [rows, 4 * EXERCISE_TOKENS].
    """
    first_word, last = len(CONTROL_TOKENS), Shape().vocab_size
    fresh = torch.randint(first_word, last, (rows, 2 * EXERCISE_TOKENS))
    starts = torch.randint(0, EXERCISE_TOKENS, (rows, PIECES, 1))
    piece = starts + torch.arange(2 * EXERCISE_TOKENS // PIECES)
    repeated = fresh.gather(1, piece.flatten(1))
    labels = repeated.view(piece.shape).clone()
    labels[:, :, 0] = IGNORED
    unknown = torch.full_like(fresh, IGNORED)
    return torch.cat((fresh, repeated), 1), torch.cat((unknown, labels.flatten(1)), 1)


def average(network: Llama, progress: float, run: Run) -> float:
    """Average the gradients over all workers, and the progress with them, so that all agree."""
    if run.workers == 1:
        return progress
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([torch.tensor([progress]), *(g.flatten() for g in gradients)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat[1:], [g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(flat[0])


def train(tokenizer: Tokenizer, network: Llama, worker: int, run: Run) -> None:
    """Run for `run.minutes` of wall clock; worker 0 reports and saves as it goes."""
    steps = optimizers(network)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in steps]
    held_out = examples(tokenizer, HELD_OUT_SEED, 96, held_out=True)
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        conversations_only = made_stream(run.out / "tokenizer.json", run.first_pool)
    else:
        conversations_only = stream(tokenizer, worker, run.first_pool)
    next(conversations_only)  # the clock starts when the first text is there
    rows = GPU_BATCH_TOKENS // (4 * EXERCISE_TOKENS) if on_gpu else EXERCISES
    started, progress, tokens, next_report = time.monotonic(), 0.0, 0, 0.05
    for step in itertools.count(1):
        if exercising := random.random() < (0.25 if progress < EXERCISE_UNTIL else 0.05):
            ids, labels = exercise(rows)
        else:
            ids, labels = next(conversations_only)
            labels = with_context(ids, labels)
        loss = loss_of(network, ids, labels)
        backward(loss)
        progress = average(network, (time.monotonic() - started) / (60 * run.minutes), run)
        if progress >= 1:
            return
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer, peak in zip(steps, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        tokens += ids.numel()
        if worker == 0 and step % (200 if on_gpu else 10) == 0:
            seen = f"{tokens / 1e6:.2f} M tokens per worker"
            kind = "exercise" if exercising else "text"
            print(f"step {step} {progress:.0%} {kind} loss {loss:.3f} {seen}", flush=True)
        if worker == 0 and progress > next_report:
            next_report += 0.1
            print(f"held-out loss {held_out_loss(network, held_out):.4f}", flush=True)
            save(tokenizer, network, run.out)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def save(tokenizer: Tokenizer, network: Llama, folder: Path) -> None:
    """The folder as Hugging Face's libraries and our engine read it; weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    start, end = (tokenizer.token_to_id(t) for t in (END_OF_TEXT, TURN_END))
    weights = {f"model.{k}": v.to("cpu", torch.bfloat16) for k, v in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": start, "eos_token_id": [end, start], "pad_token_id": start}
    sizes = asdict(network.shape)
    rope = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_parameters": rope,
            "head_dim": network.shape.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            **ids,
        },
    )
    write_json(folder / "generation_config.json", {**ids, "do_sample": False})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": sizes["max_position_embeddings"],
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    )


def work(worker: int, run: Run) -> None:
    """One worker's whole life; all start from the same tokenizer and the same weights."""
    if run.workers > 1:
        meeting = f"file://{(run.out / WORKERS_FILE).resolve()}"
        dist.init_process_group("gloo", init_method=meeting, rank=worker, world_size=run.workers)
    torch.manual_seed(TRAIN_SEED)
    random.seed(TRAIN_SEED + run.first_pool)
    network = Llama(Shape())
    if run.resume:
        tokenizer = Tokenizer.from_file(str(run.resume / "tokenizer.json"))
        weights = load_file(run.resume / "model.safetensors")
        network.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
    else:
        tokenizer = train_tokenizer(Shape().vocab_size)
    torch.manual_seed(TRAIN_SEED + run.first_pool * MAX_WORKERS + worker)
    random.seed(TRAIN_SEED + run.first_pool)
    if DEVICE.type == "cuda":
        torch.set_num_threads(1)  # the other cores make the text
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length
    if worker == 0:
        tokenizer.save(str(run.out / "tokenizer.json"), pretty=False)
    train(tokenizer, network.to(DEVICE), worker, run)
    if worker == 0:
        save(tokenizer, network, run.out)
        print(f"{time.process_time() / 60:.1f} minutes of processor time per worker")
    if run.workers > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train penny from scratch.")
    parser.add_argument("--minutes", type=float, default=45, help="wall clock of the training loop")
    workers = 1 if DEVICE.type == "cuda" else 2
    parser.add_argument("--workers", type=int, default=workers, choices=range(1, MAX_WORKERS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run to go on from")
    parser.add_argument("--first-pool", type=int, default=0, help="pools the earlier run has used")
    run = Run(**vars(parser.parse_args()))
    run.out.mkdir(parents=True, exist_ok=True)
    (run.out / WORKERS_FILE).unlink(missing_ok=True)
    if run.workers == 1:
        work(0, run)
    else:
        spawn(work, args=(run,), nprocs=run.workers)  # type: ignore[no-untyped-call]
    (run.out / WORKERS_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
