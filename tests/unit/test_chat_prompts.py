"""Prompts as their files have them: chat messages, templates, special tokens, scripts and types."""

import json

import pytest
from datasets import Dataset
from tokenizers import processors

from mppo.config import DataConfig, PromptSource
from mppo.errors import ConfigError, DataError
from mppo.rollout.prompts import load_prompts
from mppo.weights.presets import PRESETS

pytestmark = pytest.mark.unit

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if think is defined %}({{ think }}){% endif %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = PRESETS.get("char").fn({})[1]
    made.chat_template = TEMPLATE
    return made


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(tokenizer, file, sources=(), **data):
    return load_prompts(PromptSource([file]), "data.train", DataConfig(**data), tokenizer, 64, sources)


def asked(*turns, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(turns)]
    return {"prompt": messages, "ground_truth": "3", **more}


def text_of(tokenizer, path, row, **data):
    (prompt,) = read(tokenizer, write(path / "p.jsonl", row), **data)
    return prompt.text


def test_a_conversation_is_answered_or_continued(tmp_path, tokenizer):
    assert text_of(tokenizer, tmp_path, asked("1+2")) == "<user>1+2;<a>"
    assert text_of(tokenizer, tmp_path, asked("1+2", "it is ")) == "<user>1+2;<assistant>it is "


def test_contents_in_parts_of_text_are_joined_and_others_refused(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]
    assert text_of(tokenizer, tmp_path, asked(parts)) == "<user>1+2;<a>"
    with pytest.raises(DataError, match="row 0, message 0: its content has a part that is no text"):
        text_of(tokenizer, tmp_path, asked([{"type": "image", "url": "x"}]))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "the prompt is a int; it must be a text, or a list"),
        ([], "the prompt is a list"),
        (["1+2"], "row 0, message 0: it is no chat message"),
        ([{"role": "user"}], "its content is None; it must be a text"),
        ([{"role": "user", "content": 3}], "its content is 3; it must be a text"),
        ("\ud800", "no valid Unicode text"),
    ],
)
def test_what_is_no_conversation_is_refused_by_row(tmp_path, tokenizer, prompt, message):
    with pytest.raises(DataError, match=message):
        text_of(tokenizer, tmp_path, {"prompt": prompt, "ground_truth": "3"})


def test_arguments_and_tools_reach_the_template(tmp_path, tokenizer):
    assert text_of(tokenizer, tmp_path, asked("1"), chat_template_kwargs={"think": False}) == "<user>1;(False)<a>"
    with pytest.raises(ConfigError, match="data.chat_template_kwargs.thinks has no effect"):
        text_of(tokenizer, tmp_path, asked("1"), chat_template_kwargs={"thinks": False})
    schemas = [{"type": "function", "function": {"name": "add"}}]
    for tools in (schemas, json.dumps(schemas)):
        assert text_of(tokenizer, tmp_path, asked("1", tools=tools), tools_key="tools") == "<user>1;[1]<a>"
    assert text_of(tokenizer, tmp_path, asked("1", tools=schemas)) == "<user>1;<a>"
    with pytest.raises(DataError, match="row 0: its tools are a text that is no JSON"):
        text_of(tokenizer, tmp_path, asked("1", tools="add"), tools_key="tools")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match="row 0: it has tools, but the tokenizer's chat template does not read any"):
        text_of(tokenizer, tmp_path, asked("1", tools=schemas), tools_key="tools")


