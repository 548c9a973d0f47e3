"""Writes the bill of materials of an environment with rooflax: CycloneDX, with what is inside too.

python tools/sbom.py PYTHON dist/rooflax.cdx.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "src" / "rooflax" / "server" / "page" / "vendor"
INSIDE = (
    ("marked", "marked.umd.js", r"marked v([\d.]+)", "MIT"),
    ("dompurify", "purify.min.js", r"DOMPurify ([\d.]+)", "Apache-2.0 OR MPL-2.0"),
)
"""What the chat page brings: npm's name, the file, its version in it, and its licence."""


def main() -> None:
    python, out = sys.argv[1:]
    how = ("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--of", "JSON")
    command = [sys.executable, "-m", "cyclonedx_py", "environment", *how, python]
    bill = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    for name, file, pattern, licence in INSIDE:
        found = re.search(pattern, (VENDOR / file).read_text(encoding="utf-8"))
        assert found is not None, file
        package = f"pkg:npm/{name}@{found[1]}"
        bill["components"].append(
            {
                "type": "library",
                "name": name,
                "version": found[1],
                "purl": package,
                "bom-ref": package,
                "licenses": [{"expression": licence}],
                "description": "in the package, for the chat page",
            }
        )
    bill["components"].append(
        {
            "type": "library",
            "name": "libstdc++",
            "bom-ref": "libstdc++",
            "licenses": [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}],
            "description": "linked into the wheels' native library",
        }
    )
    text = re.sub(r'"file://[^"]*"', '"file:///"', json.dumps(bill, indent=1, sort_keys=True))
    Path(out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
