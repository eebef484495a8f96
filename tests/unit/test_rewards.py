"""Rewards: what functions are given, what of theirs counts, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from spotgrpo.producer.calling import Outcome, _within
from spotgrpo.producer.rewards import Rewards, Scored
from spotgrpo.shared.config import RewardConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.manifest import RewardIdentity
from spotgrpo.shared.wire import Prompt, Row

CHAT: Prompt = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward file's folder is put on the path; not beyond the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def resolve(folder: Path, source: str, *specs: str | tuple[str, float]) -> Rewards:
    """The functions ``specs`` of a file that holds ``source``."""
    (folder / "rewards.py").write_text(textwrap.dedent(source))
    configs = [
        RewardConfig(function=f"rewards.py:{name}", weight=weight)
        for name, weight in (spec if isinstance(spec, tuple) else (spec, 1.0) for spec in specs)
    ]
    return Rewards.resolve(configs, folder)


def score(
    rewards: Rewards,
    texts: list[str],
    *,
    prompt: Prompt = "p",
    row: Row | None = None,
    timeout_s: float = 30.0,
) -> list[Scored]:
    ids = [[index] for index, _ in enumerate(texts)]
    return asyncio.run(rewards.score(prompt, texts, ids, row or {}, timeout_s))


def values(rewards: Rewards, texts: list[str], **more: Any) -> list[float | None]:
    return [scored.reward for scored in score(rewards, texts, **more)]


def refused(folder: Path, spec: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Rewards.resolve([RewardConfig(function=spec)], folder)
    assert caught.value.key == "rewards[0].function"
    assert "\n" not in str(caught.value)
    return caught.value


# ---- what a function is given -----------------------------------------------------------------------


def test_a_function_gets_what_trl_gives_it(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        seen = []
        def f(prompts, completions, completion_ids=None, **columns):
            seen.append((prompts, completions, completion_ids, columns))
            return [float(len(one)) for one in completions]
        """,
        "f",
    )
    row: Row = {"answer": "a", "level": 3, "prompts": "not these", "completions": "nor these"}
    assert values(rewards, ["x", "yy"], row=row) == [1.0, 2.0]
    seen = rewards.functions[0].code.call.__globals__["seen"]
    assert seen == [(["p", "p"], ["x", "yy"], [[0], [1]], {"answer": ["a", "a"], "level": [3, 3]})]


def test_a_chat_prompt_gives_completions_as_messages(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        def f(prompts, completions, **columns):
            assert prompts[1] == [{"role": "user", "content": "hi"}]
            assert completions[1] == [{"role": "assistant", "content": "yy"}]
            return [1.0] * 2
        """,
        "f",
    )
    assert values(rewards, ["x", "yy"], prompt=CHAT) == [1.0, 1.0]


def test_a_function_that_takes_only_some_columns_gets_only_those(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        def f(completions, answer, level=None):
            return [float(c == a) + l for c, a, l in zip(completions, answer, level)]
        """,
        "f",
    )
    assert values(rewards, ["x", "y"], row={"answer": "x", "level": 2, "other": None}) == [3.0, 2.0]


def test_async_functions_classes_and_partials_are_called_too(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        import asyncio, functools
        async def waits(completions, **columns):
            await asyncio.sleep(0)
            return [1.0 for _ in completions]
        class Length:
            def __call__(self, completions, **columns):
                return [len(one) for one in completions]
        class Later:
            async def __call__(self, completions, **columns):
                return [2.0 for _ in completions]
        def times(factor, completions, **columns):
            return [factor for _ in completions]
        length, later, ten = Length(), Later(), functools.partial(times, 10)
        def gives_a_coroutine(**columns):
            return waits(**columns)
        """,
        "waits",
        "length",
        "later",
        "ten",
        "gives_a_coroutine",
    )
    (scored,) = score(rewards, ["abc"])
    assert scored == Scored(
        17.0, {"waits": 1, "length": 3, "later": 2, "ten": 10, "gives_a_coroutine": 1}
    )
    rewards.try_once("p", {})


def test_each_function_is_called_once_a_group(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        calls = 0
        def f(completions, **columns):
            global calls
            calls += 1
            return [calls] * len(completions)
        """,
        "f",
    )
    assert values(rewards, ["a", "b", "c"]) == [1.0] * 3
    assert values(rewards, ["a"]) == [2.0]


