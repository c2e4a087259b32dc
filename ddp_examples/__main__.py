"""`python -m ddp_examples` lists the demos; `python -m ddp_examples demo=basic [key=value ...]` runs one."""

import importlib
import os
import pdb
import sys
import traceback
from typing import List, NoReturn

from ddp_examples.core.config import chosen_demo, load_config_of
from ddp_examples.core.demos import demos
from ddp_examples.core.exits import Exit
from ddp_examples.core.ranks import read_ranks


def main(argv: List[str]) -> NoReturn:
    ranks = read_ranks(os.environ)
    if not argv or argv in (["--help"], ["-h"]):
        if ranks.rank == 0:
            print(listing(), flush=True)
        sys.exit(0)
    debugger = argv[0] == "--pdb"
    sys.argv[1:] = argv[debugger:]
    demo = chosen_demo(sys.argv[1:], ranks)
    load_config_of(demo, sys.argv[1:], ranks)  # before the demo, and with it torch, is imported
    module = importlib.import_module(f"ddp_examples.{demo.name}")
    if not debugger:
        sys.exit(module.main())
    try:
        sys.exit(module.main())
    except Exception:
        traceback.print_exc()
        pdb.post_mortem()
        sys.exit(Exit.ERROR)


def listing() -> str:
    """The demos, a line each, and how to start one."""
    width = max(map(len, demos()))
    lines = [f"  {name:<{width}}  {demo.about}" for name, demo in demos().items()]
    return "\n".join(
        [
            "Demos of distributed data parallel that prove what they show:",
            *lines,
            "",
            "Start one:",
            "  torchrun --nproc_per_node=4 -m ddp_examples.basic   four ranks on this machine",
            "  python -m ddp_examples demo=basic                   one rank, no launcher",
            "  python -m ddp_examples demo=basic --help            its settings",
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
