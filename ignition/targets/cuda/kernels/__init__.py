"""The cuda target's kernels: Triton functions, and beside each one the function that makes its launches.

A kernel's run-time parameters come first (pointers, then scalars), its constants after them in capitals. What all keep to:

- Values are widened to f32 right after they are loaded; products of f32 matrices are exact ("ieee"), never tf32.
- A row's result depends on that row alone: sums run in one fixed order, constants and tiles never depend on how many tokens a
  step has. So one compiled kernel serves every bucket, and gives the same bits in each.
- The first statement is `begin(PROGRAMMATIC)`, the last constant `PROGRAMMATIC: tl.constexpr = False` (programmatic.py): so a
  device may launch the kernel early. Compiling sets the constant, and refuses a kernel that lacks it or does not wait first.
- Pointers are 64-byte aligned at their base, and offsets that can pass 2^31 elements are 64-bit.
"""