def test_a_file_with_dataclasses_and_a_neighbour_imports(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("BONUS = 0.5\n")
    rewards = resolve(
        tmp_path,
        """
        from __future__ import annotations
        import dataclasses, typing
        from neighbour_of_rewards import BONUS
        @dataclasses.dataclass
        class Parsed:
            text: str
        def f(completions, **columns):
            assert typing.get_type_hints(Parsed) == {"text": str}
            return [len(Parsed(one).text) + BONUS for one in completions]
        """,
        "f",
    )
    assert values(rewards, ["ab"]) == [2.5]
    assert not (tmp_path / "__pycache__" / "rewards.cpython-311.pyc").exists()


def test_an_edit_within_the_same_second_is_seen(tmp_path: Path) -> None:
    first = resolve(tmp_path, "def f(completions, **c): return [1.0] * len(completions)", "f")
    second = resolve(tmp_path, "def f(completions, **c): return [2.0] * len(completions)", "f")
    assert (values(first, ["a"]), values(second, ["a"])) == ([1.0], [2.0])
    assert first.identities()[0].sha256 != second.identities()[0].sha256


def test_a_function_of_an_installed_module_is_found(tmp_path: Path) -> None:
    rewards = Rewards.resolve([RewardConfig(function="json:dumps")], tmp_path)
    assert rewards.functions[0].code.call is json.dumps


def test_a_function_that_changes_its_arguments_changes_neither_task_nor_others(
    tmp_path: Path,
) -> None:
    rewards = resolve(
        tmp_path,
        """
        def first(prompts, completions, entry):
            prompts[0].clear()
            entry[0].clear()
            completions.clear()
            return [0.0, 0.0]
        def second(prompts, completions, entry):
            return [float(entry[0]["a"] + len(prompts[0])) for _ in completions]
        """,
        "first",
        "second",
    )
    row: Row = {"entry": {"a": 1}}
    prompt: Prompt = [{"role": "user", "content": "hi"}]
    assert values(rewards, ["x", "y"], prompt=prompt, row=row) == [2.0, 2.0]
    assert (prompt, row) == (CHAT, {"entry": {"a": 1}})


# ---- weights and names --------------------------------------------------------------------------------


def test_the_reward_is_the_weighted_sum_of_the_parts_that_are_numbers(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        def a(completions, **columns): return [1.0, 2.0, None, None]
        def b(completions, **columns): return [10.0, None, 4.0, None]
        """,
        ("a", 2.0),
        ("b", -0.5),
    )
    assert score(rewards, ["", "", "", ""]) == [
        Scored(-3.0, {"a": 1.0, "b": 10.0}),
        Scored(4.0, {"a": 2.0, "b": None}),
        Scored(-2.0, {"a": None, "b": 4.0}),
        Scored(None, {"a": None, "b": None}),
    ]
    assert not rewards.failures


def test_two_functions_of_one_name_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def f(completions, **c): return [5.0] * len(completions)\n")
    (tmp_path / "rewards.py").write_text(
        "def f(completions, **c): return [1.0] * len(completions)\n"
    )
    specs = ["rewards.py:f", "other.py:f", "rewards.py:f"]
    rewards = Rewards.resolve([RewardConfig(function=spec) for spec in specs], tmp_path)
    assert score(rewards, ["a"]) == [Scored(7.0, {"f": 1.0, "f_2": 5.0, "f_3": 1.0})]


# ---- results ------------------------------------------------------------------------------------------


def test_scalars_of_numpy_and_torch_and_bools_are_numbers(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        import numpy, torch, fractions
        def one_by_one(completions, **columns):
            return [True, numpy.float32(0.5), numpy.int64(2), torch.tensor(1.5), torch.tensor([2.5]),
                    fractions.Fraction(1, 4), numpy.bool_(False)]
        def array(completions, **columns):
            return numpy.ones(7)
        def tensor(completions, **columns):
            return torch.ones(7)
        """,
        "one_by_one",
        "array",
        "tensor",
    )
    assert values(rewards, [""] * 7) == [3.0, 2.5, 4.0, 3.5, 4.5, 2.25, 2.0]
    assert all(type(one) is float for one in values(rewards, [""] * 7))
    assert not rewards.failures


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1.0]", "returned 1 values for 2 completions"),
        ("return [1.0] * 3", "returned 3 values"),
        ("return None", "a NoneType instead of a list"),
        ("return 1.0", "a float instead of a list"),
        ("import numpy; return numpy.array(1.0)", "instead of a list"),
        ("return '12'", "a str instead of a list"),
        ("return {0: 1.0, 1: 2.0}", "a dict instead of a list"),
        ("return (1.0 for _ in range(2))", "a generator instead of a list"),
        ("return ['1', '2']", "'1' in it, which is no number"),
        ("return [1j, 2]", "which is no number"),
        ("return [[1.0], [2.0]]", "which is no number"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("raise StopIteration", "StopIteration"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_bad_function_is_none_and_counted_and_the_others_count_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, body: str, said: str
) -> None:
    rewards = resolve(
        tmp_path,
        f"""
        {kind} bad(completions, **columns):
            {body}
        def good(completions, **columns): return [1.0, 2.0]
        """,
        "bad",
        "good",
    )
    for _ in range(2):
        assert score(rewards, ["a", "b"]) == [
            Scored(1.0, {"bad": None, "good": 1.0}),
            Scored(2.0, {"bad": None, "good": 2.0}),
        ]
    assert rewards.failures == {"bad": 2}
    assert [said in record.getMessage() for record in caplog.records] == [True]  # said once
    with pytest.raises(ConfigError) as caught:
        rewards.try_once("p", {})
    assert (caught.value.key, said in str(caught.value)) == ("rewards[0].function", True)


def test_an_error_is_logged_with_the_line_of_the_users_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = resolve(
        tmp_path, "import json\ndef f(completions, **c):\n    return json.loads('x')\n", "f"
    )
    score(rewards, ["a"])
    assert "rewards.py line 3" in caplog.text


def test_a_sum_that_no_float_holds_is_none(tmp_path: Path) -> None:
    source = "def f(completions, **c): return [1e308] * len(completions)"
    rewards = resolve(tmp_path, source, ("f", 1.0), ("f", 1.0))
    assert score(rewards, ["a"]) == [Scored(None, {"f": 1e308, "f_2": 1e308})]


def test_nan_and_infinity_are_none_and_counted(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        def f(completions, **columns):
            return [1.0, float("nan"), float("-inf"), 10**400]
        """,
        "f",
    )
    assert values(rewards, [""] * 4) == [1.0, None, None, None]
    assert rewards.failures == {"f": 1}


# ---- time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hangs",
    [
        "async def hangs(**c): await asyncio.Event().wait()",
        "async def hangs(**c): threading.Event().wait()",
        "def hangs(**c): threading.Event().wait()",
    ],
    ids=["waits", "blocks its loop", "blocks its thread"],
)
def test_a_function_that_never_answers_stops_neither_the_loop_nor_the_others(
    tmp_path: Path, hangs: str
) -> None:
    rewards = resolve(
        tmp_path,
        f"""
        import asyncio, threading
        {hangs}
        async def later(completions, **c): return [2.0] * len(completions)
        def good(completions, **c): return [1.0] * len(completions)
        """,
        "hangs",
        "later",
        "good",
    )

    async def story() -> tuple[list[Scored], list[Scored], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        first = await rewards.score("p", ["a"], [[1]], {}, timeout_s=0.3)
        second = await rewards.score("p", ["a"], [[1]], {}, timeout_s=0.3)
        ticking.cancel()
        return first, second, ticks

    first, second, ticks = asyncio.run(story())
    assert first[0].parts["hangs"] is None
    assert first[0].parts["good"] == 1.0
    # A loop that the first call blocked was replaced: what shares it may miss one group, not two.
    assert second[0].parts["later"] == 2.0 or "threading" in hangs
    assert rewards.failures["hangs"] == 2
    assert ticks > 5


def test_a_blocked_loop_of_coroutines_is_replaced(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        import threading
        blocked = False
        async def f(completions, **c):
            global blocked
            if not blocked:
                blocked = True
                threading.Event().wait()
            return [1.0] * len(completions)
        """,
        "f",
    )
    assert values(rewards, ["a"], timeout_s=0.3) == [None]
    assert values(rewards, ["a"], timeout_s=10.0) == [1.0]


def test_plain_functions_run_one_at_a_time_and_coroutines_together(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        import asyncio, time
        inside = {"plain": 0, "later": 0}
        most = {"plain": 0, "later": 0}
        def enter(name):
            inside[name] += 1
            most[name] = max(most[name], inside[name])
        def plain(completions, **c):
            enter("plain")
            time.sleep(0.02)
            inside["plain"] -= 1
            return [0.0] * len(completions)
        async def later(completions, **c):
            enter("later")
            await asyncio.sleep(0.02)
            inside["later"] -= 1
            return [0.0] * len(completions)
        """,
        "plain",
        "later",
    )

    async def story() -> None:
        await asyncio.gather(*(rewards.score("p", ["a"], [[1]], {}, 30.0) for _ in range(5)))

    asyncio.run(story())
    most = rewards.functions[0].code.call.__globals__["most"]
    assert most["plain"] == 1
    assert most["later"] > 1


def test_a_function_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import threading\ndef f(**c): threading.Event().wait()\n"
        "async def g(**c): threading.Event().wait()\n"
    )
    script = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from spotgrpo.producer.rewards import Rewards
        from spotgrpo.shared.config import RewardConfig
        configs = [RewardConfig(function=f"rewards.py:{{name}}") for name in "fg"]
        rewards = Rewards.resolve(configs, Path({str(tmp_path)!r}))
        print(asyncio.run(rewards.score("p", ["a"], [[1]], {{}}, 0.2)))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "reward=None" in done.stdout


def test_a_worker_that_stops_scoring_can_score_again(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path,
        """
        import time
        def f(completions, **c):
            time.sleep(0.2)
            return [1.0] * len(completions)
        """,
        "f",
    )

    async def story() -> list[Scored]:
        first = asyncio.create_task(rewards.score("p", ["a"], [[1]], {}, 30.0))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await rewards.score("p", ["a"], [[1]], {}, 30.0)

    assert asyncio.run(story())[0].reward == 1.0


# ---- what is refused ----------------------------------------------------------------------------------


def test_a_spec_that_names_no_function_says_how(tmp_path: Path) -> None:
    for spec in ("rewards.py", "package.module", ":f", "rewards.py:"):
        assert "package.module:function" in str(refused(tmp_path, spec))


def test_a_missing_file_module_or_function_is_refused(tmp_path: Path) -> None:
    assert "no such file" in str(refused(tmp_path, "nowhere.py:f"))
    assert "no module 'no_such_package'" in str(refused(tmp_path, "no_such_package.x:f"))
    assert "no module 'json.nope'" in str(refused(tmp_path, "json.nope:f"))
    (tmp_path / "mine.py").write_text("def g(): pass\nx = 1\n")
    assert "its functions are g" in str(refused(tmp_path, "mine.py:f"))
    assert "is a int, which cannot be called" in str(refused(tmp_path, "mine.py:x"))
    folder = tmp_path / "not_on_the_path"
    folder.mkdir()
    (folder / "yours.py").write_text("def g(): pass\n")
    assert "write yours.py:function" in str(refused(folder, "yours:g"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "x = 1\nimport no_such_module_at_all\n",
            "No module named 'no_such_module_at_all' (bad.py line 2)",
        ),
        ("x = 1\n\ndef f(:\n", "SyntaxError: invalid syntax (bad.py line 3)"),
        ("raise ValueError('odd')\n", "ValueError: odd (bad.py line 1)"),
        ("import sys\nsys.exit(4)\n", "SystemExit: 4 (bad.py line 2)"),
        ("\x00", "bad.py"),
    ],
)
def test_a_file_that_does_not_import_names_the_line(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    assert said in str(refused(tmp_path, "bad.py:f"))
    (tmp_path / "bad.py").write_text(
        "def f(completions, **c): return [0.0]\n"
    )  # mended: not cached
    Rewards.resolve([RewardConfig(function="bad.py:f")], tmp_path)


def test_a_module_that_does_not_import_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward_module.py").write_text("import json\nimport no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = str(refused(tmp_path, "broken_reward_module:f"))
    assert "broken_reward_module.py line 2" in said
    assert "no_such_module_at_all" in said


def test_a_column_that_the_row_does_not_have_is_named_at_the_start(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path, "def f(completions, solution): return [0.0] * len(completions)", "f"
    )
    with pytest.raises(ConfigError, match=r"'solution'.*completion_ids, answer"):
        rewards.try_once("p", {"answer": "x"})
    rewards.try_once("p", {"solution": "x"})


def test_parameters_that_have_no_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions, /): return []\n")
    assert "remove the '/'" in str(refused(tmp_path, "r.py:f"))


def test_trying_once_refuses_a_function_that_hangs_or_gives_nan(tmp_path: Path) -> None:
    rewards = resolve(tmp_path, "import time\ndef f(**c): time.sleep(60)", "f")
    with pytest.raises(ConfigError, match=r"no answer within 0\.2 s"):
        rewards.try_once("p", {}, timeout_s=0.2)
    rewards = resolve(tmp_path, "def f(**c): return [float('nan'), 1.0]", "f")
    with pytest.raises(ConfigError, match="gives nan"):
        rewards.try_once("p", {})


async def test_trying_once_works_inside_a_running_loop(tmp_path: Path) -> None:
    rewards = resolve(
        tmp_path, "async def f(completions, **c): return [0.0] * len(completions)", "f"
    )
    rewards.try_once("p", {})
    assert (await rewards.score("p", ["a"], [[1]], {}, 10.0))[0].reward == 0.0


# ---- a worker's side ------------------------------------------------------------------------------------

SOURCE = "def f(completions, **c): return [0.0] * len(completions)\ndef g(**c): return []\n"


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    (identity,) = resolve(tmp_path, SOURCE, ("f", 0.5)).identities()
    assert identity == RewardIdentity(
        function="rewards.py:f", weight=0.5, sha256=hashlib.sha256(SOURCE.encode()).hexdigest()
    )


def test_a_worker_resolves_the_learners_functions(tmp_path: Path) -> None:
    identities = resolve(tmp_path, SOURCE, ("f", 0.5)).identities()
    assert Rewards.from_run(identities, [], tmp_path).identities() == identities
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(ConfigError, match=r"no such file.*\[\[rewards\]\]"):
        Rewards.from_run(identities, [], elsewhere)
    (elsewhere / "copy.py").write_text(SOURCE)
    override = RewardConfig(function="copy.py:f")
    assert Rewards.from_run(identities, [override], elsewhere).functions[0].weight == 0.5


def test_other_code_function_weight_or_number_of_functions_is_refused(tmp_path: Path) -> None:
    identities = resolve(tmp_path, SOURCE, ("f", 0.5)).identities()

    def override(*configs: RewardConfig) -> None:
        Rewards.from_run(identities, configs, tmp_path)

    with pytest.raises(ConfigError, match=r"learner's function is rewards\.py:f"):
        override(RewardConfig(function="rewards.py:g"))
    with pytest.raises(ConfigError, match=r"rewards\[0\].weight = 1.0.*0.5"):
        override(RewardConfig(function="rewards.py:f", weight=1.0))
    with pytest.raises(ConfigError, match="the run has 1"):
        override(RewardConfig(function="rewards.py:f"), RewardConfig(function="rewards.py:f"))
    (tmp_path / "rewards.py").write_text(SOURCE + "\n")
    with pytest.raises(ConfigError, match="code differs") as caught:
        override()
    assert identities[0].sha256 in str(caught.value)
    assert hashlib.sha256((SOURCE + "\n").encode()).hexdigest() in str(caught.value)


def test_a_function_from_another_file_is_digested_with_it(tmp_path: Path) -> None:
    (tmp_path / "helper_with_reward.py").write_text(SOURCE)
    rewards = resolve(tmp_path, "from helper_with_reward import f\n", "f")
    alone = hashlib.sha256(b"from helper_with_reward import f\n").hexdigest()
    assert rewards.identities()[0].sha256 != alone


def test_a_cancellation_that_comes_with_the_answer_is_heard() -> None:
    """In each of the turns that the event loop takes to bring the answer."""

    async def story() -> None:
        for turns in range(5):
            running: Future[Outcome] = Future()
            waiting = asyncio.create_task(_within(running, 10.0))
            await asyncio.sleep(0)
            running.set_result(Outcome(1))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_asked = waiting.cancel()  # False: it has ended before
            await asyncio.wait({waiting})
            assert waiting.cancelled() is was_asked

    asyncio.run(story())
