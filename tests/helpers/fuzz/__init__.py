"""Files that went wrong on their way: small sound ones, mutated, must end in one clear line or in the right result.

    PYTHONPATH=tests/helpers python -m fuzz --cases 10000 --seed 1

`seeds` makes the sound files, `mutations` damages bytes, trees, archives and protos, `subjects` says for each kind of
file what is tried with it and what is right, `limits` runs a case in a process of its own with bounded time and memory.
"""
