"""Clean the chats, train the tokenizer, and write token files: `prepare.py CORPUS_FOLDER OUT_FOLDER`."""

import argparse
import hashlib
import json
import lzma
import re
import zlib
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from shapes import ID_BITS, IM_END, IM_START, PROMPT_LIMIT, SAID, SPECIALS, VOCAB, WINDOW
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# One digit a token (sums stay readable); letters, punctuation and space runs as in Qwen's tokenizers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIND_OF_SYSTEM = (("stories", "story"), ("programmer", "code"), ("arithmetic", "arithmetic"), ("teacher", "explain"))
HELD_OUT_PERCENT = 2
SENTENCE_END = re.compile(r"[.!?`)\"*:|]$")
REFUSED = re.compile(r"\ufffd|SmolLM|Hugging Face|<\|")


def loops(text: str) -> bool:
    """Whether a text repeats itself: it compresses too well, or its word 6-grams or lines come back."""
    raw = text.encode()
    if len(raw) > 200 and len(raw) / len(zlib.compress(raw, 6)) > 3.9:
        return True
    words = text.split()
    grams = [tuple(words[i : i + 6]) for i in range(len(words) - 5)]
    if len(grams) > 10 and 1 - len(set(grams)) / len(grams) > 0.22:
        return True
    lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 12]
    return len(lines) > 3 and max(Counter(lines).values()) > 2


def fraction(text: str) -> float:
    """A number in [0, 100) that depends on the text alone."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:4], "big") % 10000 / 100


def kind_of(system: str, prompt: str) -> str:
    """One of `shapes.KINDS`, from the words of the system message and of the first prompt."""
    head = prompt[:80].lower()
    if re.search(r"\b(list|tips|ways to|ideas|examples of|steps)\b|^(give me|what are) ", head):
        return "list"
    return next((kind for word, kind in KIND_OF_SYSTEM if word in system), "explain")


def clean(row: dict) -> dict | None:
    """Cut a chat before its first bad answer and drop the system message of half of them; None if nothing is left."""
    messages = [{"role": m["role"], "content": m["content"].strip()} for m in row["messages"]]
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    talk = messages[1:] if system else messages
    kept: list[dict] = []
    for user, answer in zip(talk[::2], talk[1::2], strict=False):
        both = user["content"] + answer["content"]
        if REFUSED.search(both) or len(answer["content"]) < 20 or loops(answer["content"]):
            break
        kept += [user, answer]
    if not kept or len(kept[0]["content"]) > 1200:
        return None
    prompt = kept[0]["content"]
    cut = row.get("truncated") and len(kept) == len(talk) and not SENTENCE_END.search(kept[-1]["content"])
    bare = "SmolLM" in system or fraction("system" + prompt) < 50
    head = [] if bare or not system else [{"role": "system", "content": system}]
    return {
        "messages": head + kept,
        "kind": kind_of(system, prompt),
        "held_out": fraction(prompt.lower()) < HELD_OUT_PERCENT,
        "whole": not cut,
    }


def read_file(path: Path) -> tuple[list[dict], int]:
    """All cleaned chats of one file, and how many rows it held."""
    with lzma.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [chat for row in rows if (chat := clean(row))], len(rows)


def train_tokenizer(chats: list[dict]) -> Tokenizer:
    """A byte-level BPE of VOCAB ids whose last four are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((m["content"] for chat in chats for m in chat["messages"]), trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    assert tokenizer.token_to_id("<|im_end|>") == IM_END and tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def encode(tokenizer: Tokenizer, chats: list[dict]) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Token rows of whole chats (cut to WINDOW), and for each chat the rows that an answer would follow."""
    texts = [m["role"] + "\n" + m["content"] for chat in chats for m in chat["messages"]]
    ids = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    newline = tokenizer.encode("\n").ids
    opening = [IM_START, *tokenizer.encode("assistant\n").ids]
    rows, prompts = [], []
    for chat in chats:
        row: list[int] = []
        asked: list[np.ndarray] = []
        last = len(chat["messages"]) - 1
        for i, message in enumerate(chat["messages"]):
            body = next(ids).ids
            end = [IM_END] if chat["whole"] or i < last else []
            if message["role"] == "assistant":
                asked.append(np.array(row + opening, np.uint16) & ID_BITS)
                assert [IM_START, *body[: len(opening) - 1]] == opening
                turn = opening + [t | SAID for t in body[len(opening) - 1 :] + end]
            else:
                turn = [IM_START, *body, *end]
            row += turn + newline
        rows.append(np.array(row[:WINDOW], np.uint16))
        prompts.append(asked)
    return rows, prompts


def pack(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of different lengths as one flat array and their lengths."""
    return {"flat": np.concatenate(rows), "lengths": np.array([len(r) for r in rows], np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with Pool() as pool:
        parts = pool.map(read_file, sorted(args.corpus.glob("*.jsonl.xz")), chunksize=1)
    chats = [chat for part, _ in parts for chat in part]
    print(f"{sum(n for _, n in parts)} chats read, {len(chats)} kept", dict(Counter(c["kind"] for c in chats)))
    tokenizer = train_tokenizer(chats[::3])
    tokenizer.save(str(args.out / "tokenizer.json"))
    rows, prompts = encode(tokenizer, chats)
    train = [i for i, c in enumerate(chats) if not c["held_out"]]
    order = np.random.default_rng(0).permutation(train)
    np.savez(args.out / "train.npz", **pack([rows[i] for i in order]))
    short = [asked for i in order for asked in prompts[i][:3] if len(asked) <= PROMPT_LIMIT]
    np.savez(args.out / "prompts.npz", **pack(short))
    first = {prompts[i][0].tobytes(): i for i, c in enumerate(chats) if c["held_out"]}
    held = [i for i in first.values() if len(prompts[i][0]) <= PROMPT_LIMIT]
    kinds = np.array([chats[i]["kind"] for i in held])
    np.savez(args.out / "held.npz", kinds=kinds, **pack([prompts[i][0] for i in held]))
    np.savez(args.out / "valid.npz", **pack([rows[i] for i, c in enumerate(chats) if c["held_out"]][:1024]))
    print(f"{sum(len(rows[i]) for i in train)} tokens, {len(short)} prompts, {len(held)} held out")


if __name__ == "__main__":
    main()
