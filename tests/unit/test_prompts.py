"""Prompts from files and generators: read whole, or refused by name."""

import json

import pytest
from datasets import Dataset

from mppo.config import DataConfig, PromptSource
from mppo.errors import ConfigError, DataError
from mppo.rollout.prompts import load_prompts
from mppo.weights.presets import PRESETS

pytestmark = pytest.mark.unit

VOCABULARY = 64


@pytest.fixture
def tokenizer():
    return PRESETS.get("char").fn({})[1]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"prompt": "1+2=", "ground_truth": "3"}, {"prompt": "10+20=", "ground_truth": "30"}]


def read(tokenizer, source, vocab_size=VOCABULARY, **data):
    return load_prompts(source, "data.train", DataConfig(**data), tokenizer, vocab_size)


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path, tokenizer):
    jsonl = write_jsonl(tmp_path / "p.jsonl", ROWS)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "p.parquet")
    a = read(tokenizer, PromptSource([jsonl]))
    b = read(tokenizer, PromptSource([str(tmp_path / "p.parquet")]))
    assert a.prompts == b.prompts
    assert [(p.text, p.ground_truth) for p in a.prompts] == [("1+2=", "3"), ("10+20=", "30")]
    assert a.prompts[0].ids == tuple(tokenizer("1+2=")["input_ids"])


def test_chat_messages_go_through_the_tokenizers_template(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "ground_truth": "3"}]
    (prompt,) = read(tokenizer, PromptSource([write_jsonl(tmp_path / "p.jsonl", rows)])).prompts
    assert prompt.text == "u:1+2;a:"


def test_chat_messages_without_a_template_are_refused(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "ground_truth": "3"}]
    with pytest.raises(DataError, match="row 0.*no chat template"):
        read(tokenizer, PromptSource([write_jsonl(tmp_path / "p.jsonl", rows)]))


def test_a_prompt_that_is_too_long_is_an_error_or_skipped_and_counted(tmp_path, tokenizer):
    source = PromptSource([write_jsonl(tmp_path / "p.jsonl", ROWS)])
    with pytest.raises(DataError, match=r"row 1 has a prompt of 6 tokens, over data\.max_prompt_length=4"):
        read(tokenizer, source, max_prompt_length=4)
    kept = read(tokenizer, source, max_prompt_length=4, overlong_prompts="skip")
    assert len(kept) == 1 and kept.skipped == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts to use"),
        ('{"prompt": "1"}\n', "row 0 has no field 'ground_truth'"),
        ('{"question": "1", "ground_truth": "1"}\n', "row 0 has no field 'prompt'"),
        ('{"prompt": "1", \n', "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path, tokenizer, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read(tokenizer, PromptSource([str(path)]))


def test_a_missing_file_is_named(tokenizer):
    with pytest.raises(DataError, match=r"data\.train\.files: nowhere\.jsonl: no such file"):
        read(tokenizer, PromptSource(["nowhere.jsonl"]))


def test_ids_outside_the_models_vocabulary_are_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match="row 0 has token id .* vocabulary of 4"):
        read(tokenizer, PromptSource([write_jsonl(tmp_path / "p.jsonl", ROWS)]), vocab_size=4)


def test_a_generators_unknown_knob_is_named(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.train\.options\.sise.*did you mean 'size'"):
        read(tokenizer, PromptSource(generator="class", options={"sise": 1}))


def test_the_order_of_draws_is_a_function_of_seed_and_step(tokenizer):
    prompts = read(tokenizer, PromptSource(generator="offset", options={"size": 10}))
    epoch = [p for step in range(5) for p in prompts.draw(step, 2, seed=7)]
    assert sorted(p.text for p in epoch) == sorted(p.text for p in prompts.prompts)
    assert prompts.draw(3, 2, seed=7) == epoch[6:8]
    assert prompts.draw(0, 10, seed=7) != prompts.draw(1, 10, seed=7)
    assert prompts.draw(0, 10, seed=None) == prompts.prompts


def test_held_out_pairs_are_not_trained_on(tokenizer):
    from mppo.rollout.generators import AdditionConfig, addition

    train, held_out = (addition(AdditionConfig(split=s)) for s in ("train", "held_out"))
    assert (len(train), len(held_out)) == (80, 20)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


def test_reasoning_gym_gives_its_own_entries():
    pytest.importorskip("reasoning_gym")
    from mppo.rollout.generators import ReasoningGymConfig, reasoning_gym

    row = reasoning_gym(ReasoningGymConfig(dataset="chain_sum", size=3))[0]
    assert row["prompt"] == row["ground_truth"]["question"]
