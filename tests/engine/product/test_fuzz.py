"""Files that `make fuzz` once found to be read wrongly."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KINDS = sorted({path.name.partition("-")[0] for path in (ROOT / "tests/data/fuzz").iterdir()})


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_were_read_wrongly_are_read_or_rejected(kind):
    command = [sys.executable, "tools/fuzz_files.py", "--seconds", "0", "--only", kind]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kept = len(list((ROOT / "tests/data/fuzz").glob(f"{kind}-*")))
    assert f"{kind}: {kept} files" in ran.stdout
