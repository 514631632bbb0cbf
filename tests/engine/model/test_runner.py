"""The runner on hand-built steps: whatever way tokens are batched, cut, shared or copied, the same tokens come out."""

import json
import random

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import EngineConfig
from engine.device import load_model
from engine.model import decoder
from engine.model.checkpoint import open_checkpoint
from engine.model.errors import ModelError
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.step import PageUpdate, RowWork, Sample, Step
from kernels.activation import silu_mul

PAGE = 16


def test_any_batching_gives_the_same_tokens(llama, prompts, tools):
    """Alone, all at once, cut into chunks of 1 to 40 tokens, and staggered so that prefill and decode mix."""
    folder, model = llama
    runner = tools.make_runner(folder)
    expected = [tools.Driver(runner).generate([prompt], 20)[0] for prompt in prompts]
    assert expected == [tools.oracle(model, p, o) for p, o in zip(prompts, expected, strict=True)]
    for chunk, stagger in ((10_000, 0), (1, 0), (7, 3), (16, 1), (40, 5)):
        assert tools.Driver(runner).generate(prompts, 20, chunk=chunk, stagger=stagger) == expected


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size(page_size, llama, prompts, tools):
    """Any power of two serves as page size."""
    folder, model = llama
    runner = tools.make_runner(folder, page_size=page_size, max_num_seqs=8)
    outputs = tools.Driver(runner, page_size).generate(prompts, 8, chunk=20, stagger=1)
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


def test_every_batch_size(llama, tools):
    """Every number of rows from 1 to max_num_seqs gives each row its lone answer."""
    folder, _ = llama
    runner = tools.make_runner(folder, max_num_seqs=9)
    draw = random.Random(5)
    prompts = [[draw.randrange(160) for _ in range(draw.choice((3, 40, 16)))] for _ in range(9)]
    expected = [tools.Driver(runner).generate([prompt], 4)[0] for prompt in prompts]
    for size in range(1, 10):
        assert tools.Driver(runner).generate(prompts[:size], 4) == expected[:size]


def test_stale_pages_do_not_matter(llama, prompts, tools):
    """NaN beyond the rows' tokens, in the dummy page and in pages that nobody owns changes nothing."""
    folder, _ = llama
    expected = tools.Driver(tools.make_runner(folder)).generate(prompts, 20, chunk=40, stagger=2)
    runner = tools.make_runner(folder)
    runner.warm_up()
    tools.poison(runner)
    assert tools.Driver(runner).generate(prompts, 20, chunk=40, stagger=2) == expected


def test_pool_is_zero_and_warm_up_leaves_it_so(llama, tools):
    """The pool starts at zero, and warm-up writes into the page that no sequence owns."""
    runner = tools.make_runner(llama[0])
    runner.warm_up()
    assert runner._kv_cache.shape[1] == runner.num_pages + 1
    assert runner._kv_cache.count_nonzero() == 0


def test_prefix_pages_filled_in_the_same_step(llama, tools):
    """Two rows share pages of a prefix that a third fills in that very step: K and V are written before any read."""
    folder, model = llama
    runner = tools.make_runner(folder)
    draw = random.Random(3)
    prefix = [draw.randrange(160) for _ in range(2 * PAGE)]
    prompts = [[*prefix, 1], [*prefix, 2, 3], [*prefix[:PAGE], 4]]
    step = Step(
        0,
        tuple(tools.row_init(row, prompt) for row, prompt in enumerate(prompts)),
        (PageUpdate(0, 0, (9, 4, 7)), PageUpdate(1, 0, (9, 4, 2)), PageUpdate(2, 0, (9, 11))),
        # The readers come first, so that order within the step cannot be what helps.
        (RowWork(1, 32, 2), RowWork(2, 16, 1), RowWork(0, 0, 33)),
        (Sample(0, 1), Sample(1, 2), Sample(2, 0)),
    )
    one, two, zero = runner.collect(runner.launch(step)).tokens
    assert [[zero], [one], [two]] == [tools.oracle(model, prompt, [0]) for prompt in prompts]


