"""What the engine's tests share: a runner without a model that checks what it is given, and a harness around it."""

import random
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.messages import CoreInfo
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceUpdate
from engine.static_scheduler import StaticScheduler
from engine.step import RowInit, RowWork, Step, StepResult

VOCAB = 50
EOS = (7, 11)
GARBAGE = -1  # what a failed step leaves in the pages it should have written
NAN = -2  # not finite
MASK = (1 << 61) - 1


def mix(history: int, token: int) -> int:
    """Names a history by the one before it and its last token."""
    return hash((history, token)) & MASK


def next_token(history: int, params: SamplingParams, index: int, generated: int, mask: Iterable[int]) -> int:
    """The fake model: a token that depends on everything it should depend on, and on nothing else."""
    key = (history, params.seed, index) if params.temperature else (history,)
    token = hash((*key, 1)) % VOCAB
    while generated < params.min_tokens and token in mask:
        token = (token + 1) % VOCAB
    return token


class Counting:
    """A grammar of `length` tokens of which the i-th is i modulo 5, and then the end.

    Refuses by itself whatever it has not allowed; `broken_at` makes it refuse a right one, `empty_at` allow none.
    Says that each mask takes `takes` seconds, or that of the token at `slow_at` one.
    """

    def __init__(self, length: int, broken_at: int = -1, empty_at: int = -1, takes: int = 0, slow_at: int = -1) -> None:
        self.length, self.broken_at, self.empty_at = length, broken_at, empty_at
        self.takes, self.slow_at, self.taken, self.asked = takes, slow_at, 0, 0
        self.tokens: list[int] = []
        self.terminated = False

    def _allowed(self) -> set[int]:
        place = len(self.tokens)
        if place == self.empty_at:
            return set()
        return {EOS[0]} if place >= self.length else {t for t in range(VOCAB) if t % 5 == place % 5 and t not in EOS}

    def accept(self, token: int) -> bool:
        assert not self.terminated, "nothing follows the end"
        if token not in self._allowed() or len(self.tokens) == self.broken_at:
            return False
        self.tokens.append(token)
        self.terminated = token == EOS[0]
        return True

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]
        self.terminated = False

    def mask(self, barred=()) -> bytes:
        assert not self.terminated
        allowed = self._allowed() - set(barred) or self._allowed()
        self.taken += self.takes + (len(self.tokens) == self.slow_at)
        return sum(1 << token for token in allowed).to_bytes(8, "little")

    def seconds(self) -> float:
        self.asked, before = self.taken, self.asked
        return self.taken - before


class Source:
    """The grammars "3", "12 broken_at=2" and so on; remembers what it made."""

    def __init__(self) -> None:
        self.made: list[Counting] = []

    def matcher(self, key: str) -> Counting:
        length, *faults = key.split()
        self.made.append(
            Counting(int(length), **{name: int(at) for name, at in (fault.split("=") for fault in faults)})
        )
        return self.made[-1]


