"""The table of special instructions: those that end a segment because they synchronise, copy or involve other lanes."""

from dataclasses import dataclass
from functools import cache

_TABLE: dict[str, "Special"] = {}

# Special registers (PTX ISA section 10) and the NumPy type they are kept in.
_REGISTERS = {
    f"%{base}.{axis}": "uint32"
    for base in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
    for axis in "xyz"
}
_REGISTERS |= {
    name: "uint32"
    for name in (
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%smid",
        "%nsmid",
        "%lanemask_eq",
        "%lanemask_lt",
        "%lanemask_le",
        "%lanemask_gt",
        "%lanemask_ge",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%clock",
        "%globaltimer_lo",
    )
}
_REGISTERS |= {"%clock64": "uint64", "%globaltimer": "uint64", "%gridid": "uint64"}


@dataclass(frozen=True)
class Special:
    """decode(instruction, program) returns execute(machine, fragment), which returns None or a Wait to park on.

    results are operand positions that are written, updates positions that are read and written.  batches says that the
    instruction also works on many CTAs in lock step.  runs says that decode takes a list: one such instruction, or several
    that follow one another and do not depend on each other's results.
    """

    decode: object
    results: tuple[int, ...]
    updates: tuple[int, ...]
    batches: bool
    runs: bool


def special(*prefixes, results=(), updates=(), batches=False, runs=False):
    def register(decode):
        for prefix in prefixes:
            _TABLE[prefix] = Special(decode, results, updates, batches, runs)
        find.cache_clear()
        return decode

    return register


@cache
def find(opcode: str) -> Special | None:
    """The entry with the longest prefix of opcode, in whole parts."""
    parts = opcode.split(".")
    for length in range(len(parts), 0, -1):
        found = _TABLE.get(".".join(parts[:length]))
        if found:
            return found
    return None


def special_register(name: str) -> str | None:
    return _REGISTERS.get(name)
