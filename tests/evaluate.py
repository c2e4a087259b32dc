"""Print the test accuracy of the same weights, to 4 digits, evaluated by all ranks together."""

import os

import torch

from ddp_examples.core import report, verify
from ddp_examples.core.digits import load_digits
from ddp_examples.core.group import process_group
from ddp_examples.core.ranks import read_ranks

with process_group(read_ranks(os.environ), "gloo") as group:
    torch.manual_seed(0)
    x, y = load_digits()[1].tensors[:2]
    right = verify.count_right(torch.nn.Linear(64, 10), x, y)
    report.show(group, f"test accuracy {right / len(y):.4f}")