def with_ends(tokenizer):
    """The tokenizer puts <pad> before a text and <eos> after it, as others do with BOS and EOS."""
    ids = [("<pad>", tokenizer.pad_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<pad> $A <eos>", None, ids)
    return tokenizer


def test_a_text_begins_with_bos_once_and_does_not_end_with_eos(tmp_path, tokenizer):
    bos, one = tokenizer.pad_token_id, tokenizer("1")["input_ids"][0]
    with_ends(tokenizer)
    rows = [{"prompt": text, "ground_truth": "3"} for text in ("1", "<pad>1", "1<eos>")]
    rows.append(asked("1"))
    plain, templated, ended, chat = read(tokenizer, write(tmp_path / "p.jsonl", *rows))
    assert plain.token_ids == (bos, one)
    assert templated.token_ids == (bos, one)
    assert ended.token_ids == (bos, one, tokenizer.eos_token_id), "an EOS that the user wrote stays"
    assert bos not in chat.token_ids and tokenizer.eos_token_id not in chat.token_ids


def test_fields_inside_others_are_found_by_their_path(tmp_path, tokenizer):
    rows = [{"q": {"text": f"{i}="}, "reward_model": {"ground_truth": str(i), "style": "rule"}} for i in range(3)]
    Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    keys = {"prompt_key": "q.text", "answer_key": "reward_model.ground_truth"}
    for file in (write(tmp_path / "p.jsonl", *rows), str(tmp_path / "p.parquet")):
        prompts = read(tokenizer, file, **keys)
        assert [(p.text, p.ground_truth) for p in prompts] == [("0=", "0"), ("1=", "1"), ("2=", "2")]
        assert prompts[1].fields == rows[1]
    dotted = {"a.b": "9", "prompt": "1"}
    (prompt,) = read(tokenizer, write(tmp_path / "d.jsonl", dotted), answer_key="a.b")
    assert prompt.ground_truth == "9"
    with pytest.raises(DataError, match=r"row 0 has no field 'reward_model.truth' \(data.answer_key\)"):
        read(tokenizer, write(tmp_path / "p.jsonl", *rows), prompt_key="q.text", answer_key="reward_model.truth")


def test_every_row_names_a_data_source_that_has_a_reward(tmp_path, tokenizer):
    rows = [{"prompt": "1", "ground_truth": "1", "data_source": source} for source in ("math", "code")]
    file = write(tmp_path / "p.jsonl", *rows)
    assert [p.source for p in read(tokenizer, file, sources=["math", "code"])] == ["math", "code"]
    assert [p.source for p in read(tokenizer, file)] == [None, None]
    with pytest.raises(DataError, match="row 1 has data_source='code', for which reward.sources has no reward"):
        read(tokenizer, file, sources=["math"])


TRUTHS = [
    "2024-01-01 00:00:00",
    "2024-01-01",
    7,
    1.5,
    2**70,
    True,
    "",
    " 3 ",
    "\u06f3\u00e9\U0001f600\u200f",
    ["a", {"b": None}],
    {"x": 1},
    "a" * 100_000,
]


def test_ground_truths_arrive_as_they_are_written(tmp_path, tokenizer):
    rows = [{"prompt": "1", "ground_truth": truth} for truth in TRUTHS]
    found = [prompt.ground_truth for prompt in read(tokenizer, write(tmp_path / "p.jsonl", *rows))]
    assert found == TRUTHS and list(map(type, found)) == list(map(type, TRUTHS))
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    assert [prompt.ground_truth for prompt in read(tokenizer, str(tmp_path / "p.json"))] == TRUTHS


def test_lines_may_end_in_any_way_and_blank_ones_do_not_count(tmp_path, tokenizer):
    row = json.dumps({"prompt": "1", "ground_truth": "\u2028 \x85"}, ensure_ascii=False).encode()
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\n  \n" + row)
    assert [p.ground_truth for p in read(tokenizer, str(tmp_path / "p.jsonl"))] == ["\u2028 \x85"] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "1", "ground_truth": "1"}\n{"prompt": \n', "p.jsonl, line 2 cannot be read"),
        (b'{"prompt": "1", "ground_truth": "\xff"}\n', "p.jsonl, line 1 cannot be read: it is no JSON in UTF-8"),
        (b'\n["1"]\n', "p.jsonl, line 2 holds a list; a row is a JSON object"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, tokenizer, content, message):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tokenizer, str(tmp_path / "p.jsonl"))
