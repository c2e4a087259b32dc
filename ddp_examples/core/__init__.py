"""What the demos share; knows no demo. Import it before torch: see the one line below."""

import warnings

# torch works without numpy (no dependency of ours), but says so once a process, so 5 times in a run of 4 ranks; people
# take the line for the error. Seen with torch 2.6 and 2.13: `python -c "import torch"` where numpy is not installed.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
