"""The check before timing: results of two heads against fp64, relative to plain arithmetic in the same precision.

The plain computation multiplies the rounded inputs with fp32 sums, computes the softmax in fp32 and rounds P, dS and
the results to the input type. A result passes if its error, in the largest element and in the Frobenius norm, is at
most three times that of the plain computation plus one epsilon of the type, and if nothing in the whole tensor is NaN
or infinite. `tessera verify` is stricter; this keeps a wrong result out of the table.
"""

import math

FACTOR = 3.0
CHUNK = 2048  # query rows at a time


def heads_checked(batch, heads):
    return sorted({(0, 0), (batch - 1, heads - 1)})


def one_head(q, k, v, do, causal, exact):
    """o, dq, dk, dv of one query head, [S, D] each, as fp64; `exact`: fp64 throughout, else the plain computation. dk and
    dv are not rounded yet: the heads of a group are summed first."""
    import torch

    real = torch.float64 if exact else torch.float32
    rounded = (lambda t: t) if exact else (lambda t: t.to(q.dtype).to(real))
    dtype_q, dtype_k, dtype_v, dtype_do = (t.to(real) for t in (q, k, v, do))
    scale = 1.0 / math.sqrt(q.shape[-1])
    seq = k.shape[0]
    o, dq = torch.empty_like(dtype_do), torch.empty_like(dtype_q)
    dk, dv = torch.zeros_like(dtype_k), torch.zeros_like(dtype_v)
    columns = torch.arange(seq, device=q.device)
    for first in range(0, q.shape[0], CHUNK):
        rows = slice(first, min(first + CHUNK, q.shape[0]))
        end = rows.stop if causal else seq  # keys past the last row of the chunk are masked
        scores = dtype_q[rows] @ dtype_k[:end].T * scale
        if causal:
            position = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(columns[None, :end] > position[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        del scores
        o[rows] = rounded(rounded(weights) @ dtype_v[:end])
        delta = (dtype_do[rows] * o[rows]).sum(-1, keepdim=True)
        dv[:end] += rounded(weights).T @ dtype_do[rows]
        ds = rounded(weights * (dtype_do[rows] @ dtype_v[:end].T - delta))
        del weights
        dq[rows] = rounded(ds @ dtype_k[:end] * scale)
        dk[:end] += ds.T @ dtype_q[rows]
    return {name: t.double() for name, t in (("out", o), ("dq", dq), ("dk", dk * scale), ("dv", dv))}


def key_head_gradients(heads, exact, dtype):
    """dk and dv of a key head from the results of its query heads."""
    sums = {name: sum(head[name] for head in heads) for name in ("dk", "dv")}
    return sums if exact else {name: t.to(dtype).double() for name, t in sums.items()}


class Reference:
    def __init__(self, cell, q, k, v, do):
        import torch

        self.dtype = q.dtype
        self.epsilon = 2.0**-7 if q.dtype == torch.bfloat16 else 2.0**-10 if q.dtype == torch.float16 else 2.0**-23
        self.heads = []
        group = cell.heads_q // cell.heads_kv
        for b, h in heads_checked(cell.batch, cell.heads_q):
            key_head = h // group
            members = range(key_head * group, (key_head + 1) * group) if "backward" in cell.ops else [h]
            found = []
            for exact in (True, False):
                heads = {m: one_head(q[b, :, m], k[b, :, key_head], v[b, :, key_head], do[b, :, m], cell.causal, exact)
                         for m in members}
                found.append(heads[h] | key_head_gradients(heads.values(), exact, q.dtype))
            self.heads.append((b, h, key_head, *found))

    def judge(self, **results):
        """(error over what is allowed, a message if that is too much, {name: error in the Frobenius norm over the
        result's})."""
        worst, message, relative = 0.0, "", {}
        for name, tensor in results.items():
            if not bool(tensor.isfinite().all()):
                return float("inf"), f"{name} has NaN or infinity", {}
            for b, h, key_head, exact, plain in self.heads:
                want, base = exact[name], plain[name]
                error, own = tensor[b, :, key_head if name in ("dk", "dv") else h].double() - want, base - want
                size = float(want.norm())
                relative[name] = max(relative.get(name, 0.0), float(error.norm()) / size if size > 0 else 0.0)
                for norm in (lambda t: float(t.abs().max()), lambda t: float(t.norm())):
                    allowed = FACTOR * norm(own) + self.epsilon * norm(want)
                    ratio = norm(error) / allowed if norm(error) > 0 else 0.0
                    worst = max(worst, ratio)
                    if not ratio <= 1 and not message:
                        message = f"{name} is off by {ratio:.3g} times what is allowed"
        return worst, message, relative
