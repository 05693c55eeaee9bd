"""llama.cpp's side of a step measurement: runs under an interpreter that has llama-cpp-python; prints one JSON line.

    PEER_PYTHON -m benchmarks.step_llama model.gguf --threads 2 --batches 1 4 8 16

The low-level API is used, so nothing of the Python wrapper's own sampling or prompt handling is in the figures.
The context holds 8192 tokens in all and a batch 512, the longest prompt measured (n_batch = n_ubatch; llama.cpp's defaults are
2048 and 512); flash attention and weight repacking are llama.cpp's defaults.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

from benchmarks import workload

started = time.perf_counter()
import llama_cpp  # noqa: E402  (its import is timed)
import numpy as np  # noqa: E402

IMPORT_S = time.perf_counter() - started
MUTE = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Llama:
    """A llama.cpp context behind workload.Stepper."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(MUTE, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = workload.SEQUENCES * workload.SEQUENCE_TOKENS
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = workload.SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def prefill(self, tokens: list[int], sequence: int) -> int:
        last = len(tokens) - 1
        self._run([(token, position, sequence, position == last) for position, token in enumerate(tokens)])
        return self._greedy(last)

    def decode(self, tokens: list[int], position: int) -> list[int]:
        self._run([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
        return [self._greedy(row) for row in range(len(tokens))]

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise SystemExit(f"llama_decode of {len(entries)} tokens ended with code {code}")

    def _greedy(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=workload.PREFILL_REPEATS, help="of the prefill; 0: none")
    arguments = parser.parse_args()
    figures = workload.measure(lambda: Llama(arguments.model, arguments.threads), arguments.batches, arguments.repeats)
    print(json.dumps({"import_s": IMPORT_S} | figures))


if __name__ == "__main__":
    main()
