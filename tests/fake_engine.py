"""An engine whose answers are written down beforehand; as a script it is `dflash-mlx` running on that engine."""

import sys
import time
from types import SimpleNamespace

from dflash_mlx.types import Chunk, Completion, Cycle, Sampling, Stats


def stats(**changed):
    named = {
        "model": "fake/target", "draft": "fake/draft", "revision": "abc", "mode": "dflash2", "block_size": 8,
        "seed": None, "prompt_tokens": 5, "completion_tokens": 3, "cycles": 2, "drafted": (7,), "accepted": (2,),
        "tau": 1.5, "prefill_s": 0.25, "decode_s": 0.5, "tokens_per_s": 4.0, "peak_bytes": 1_500_000_000,
    }  # fmt: skip
    return Stats(**named | changed)


class FakeEngine:
    """Plays enqueued answers; a part is a text, a ("reasoning", text), a notice as Cycle, or an error to raise."""

    def __init__(
        self, *answers, plan=("dflash2", 8, None), notices=(), checks=(), refuse=None, pause=0.0, finish="stop"
    ):
        self.answers, self.plan_, self.checks, self.refuse = list(answers), plan, list(checks), refuse
        self.pause, self.finish = pause, finish
        self.asked = []
        self.loaded = []
        self.closed = 0
        self.pair = SimpleNamespace(
            name="fake", model_id="fake/target", draft_id="fake/draft", notices=notices,
            sampling=Sampling(temperature=0.7, top_p=0.9), sampling_plain=Sampling(temperature=0.3),
            tokenizer=SimpleNamespace(decode=lambda ids, special=False: f"<{ids[0]}>"),
        )  # fmt: skip

    def __call__(self):
        return self

    def load(self, pair=None, **options):
        self.loaded.append({"pair": pair, **options})
        if self.refuse:
            raise self.refuse
        return self.pair

    def plan(self, pair, **options):
        self.planned = options
        return self.plan_

    def stream(self, prompt, **options):
        self.asked.append({"prompt": prompt, **options})
        parts = self.answers.pop(0)
        try:
            for at, part in enumerate(parts):
                time.sleep(self.pause)
                if isinstance(part, BaseException):
                    raise part
                yield self._chunk(part, at)
            notices = tuple(part.notice for part in parts if isinstance(part, Cycle)) + (self.plan_[2],) * bool(
                self.plan_[2]
            )
            count = sum(isinstance(part, (str, tuple)) for part in parts)
            seed = options.get("sampling", Sampling()).seed
            yield Chunk("", finish_reason=self.finish, stats=stats(completion_tokens=count, seed=seed, notices=notices))
        finally:
            self.closed += 1

    @staticmethod
    def _chunk(part, at):
        if isinstance(part, Cycle):
            return Chunk("", cycle=part)
        kind, text = part if isinstance(part, tuple) else ("answer", part)
        return Chunk(text, kind, tokens=(at,))

    def generate(self, prompt, **options):
        chunks = list(self.stream(prompt, **options))
        text = {kind: "".join(c.text for c in chunks if c.kind == kind) for kind in ("answer", "reasoning")}
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Completion(text["answer"], text["reasoning"], tokens, chunks[-1].finish_reason, chunks[-1].stats)

    def check(self, prompts, **options):
        self.asked.append({"prompts": prompts, **options})
        yield from (self.checks.pop(0) for _ in prompts)


def endless():
    while True:
        yield "word "


class Echo(FakeEngine):
    def stream(self, prompt, **options):
        self.answers.append([f"GOT {prompt[-1]['content']!r} END"])
        return super().stream(prompt, **options)


class SlowLoad(FakeEngine):
    def load(self, pair=None, **options):
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)


SCENES = {
    "short": lambda: FakeEngine(["Hello ", "there."]),
    "endless": lambda: FakeEngine(endless(), ["second answer"], pause=0.02),
    "wave": lambda: FakeEngine(["wave 👋"]),
    "echo": Echo,
    "flood": lambda: FakeEngine(endless()),
    "slow-load": lambda: SlowLoad(["never"]),
}


if __name__ == "__main__":
    from dflash_mlx.cli.main import main

    sys.exit(main(sys.argv[2:], SCENES[sys.argv[1]]()))
