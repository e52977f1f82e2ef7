"""A process that does jobs: one JSON line in, one JSON line out, the model stays loaded in between.

Started as `python -m moe_lab.study.worker`; needs neither Hydra nor the configuration. It ends when its standard
input does, even in the middle of a job, so that no orphan goes on writing after its parent was killed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import IO, Any

from moe_lab.study.job import Job, error_document


def _listen(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def serve(replies: IO[str]) -> None:
    """Do jobs for ever, replying {} for success or the error's document."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = Job(**jobs.get())
        print(f"{time.strftime('%H:%M:%S')} {job.name}", file=sys.stderr, flush=True)
        try:
            from moe_lab.study.steps import perform

            perform(job)
            reply: dict[str, Any] = {}
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to this job alone, and is reported
            reply = error_document(error)
            print(reply["trace"] or reply["message"], file=sys.stderr, flush=True)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
    serve(channel)
