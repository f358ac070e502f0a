"""A paged decode loop with speculative verification, through flashverify alone.

Two requests of different lengths share one pool of pages. A step takes each
request's tokens that are not in the cache yet, and a few drafts looked up in its
own text; writes their keys and values; attends; keeps the drafts that the model
would have chosen itself, and takes the others back by forgetting their slots.

With and without drafts the tokens and every logit are equal bit for bit:
`python verify_loop.py` shows it. The model is a toy: one layer, random weights.
"""

import random
import sys

import torch

import flashverify as fv

VOCAB, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, CHUNK = 96, 6, 2, 64, 16, 32


class ToyModel:
    """Queries, keys and values of a token are rows of tables; one LM head."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(3)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).half().to(device)

        self.q = weights(VOCAB, Q_HEADS, HEAD_DIM)
        self.k = weights(VOCAB, KV_HEADS, HEAD_DIM)
        self.v = weights(VOCAB, KV_HEADS, HEAD_DIM)
        self.head = weights(VOCAB, Q_HEADS * HEAD_DIM)


def look_up_drafts(text: list[int], count: int) -> list[int]:
    """What followed the last token's previous occurrence."""
    for i in range(len(text) - 2, -1, -1):
        if text[i] == text[-1]:
            return text[i + 1 : i + 1 + count]
    return []


def decode(
    model: ToyModel, prompts: list[list[int]], new_tokens: int, drafts: int, device: str
) -> tuple[list[list[int]], list[torch.Tensor], int, int]:
    """Greedy decoding. Returns the texts, their logits, and the drafts proposed and accepted."""
    needed = sum(-(-(len(prompt) + new_tokens + drafts) // PAGE_SIZE) for prompt in prompts)
    cache = torch.zeros(2, needed, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device)
    k_cache, v_cache = cache.to(torch.float8_e4m3fn)
    free = random.Random(drafts).sample(range(needed), needed)  # the pages' places do not matter
    texts = [list(prompt) for prompt in prompts]
    pages: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    ends = [len(prompt) + new_tokens for prompt in prompts]
    proposed = accepted = 0

    def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        # The rows of this step: a chunk of what is pending, and drafts behind its end.
        blocks, starts, slots = [], [0], []
        for i, text in enumerate(texts):
            block = text[cached[i] :][:CHUNK] if len(text) < ends[i] else []
            if block and cached[i] + len(block) == len(text):
                block += look_up_drafts(text, drafts)
            while len(pages[i]) * PAGE_SIZE < cached[i] + len(block):
                pages[i].append(free.pop())
            for position in range(cached[i], cached[i] + len(block)):
                page, offset = divmod(position, PAGE_SIZE)
                slots.append(pages[i][page] * PAGE_SIZE + offset)
            blocks.append(block)
            starts.append(starts[-1] + len(block))

        tokens = torch.tensor([token for block in blocks for token in block], device=device)
        fv.append_kv(model.k[tokens], model.v[tokens], k_cache, v_cache, int32(slots))
        width = max(map(len, pages))
        out = fv.paged_attention(
            model.q[tokens], k_cache, v_cache,
            page_table=int32([table + [-1] * (width - len(table)) for table in pages]),
            seq_lens=int32([n + len(b) for n, b in zip(cached, blocks, strict=True)]),
            query_start_loc=int32(starts),
        )  # fmt: skip
        step_logits = fv.lm_head_logits(out.flatten(1), model.head)
        choices = step_logits.argmax(-1).tolist()

        for i, block in enumerate(blocks):
            known = len(texts[i]) - cached[i]  # rows before the drafts
            kept = min(known, len(block))
            if kept == known and block:
                while kept < len(block) and block[kept] == choices[starts[i] + kept - 1]:
                    kept += 1
                proposed += len(block) - known
                accepted += kept - known
                texts[i] += [*block[known:kept], choices[starts[i] + kept - 1]]
            logits[i] += step_logits[starts[i] : starts[i] + kept].unbind()
            # Roll back: what lies beyond `cached` is never read, and its pages are free again.
            cached[i] += kept
            while len(pages[i]) > -(-cached[i] // PAGE_SIZE):
                free.append(pages[i].pop())

    kept_logits = [torch.stack(rows[: end - 1]) for rows, end in zip(logits, ends, strict=True)]
    return [t[:end] for t, end in zip(texts, ends, strict=True)], kept_logits, proposed, accepted


def main(device: str = "cpu") -> None:
    """Decodes with and without drafts, and compares."""
    model = ToyModel(device)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (45, 7)]
    with fv.require_route("grouped_fp32"):
        plain, plain_logits, _, _ = decode(model, prompts, 64, drafts=0, device=device)
        texts, logits, proposed, accepted = decode(model, prompts, 64, drafts=7, device=device)
    assert texts == plain
    for ours, theirs in zip(logits, plain_logits, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    print(f"{proposed} drafts, {accepted} accepted; tokens and logits are equal to the bit")


if __name__ == "__main__":
    main(*sys.argv[1:])
