"""What cases of all clients share: they run in the client's environment, without rooflax."""

import json
import os
import sys
import traceback

URL = os.environ["MODEL_URL"]  # the embedded chat model
SCRIPTED = os.environ["SCRIPTED_URL"]  # says "Hello, world.", or calls get_weather once
NAME = os.environ["MODEL_NAME"]
ASK = "What is the weather in Oslo?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "cold": {"type": "boolean"}},
    "required": ["city", "cold"],
    "additionalProperties": False,
}


def run(*cases):
    """Runs functions one by one; prints a line of JSON for each."""
    for case in cases:
        name = case.__name__.replace("_", " ")
        try:
            case()
            found = {"case": name, "why": None}
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            found = {"case": name, "why": f"{type(error).__name__}: {str(error)[:300]}"}
        print("CASE " + json.dumps(found), flush=True)
