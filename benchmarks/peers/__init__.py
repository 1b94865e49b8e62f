"""Other systems of the kind beside ours, in one emulated network: `python -m benchmarks.peers`.

1. `interface`: what a system has to offer: say whether it can run, start servers at some
   places, and answer workloads.
2. `ours` and `petals` are two of them. Another one is a class beside them, and a line in
   `__main__`.
3. `folder` saves the demonstration model as a folder that older versions of transformers read.
4. `petals_env` makes the virtual environment in which Petals runs; `petals_side` is what runs
   there: it imports nothing of ours.
"""