def allowed(token: int, mask: bytes) -> int | None:
    """The token, or the next one that the mask allows; None where it allows none."""
    may = [one for one in range(VOCAB) if mask[one // 8] >> one % 8 & 1]
    return next((one for one in may if one >= token), may[0] if may else None)


def lone_run(request: Request, index: int) -> tuple[list[int], FinishReason]:
    """The text that the fake model gives a sequence, greedy or with a seed of its own, without any engine."""
    params = request.params
    history = 0
    for token in request.prompt:
        history = mix(history, token)
    eos = () if params.ignore_eos else EOS
    ends = (*params.stop_token_ids, *eos)
    matcher = Source().matcher(request.grammar) if request.grammar else None
    tokens: list[int] = []
    while True:
        token = next_token(history, params, index, len(tokens), () if matcher else ends)
        if matcher:
            token = allowed(token, matcher.mask(ends if len(tokens) < params.min_tokens else ()))
            assert matcher.accept(token)
        history = mix(history, token)
        tokens.append(token)
        if matcher and matcher.terminated:
            return tokens, FinishReason.EOS
        if len(tokens) > params.min_tokens:
            if token in eos:
                return tokens, FinishReason.EOS
            if token in params.stop_token_ids:
                return tokens, FinishReason.STOP_TOKEN
        if len(tokens) == params.max_tokens:
            return tokens, FinishReason.LENGTH


@dataclass
class Row:
    """A row of the fake runner."""

    init: RowInit
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    certain: int = -1  # place of the last token that is of the text whatever guesses were worth


class FakeRunner:
    """Executes steps on a model of the KV pool: each slot holds the name of the token history whose K and V it has.

    A work reads all slots before its own, and writes its own histories only if those were right. So whatever is shared,
    reused, evicted or copied wrongly comes to light when a token is drawn.
    """

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.page_size = page_size
        self.width = -(-max_model_len // page_size)
        self.num_pages = num_pages
        self.slots = [[GARBAGE] * page_size for _ in range(num_pages)]
        self.rows: list[Row | None] = [None] * max_num_seqs
        self.uncollected: deque[Step] = deque()
        self.poison: set[int] = set()  # rows whose next written slot is not finite

    def execute(self, step: Step, broken: bool = False) -> StepResult:
        """The whole step at once, in the documented order of effects; a broken one leaves garbage."""
        busy = {work.row for old in self.uncollected for work in old.works}
        busy |= {sample.row for old in self.uncollected for sample in old.samples}
        readers: dict[int, set[int]] = {}
        for row in busy:
            for page in self.rows[row].pages:
                readers.setdefault(page, set()).add(row)
        for init in step.inits:
            assert init.row not in busy, "a row is reused while a step in flight uses it"
            assert all(0 <= token < VOCAB for token in init.tokens)
            self.rows[init.row] = Row(init, list(init.tokens), certain=len(init.tokens) - 1)
        for update in step.page_updates:
            pages = self.rows[update.row].pages
            assert update.first == len(pages), "page tables are only appended to"
            assert all(0 <= page < self.num_pages for page in update.pages)
            pages += update.pages
            assert len(pages) <= self.width, "the page table is wider than the window"
        guesses = [(draft.row, draft.start + at) for draft in step.drafts for at in range(len(draft.tokens))]
        assert [(row, start) for row, start, _ in step.works[len(step.works) - len(guesses) :]] == guesses
        assert [row for _, row in step.samples[len(step.samples) - len(guesses) :]] == [row for row, _ in guesses]
        for draft in step.drafts:
            self.rows[draft.row].tokens[draft.start :] = draft.tokens
        for work in step.works:
            assert work.length >= 1
            written = self.rows[work.row].pages[work.start // self.page_size :]
            assert all(readers.get(page, {work.row}) == {work.row} for page in written), "written while it is read"
        ends = [self._forward(work.row, work.start, work.length, broken) for work in step.works]
        tokens, failed, masks = [], [], dict(step.masks)
        for number, sample in enumerate(step.samples):
            row = self.rows[sample.row]
            end = step.works[sample.work].start + step.works[sample.work].length
            # Behind what a guess may have got wrong, some tokens are not of the text.
            assert row.certain < end <= len(row.tokens), "a token is drawn from the last known one"
            generated = end - row.init.prompt_length
            token = next_token(ends[sample.work], row.init.params, row.init.index, generated, row.init.stop_mask)
            if number in masks:
                limited = allowed(token, masks[number])
                token = limited or 0
                if limited is None:
                    failed.append(number)
            if ends[sample.work] in (NAN, GARBAGE):
                token = -1
            if ends[sample.work] == NAN:
                failed.append(number)
            tokens.append(token)
        for sample, token in zip(step.samples, tokens, strict=True):
            work, row = step.works[sample.work], self.rows[sample.row]
            row.tokens[work.start + work.length :] = [token]
            if (sample.row, work.start) not in guesses:
                row.certain = work.start + work.length
        for source, target in step.copies:
            self.slots[target] = list(self.slots[source])
        self.uncollected.append(step)
        logprobs = tuple(self.record(tokens[index], top) for index, top in step.logprobs)
        prompt_logprobs = tuple(self._prompt_records(step.works[work], *rest) for work, *rest in step.prompt_logprobs)
        return StepResult(tuple(tokens), tuple(failed), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    @staticmethod
    def record(token: int, top: int) -> bytes:
        """A record (`engine.logprobs`) by which the token can be told."""
        return struct.pack("<f" + "if" * top, token, *(token for _ in range(2 * top)))

    def _prompt_records(self, work: RowWork, first: int, end: int, top: int) -> bytes:
        row = self.rows[work.row]
        assert work.start < first < end <= work.start + work.length + 1, "they are of the work's logits"
        assert end <= row.init.prompt_length
        return b"".join(self.record(token, top) for token in row.tokens[first:end])

    def _forward(self, number: int, start: int, length: int, broken: bool) -> int:
        row = self.rows[number]
        history = 0
        worst = 0
        for position in range(start):
            history = mix(history, row.tokens[position])
            slot = self._slot(row, position)
            if slot in (GARBAGE, NAN):
                worst = worst or slot
            else:
                assert slot == history or worst, f"row {number} reads another history at {position}"
        for position in range(start, start + length):
            history = mix(history, row.tokens[position])
            content = GARBAGE if broken or -1 in row.tokens[: position + 1] else worst or history
            if number in self.poison:
                content = worst = NAN
                self.poison.discard(number)
            row_page, offset = divmod(position, self.page_size)
            self.slots[row.pages[row_page]][offset] = content
        return worst or (GARBAGE if broken or -1 in row.tokens[: start + length] else history)

    def _slot(self, row: Row, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return self.slots[row.pages[page]][offset]


class Guesser:
    """In the place of `engine.ngram.NGrams`: knows the text, and errs at random."""

    def __init__(self, sequence: Sequence, draw: random.Random) -> None:
        self.sequence, self.draw = sequence, draw
        self.text = lone_run(sequence.request, sequence.index)[0]

    def follow(self, most: int) -> int:
        return most

    @property
    def worth_waiting(self) -> bool:
        return self.draw.random() < 0.5

    def guesses(self, most: int) -> tuple[int, ...]:
        known = len(self.sequence.tokens) - len(self.sequence.request.prompt)
        right = self.text[known:] + [self.draw.randrange(VOCAB) for _ in range(3)]  # also beyond the end
        return tuple(t if self.draw.random() < 0.8 else self.draw.randrange(VOCAB) for t in right[:most])


def new_scheduler(*, static: bool = False, **settings: object) -> Scheduler:
    """One of pages of 4 tokens, 64 of them, 8 rows, 32 tokens a step; `settings` of the config or the info."""
    info = {
        "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128,
        "vocab_size": VOCAB, "eos_token_ids": EOS, "max_samples": 0,
    }  # fmt: skip
    grammars = settings.pop("grammars", None)
    info |= {name: settings.pop(name) for name in info if name in settings}
    length = settings.pop("speculative_length", 0)
    guessing = {"speculative": "ngram", "speculative_length": length} if length else {}
    config = EngineConfig(Path(), **guessing, **settings)
    scheduler = (StaticScheduler if static else Scheduler)(config, CoreInfo(**info))
    scheduler.grammars = grammars or scheduler.grammars
    return scheduler


class Harness:
    """A scheduler, a fake runner, and everything that must hold between them after every turn."""

    Source = Source
    new_scheduler = staticmethod(new_scheduler)

    def __init__(self, *, depth: int = 0, static: bool = False, check: bool = True, **settings: object) -> None:
        self.scheduler = new_scheduler(static=static, **settings)
        info = self.scheduler._info
        self.budget, self.max_num_seqs = info.max_num_batched_tokens, settings.get("max_num_seqs", 8)
        self.runner = FakeRunner(info.num_pages, info.page_size, self.max_num_seqs, info.max_model_len)
        self.max_samples = max(info.max_samples, self.max_num_seqs)
        self.guessers = random.Random(0) if settings.get("speculative_length") else None
        self.depth, self.check = depth, check
        self.in_flight: deque[tuple[Step, StepResult | None]] = deque()
        self.steps: list[Step] = []
        self.requests: dict[str, Request] = {}
        self.cached: dict[str, int] = {}
        self.order: list[str] = []  # of first scheduling
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], bytes] = {}
        self.prompt_logprobs: dict[str, bytes] = {}
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.silent: set[tuple[str, int]] = set()  # aborted, or ended from outside

    def add(self, request_id: str, prompt: Iterable[int], **settings: object) -> Request:
        own = {
            name: settings.pop(name)
            for name in ("priority", "salt", "bypass_cache", "tenant", "marks", "grammar")
            if name in settings
        }
        params = SamplingParams(**{"temperature": 0.0, **settings})
        request = Request(request_id, tuple(prompt), params, **own)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.prompt_logprobs[request_id] = b""
        for sequence in self.scheduler._live[request_id].values() if self.guessers else ():
            sequence.ngrams = Guesser(sequence, self.guessers)
        for index in range(params.n):
            self.tokens[request_id, index], self.logprobs[request_id, index] = [], b""
        return request

    def abort(self, request_id: str) -> bool:
        was_live = self.scheduler.abort(request_id)
        if was_live:
            self.silent |= {(request_id, index) for index in range(self.requests[request_id].params.n)}
        return was_live

    def end_sequence(self, request_id: str, index: int) -> None:
        self.scheduler.end_sequence(request_id, index)
        self.silent.add((request_id, index))

    def turn(self, *, broken: bool = False, early: bool = False) -> Step | None:
        """Schedules and launches a step; collects the oldest if its time has come.

        Args:
            broken: the step raises, when it is collected or (early) when it is launched, before it has had any effect.
        """
        step = self.scheduler.schedule()
        for request_id, cached in step.started if step else ():
            assert request_id not in self.cached, "a request starts once"
            self.cached[request_id] = cached
            self.order.append(request_id)
        if step is not None:
            self._check_step(step)
            if broken and early:
                self._take(self.scheduler.fail(step, "broken"))
            else:
                result = self.runner.execute(step, broken)
                self.in_flight.append((step, None if broken else result))
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.collect()
        elif step is None:
            assert not self.scheduler.has_work, "nothing runs, nothing is in flight, and requests wait"
        if self.check:
            self.scheduler.check_integrity()
            self._check_waiting()
        return step

    def collect(self) -> list[SequenceUpdate]:
        step, result = self.in_flight.popleft()
        self.runner.uncollected.popleft()
        updates = self.scheduler.fail(step, "broken") if result is None else self.scheduler.update(step, result)
        self._take(updates)
        return updates

    def run(self, limit: int = 10_000) -> "Harness":
        """Turns until nothing is left."""
        while self.scheduler.has_work or self.in_flight:
            self.turn()
            limit -= 1
            assert limit, "it does not come to an end"
        return self

    def _check_waiting(self) -> None:
        """Who waits is looked up from where it was found last, and finds what it would find from the beginning."""
        cache = self.scheduler.cache
        for waiting in self.scheduler._waiting:
            prefix = cache._prefix(waiting)
            assert cache._tree.find(*prefix, waiting.found).pages == cache._tree.find(*prefix).pages

    def _check_step(self, step: Step) -> None:
        self.steps.append(step)
        assert 1 <= step.num_tokens <= self.budget
        rows = [work.row for work in step.works] + [sample.row for sample in step.samples]
        assert len(set(rows)) <= self.max_num_seqs
        assert len(step.samples) <= self.max_samples
        assert all(init.params.seed is not None for init in step.inits)

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            key = update.request_id, update.index
            assert key not in self.finish, "nothing comes after the end"
            assert key not in self.silent, "nothing comes after an abort"
            assert all(0 <= token < VOCAB for token in update.tokens), "a void token got out"
            self.tokens[key] += update.tokens
            self.logprobs[key] += update.logprobs
            if update.prompt_logprobs:
                self.prompt_logprobs[update.request_id] += update.prompt_logprobs
                indexes = range(self.requests[update.request_id].params.n)
                assert not any(self.tokens[update.request_id, index] for index in indexes), "the prompt's come first"
            if update.finish is not None:
                self.finish[key] = update.finish

    def check_outputs(self) -> None:
        """Every sequence has the text of its lone run, or the beginning of it if it was cut short."""
        for (request_id, index), tokens in self.tokens.items():
            request = self.requests[request_id]
            expected, reason = lone_run(request, index)
            finish = self.finish.get((request_id, index))
            self._check_logprobs(request, index, tokens)
            if finish in (None, FinishReason.ERROR):
                assert tokens == expected[: len(tokens)]
                assert finish or (request_id, index) in self.silent or self.scheduler.is_live(request_id)
            else:
                assert (tokens, finish) == (expected, reason)

    def _check_logprobs(self, request: Request, index: int, tokens: list[int]) -> None:
        """One record for each token where they are asked for, and of the prompt each but the first one's, once.

        What a request that was cut short has of the prompt's is their beginning.
        """
        asked, of_prompt = request.params.top_logprobs, request.params.prompt_logprobs
        records = [] if asked is None else [self.runner.record(token, asked) for token in tokens]
        assert self.logprobs[request.request_id, index] == b"".join(records)
        records = [] if of_prompt is None else [self.runner.record(token, of_prompt) for token in request.prompt[1:]]
        got, whole = self.prompt_logprobs[request.request_id], b"".join(records)
        keys = [(request.request_id, index) for index in range(request.params.n)]
        harmed = any(key in self.silent or self.finish.get(key) in (None, FinishReason.ERROR) for key in keys)
        assert whole.startswith(got) if harmed else got == whole

    @staticmethod
    def lone(prompt: Iterable[int], max_tokens: int) -> list[int]:
        """What the fake model says greedily to a prompt, past every end."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return lone_run(Request("", tuple(prompt), params), 0)[0]

    def check_cache(self) -> None:
        """Every page of the tree holds the K and V of just the tokens that it is found by (or is not finite)."""
        tree = self.scheduler.cache._tree
        stack = [(child, 0) for child in tree._root.children.values()]
        while stack:
            node, history = stack.pop()
            for key, page in zip(node.keys, node.pages, strict=True):
                for offset, token in enumerate(key[1] if isinstance(key[0], str) else key):
                    history = mix(history, token)
                    assert self.runner.slots[page][offset] in (history, NAN)
            stack += [(child, history) for child in node.children.values()]

    def check_idle(self) -> None:
        """All pages are free or cached, all rows are back, and the cache is right."""
        self.check_cache()
        stats = self.scheduler.stats
        assert (stats.running_sequences, stats.waiting_sequences, stats.live_requests) == (0, 0, 0)
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        assert stats.used_pages == 0
        self.scheduler.check_integrity()


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    """The class: `harness(depth=1, num_pages=32)` gives one."""
    return Harness
