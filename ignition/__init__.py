"""ignition: the compile-ahead exporter. It traces a model recipe into a core that `flare` serves.

`export.py` is the pipeline and reads like its eight stages: open a checkpoint (`checkpoint/`), configure a recipe
(`recipes`), capture its step as a graph of ops (`capture.py`, `ops/`, `graph.py`), lower it to kernels (`targets/`), place
everything in memory (`plan.py`), probe tokenizer and template (`template_probe.py`, `sampling.py`), compile the kernels, pack
all into a directory beside the core's place (`pack.py`), and prove it against the torch references (`oracle.py`,
`reference.py`) before it is moved there. `inspect.py` shows a core to
people, `validate.py` accepts or refuses one; neither needs torch.
"""

__version__ = "0.1.0"
