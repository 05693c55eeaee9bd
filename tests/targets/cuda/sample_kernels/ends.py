"""A file of kernels whose import ends the process."""

import os
import signal
import sys

print("the last words", file=sys.stderr)
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGKILL)
