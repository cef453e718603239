"""A small real decoder whose keys and values live in kvcore pages: what `kvcore demo` runs.

`weights` reads the shipped model, `model` computes it in NumPy or CuPy, `stores` keeps its K/V
dense or in pages, `search` is the beam search, `run` plays both stores against each other and
counts, `report` says it in JSON. Needs the `cli` extra (safetensors).
"""
