"""EvalScope's tasks: its process (`evalscope_worker.py`) says what to ask, and later grades what was generated."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror
from moe_lab.evaluation.generation import Answer, Question
from moe_lab.evaluation.harness import HARNESSES, Graded, mean_result, prompt_hash
from moe_lab.evaluation.harnesses.evalplus_grader import cores
from moe_lab.evaluation.harnesses.evalscope_code import CodeSettings
from moe_lab.evaluation.harnesses.evalscope_tasks import TASKS, interpreter
from moe_lab.evaluation.harnesses.evalscope_worker import Reply, Request
from moe_lab.evaluation.sandbox.policy import NAMESPACES, Policy
from moe_lab.results import Sample
from moe_lab.start import command

UNSCORED_AT_MOST = 0.01
"""Share of answers that EvalScope may fail to compare (its time for one is limited); they count as wrong."""
_TESTS_SECONDS = 6.0  # EvalScope's own limit
_SAME = 1e-4  # EvalScope rounds its means to so much


def ask(benchmark: BenchmarkConfig) -> list[Question]:
    """EvalScope's prompts: conversations for a chat template, or their text where benchmark.chat is off."""
    reply = _run(benchmark, None, None)
    return [Question(each["item"], _prompt(each["messages"], benchmark.chat)) for each in reply.questions]


def _prompt(messages: list[dict[str, str]], chat: bool) -> str | list[dict[str, str]]:
    return messages if chat else "\n\n".join(message["content"] for message in messages) + "\n"


def stops(benchmark: BenchmarkConfig) -> tuple[str, ...]:
    """Nothing: EvalScope reads whole answers."""
    return ()


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """EvalScope's verdicts. RuntimeError when it could not compare more than 1 % of the answers, or did not grade each
    of them once."""
    code = TASKS[benchmark.task].code
    protection = policy.protection(closed_world=False) if code else None
    reply = _run(benchmark, {answer.item: _whole(answer.output) for answer in answers}, policy)
    verdicts = {sample["item"]: sample for sample in reply.samples}
    unscored = [item for item, verdict in verdicts.items() if verdict["outcome"] is None]
    _check(reply, unscored, benchmark)
    samples = [_sample(name, answer, verdicts[answer.item], code) for name in benchmark.reports for answer in answers]
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    protocol = {"evalscope": reply.versions, "unscored": unscored, **({"sandbox": protection} if code else {})}
    return Graded(results, samples, protocol)


def _whole(text: str) -> str:
    """Text that can be written: a model, or its server, may send half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _check(reply: Reply, unscored: Sequence[str], benchmark: BenchmarkConfig) -> None:
    if len(unscored) > UNSCORED_AT_MOST * len(reply.samples):
        raise RuntimeError(
            f"benchmark {benchmark.name}: EvalScope could not compare {len(unscored)} of {len(reply.samples)} answers, "
            f"such as that to {unscored[0]}"
        )
    scored = [sample["outcome"] for sample in reply.samples if sample["outcome"] is not None]
    mean = math.fsum(scored) / len(scored)
    if reply.score is None or abs(mean - reply.score) > _SAME:
        raise RuntimeError(
            f"benchmark {benchmark.name}: EvalScope's mean is {reply.score}, that of its verdicts {mean}"
        )


def _sample(name: str, answer: Answer, verdict: Mapping[str, Any], code: bool) -> Sample:
    outcome = verdict["outcome"]
    extracted = ("pass" if outcome else verdict["why"]) if code else verdict["extracted"]
    return Sample(
        benchmark=name,
        item=answer.item,
        outcome=outcome or 0.0,
        prompt_hash=prompt_hash(answer.prompt),
        output=answer.output,
        extracted=extracted if outcome is not None else f"not compared: {verdict['why']}",
    )


def _run(benchmark: BenchmarkConfig, texts: dict[str, str] | None, policy: Policy | None) -> Reply:
    """One run of EvalScope's process. UserError for what is wrong with the data, RuntimeError with its last words."""
    with tempfile.TemporaryDirectory(prefix="moe_lab-evalscope-") as folder:
        place = Path(folder)
        request = Request(
            task=benchmark.task,
            folder=str(_view(benchmark, place / "data")),
            work=str(place / "work"),
            dataset_args=_dataset_args(benchmark),
            settings={"max_tokens": benchmark.max_new_tokens, "temperature": 0.0},
            limit=benchmark.limit,
            texts=texts,
            code=_code(benchmark, policy),
        )
        (place / "request.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
        _wait(_command(benchmark, place), place, benchmark)
        reply = Reply(**json.loads((place / "reply.json").read_text(encoding="utf-8")))
    if reply.error:
        raise UserError(f"benchmark {benchmark.name}: {reply.error}")
    return reply


def _view(benchmark: BenchmarkConfig, place: Path) -> Path:
    """The mirror's data as EvalScope can read it, in links: it deletes files of folders that it reads."""
    configs = []
    for subset, splits in mirror.subsets(benchmark).items():
        files = []
        for split, sources in splits.items():
            for number, source in enumerate(sources):
                link = place / subset / f"{split}-{number}{''.join(source.suffixes[-2:])}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
            files.append({"split": split, "path": f"{subset}/{split}-*"})
        configs.append({"config_name": subset, "data_files": files})
    (place / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n", encoding="utf-8")
    return place


def _dataset_args(benchmark: BenchmarkConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {"few_shot_num": benchmark.shots, "eval_split": benchmark.split}
    return arguments if TASKS[benchmark.task].parted else {**arguments, "subset_list": [benchmark.subset or "default"]}


def _code(benchmark: BenchmarkConfig, policy: Policy | None) -> CodeSettings | None:
    if not TASKS[benchmark.task].code:
        return None
    limits = {
        name: benchmark.parameters[name]
        for name in HARNESSES["evalscope"].grading_parameters
        if benchmark.parameters.get(name)
    }
    return CodeSettings(
        start_date=str(benchmark.parameters["start_date"]),
        end_date=str(benchmark.parameters["end_date"]),
        pickles=policy is not None and policy.allow_pickled_data,
        confined=policy is not None and policy.protection(closed_world=False) == NAMESPACES,
        **{"processes": cores(), "seconds": _TESTS_SECONDS, **limits},
    )


def _command(benchmark: BenchmarkConfig, place: Path) -> list[str]:
    files = [str(place / name) for name in ("request.json", "reply.json")]
    return command("moe_lab.evaluation.harnesses.evalscope_worker", *files, python=interpreter(benchmark))


def _wait(command: list[str], place: Path, benchmark: BenchmarkConfig) -> None:
    """Run the process to its end; nothing of this environment reaches it, and nothing of it outlives this."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    caches = {name: str(place / "cache") for name in ("HF_HOME", "MODELSCOPE_CACHE", "EVALSCOPE_CACHE")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    log = place / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=place,
            env={**kept, **caches, **offline, "PYTHONNOUSERSITE": "1", "HOME": str(place), "TMPDIR": str(place)},
            stdin=subprocess.PIPE,  # stays open as long as this process lives
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what it started, if it left anything
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = f"killed by signal {-code}" if code < 0 else lines[-1] if lines else f"exit code {code}"
        raise RuntimeError(f"benchmark {benchmark.name}: EvalScope failed: {reason}")
