"""Prompts: what is loaded, in what order, and what is refused before anything starts."""

from __future__ import annotations

import csv
import datetime as dt
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spotgrpo.consumer.prompts import PromptSource, pass_order
from spotgrpo.shared.config import DataConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Sampling, Task, decode_task, encode_task

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<{{ m.role }}>{% if m.tool_calls is defined %}CALLS{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; BOS in front and EOS behind, as some models' tokenizers do."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {"<s>": 0, "</s>": 1, "?u": 2} | {c: i for i, c in enumerate(characters, start=3)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?u"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    found.chat_template = CHAT
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(
    path: Path, tokenizer: Any, *, seed: int = 0, context: int = 100, new: int = 20, **options: Any
) -> PromptSource:
    return PromptSource.open(DataConfig(path=str(path), **options), seed, tokenizer, context, new)


def refused(path: Path, tokenizer: Any, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make(path, tokenizer, **options)
    assert "\n" not in str(caught.value)
    return caught.value


NUMBERS = [{"prompt": f"n{i}", "answer": str(i)} for i in range(20)]


def test_every_pass_holds_every_prompt_once_in_an_order_of_its_own(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = make(write(tmp_path / "d.jsonl", NUMBERS), tokenizer, seed=7)
    passes = [[source[k * 20 + i].row["answer"] for i in range(20)] for k in range(3)]
    assert all(sorted(one) == sorted(str(i) for i in range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_order_depends_on_seed_and_index_alone(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", NUMBERS)
    first, again, other = (make(path, tokenizer, seed=seed) for seed in (7, 7, 8))
    backwards = [first[i] for i in reversed(range(50))][::-1]
    assert backwards == [again[i] for i in range(50)]
    assert backwards != [other[i] for i in range(50)]


def test_the_order_is_pinned_since_a_resumed_run_must_find_it_again() -> None:
    assert pass_order(range(8), seed=1, done=0) == [3, 0, 5, 4, 2, 1, 6, 7]
    assert pass_order(range(8), seed=1, done=1) == [6, 5, 3, 0, 2, 7, 4, 1]


def test_without_shuffle_prompts_come_in_the_order_of_the_file(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = make(write(tmp_path / "d.jsonl", NUMBERS), tokenizer, shuffle=False)
    assert [source[i].prompt for i in range(40)] == [row["prompt"] for row in NUMBERS] * 2
    with pytest.raises(IndexError):
        source[-1]


def test_jsonl_json_csv_and_parquet_give_the_same_prompts(tmp_path: Path, tokenizer: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"n{i}", "answer": f"a{i}", "level": i} for i in range(4)]
    write(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = {
        suffix: [make(tmp_path / f"d.{suffix}", tokenizer)[i] for i in range(8)]
        for suffix in ("jsonl", "json", "csv", "parquet")
    }
    assert found["jsonl"] == found["json"] == found["csv"] == found["parquet"]
    assert found["csv"][0].row["level"] in range(4)


def test_rows_of_a_json_file_stay_as_the_file_says(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"prompt": "a", "day": "2024-01-02", "extra": {"x": 1}, "mixed": 1},
        {"prompt": "b", "day": "2024-01-03", "extra": {"y": [1, "z"]}, "mixed": "s"},
        {"prompt": "c"},
    ]
    source = make(write(tmp_path / "d.jsonl", rows), tokenizer, shuffle=False)
    assert [source[i].row for i in range(2)] == [
        {key: value for key, value in row.items() if key != "prompt"} for row in rows[:2]
    ]
    assert source[2].row == {"day": None, "extra": None, "mixed": None}


def test_values_of_parquet_become_json_types_that_a_task_carries(
    tmp_path: Path, tokenizer: Any
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    day, moment = (
        dt.date(2024, 1, 2),
        dt.datetime(2024, 1, 2, 3, 4, tzinfo=dt.UTC),
    )
    table = pa.table(
        {
            "prompt": ["a"],
            "day": [day],
            "moment": [moment],
            "vector": pa.array([[1.5, 2.5]], pa.list_(pa.float32())),
            "small": pa.array([3], pa.int8()),
            "nested": [{"k": [1, None]}],
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    found = make(tmp_path / "d.parquet", tokenizer)[0]
    assert found.row == {
        "day": "2024-01-02",
        "moment": "2024-01-02T03:04:00+00:00",
        "vector": [1.5, 2.5],
        "small": 3,
        "nested": {"k": [1, None]},
    }
    task = Task("r", TaskId(0), found.prompt_ids, found.prompt, found.row, Sampling(5), (1, 2))
    assert decode_task(encode_task(task)) == task


@pytest.mark.parametrize("split", ["train[:2]", "train[2:4]", "train[50%:]", "train[:1]+train[3:]"])
def test_a_part_of_a_split_is_the_same_part_in_every_format(
    tmp_path: Path, tokenizer: Any, split: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"n{i}"} for i in range(4)]
    write(tmp_path / "d.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    one, other = (
        make(tmp_path / f"d.{suffix}", tokenizer, split=split, shuffle=False)
        for suffix in ("jsonl", "parquet")
    )
    assert len(one) == len(other) == 2
    assert [one[i] for i in range(2)] == [other[i] for i in range(2)]


# ---- token ids ------------------------------------------------------------------------------------


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_text_gets_one_bos_and_no_eos(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "<s>ab"}]
    source = make(write(tmp_path / "d.jsonl", rows), tokenizer, shuffle=False)
    assert source[0].prompt_ids == source[1].prompt_ids == (0, *ids_of(tokenizer, "ab"))


def test_messages_go_through_the_chat_template_with_one_bos(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    source = make(
        write(tmp_path / "d.jsonl", [{"prompt": messages}]),
        tokenizer,
        chat_template_kwargs={"suffix": "!"},
    )
    assert list(source[0].prompt_ids) == ids_of(tokenizer, "<s><user>hi<assistant>!")
    assert source[0].prompt_ids.count(0) == 1
    assert source[0].prompt == messages


def test_the_system_prompt_comes_first_and_makes_a_chat_of_text(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}]
    path = write(tmp_path / "d.jsonl", rows)
    source = make(path, tokenizer, shuffle=False, system_prompt="be")
    assert list(source[0].prompt_ids) == ids_of(tokenizer, "<s><system>be<user>hi<assistant>")
    assert source[0] == source[1]
    assert source[0].prompt[0] == {"role": "system", "content": "be"}


def test_null_keys_that_columnar_files_fill_in_do_not_reach_the_template(
    tmp_path: Path, tokenizer: Any
) -> None:
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    source = make(write(tmp_path / "d.jsonl", [{"prompt": messages}]), tokenizer)
    assert list(source[0].prompt_ids) == ids_of(tokenizer, "<s><user>hi<assistant>")


# ---- identity -------------------------------------------------------------------------------------


def test_the_identity_is_that_of_content_and_order_not_of_the_folder(
    tmp_path: Path, tokenizer: Any
) -> None:
    here, there = tmp_path / "d.jsonl", tmp_path / "x" / "d.jsonl"
    there.parent.mkdir()
    write(here, NUMBERS)
    write(there, [dict(reversed(row.items())) for row in NUMBERS])
    identity = make(here, tokenizer).identity()
    assert identity == make(there, tokenizer).identity()
    assert (identity.rows, identity.shuffle_seed) == (20, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"shuffle": False},
        {"system_prompt": "x"},
        {"max_prompt_tokens": 3, "overlong": "drop"},
        {"split": "train[:19]"},
    ],
)
def test_another_order_or_question_is_another_identity(
    tmp_path: Path, tokenizer: Any, change: dict[str, Any]
) -> None:
    path = write(tmp_path / "d.jsonl", NUMBERS)
    assert make(path, tokenizer).identity() != make(path, tokenizer, **change).identity()


def test_one_changed_answer_is_another_identity(tmp_path: Path, tokenizer: Any) -> None:
    one = make(write(tmp_path / "d.jsonl", NUMBERS), tokenizer).identity()
    changed = [*NUMBERS[:-1], {"prompt": "n19", "answer": "20"}]
    assert one != make(write(tmp_path / "d.jsonl", changed), tokenizer).identity()


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet"])
def test_a_missing_or_empty_or_broken_file_is_refused(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    path = tmp_path / name
    assert "no such file" in str(refused(path, tokenizer))
    path.write_text("")
    assert refused(path, tokenizer).key == "data.path"
    if not name.endswith("csv"):
        path.write_text('{"prompt": "a"\n[')
        assert refused(path, tokenizer).key == "data.path"


def test_a_broken_line_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": }\n')
    assert "line 3" in str(refused(path, tokenizer))
    path.write_text('{"prompt": "a"}\n["prompt"]\n')
    assert "line 2 is a list" in str(refused(path, tokenizer))


def test_a_csv_with_a_header_alone_has_no_rows(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "d.csv").write_text("prompt,answer\n")
    assert "no rows" in str(refused(tmp_path / "d.csv", tokenizer))


def test_a_data_set_without_the_prompt_column_names_those_it_has(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "a", "answer": "b"}])
    error = refused(path, tokenizer)
    assert error.key == "data.prompt_column"
    assert "question, answer" in str(error)
    assert make(path, tokenizer, prompt_column="question")[0].row == {"answer": "b"}


@pytest.mark.parametrize("prompt", [3, None, [], {"role": "user"}, [1], [{"content": "x"}]])
def test_a_prompt_that_is_neither_text_nor_messages_names_its_row(
    tmp_path: Path, tokenizer: Any, prompt: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": prompt}])
    error = refused(path, tokenizer)
    assert (error.key, "row 1" in str(error)) == ("data.prompt_column", True)


def test_an_empty_prompt_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    class NoBos:
        """Some models' tokenizers put nothing in front, and an engine needs one token to start from."""

        def __call__(self, text: Any, **options: Any) -> Any:
            return tokenizer(text, add_special_tokens=False)

    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    assert "row 1 is empty" in str(refused(path, NoBos()))


def test_a_chat_without_a_template_and_one_that_the_template_refuses(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": [{"role": role, "content": "x"}]} for role in ("user", "tool")]
    path = write(tmp_path / "d.jsonl", rows)
    error = str(refused(path, tokenizer))
    assert "row 1" in error
    assert "no tools" in error
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert "no chat template" in str(refused(path, bare))


def test_a_second_system_message_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    path = write(tmp_path / "d.jsonl", [{"prompt": messages}])
    assert refused(path, tokenizer, system_prompt="be").key == "data.system_prompt"


def test_an_overlong_prompt_is_refused_with_row_length_limit_and_remedy(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b" * 80}])
    error = str(refused(path, tokenizer))
    assert "row 1 has 81 tokens, more than the limit of 80" in error
    assert "data.overlong" in error
    assert len(make(path, tokenizer, new=19)) == 2


def test_dropped_prompts_are_counted_and_never_come(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a" * length} for length in (1, 90, 2, 91)]
    with caplog.at_level(logging.WARNING):
        source = make(write(tmp_path / "d.jsonl", rows), tokenizer, overlong="drop")
    assert "2 of 4 prompts" in caplog.text
    assert {source[i].prompt for i in range(20)} == {"a", "aa"}
    write(tmp_path / "d.jsonl", rows[1::2])
    assert "all 2 prompts" in str(refused(tmp_path / "d.jsonl", tokenizer, overlong="drop"))


def test_limits_that_leave_no_room_or_contradict_are_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", NUMBERS)
    assert refused(path, tokenizer, new=100).key == "sampling.max_new_tokens"
    assert refused(path, tokenizer, max_prompt_tokens=81).key == "data.max_prompt_tokens"


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**70, [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]
)
def test_a_value_that_json_cannot_carry_names_its_column_and_row(
    tmp_path: Path, tokenizer: Any, value: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": value}])
    assert "column 'x' of row 1" in str(refused(path, tokenizer))


def test_bytes_and_half_characters_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"], "blob": [b"\x00"]}), tmp_path / "d.parquet")
    assert "column 'blob' of row 0" in str(refused(tmp_path / "d.parquet", tokenizer))
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "x": "\\ud800"}\n')
    assert "surrogate" in str(refused(tmp_path / "d.jsonl", tokenizer))


def test_a_row_that_no_message_can_carry_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "x": "y" * (5 << 20)}])
    assert "row 0 has" in str(refused(path, tokenizer))


@pytest.mark.parametrize("path", ["nobody/has-this", "no such//name", "/nowhere/at/all"])
def test_a_data_set_that_is_not_found_is_refused(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, path: str
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    error = refused(Path(path), tokenizer)
    assert (error.key, "neither a file nor" in str(error)) == ("data.path", True)


def test_a_split_that_is_not_there_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", NUMBERS)
    assert refused(path, tokenizer, split="train[:x]").key == "data.split"
    assert "no rows" in str(refused(path, tokenizer, split="train[20:]"))
