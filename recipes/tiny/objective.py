"""What the draft is trained on, and how long a draft is accepted."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from drafter import Draft, block_mask
from target import Target
from torch import Tensor

GAMMA = 4.0


class Blocks(NamedTuple):
    """Rows of drafted slots: M = batch x anchors x (block - 1), flattened."""

    rows: Tensor  # (M, hidden) normed draft rows
    told: Tensor  # (M, hidden) normed target rows that predict the same token
    label: Tensor  # (M,) the token that came
    previous: Tensor  # (M,) the token before it
    counts: Tensor  # (M,) bool, inside the answer
    temperature: Tensor  # (M,) of the chat's sampling


def random_anchors(eligible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` positions of each row (B, T), eligible ones first, in random order; and which are eligible."""
    score = torch.rand(eligible.shape, device=eligible.device) + eligible
    value, anchors = score.topk(count, dim=1)
    return anchors, value >= 1


def eligible_anchors(index: Tensor, said: Tensor) -> Tensor:
    """(B, T): the next token belongs to the same chat and was said."""
    follows = F.pad(said[:, 1:] & (index[:, 1:] > 0), (0, 1))
    return follows & (index > 0)


def draft_blocks(
    target: Target, draft: Draft, batch: tuple[Tensor, Tensor, Tensor], heat: Tensor, anchors: Tensor, good: Tensor
) -> Blocks:
    """Run target and draft over windows (B, T) with anchors (B, N); heat (B, T) is each token's temperature."""
    tokens, index, said = batch
    s = draft.s
    with torch.no_grad():
        rows, seen = target(tokens, index, s.taps)
        features = torch.cat(seen, dim=-1).bfloat16()
    chat = (index == 0).cumsum(1)
    offset = torch.arange(s.block, device=tokens.device)
    block = torch.where(offset == 0, tokens.gather(1, anchors)[..., None], s.mask_id).flatten(1)
    at = (index.gather(1, anchors)[..., None] + offset).flatten(1)
    out = draft(features, target.embed_tokens(block), at, index, block_mask(chat, index, anchors, s))
    slots = anchors[..., None] + offset[1:]
    inside = slots < tokens.shape[1]
    slots = slots.clamp(max=tokens.shape[1] - 1)
    flat = slots.flatten(1)
    mine = chat.gather(1, flat) == chat.gather(1, anchors).repeat_interleave(s.block - 1, 1)
    counts = inside.flatten(1) & mine & said.gather(1, flat) & good.repeat_interleave(s.block - 1, 1)
    before = (flat - 1).clamp(min=0)
    return Blocks(
        out.unflatten(1, (-1, s.block))[:, :, 1:].flatten(0, 2),
        rows.gather(1, before[..., None].expand(-1, -1, rows.shape[-1])).flatten(0, 1),
        tokens.gather(1, flat).flatten(),
        tokens.gather(1, before).flatten(),
        counts.flatten(),
        heat.gather(1, flat).flatten(),
    )


def scores(target: Target, draft: Draft, b: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Unary logits (M, V) float32, the best candidates (M, k), and their selector scores (M, k)."""
    unary = target.lm_head(b.rows).float()
    candidates = unary.detach().topk(draft.s.top_k, dim=-1).indices
    chosen = unary.gather(-1, candidates)
    return unary, candidates, draft.candidate_selector(b.rows, b.previous, candidates, chosen)


def acceptance(score: Tensor, candidates: Tensor, logits: Tensor, b: Blocks) -> Tensor:
    """(M,) chance that a slot is kept once those before it were: sum of min(p, q), or q of the label when greedy."""
    heat = b.temperature.clamp(min=0.1)[:, None]
    q = (score / torch.where(b.temperature[:, None] > 0, heat, 1.0)).softmax(-1)
    p = (logits / heat).softmax(-1).gather(-1, candidates)
    greedy = (q * (candidates == b.label[:, None])).sum(-1)
    return torch.where(b.temperature > 0, torch.minimum(p, q).sum(-1), greedy)


def losses(target: Target, draft: Draft, b: Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unary loss, selector loss, expected accepted share of the slots, and recall of the label among the candidates."""
    slots = draft.s.block - 1
    fade = torch.exp(-torch.arange(slots, device=b.label.device) / GAMMA).repeat(len(b.label) // slots)
    weight = fade * b.counts
    weight = weight / weight.sum().clamp(min=1e-6)
    unary, candidates, score = scores(target, draft, b)
    logits = target.lm_head(b.told).float()
    wanted = logits.softmax(-1)
    log_unary = unary.log_softmax(-1)
    hard = -log_unary.gather(-1, b.label[:, None])[:, 0]
    unary_loss = 0.5 * hard - 0.5 * (wanted * log_unary).sum(-1)
    hit = candidates == b.label[:, None]
    log_q = score.log_softmax(-1)
    share = wanted.gather(-1, candidates)
    selector_loss = -0.5 * (hit * log_q).sum(-1) - 0.5 * (share * log_q).sum(-1)
    alpha = torch.where(b.counts, acceptance(score, candidates, logits, b), 0.0).view(-1, slots)
    first = b.counts.view(-1, slots)[:, 0]
    accepted = alpha.cumprod(-1).sum(-1).mul(first).sum() / first.sum().clamp(min=1)
    found = (hit.any(-1) & b.counts).sum() / b.counts.sum().clamp(min=1)
    return (unary_loss * weight).sum(), (selector_loss * weight).sum(), accepted / slots, found
