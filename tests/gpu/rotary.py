"""Rotary position embeddings against float64. The bound is the error of transformers' formula."""

import gander
import torch
from grid import offset, same_bits
from tolerance import assert_accurate

# Sequences, tokens, heads of queries and of keys, columns, and how many of these are rotated. Where half of
# them are no whole 16-byte vectors, nor all columns, another kernel runs.
SIZES = (
    (1, 1, 1, 1, 2, 2),
    (2, 3, 2, 1, 7, 2),
    (2, 129, 4, 2, 64, 64),
    (3, 100, 7, 3, 128, 64),
    (1, 31, 3, 1, 96, 32),
    (1, 257, 5, 9, 50, 18),
    (1, 3, 2, 2, 16384, 16384),
    (2, 2048, 32, 8, 128, 128),
)


# ---- Layouts: the same values, (B, S, H, D), seen as (B, H, S, D) at other places in memory ----


def tokens_first(x):
    return x.contiguous().transpose(1, 2)


def heads_first(x):
    return x.transpose(1, 2).contiguous()


def sliced(x):
    """Some heads of a buffer, which has more behind them and before."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype, device=x.device)
    return wide[:, :, 1:-2].copy_(x).transpose(1, 2)


def shifted(x):
    """One element after a multiple of 16 bytes."""
    return offset(x).transpose(1, 2)


LAYOUTS = tokens_first, heads_first, sliced, shifted


# ---- The formula ----


def for_elements(table, interleaved):
    """A table with a number for each element, from one with a number for each pair."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def formula(x, cos, sin, interleaved):
    """Of heads before tokens, with tables of a number for each element."""
    width = cos.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-head[..., width // 2 :], head[..., : width // 2]), -1)
    return torch.cat((head * cos + turned * sin, rest), -1)


def of_torch(tables, interleaved):
    tables = [for_elements(t, interleaved) if t.ndim == 2 else t[0] for t in tables]
    return lambda *heads: [formula(x, *(t.to(x.dtype) for t in tables), interleaved) for x in heads]


def of_gander(tables, interleaved, casting_mode=None):
    return lambda q, k: gander.rotary(q, k, *tables, interleaved, casting_mode=casting_mode)


RESULTS = "q", "k", "dq", "dk"


def results_of(function, heads, upstream):
    """The two results of a function, and their gradients."""
    leaves = [x.detach().requires_grad_() for x in heads]
    results = function(*leaves)
    return *(y.detach() for y in results), *torch.autograd.grad(results, leaves, upstream)


def check(size, dtype, layout, interleaved):
    sequences, tokens, of_q, of_k, columns, width = size
    shapes = [(sequences, tokens, heads, columns) for heads in (of_q, of_k)]
    values = [torch.randn(shape, device="cuda").to(dtype) for shape in (*shapes, *shapes)]
    given, plain = ((x[:2], x[2:]) for x in (list(map(where, values)) for where in (layout, tokens_first)))
    wide = [[x.double() for x in part] for part in given]
    angles = torch.randn(tokens, width // 2, device="cuda", dtype=torch.float64)
    pairs = angles.cos().float(), angles.sin().float()
    elements = [for_elements(t, interleaved).to(dtype)[None] for t in pairs]
    for tables in pairs, elements:
        got = results_of(of_gander(tables, interleaved), *given)
        theirs, exact = (results_of(of_torch(tables, interleaved), *part) for part in (given, wide))
        for what, *results in zip(RESULTS, got, theirs, exact, strict=True):
            assert_accurate(*results, what)
        # Bits depend on the elements alone, not on where they lie.
        assert all(map(same_bits, got, results_of(of_gander(tables, interleaved), *plain)))
        alone = gander.rotary(given[0][0], None, *tables, interleaved)[0]
        assert same_bits(alone, got[0])
        written = [layout(value.clone()) for value in values[:2]]
        assert gander.rotary(*written, *tables, interleaved, inplace=True)[0] is written[0]
        assert all(map(same_bits, written, got[:2]))

    # With tables of the heads' dtype rounded products have the bits of torch's operators, and of the CPU's.
    got = results_of(of_gander(elements, interleaved, "llama"), *given)
    assert all(map(torch.equal, got, theirs))
    on_cpu = [[x.cpu() for x in part] for part in (elements, *given)]
    of_cpu = results_of(of_gander(on_cpu[0], interleaved, "llama"), *on_cpu[1:])
    for what, mine, other in zip(RESULTS, got, of_cpu, strict=True):
        assert same_bits(mine.cpu(), other), f"{what} differs from the CPU's"


def check_positions(columns, width, dtype):
    """Positions that the device reads, some of them in no table: what the CPU computes, with its bits."""
    ops, sequences, tokens, positions = torch.ops.gander, 4, 300, 350
    q, k = (torch.randn(sequences, tokens, heads, columns).to(dtype) for heads in (6, 3))
    cos, sin = torch.randn(2, positions, width // 2).unbind()
    packed = q.flatten(0, 1), k.flatten(0, 1)
    ends = torch.tensor([3, 3, 70, 600, 1190])  # one of no tokens, and tokens of none before and behind
    added = torch.tensor([5, 60, -4, 0])
    each = [torch.randn(sequences, positions, width // 2) for _ in "cs"]
    cases = (
        (q, k, cos, sin, {"offset": 50}),
        (q, k, cos, sin, {"offsets": added}),
        (q, k, *each, {"offsets": added.int(), "offset": -2}),
        (*packed, cos, sin, {"cu_seqlens": ends}),
        (*packed, cos, sin, {"cu_seqlens": ends.int(), "offsets": added, "offset": 3}),
    )
    for *operands, options in cases:
        tensors = {name: v for name, v in options.items() if torch.is_tensor(v)}
        on_device = options | {name: v.cuda() for name, v in tensors.items()}
        for operator, needs in (ops.rotary, "needs_k_out"), (ops.rotary_bwd, "needs_dk"):
            for interleaved in False, True:
                more = {needs: True, "interleaved": interleaved, "round_products": True}
                want = operator(*operands, **options, **more)
                got = operator(*(t.cuda() for t in operands), **on_device, **more)
                for mine, other in zip(got, want, strict=True):
                    torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=0, equal_nan=True)
        assert bool(want[0].isnan().any()) == bool(tensors)
