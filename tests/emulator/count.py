"""Lane operations by class: how often each basic block ran times what the optimised IR of that block does."""

import re
from collections import Counter

CLASSES = {
    "float": ("fadd", "fsub", "fmul", "fdiv", "fneg"),
    "bitwise": ("and", "or", "xor"),
    "shift": ("shl", "lshr", "ashr"),
    "integer": ("add", "sub", "mul", "udiv", "urem", "sdiv", "srem"),
    "convert": ("uitofp", "sitofp", "fptoui", "fptosi"),
    "widen": ("fpext", "fptrunc"),
    "load": ("load",),
    "store": ("store",),
    "compare": ("icmp", "fcmp", "select"),
    "address": ("getelementptr",),
}
CLASS = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}
FREE = ("address",)  # folded into loads, or kept in scalar registers
INSTRUCTION = re.compile(r"^  (?:%[\w.]+ = )?(?:tail |musttail |notail )?(\w+)")
# The guard is the array itself or an element of it, by index or (in other clangs) by byte.
GUARD = re.compile(
    r"__sanitizer_cov_trace_pc_guard\(ptr (?:@__sancov_gen_\)|getelementptr [\w ]*\(\[\d+ x i32\], ptr @__sancov_gen_,"
    r" i64 0, i64 (?P<element>\d+)\)|getelementptr [\w ]*\(i8, ptr @__sancov_gen_, i64 (?P<byte>\d+)\))"
)


def operations(ir: str, blocks: list[int]) -> dict[str, int]:
    """Operations of each class over the whole launch, and `total` without address arithmetic."""
    total: Counter[str] = Counter()
    entry = ir[ir.index("@emu_entry(") :]
    entry = entry[: entry.index("\n}")]
    # Reading buffer pointers and thread positions is the emulator's doing, not the kernel's.
    ours = {"%0", "%1", *re.findall(r"^  (%\w+) = getelementptr .*?ptr %[01],", entry, flags=re.M)}
    for block in re.split(r"^\d+:.*$|^[\w.]+:.*$", entry, flags=re.M):
        guard = GUARD.search(block)
        assert guard or "trace_pc_guard" not in block, block
        if not guard:
            continue
        ran = blocks[int(guard["element"] or 0) or int(guard["byte"] or 0) // 4]
        for line in block.splitlines():
            pointer = re.search(r"= load .*?ptr (%\w+)", line)
            if (name := _class(line)) and not (pointer and pointer[1] in ours):
                total[name] += ran
    total["total"] = sum(n for name, n in total.items() if name not in FREE)
    return dict(total)


def _class(line: str) -> str | None:
    found = INSTRUCTION.match(line)
    if not found:
        return None
    if found[1] == "call":
        return "fma" if "@llvm.fma." in line else None
    return CLASS.get(found[1])
