"""Turns CUDA code of this library into C++ for the host: python rewrite.py FROM TO

FROM is kernels/cuda, TO a new folder. Inline PTX becomes calls of functions of emulator.h. Variables in
shared memory become references into the memory of a CTA. emulator.h defines the rest of CUDA.
"""

import re
import sys
from pathlib import Path

# What instructions become: a regular expression that the text of an asm statement matches, and the function
# that is called with its outputs and inputs. The first match counts.
PTX = (
    (r"^$", "opaque"),
    (r"ex2\.approx\.ftz\.f32", "ex2"),
    (r"rcp\.approx\.ftz\.f32", "reciprocal"),
    (r"min\.NaN\.f32", "minimum_or_nan"),
    (r"setp\.ge\.f32 p, .*@p add\.s32", "add_or_count"),
    (r"setp\.ge\.f32 p, .*@p min\.s32", "add_square_or_find"),
    (r"xor\.b32 %0, %0, %1;", "xor_bits"),
    (r"mov\.u32 %0, %%tid\.x;", "thread_number"),
    (r"mov\.u32 %0, %%cluster_ctarank;", "cluster_rank"),
    (r"mov\.u32 %0, %%cluster_nctarank;", "cluster_size"),
    (r"bar\.arrive %0,", "named_arrive"),
    (r"bar\.sync %0,", "named_sync"),
    (r"barrier\.cluster\.arrive", "cluster_arrive"),
    (r"barrier\.cluster\.wait", "cluster_wait"),
    (r"mbarrier\.init", "barrier_init"),
    (r"mbarrier\.arrive\.expect_tx", "barrier_expect"),
    (r"mbarrier\.arrive", "barrier_arrive"),
    (r"mbarrier\.try_wait\.parity", "barrier_wait"),
    (r"mapa.*st\.async", "send"),
    (r"cp\.async\.bulk\.prefetch\.L2", "prefetch"),
    (r"cp\.async\.bulk\.shared", "bulk_copy"),
    (r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+), %2;", "copy_async"),
    (r"cp\.async\.commit_group", "copies_commit"),
    (r"cp\.async\.wait_group", "copies_wait"),
    (r"setp\.ne\.u32 p, %\d, 0;@p ld\.global", "load_if"),
    (r"setp\.ne\.u32 p, %\d, 0;@p st\.global", "store_if"),
    (r"st\.relaxed\.gpu\.global\.v2\.b64", "publish"),
    (r"ld\.relaxed\.gpu\.global\.v2\.b64", "poll"),
    (r"fence\.|griddepcontrol", "nothing"),
)


def end_of(text, start):
    """Where the parentheses end that open at `start`."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        if text[i] == '"':
            quoted = not quoted
        elif not quoted:
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                return i
    raise ValueError("unbalanced parentheses")


def operands(text):
    """The expressions of a list of asm operands: "constraint"(expression), ..."""
    found, at = [], 0
    while (start := text.find("(", at)) >= 0:
        at = end_of(text, start)
        found.append(text[start + 1 : at])
    return found


def call(statement, place):
    """The call that takes the place of what stands in the parentheses of an asm statement."""
    instructions, *lists = re.split(r":(?=\s*\"|\s*:|\s*$)(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", statement)
    text = "".join(re.findall(r'"([^"]*)"', instructions)).replace("\\n", "")
    arguments = [operand for part in lists[:2] for operand in operands(part)]
    for pattern, function in PTX:
        if match := re.search(pattern, text):
            return f"emulator::{function}({', '.join([*arguments, *match.groups()])});"
    raise SystemExit(f"{place}: rewrite.py does not know this PTX: {text}")


def without_asm(text, name):
    out, at = [], 0
    for match in re.finditer(r"^[^/\n]*?\b(asm(?: volatile)?\()", text, re.MULTILINE):
        start, end = match.start(1), end_of(text, match.end() - 1)
        statement = text[match.end() : end]
        place = f"{name}:{text.count(chr(10), 0, start) + 1}"
        out += text[at:start], call(statement, place), "\n" * statement.count("\n")
        at = text.index(";", end) + 1
    return "".join(out) + text[at:]


def shared(match):
    """A structure with the variables of a declaration, and references to its members."""
    if match[1]:
        kind, name = re.fullmatch(r"(?:__align__\(\d+\) )?(\w+) (\w+)\[\]", match[2]).groups()
        return f"{kind}* const {name} = static_cast<{kind}*>(emulator::dynamic_shared());"
    plain, brackets = match[2], 1
    while brackets:
        plain, brackets = re.subn(r"\[[^][]*\]", "", plain)
    names = [part.split()[-1] for part in plain.split(",")]
    kind = f"Shared_{names[0]}"
    return f"struct {kind} {{ {match[2]}; }}; auto& [{', '.join(names)}] = emulator::shared<{kind}>();"


def rewritten(text, name):
    text = without_asm(text, name)
    text = re.sub(r"^(?!.*//.*__shared__)\s*(extern )?__shared__ ([^;]+);", shared, text, flags=re.MULTILINE)
    text = text.replace("__CUDA_ARCH__", "EMULATED_ARCH")
    # Kernels register themselves, with the type of their argument.
    kernel = (
        r"#define KERNEL\(name, threads, resident, \.\.\.\) \\\n.*?const __grid_constant__ (\w+) args\).*"
    )
    return re.sub(
        kernel,
        r"#define KERNEL(name, threads, resident, ...) \\\n"
        r"  EMULATED_KERNEL(\1, name, threads, __VA_ARGS__)",
        text,
    )


def main(source, target):
    for path in sorted([*source.glob("*.cuh"), *source.glob("*_gen.cu")]):
        text = f'#line 1 "{path}"\n' + rewritten(path.read_text(), path.name)
        (target / path.name).with_suffix(".cpp" if path.suffix == ".cu" else ".cuh").write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
