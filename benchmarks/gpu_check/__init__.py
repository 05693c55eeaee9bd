"""Checks and measures the cuda target on a device: every kernel, whole cores, draws, and the time that they take.

`python -m benchmarks.gpu_check.bundle` (`make gpu-bundle`) prepares what a machine with a device needs, on a machine with the
exporter; `python -m benchmarks.gpu_check` (`make gpu-check`) checks it there. `docs/targets.md` says how, and what the result
means. Here `bundle.py` and `models.py` make the bundle; `__main__.py`, `plan.py` and `children.py` run groups of checks in
processes of their own, whose side is `child.py`; a group's checks are in `environment.py`, `kernels.py`, `draws.py`, `cores.py`
and `timing.py`.
"""
