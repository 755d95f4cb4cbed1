"""Prompts from files and generators: read whole, or refused by name."""

import json
import random

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from mppo.config import DataConfig, PromptSource
from mppo.errors import ConfigError, DataError
from mppo.rollout.prompt_reader import PromptReader
from mppo.rollout.prompt_rows import Rows
from mppo.rollout.prompts import PromptSet, PromptStream, load_prompts
from mppo.rollout.tasks import addition, reasoning_gym
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
    assert list(a) == list(b)
    assert [(p.text, p.ground_truth) for p in a] == [("1+2=", "3"), ("10+20=", "30")]
    assert a[0].token_ids == tuple(tokenizer("1+2=")["input_ids"])
    assert a[1].fields == ROWS[1]


def test_files_are_numbered_through_and_need_not_have_the_same_fields(tmp_path, tokenizer):
    other = [{"ground_truth": 7, "level": 2, "prompt": "3+4="}, {"ground_truth": 8, "level": 3, "prompt": "4+4="}]
    files = [write_jsonl(tmp_path / "a.jsonl", ROWS), write_jsonl(tmp_path / "b.jsonl", other)]
    prompts = read(tokenizer, PromptSource(files))
    assert [p.fields for p in prompts] == ROWS + other
    write_jsonl(tmp_path / "b.jsonl", [*other, {"ground_truth": None, "level": 1, "prompt": "5+5="}])
    with pytest.raises(DataError, match=r"row 4 has nothing .null. in its field 'ground_truth'"):
        read(tokenizer, PromptSource(files))


def test_chat_messages_go_through_the_tokenizers_template(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "ground_truth": "3"}]
    (prompt,) = read(tokenizer, PromptSource([write_jsonl(tmp_path / "p.jsonl", rows)]))
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


def test_only_what_may_be_too_long_is_tokenised_before_it_is_drawn(tokenizer):
    calls = []

    class Counting:
        def __call__(self, texts, **options):
            calls.extend([len(texts)] if isinstance(texts, list) else [])
            return tokenizer(texts, **options)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    source = PromptSource(generator="offset", options={"size": 2500})
    prompts = read(Counting(), source)
    assert calls == [] and len(prompts) == 2500
    assert prompts[2499].token_ids == tuple(tokenizer(prompts[2499].text)["input_ids"])
    assert calls == [1, 1]
    calls.clear()
    assert len(read(Counting(), source, max_prompt_length=6)) == 2500
    assert calls == [1000, 1000, 500]


def test_a_prompt_that_turns_out_too_long_when_it_is_drawn_is_refused(tokenizer):
    """The normaliser writes more than a token for a byte, which the check before the run does not foresee."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("1", "111111")
    prompts = read(tokenizer, PromptSource(generator="addition", options={"prefix": ""}), max_prompt_length=5)
    with pytest.raises(DataError, match=r"row \d+ has a prompt of \d+ tokens"):
        list(prompts)


def order_of(size, epoch, seed):
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


@given(size=st.integers(1, 30), counts=st.lists(st.integers(0, 40), max_size=6), seed=st.none() | st.integers(0, 99))
def test_numbers_grow_and_the_order_of_an_epoch_follows_from_the_seed(size, counts, seed):
    rows = Rows([[{"prompt": f"{i}=", "ground_truth": i} for i in range(size)]])
    prompts = PromptSet(rows, PromptReader("data.train", DataConfig(), PRESETS.get("char").fn({})[1], VOCABULARY))
    stream = PromptStream(prompts, seed)
    drawn = [stream.draw(count) for count in counts]
    numbers = [number for prompts in drawn for number in prompts]
    assert numbers == list(range(sum(counts)))
    for number, prompt in ((number, prompt) for prompts in drawn for number, prompt in prompts.items()):
        epoch, offset = divmod(number, size)
        expected = offset if seed is None else order_of(size, epoch, seed)[offset]
        assert prompt.ground_truth == expected
        assert stream[number] == prompt


def test_a_stream_goes_on_where_its_state_was_saved(tokenizer):
    prompts = read(tokenizer, PromptSource(generator="offset", options={"size": 10}))
    stream = PromptStream(prompts, seed=7)
    stream.draw(13)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(prompts, seed=7)
    resumed.load_state_dict(state)
    assert resumed.draw(9) == stream.draw(9)


def test_the_order_of_an_epoch_is_made_once(tokenizer, monkeypatch):
    prompts = read(tokenizer, PromptSource(generator="offset", options={"size": 10}))
    shuffled = []
    shuffle = random.Random.shuffle
    monkeypatch.setattr(random.Random, "shuffle", lambda self, x: (shuffled.append(len(x)), shuffle(self, x)))
    stream = PromptStream(prompts, seed=7)
    for _ in range(9):
        stream.draw(3)
    assert shuffled == [10, 10, 10]


def test_held_out_pairs_are_not_trained_on():
    train, held_out = (addition.addition_prompts(addition.AdditionConfig(split=s)) for s in ("train", "held_out"))
    assert (len(train), len(held_out)) == (80, 20)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


def test_reasoning_gym_gives_its_own_entries():
    pytest.importorskip("reasoning_gym")
    row = reasoning_gym.reasoning_gym_prompts(reasoning_gym.ReasoningGymConfig(dataset="chain_sum", size=3))[0]
    assert row["prompt"] == row["ground_truth"]["question"]
