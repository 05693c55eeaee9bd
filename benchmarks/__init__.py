"""Side-by-side measurements of flare against other servers, on the same weights, threads and prompts.

`python -m benchmarks` (or `make bench`) runs the parts in order and writes the tables of docs/performance.md:

    steps.py        replayed steps: load, prefill, decode at several batch sizes, memory; also beside a busy process
    serving.py      streaming chat through HTTP at several numbers of clients
    cold_start.py   process start to first streamed token, and memory at that moment

outputs.py stands by itself (`python -m benchmarks.outputs`): what it costs to read what models write. So does gpu_check/
(`make gpu-check`): a check of the cuda target on a device, and its figures.

Everything is interleaved: each round runs every contestant once, in alternating order. The figures are medians over the
rounds, and the load that other processes put on the machine during each measurement is written beside them.
step_flare.py and step_llama.py are the two sides of a step measurement; each runs in a process of its own, with the
interpreter that has the engine, and does the work of workload.py. requantise.py makes the weight files that both sides
read, contestants.py says how each server is started, clients.py is the HTTP load, machine.py watches the machine and
report.py writes the tables. ask.py asks a server one question: the last step of `make quickstart`.
"""
