import json
import os
import subprocess
import sys
import tempfile

import check

folder = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = folder
with open(f"{folder}/extra-openai-models.yaml", "w") as file:
    file.write(
        f"- model_id: m\n  model_name: {check.NAME}\n  api_base: {check.URL}/v1\n"
        f"  supports_tools: true\n  supports_schema: true\n"
        f"- model_id: s\n  model_name: {check.NAME}\n  api_base: {check.SCRIPTED}/v1\n"
        f"  supports_tools: true\n"
    )
os.environ["OPENAI_API_KEY"] = "any"


def llm(*words):
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


def prompt():
    assert "rooflax" in llm("-m", "m", "Who are you?")
    assert "rooflax" in llm("-m", "m", "--no-stream", "Who are you?")


def schema():
    found = json.loads(llm("-m", "m", "--schema", json.dumps(check.CITY), "Oslo"))
    assert set(found) == {"city", "cold"}


def tools():
    code = 'def get_weather(city: str) -> str:\n    "Weather of a city"\n    return "12 degrees"\n'
    assert "It is 12 degrees." in llm("-m", "s", "--functions", code, check.ASK)


check.run(prompt, schema, tools)
