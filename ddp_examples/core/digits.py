"""The real handwritten digits in ddp_examples/data, as tensors. Where they come from: data/README.md."""

import gzip
from pathlib import Path
from typing import Tuple

import torch
from torch.utils.data import TensorDataset

TRAIN = 1437  # the first rows; the others are in part by other writers, so the test is harder than a random split
NUMBERS = {str(number): number for number in range(17)}  # labels and grey levels


def load_digits() -> Tuple[TensorDataset, TensorDataset]:
    """(train, test), 1,437 and 360 samples of (pixels, label, index).

    Pixels are 64 float32 grey levels in [0, 1], 8 rows of 8; labels 0 to 9; the index is the row in the set, by which a
    run can tell which samples it has seen. Both int64.
    """
    text = gzip.decompress((Path(__file__).parents[1] / "data" / "digits.csv.gz").read_bytes()).decode()
    words = text[text.index("\n") + 1 :].split()  # a line a sample, after the names of the columns
    # Looked up: csv and int() take 60 ms a rank instead of 25.
    numbers = bytearray(map(NUMBERS.__getitem__, ",".join(words).split(",")))
    table = torch.frombuffer(numbers, dtype=torch.uint8).view(-1, 65).to(torch.int64)
    return _dataset(table[:TRAIN]), _dataset(table[TRAIN:])


def _dataset(table: torch.Tensor) -> TensorDataset:
    return TensorDataset(table[:, 1:] / 16, table[:, 0].clone(), torch.arange(len(table)))
