"""The tables of the documents this project grew from, each measured again on this machine.

`python -m benchmarks.founding` writes docs/founding-tables.json and docs/founding-tables.md. A file
per table holds their figures, the measurement and its Markdown; what is drawn or said is computed
from the JSON alone.
"""