@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_guesses_are_sampled_as_plain_decoding_would(wrong, llama, tools):
    """Every position with its own number and its own history: penalties, bias, min_tokens, filters."""
    runner = tools.make_runner(llama[0])
    tools.poison(runner)
    tools.verify(runner, [SamplingParams(**each) for each in tools.SAMPLING], wrong)


def test_fork_by_sibling_sample_and_page_copy(llama, tools):
    """A sibling samples from the prompt that another row computed, and goes on in a copy of its last page."""
    folder, model = llama
    runner = tools.make_runner(folder)
    prompt = [(3 * i + 1) % 160 for i in range(21)]
    first = Step(
        0,
        (tools.row_init(0, prompt), tools.row_init(1, prompt)),
        (PageUpdate(0, 0, (5, 6)), PageUpdate(1, 0, (5, 8))),
        (RowWork(0, 0, 21),),
        (Sample(0, 0), Sample(0, 1)),
        copies=((6, 8),),
    )
    outputs = [[token] for token in runner.collect(runner.launch(first)).tokens]
    # Were the sibling's page not its own copy, the poison would reach it.
    tools.poison(runner, slice(None), 6)
    for at in range(21, 30):
        step = Step(at, (), (), (RowWork(1, at, 1),), (Sample(0, 1),))
        outputs[1] += runner.collect(runner.launch(step)).tokens
    assert outputs[0] == outputs[1][:1]
    assert outputs[1] == tools.oracle(model, prompt, outputs[1])


def test_launch_before_collect(llama, tools):
    """Every decode step is launched before the tokens of the steps before it are read back."""
    folder, model = llama
    output = tools.Driver(tools.make_runner(folder)).generate_ahead([5, 6, 7], 30)
    assert output == tools.oracle(model, [5, 6, 7], output)


def test_work_without_sample_and_empty_step(llama, tools):
    """A chunk that does not end the prompt samples nothing; a step may consist of copies alone."""
    runner = tools.make_runner(llama[0])
    init = tools.row_init(0, range(40))
    chunk = Step(0, (init,), (PageUpdate(0, 0, (0, 1, 2)),), (RowWork(0, 0, 30),), ())
    assert runner.collect(runner.launch(chunk)).tokens == ()
    copy = Step(1, (), (), (), (), copies=((0, 3), (1, 4)))
    assert runner.collect(runner.launch(copy)).tokens == ()
    assert torch.equal(runner._kv_cache[:, [0, 1]], runner._kv_cache[:, [3, 4]])
    assert runner._kv_cache[:, 3].count_nonzero() > 0


def test_the_last_layer_is_done_for_sampled_tokens_alone(llama, tools, monkeypatch):
    """A chunk that ends before the prompt needs none of it; of one that ends with it the last token is sampled from."""
    rows: list[int] = []
    monkeypatch.setattr(decoder, "silu_mul", lambda x: (rows.append(len(x)), silu_mul(x))[1])
    folder, model = llama
    prompt = [(3 * i + 2) % 160 for i in range(40)]
    outputs = tools.Driver(tools.make_runner(folder)).generate([prompt], 1, chunk=20)
    assert outputs == [tools.oracle(model, prompt, outputs[0])]
    layers = model.config.num_hidden_layers
    assert rows == [20] * (layers - 1) + [0] + [20] * (layers - 1) + [1]


def test_row_is_reused(llama, tools):
    """A shorter sequence in the row of a longer one sees nothing of it."""
    folder, model = llama
    runner = tools.make_runner(folder)
    driver = tools.Driver(runner)
    driver.generate([list(range(100))], 10)
    prompt = [8, 9]
    output = driver.generate([prompt], 10)[0]
    assert output == tools.oracle(model, prompt, output)


def test_rows_with_non_finite_logits_are_reported(llama, tools):
    """Only the row whose own history is poisoned fails; its neighbour's token is right."""
    folder, model = llama
    runner = tools.make_runner(folder)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    inits = tuple(tools.row_init(row, prompt) for row, prompt in enumerate(prompts))
    updates = (PageUpdate(0, 0, (0,)), PageUpdate(1, 0, (1,)))
    works = tuple(RowWork(row, 0, len(prompt)) for row, prompt in enumerate(prompts))
    samples = (Sample(0, 0), Sample(1, 1))
    output = [runner.collect(runner.launch(Step(0, inits, updates, works, samples))).tokens[1]]
    tools.poison(runner, slice(None), 0, 0)
    step = Step(1, (), (), (RowWork(0, 3, 1), RowWork(1, 4, 1)), samples)
    result = runner.collect(runner.launch(step))
    assert result.failed == (0,)
    output.append(result.tokens[1])
    assert output == tools.oracle(model, prompts[1], output)


