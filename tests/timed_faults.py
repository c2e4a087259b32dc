"""The demo faults, that also leaves the time of its fault: `timed_faults FILE [key=value ...]`."""

import sys
import time
from pathlib import Path
from unittest.mock import patch

from ddp_examples import faults


def main() -> int:
    file = Path(sys.argv.pop(1))
    original = faults.break_rank

    def timed(kind, net):
        if kind != "none":
            file.write_text(str(time.time()))
        original(kind, net)

    with patch.object(faults, "break_rank", timed):
        return faults.main()


if __name__ == "__main__":
    sys.exit(main())
