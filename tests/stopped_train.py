"""The train demo that stops by itself after a step: `stopped_train STEP SETTINGS...`, as if it had been asked to."""

import runpy
import sys

from ddp_examples.core import stop

limit = int(sys.argv.pop(1))
agreed = stop.StopRequest.agreed
count = 0


def stop_after(self: stop.StopRequest, save: bool = False) -> stop.Wish:
    global count
    count += 1
    answer = agreed(self, save)
    return stop.Wish.STOP if count == limit else answer


if __name__ == "__main__":
    stop.StopRequest.agreed = stop_after  # type: ignore[method-assign]
    runpy.run_module("ddp_examples.train", run_name="__main__", alter_sys=True)