def test_the_window_can_be_filled(llama, tools):
    """The last position of max_model_len is computed, and a token sampled from it."""
    folder, model = llama
    runner = tools.make_runner(folder, max_model_len=40)
    prompt = list(range(38))
    output = tools.Driver(runner).generate([prompt], 3)[0]
    assert output == tools.oracle(model, prompt, output)


def test_pool_size(llama, tools):
    """The budget is what the pool may take: 2 (K, V) x 3 layers x 16 tokens x 2 heads x 16 x 4 bytes a page."""
    runner = tools.make_runner(llama[0], memory_budget=1_000_000)
    assert runner.num_pages == 1_000_000 // 12_288
    assert runner.max_model_len == 512
    assert (runner.dtype, runner.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_it_is_native(native, dtype, llama, tools, monkeypatch):
    monkeypatch.setattr("engine.device.cpu_computes_bfloat16", lambda: native)
    assert tools.make_runner(llama[0], dtype="auto").dtype == dtype


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_budget": 10_000}, "memory_budget"),
        ({"memory_budget": 1 << 60}, "memory_budget is 1152921504606846976 bytes, and the device has"),
        ({"max_model_len": 513}, "max_model_len \\(513\\) is beyond the model's window of 512"),
        ({"device": "abacus"}, "device 'abacus'"),
    ],
)
def test_refused_settings(settings, message, llama, tools):
    """What cannot be done is refused at start, by name."""
    with pytest.raises(ModelError, match=message):
        tools.make_runner(llama[0], **settings)


def test_dummy_weights(llama, tmp_path, tools):
    """load_format dummy needs only a config.json, and the seed decides the weights."""
    config = (llama[0] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    runners = [tools.make_runner(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    for embedding in (runner._decoder.embedding for runner in runners):
        assert embedding.std().item() == pytest.approx(0.02, rel=0.05)
        assert embedding.mean().item() == pytest.approx(0.0, abs=0.001)
    outputs = [tools.Driver(runner).generate([[1, 2, 3]], 20) for runner in runners]
    assert outputs[0] == outputs[1] != outputs[2]
    assert json.loads(config)["vocab_size"] == runners[0].model_config.vocab_size


def test_padded_vocabulary(model_at, tools):
    """A vocabulary wider than any tokenizer is trusted as it is; every id can be sampled and read back."""
    folder, model = model_at("llama", vocab_size=331, tie_word_embeddings=True)
    output = tools.Driver(tools.make_runner(folder)).generate([[330, 329]], 20)[0]
    assert output == tools.oracle(model, [330, 329], output)


def test_smollm2(default_model, own_data, tools):
    """The default model, ten prompts in mixed steps, 64 tokens each: five of the golden file, and five more that
    transformers is asked about with the same weights."""
    golden = json.loads((own_data / "smollm2_golden.json").read_text())
    cases = [case["ids"] for case in golden["tokenizer_cases"] if case["ids"]]
    more = [sum(cases[at::5], [1]) for at in range(5)]  # of many languages and scripts
    config = EngineConfig(model=default_model, dtype="float32", threads=1)
    runner = ModelRunner(config, load_model(config, progress=False))
    driver = tools.Driver(runner)
    outputs = driver.generate([*(case["prompt_ids"] for case in golden["prompts"]), *more], 64, chunk=50, stagger=3)
    assert outputs[:5] == [case["output_ids"] for case in golden["prompts"]]
    checkpoint = open_checkpoint(default_model)
    shape = checkpoint.config
    settings = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.window,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    weights = dict(checkpoint.tensors())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(settings)
    assert outputs[5:] == [tools.oracle(model.eval(), p, o) for p, o in zip(more, outputs[5:], strict=True)]
