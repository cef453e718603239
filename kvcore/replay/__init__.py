"""Replay of recorded traffic: the real manager, without a model, at the speed of its bookkeeping.

`trace` reads a recording, `simulate` drives a `KVCacheManager` with it, `policies` say what the
manager should keep, `report` what came of it. `kvcore replay` is this on the command line.
"""
