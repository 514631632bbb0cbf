"""User logits processors: how they are loaded, what they see, what happens when they misbehave, and the example."""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from engine.logits import LogitsProcessorError, apply_logits_processors, load_logits_processors
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import RowInit

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, seed=0)
EXAMPLE = "examples.logits_processors:NoRepeatTrigram"


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a user's module; returns its name."""
    names = []

    def write(text):
        name = f"user_processors_{tmp_path.name}_{len(names)}"
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in names:
        sys.modules.pop(name, None)


def load(*specs):
    return load_logits_processors(specs, vocab_size=8, device=CPU)


def test_loads_in_order_and_constructs_with_what_is_promised(user_module):
    name = user_module(
        "class First:\n"
        "    def __init__(self, *, vocab_size, device):\n"
        "        self.got = (vocab_size, device)\n"
        "    def __call__(self, logits, rows):\n"
        "        return logits + 1\n"
        "class Second(First):\n"
        "    def __call__(self, logits, rows):\n"
        "        return logits * 2\n"
    )
    processors = load(f"{name}:First", f"{name}:Second")
    assert [processor.got for processor in processors] == [(8, CPU)] * 2
    assert apply_logits_processors(processors, torch.ones(1, 8), []).tolist() == [[4.0] * 8]
    assert load() == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "package.module:Class"),
        ("", "package.module:Class"),
        (":Class", "package.module:Class"),
        ("module:", "package.module:Class"),
        ("a..b:Class", "package.module:Class"),
        ("a/b.py:Class", "package.module:Class"),
        ("a:b:c", "package.module:Class"),
        ("engine.no_such_module:Class", "cannot import engine.no_such_module"),
        ("engine.logits:NoSuchClass", "cannot construct NoSuchClass: AttributeError"),
        ("engine.sampler:GREEDY_TEMPERATURE", "cannot construct GREEDY_TEMPERATURE: TypeError"),
        ("engine.logits:LogitsRow", "cannot construct LogitsRow"),
    ],
)
def test_wrong_specs_are_named(spec, message):
    with pytest.raises(ValueError, match="logits processor") as caught:
        load(spec)
    assert repr(spec) in str(caught.value)
    assert message in str(caught.value)


def test_modules_and_constructors_that_raise_are_named(user_module):
    broken = user_module("1 / 0")
    with pytest.raises(ValueError, match=r"cannot import .*ZeroDivisionError"):
        load(f"{broken}:Class")
    name = user_module(
        "class Raises:\n"
        "    def __init__(self, *, vocab_size, device):\n"
        "        raise KeyError('weights')\n"
        "class NotCallable:\n"
        "    def __init__(self, *, vocab_size, device):\n"
        "        pass\n"
    )
    with pytest.raises(ValueError, match="cannot construct Raises: KeyError"):
        load(f"{name}:Raises")
    with pytest.raises(ValueError, match="__call__"):
        load(f"{name}:NotCallable")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda logits: logits[:, :-1], "shape"),
        (lambda logits: logits.double(), "dtype torch.float64"),
        (lambda logits: logits.to("meta"), "device meta"),
        (lambda logits: None, "NoneType"),
        (lambda logits: logits.nothing_of_the_kind, "raised AttributeError"),
    ],
)
def test_a_processor_that_misbehaves_is_named(result, message):
    class Misbehaves:
        def __call__(self, logits, rows):
            return result(logits)

    with pytest.raises(LogitsProcessorError, match=message) as caught:
        apply_logits_processors([Misbehaves()], torch.zeros(2, 8), [])
    assert "Misbehaves" in str(caught.value)


def test_a_processor_sees_the_rows_between_penalties_and_stop_mask():
    calls = []

    class Watch:
        def __call__(self, logits, rows):
            calls.append((logits.clone(), rows))
            logits += 10  # writing in place is its right, and reaches nobody else
            logits[:, 3] = 99
            return logits

    sampler = Sampler(vocab_size=5, device=CPU, max_num_seqs=4, processors=[Watch()])
    token_ids = torch.full((4, 16), -1, dtype=torch.int32)
    token_ids[2, :3] = torch.tensor([4, 2, 2])
    token_ids[0, :1] = 1
    penalized = replace(GREEDY, frequency_penalty=1.0, logit_bias={0: 7.0}, min_tokens=5)
    sampler.add_row(RowInit(2, (4, 2, 2), 1, penalized, 6, (3,)))
    sampler.add_row(RowInit(0, (1,), 1, GREEDY, 0, (3,)))
    for _ in range(2):
        logits = torch.zeros(2, 5)
        tokens, failed = sampler.sample(logits, [2, 0], token_ids, [3, 1])
        assert not logits.any()
        assert (tokens.tolist(), failed.tolist()) == ([0, 3], [False, False])
    seen, rows = calls[0]
    assert seen.tolist() == [[7, 0, -2, 0, 0], [0] * 5]
    assert [row.token_ids.tolist() for row in rows] == [[4, 2, 2], [1]]
    assert [(row.prompt_length, row.index, row.params) for row in rows] == [(1, 6, penalized), (1, 0, GREEDY)]


def test_bug_17_a_processor_that_forbids_everything_fails_the_row():
    class Forbid:
        def __call__(self, logits, rows):
            logits[0] = -torch.inf
            return logits

    sampler = Sampler(vocab_size=4, device=CPU, max_num_seqs=2, processors=[Forbid()])
    for row in range(2):
        sampler.add_row(RowInit(row, (1,), 1, SamplingParams(seed=row, top_p=0.5), 0, ()))
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]] * 2)
    tokens, failed = sampler.sample(logits, [0, 1], torch.ones(2, 8, dtype=torch.int32), [1, 1])
    assert (tokens.tolist(), failed.tolist()) == ([0, 1], [True, False])


def test_the_example_equals_transformers_no_repeat_ngram():
    vocab_size = 4  # few tokens, so that trigrams do repeat
    processors = load_logits_processors([EXAMPLE], vocab_size=vocab_size, device=CPU)
    reference = NoRepeatNGramLogitsProcessor(3)
    generator = torch.Generator().manual_seed(0)
    for params in (GREEDY, SamplingParams(temperature=0.7, seed=5)):
        sampler = Sampler(vocab_size=vocab_size, device=CPU, max_num_seqs=2, processors=processors)
        tokens = [[1, 2, 1], [3]]
        token_ids = torch.zeros(2, 64, dtype=torch.int32)
        for row in range(2):
            sampler.add_row(RowInit(row, tuple(tokens[row]), len(tokens[row]), params, 0, ()))
            token_ids[row, : len(tokens[row])] = torch.tensor(tokens[row])
        forbidden = 0
        for _ in range(30):
            logits = torch.randn(2, vocab_size, generator=generator)
            expected = [reference(torch.tensor([tokens[i]]), logits[i : i + 1])[0] for i in range(2)]
            sampled, failed = sampler.sample(logits, [0, 1], token_ids, [len(row) for row in tokens])
            for i, token in enumerate(sampled.tolist()):
                forbidden += int((~expected[i].isfinite()).sum())
                assert bool(failed[i]) == (not expected[i].isfinite().any())
                if not failed[i]:
                    assert expected[i][token].isfinite()
                    assert params.temperature > 0 or token == expected[i].argmax()
                token_ids[i, len(tokens[i])] = token
                tokens[i].append(token)
        assert forbidden > 20
