"""Miniature data sets in the exact schema of the hub, mirrors made of them, and a hub that serves them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.data_sets import write_data_set
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation.mirror import benchmarks, make

Rows = list[dict[str, Any]]

BOOLQ: Rows = [
    {"question": "is the sea salt", "passage": "Sea -- The sea is salt water.", "idx": 0, "label": 1},
    {"question": "can a stone swim", "passage": "Stone -- A stone sinks.\nIt is heavy.", "idx": 1, "label": 0},
    {"question": "do owls fly", "passage": "Owl -- Owls fly at night.", "idx": 2, "label": 1},
]
HELLASWAG: Rows = [
    {
        "ind": number,
        "activity_label": label,
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}",
        "endings": endings,
        "source_id": f"activitynet~v_{number}",
        "split": "val",
        "split_type": "indomain",
        "label": answer,
    }
    for number, (label, first, second, endings, answer) in enumerate(
        [
            ("Roof", "A man sits on a roof.", "he", ["is using wrap.", "is tiles.", "holds a cube.", "pulls."], "3"),
            (
                "Tea",
                "[header] How to make tea [title] Boil water.",
                "you",
                ["[step] pour", "wait  long", "x", "y"],
                "0",
            ),
            ("Dogs", "Two dogs run.", "", ["They bark loudly at cars.", "They", "fly.", "sleep on."], "1"),
        ]
    )
]
RTE: Rows = [
    {"sentence1": "Ann lives in Rome.", "sentence2": "Ann lives in Italy.", "label": 0, "idx": 0},
    {"sentence1": "It rained.", "sentence2": "It was dry.", "label": 1, "idx": 1},
    {"sentence1": "He has two cats.", "sentence2": "He has a cat.", "label": 0, "idx": 2},
]
MATHQA: Rows = [
    {
        "Problem": problem,
        "Rationale": '"explanation"',
        "options": options,
        "correct": correct,
        "annotated_formula": "add(1, 2)",
        "linear_formula": "add(n0,n1)|",
        "category": "general",
    }
    for problem, options, correct in [
        ("two and three is ?", "a ) 38 , b ) 27.675 , c ) 5 , d ) data inadequate , e ) none of these", "c"),
        ("a train runs 10 km in 2 h", "a ) 5 , b ) 50 , c ) 1,000 , d ) 7 , e ) 12 km", "a"),
        ("half of 9 is ?", "a ) rs . 4 , b ) 4.5 , c ) 5 , d ) 9 , e ) 18", "b"),
    ]
]
MINIATURES: dict[str, Rows] = {"boolq": BOOLQ, "hellaswag": HELLASWAG, "rte": RTE, "mathqa": MATHQA}


def subject_rows(subject: str, count: int) -> Rows:
    """MMLU questions of one subject."""
    return [
        {
            "question": f" {subject} {n} ?",
            "subject": subject,
            "choices": [f"{n}", f"{n + 1}", "x", "y"],
            "answer": n % 4,
        }
        for n in range(count)
    ]


def mirrored(folder: Path, name: str, rows: Rows, **more: Rows) -> BenchmarkConfig:
    """The benchmark with a mirror under folder/data of rows for the split that is asked and `more` splits."""
    (benchmark,) = benchmarks([name], str(folder / "data"))
    benchmark = replace(benchmark, expected=len(rows))
    parts: dict[tuple[str, str], Rows] = {}
    for split, content in {str(benchmark.split): rows, **more}.items():
        for row in content:
            subset = benchmark.subset or (row["subject"] if name == "mmlu" else "default")
            parts.setdefault((subset, split), []).append(row)
    make(benchmark, write_data_set(folder / f"{name}_source", parts))
    return benchmark


_ROUTE = re.compile(r"/(?:api/)?datasets/([^/]+/[^/]+)/(revision|tree|resolve)/(\w+)/?([^?]*)")


class _Hub(BaseHTTPRequestHandler):
    folder: Path
    sent: list[str]

    def do_GET(self) -> None:
        route = _ROUTE.match(self.path)
        if route is None or not (self.folder / route[1]).is_dir():
            self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)
            return
        name, asked, revision, path = route.groups()
        files = {file.relative_to(self.folder / name).as_posix(): file for file in (self.folder / name).rglob("*.*")}
        if asked == "resolve":
            content = files[path].read_bytes()
            if self.command == "GET":
                self.sent.append(f"{revision}/{path}")
            self._send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": revision})
        elif asked == "tree":
            about = {"type": "file", "oid": "0" * 40}
            self._send_json([{**about, "path": path, "size": f.stat().st_size} for path, f in files.items()])
        else:
            self._send_json({"id": name, "sha": revision, "siblings": [{"rfilename": path} for path in files]})

    do_HEAD = do_GET

    def _send_json(self, document: Any) -> None:
        self._send(json.dumps(document).encode(), {})

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with the data sets folder/OWNER/NAME, and the files that were sent, as revision/path."""
    sent: list[str] = []
    handler = type("Hub", (_Hub,), {"folder": folder, "sent": sent})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
