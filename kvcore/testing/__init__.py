"""The oracle: what proves that a cache does what it promises, for kvcore's tests and for yours.

`check` walks the real structures of a manager. `ModelManager` is the specification as a slow
program, and `Lockstep` drives both with the same calls. `FakeEngine` follows the content of every
token. `fail_at` makes one allocation or device operation fail. `Walk` puts all of it to work.
"""

from kvcore.testing.check import OracleError, check
from kvcore.testing.fake_engine import ContentError, FakeEngine
from kvcore.testing.faults import Fault, FaultError, fail_at
from kvcore.testing.lockstep import Lockstep
from kvcore.testing.model import ModelKVCache, ModelManager
from kvcore.testing.walk import Walk

__all__ = [
    "ContentError",
    "FakeEngine",
    "Fault",
    "FaultError",
    "Lockstep",
    "ModelKVCache",
    "ModelManager",
    "OracleError",
    "Walk",
    "check",
    "fail_at",
]
