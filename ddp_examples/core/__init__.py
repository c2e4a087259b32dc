"""What the demos share; knows no demo. Import it before torch: see the one line below.

Who says what broke a run:

    frames      whose code a frame is of, and whether it waits for other ranks
    failure     an exception that ends a rank -> Failure
    trail       what a rank did last, in a file that outlives it; progress notes it there, by hooks
    deaths      what a parent or the kernel tells of a process that has died
    judge       what all ranks have told -> Stall: who holds the others up (pure)
    verdict     all that is known after the end -> Verdict: at most 10 lines (pure)
    records     the folder of a run, where all of these lie
    last_words  how a rank leaves that fails
    watch       a thread a rank, which tells, listens, and ends a run that stands still
    witness     what process_group opens and closes of all this
    debug       what debug=true adds
"""

import warnings

# torch works without numpy (no dependency of ours), but says so once a process, so 5 times in a run of 4 ranks; people
# take the line for the error. Seen with torch 2.6 and 2.13: `python -c "import torch"` where numpy is not installed.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
