"""How every kernel begins, so that it can be launched before the kernel that it follows has ended.

Where an architecture has programmatic edges, a kernel behind one is launched as soon as every block of the kernel before has
asked for that or has ended, and itself waits for that one's end: so the time of a launch passes while the kernel before
computes (CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, "griddepcontrol").

- **It waits first**: every block, before it touches memory and before it may return. A wait is over when all kernels that edges
  lead from have ended and what they wrote is to be seen. Each of them has waited itself, or was launched behind full edges;
  so its end implies that of all nodes before it, and an edge of either kind means what it says. Copies, which cannot wait,
  have full edges.
- **Then it asks for the next kernel.** When all of its blocks have, they all run or have ended, and all kernels before it have
  ended: so the blocks of the next one, which only wait, take registers, shared and tensor memory from none that has yet to
  begin. If it asked before it waits, the next but one would be launched too while the kernel before still runs. That would
  gain something only where a kernel takes less time than a launch, and blocks would gather where the running one left room,
  instead of being spread over the device.
- **It never waits for a later kernel**: whether one is launched early is for the device to decide.

No node writes weights, so a product could load its first ones before it waits. They would have to be held apart from those that
its loop copies ahead, or be fetched into the cache by inline assembly; neither is done.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(PROGRAMMATIC: tl.constexpr):
    """The first statement of every kernel, with the kernel's last constant: whether the architecture has programmatic edges. It
    is not in a launch, since compile_worker.py knows the architecture; in the interpreter it is False."""
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
