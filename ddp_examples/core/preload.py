"""What the fork server imports once a node, so that no rank has to; nothing else should import it.

The server is a fresh Python without threads; it imports this, and forks the ranks. CUDA must not be initialised here: a
forked process can't use it. `torch.cuda.device_count()` would be fine, it asks NVML.
"""

import gc
import importlib
import signal

from ddp_examples.core.orphans import die_with_parent

die_with_parent(signal.SIGKILL)  # the server lives as long as a rank does: without this, ranks outlive the launcher

gc.disable()  # the collections while torch is imported find nothing: 0.4 s
for name in (
    "torch._dynamo",  # DistributedDataParallel's constructor imports it: 0.6 s
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.data",
    "ddp_examples.core.digits",
    "ddp_examples.core.report",
):
    importlib.import_module(name)

gc.enable()
# 0.28 million objects stay out of every later collection: that saves time, and the pages stay shared. No collection
# before: it takes 0.4 s, in which all ranks wait.
gc.freeze()
