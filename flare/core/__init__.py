"""The core: the exported directory, the one artefact between the exporter and the runtime.

`manifest.py` says what `core.json` holds, `graph.py` what a lowered graph of the cpu target is, `cuda_graph.py` those of the
cuda target, `checksums.py` how files are hashed, and `directory.py` opens a core: it trusts nothing on disk until names,
modes, sizes and hashes agree with the manifest. `cuda_checks.py` holds cuda graphs against their cubins, which `cubin.py`
reads. The exporter writes through the same types, so there is one description of the format. `docs/core-format.md`
explains it.
"""
