import subprocess
import sys
from pathlib import Path

import check

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


def schemathesis(phase):
    """No status that the description lacks, no 5xx, no answer of another shape. The routes that the
    chat model does not have answer 501, which is left out."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run"]
    done = subprocess.run(
        [*command, f"{check.SCRIPTED}/openapi.json", "--phases", phase, "--checks", CHECKS,
         "--exclude-path-regex", "embeddings|rerank", "--max-examples", "25", "--seed", "1",
         "--workers", "2", "--request-timeout", "60"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    said = done.stdout.partition("SUMMARY")[2]
    # Its generator may fail by itself ("Inconsistent results"); what it found counts.
    assert "Tested:" in said and "Failures:" not in said, done.stdout[-3000:]


def coverage():
    schemathesis("coverage")


def fuzzing():
    schemathesis("fuzzing")


check.run(coverage, fuzzing)
