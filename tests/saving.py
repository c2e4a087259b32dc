"""`saving FOLDER`: a rank that takes a second to save when it is asked to stop, and leaves with "go on later"."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    rank = os.environ["RANK"]

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to every process, and the agent to its ranks
        time.sleep(1)
        (folder / f"{rank}.saved").touch()
        sys.exit(75)

    signal.signal(signal.SIGTERM, stop)
    print(f"rank {rank} is up")
    (folder / f"{rank}.up").touch()
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
