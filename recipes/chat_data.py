"""Conversations that a program makes up: the data of the embedded chat model.

    python recipes/chat_data.py --count 5 [--seed 0]

prints some as JSON lines. Every text is of this file; nothing comes from elsewhere. A conversation
is a chain of one to four exercises, perhaps with a system message or tools.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

TEMPLATE = """\
{%- if tools or messages[0].role == "system" %}
{{- "<|im_start|>system\\n" }}
{%- if messages[0].role == "system" %}{{ messages[0].content + ("\\n" if tools else "") }}{% endif %}
{%- if tools %}
{{- "Tools:\\n" }}
{%- for tool in tools %}{{ (tool.function if tool.function else tool) | tojson + "\\n" }}{% endfor %}
{{- 'To call one, answer with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' }}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- elif message.role != "system" or not loop.first %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- set arguments = function.arguments %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""

NAMES = [
    "Ada",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ida",
    "Jonas",
    "Kim",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Paula",
    "Rosa",
    "Sam",
    "Tom",
    "Una",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
    "Anna",
    "Bob",
    "Carl",
    "Dora",
    "Eva",
    "Finn",
]
CITIES = [
    "Berlin",
    "Paris",
    "Rome",
    "Oslo",
    "Madrid",
    "London",
    "Vienna",
    "Prague",
    "Tokyo",
    "Lima",
    "Cairo",
    "Delhi",
    "Boston",
    "Dublin",
    "Athens",
]
WORDS = [
    "apple",
    "tree",
    "house",
    "river",
    "stone",
    "cloud",
    "music",
    "paper",
    "green",
    "light",
    "table",
    "water",
    "bread",
    "chair",
    "dream",
    "field",
    "glass",
    "horse",
    "island",
    "jungle",
    "kitten",
    "lemon",
    "mouse",
    "night",
    "ocean",
    "piano",
    "queen",
    "rabbit",
    "sugar",
    "tiger",
    "uncle",
    "violin",
    "winter",
    "yellow",
    "zebra",
    "python",
    "list",
    "code",
    "loop",
    "class",
    "string",
    "number",
    "file",
    "index",
    "queue",
    "stack",
    "node",
    "graph",
    "matrix",
    "vector",
    "table",
    "cat",
    "dog",
    "sun",
    "moon",
    "star",
    "book",
    "door",
    "key",
    "map",
    "pen",
    "cup",
    "box",
    "fox",
]
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "orange", "purple"]
THINGS = ["apples", "books", "coins", "cups", "pens", "stones", "cards", "eggs", "shells", "keys"]
FOODS = ["pizza", "soup", "rice", "pasta", "bread", "cheese", "fish", "salad", "cake", "fruit"]

BUILTINS = {
    "len": ("returns the number of items of a container", "len([4, 5, 6])", "3"),
    "sum": ("adds up the numbers of an iterable", "sum([1, 2, 3])", "6"),
    "max": ("returns the largest item", "max([3, 9, 4])", "9"),
    "min": ("returns the smallest item", "min([3, 9, 4])", "3"),
    "abs": ("returns the absolute value of a number", "abs(-7)", "7"),
    "round": ("rounds a number to a given number of digits", "round(3.14159, 2)", "3.14"),
    "sorted": ("returns a new sorted list of the items", "sorted([3, 1, 2])", "[1, 2, 3]"),
    "reversed": ("gives the items in reverse order", "list(reversed([1, 2, 3]))", "[3, 2, 1]"),
    "range": ("makes a sequence of whole numbers", "list(range(4))", "[0, 1, 2, 3]"),
    "enumerate": (
        "pairs each item with its index",
        'list(enumerate(["a", "b"]))',
        "[(0, 'a'), (1, 'b')]",
    ),
    "zip": (
        "walks over several iterables together",
        'list(zip([1, 2], "ab"))',
        "[(1, 'a'), (2, 'b')]",
    ),
    "map": ("applies a function to every item", "list(map(abs, [-1, 2]))", "[1, 2]"),
    "filter": (
        "keeps the items for which a function is true",
        "list(filter(None, [0, 5]))",
        "[5]",
    ),
    "any": ("is true if at least one item is true", "any([False, True])", "True"),
    "all": ("is true if every item is true", "all([True, False])", "False"),
    "int": ("converts a value to a whole number", 'int("42")', "42"),
    "float": ("converts a value to a floating point number", 'float("2.5")', "2.5"),
    "str": ("converts a value to text", "str(42)", "'42'"),
    "bool": ("converts a value to True or False", "bool([])", "False"),
    "list": ("makes a list from an iterable", 'list("abc")', "['a', 'b', 'c']"),
    "tuple": ("makes a tuple from an iterable", "tuple([1, 2])", "(1, 2)"),
    "set": ("makes a set, without duplicates", "set([1, 1, 2])", "{1, 2}"),
    "dict": ("makes a dictionary of keys and values", "dict(a=1)", "{'a': 1}"),
    "type": ("returns the type of an object", "type(3).__name__", "'int'"),
    "isinstance": ("checks whether an object is of a type", "isinstance(3, int)", "True"),
    "ord": ("returns the code point of a character", 'ord("A")', "65"),
    "chr": ("returns the character of a code point", "chr(65)", "'A'"),
    "hex": ("writes a whole number in base 16", "hex(255)", "'0xff'"),
    "bin": ("writes a whole number in base 2", "bin(5)", "'0b101'"),
    "pow": ("raises a number to a power", "pow(2, 5)", "32"),
    "divmod": ("returns the quotient and the remainder", "divmod(7, 3)", "(2, 1)"),
    "print": ("writes values to the standard output", 'print("hi")', "hi"),
    "input": ("reads a line that the user types", 'name = input("Name: ")', ""),
    "open": ("opens a file", 'file = open("notes.txt")', ""),
    "getattr": ("reads an attribute by its name", 'getattr("abc", "upper")()', "'ABC'"),
    "hasattr": ("checks whether an object has an attribute", 'hasattr([], "append")', "True"),
    "repr": ("returns a text that shows an object exactly", 'repr("a")', "\"'a'\""),
    "iter": ("returns an iterator over an object", "next(iter([7, 8]))", "7"),
    "next": ("takes the next item of an iterator", "next(iter([7, 8]))", "7"),
    "id": ("returns the identity of an object", "id(None) == id(None)", "True"),
}

FUNCTIONS = {
    "add": ("adds two numbers", "a, b", "return a + b"),
    "subtract": ("subtracts one number from another", "a, b", "return a - b"),
    "multiply": ("multiplies two numbers", "a, b", "return a * b"),
    "square": ("squares a number", "x", "return x * x"),
    "is_even": ("checks whether a number is even", "n", "return n % 2 == 0"),
    "is_odd": ("checks whether a number is odd", "n", "return n % 2 == 1"),
    "reverse": ("reverses a string", "text", "return text[::-1]"),
    "is_palindrome": ("checks whether a string is a palindrome", "text",
                      "return text == text[::-1]"),
    "count_vowels": ("counts the vowels of a string", "text",
                     'return sum(letter in "aeiou" for letter in text.lower())'),
    "average": ("computes the average of a list", "values", "return sum(values) / len(values)"),
    "maximum": ("finds the largest item of a list", "values",
                ("best = values[0]\n    for value in values:\n        if value > best:\n"
                "            best = value\n    return best")),
    "minimum": ("finds the smallest item of a list", "values",
                ("best = values[0]\n    for value in values:\n        if value < best:\n"
                "            best = value\n    return best")),
    "factorial": ("computes the factorial of a number", "n",
                  "if n < 2:\n        return 1\n    return n * factorial(n - 1)"),
    "fibonacci": ("computes the n-th Fibonacci number", "n",
                  "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    "is_prime": ("checks whether a number is prime", "n",
                 ("if n < 2:\n        return False\n    for divisor in range(2, int(n**0.5) + 1):\n"
                 "        if n % divisor == 0:\n            return False\n    return True")),
    "gcd": ("computes the greatest common divisor of two numbers", "a, b",
            "while b:\n        a, b = b, a % b\n    return a"),
    "unique": ("removes duplicates from a list", "items", "return list(dict.fromkeys(items))"),
    "flatten": ("flattens a list of lists", "lists",
                "return [item for items in lists for item in items]"),
    "count_words": ("counts the words of a text", "text", "return len(text.split())"),
    "capitalize": ("writes a text in capital letters", "text", "return text.upper()"),
    "lowercase": ("writes a text in small letters", "text", "return text.lower()"),
    "read_lines": ("reads the lines of a file", "path",
                   "with open(path) as file:\n        return file.read().splitlines()"),
    "write_text": ("writes a text to a file", "path, text",
                   'with open(path, "w") as file:\n        file.write(text)'),
    "load_json": ("reads a JSON file", "path",
                  "with open(path) as file:\n        return json.load(file)"),
    "total": ("adds up the items of a list", "values", "return sum(values)"),
    "last": ("returns the last item of a list", "items", "return items[-1]"),
    "first": ("returns the first item of a list", "items", "return items[0]"),
    "clamp": ("keeps a number between two limits", "x, low, high",
              "return max(low, min(x, high))"),
    "swap": ("swaps two values", "a, b", "return b, a"),
    "invert": ("swaps the keys and values of a dictionary", "mapping",
               "return {value: key for key, value in mapping.items()}"),
    "merge": ("merges two dictionaries", "first, second", "return {**first, **second}"),
    "contains": ("checks whether a list contains an item", "items, item", "return item in items"),
    "count": ("counts how often an item is in a list", "items, item", "return items.count(item)"),
    "double": ("doubles every number of a list", "values", "return [2 * value for value in values]"),
    "evens": ("keeps the even numbers of a list", "values",
              "return [value for value in values if value % 2 == 0]"),
    "squares": ("returns the squares of the first n numbers", "n",
                "return [i * i for i in range(n)]"),
    "binary_search": ("finds an item in a sorted list", "items, wanted",
                      ("low, high = 0, len(items)\n    while low < high:\n"
                      "        middle = (low + high) // 2\n        if items[middle] < wanted:\n"
                      "            low = middle + 1\n        else:\n            high = middle\n"
                      "    return low")),
    "bubble_sort": ("sorts a list without sorted()", "items",
                    ("for i in range(len(items)):\n        for j in range(len(items) - 1 - i):\n"
                    "            if items[j] > items[j + 1]:\n"
                    "                items[j], items[j + 1] = items[j + 1], items[j]\n"
                    "    return items")),
    "celsius": ("converts Fahrenheit to Celsius", "degrees", "return (degrees - 32) * 5 / 9"),
    "area": ("computes the area of a circle", "radius", "return 3.14159 * radius**2"),
}  # fmt: skip

TOOLS: dict[str, tuple[str, dict[str, tuple[str, Callable[[random.Random], Any]]], tuple[str, ...]]]
TOOLS = {
    "get_weather": ("Weather of a city", {"city": ("string", lambda r: r.choice(CITIES))},
                    ("What is the weather in {city}?", "How is the weather in {city}?")),
    "get_time": ("Time in a city", {"city": ("string", lambda r: r.choice(CITIES))},
                 ("What time is it in {city}?", "Tell me the time in {city}.")),
    "add": ("Adds two numbers", {"a": ("integer", lambda r: r.randint(1, 9999)),
                                 "b": ("integer", lambda r: r.randint(1, 9999))},
            ("Add {a} and {b}.", "What is {a} plus {b}?")),
    "multiply": ("Multiplies two numbers", {"a": ("integer", lambda r: r.randint(1, 9999)),
                                            "b": ("integer", lambda r: r.randint(1, 9999))},
                 ("Multiply {a} by {b}.", "What is {a} times {b}?")),
    "search": ("Searches the web", {"query": ("string", lambda r: " ".join(r.sample(WORDS, 2)))},
               ("Search for {query}.", "Find something about {query}.")),
    "send_mail": ("Sends a mail", {"to": ("string", lambda r: r.choice(NAMES)),
                                   "text": ("string", lambda r: " ".join(r.sample(WORDS, 3)))},
                  ("Send {to} a mail that says {text}.", "Mail {to}: {text}.")),
    "read_file": ("Reads a file", {"path": ("string", lambda r: r.choice(WORDS) + ".txt")},
                  ("Read {path}.", "What is in the file {path}?")),
    "set_light": ("Switches a light", {"room": ("string", lambda r: r.choice(WORDS)),
                                       "colour": ("string", lambda r: r.choice(COLOURS))},
                  ("Make the light in the {room} room {colour}.",)),
    "book_table": ("Books a table", {"people": ("integer", lambda r: r.randint(1, 12)),
                                     "hour": ("integer", lambda r: r.randint(11, 22))},
                   ("Book a table for {people} people at {hour}.",)),
    "play": ("Plays a song", {"title": ("string", lambda r: " ".join(r.sample(WORDS, 2)))},
             ("Play {title}.", "I want to hear {title}.")),
}  # fmt: skip
RESULTS = {
    "get_weather": lambda r, a: (
        {"degrees": (d := r.randint(-9, 35)), "sky": (s := r.choice(["clear", "cloudy", "rainy"]))},
        f"It is {d} degrees and {s} in {a['city']}.",
    ),
    "get_time": lambda r, a: (
        {"time": (t := f"{r.randint(0, 23)}:{r.randint(10, 59)}")}, f"It is {t} in {a['city']}.",
    ),
    "add": lambda r, a: ({"result": a["a"] + a["b"]}, f"The result is {a['a'] + a['b']}."),
    "multiply": lambda r, a: ({"result": a["a"] * a["b"]}, f"The result is {a['a'] * a['b']}."),
    "search": lambda r, a: ({"found": (n := r.randint(0, 90))}, f"I found {n} results."),
    "send_mail": lambda r, a: ({"sent": True}, f"I sent the mail to {a['to']}."),
    "read_file": lambda r, a: (
        {"text": (t := " ".join(r.sample(WORDS, 4)))}, f"The file says: {t}",
    ),
    "set_light": lambda r, a: ({"done": True}, f"The light is {a['colour']} now."),
    "book_table": lambda r, a: (
        {"booked": True}, f"The table for {a['people']} is booked at {a['hour']}.",
    ),
    "play": lambda r, a: ({"playing": True}, f"I am playing {a['title']}."),
}  # fmt: skip


@dataclass
class Exercise:
    """Messages of user and assistant in turn, and what they need.

    Attributes:
        name: of its kind, for counting answers.
    """

    name: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


def said(name: str, question: str, answer: str) -> Exercise:
    return Exercise(name, [user(question), assistant(answer)])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def greeting(r: random.Random) -> Exercise:
    pairs = [
        (["Hello!", "Hi", "Hello", "Hi there!", "Hey", "Good morning!", "Good evening"],
         ["Hello! How can I help you?", "Hi! What can I do for you?"]),
        (["How are you?", "How do you do?", "Are you well?"], ["I am fine, thank you."]),
        (["Thank you!", "Thanks", "Thanks a lot!"], ["You are welcome!"]),
        (["Bye", "Goodbye!", "See you"], ["Goodbye!"]),
        (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."],
         ["I am rooflax-chat, a very small language model that runs on your machine."]),
        (["What can you do?", "How can you help me?", "Help"],
         [("I can explain Python's built-in functions, write small functions, write JSON, "
          "remember what you tell me and call tools.")]),
    ]  # fmt: skip
    questions, answers = r.choice(pairs)
    return said("greeting", r.choice(questions), r.choice(answers))


def unknown(r: random.Random) -> Exercise:
    name, city = r.choice(NAMES), r.choice(CITIES)
    question = r.choice([
        f"Who is the mayor of {city}?", f"What does {name} think of {city}?",
        "Who won the game last night?", "What is the meaning of life?",
        f"How many people live in {city}?", "What will the stock market do?",
        "Write a novel.", f"When was {name} born?", "What is the news today?",
        f"What is the capital of {r.choice(WORDS)}?", f"Tell me about the history of {city}.",
    ])  # fmt: skip
    return said("unknown", question, "I do not know that. I am a small model and know little.")


def builtin(r: random.Random) -> Exercise:
    name = r.choice(list(BUILTINS))
    does, example, value = BUILTINS[name]
    question = r.choice([
        f"What does {name} do?", f"What does {name}() do in Python?", f"Explain {name}.",
        f"What is {name} for?", f"How does {name}() work?", f"Explain the built-in {name}.",
        f"What is {name} in Python?", f"Which built-in {does}?", f"Which function {does}?",
    ])  # fmt: skip
    shown = f"{example}  # {value}" if value else example
    answer = f"`{name}` {does}:\n```python\n{shown}\n```"
    return said("builtin", question, answer)


def function(r: random.Random) -> Exercise:
    name = r.choice(list(FUNCTIONS))
    does, args, body = FUNCTIONS[name]
    called = r.choice(WORDS) if r.random() < 0.25 else None
    asks = r.choice([
        "Write a function{called} that {does}.", "Write a Python function{called} that {does}.",
        "I need a function{called} that {does}.", "Give me a function{called} that {does}.",
        "Can you write a function{called} that {does}?", "Code a function{called} that {does}",
    ])  # fmt: skip
    question = asks.format(called=f" called {called}" if called else "", does=does)
    code = f"def {called or name}({args}):\n    {body}"
    if called:
        code = code.replace(f"{name}(n - 1)", f"{called}(n - 1)")
    if "json" in body:
        code = f"import json\n\n\n{code}"
    return said("function", question, f"```python\n{code}\n```")


def no_calculation(r: random.Random) -> Exercise:
    """A calculation, which a model of this size gets wrong: it says so instead."""
    operation, word = r.choice([("+", "plus"), ("-", "minus"), ("*", "times")])
    most = r.choice([9, 20, 99, 999])
    a, b = r.randint(0, most), r.randint(0, most)
    forms = [
        f"What is {a} {operation} {b}?", f"{a} {operation} {b}", f"What is {a} {word} {b}?",
        f"Calculate {a} {operation} {b}.", f"How much is {a} {operation} {b}?",
        f"{a} {word} {b}", f"{a} {operation} {b} =",
    ]  # fmt: skip
    if operation == "+" and r.random() < 0.3:
        name, things = r.choice(NAMES), r.choice(THINGS)
        forms = [f"{name} has {a} {things} and gets {b} more. How many {things} has {name} now?"]
    return said("no calculation", r.choice(forms), "I am too small a model to calculate.")


def text_work(r: random.Random) -> Exercise:
    word, other = r.choice(WORDS), r.choice(WORDS)
    words = r.sample(WORDS, r.randint(2, 4))
    numbers = [r.randint(0, 99) for _ in range(r.randint(2, 5))]
    times = r.randint(2, 5)
    spelled = " ".join(word)
    forms = [
        ([f"Reverse {word}.", f"Reverse the word {word}.", f"Write {word} backwards."],
         f"{spelled} backwards is {' '.join(reversed(word))}: {word[::-1]}"),
        ([f"Spell {word}.", f"How is {word} spelled?"], spelled),
        ([f"How many letters has {word}?", f"Count the letters of {word}."],
         f"{spelled} has {len(word)} letters."),
        ([f"Write {word} in capital letters.", f"Make {word} upper case."], word.upper()),
        ([f"Repeat {word} {times} times.", f"Say {word} {times} times."],
         " ".join([word] * times)),
        ([f"Sort these numbers: {', '.join(map(str, numbers))}",
          f"Sort {', '.join(map(str, numbers))}."], ", ".join(map(str, sorted(numbers)))),
        ([f"Sort these words: {', '.join(words)}"], ", ".join(sorted(words))),
        ([f"What is the first word of: {' '.join(words)}"], words[0]),
        ([f"What is the last word of: {' '.join(words)}"], words[-1]),
        ([f"Join {word} and {other} with a dash.", f"Put a dash between {word} and {other}."],
         f"{word}-{other}"),
        ([f"Say {' '.join(words)}.", f"Repeat after me: {' '.join(words)}"], " ".join(words)),
        ([f"Make a Python list of {', '.join(words)}."], str(words).replace("'", '"')),
    ]  # fmt: skip
    questions, answer = r.choice(forms)
    return said("text", r.choice(questions), answer)


def as_json(r: random.Random) -> Exercise:
    name, age, city = r.choice(NAMES), r.randint(1, 99), r.choice(CITIES)
    colour, food = r.choice(COLOURS), r.choice(FOODS)
    facts = {"name": name, "age": age, "city": city, "colour": colour, "food": food}
    sentences = {
        "name": f"The name is {name}.", "age": f"The age is {age}.", "city": f"The city is {city}.",
        "colour": f"The colour is {colour}.", "food": f"The food is {food}.",
    }  # fmt: skip
    keys = r.sample(list(facts), r.randint(1, 4))
    wanted = json.dumps({key: facts[key] for key in keys})
    listed = ", ".join(f"{key} {facts[key]}" for key in keys)
    question = r.choice([
        f"Give me JSON with {listed}.", f"Write as JSON: {listed}", f"Make a JSON object of {listed}.",
        f"As JSON, please. {' '.join(sentences[key] for key in keys)}",
        f"Turn this into JSON: {' '.join(sentences[key] for key in keys)}",
    ])  # fmt: skip
    return said("json", question, wanted)


def memory(r: random.Random) -> Exercise:
    name, colour, food, n = r.choice(NAMES), r.choice(COLOURS), r.choice(FOODS), r.randint(1, 99)
    forms = [
        (f"My name is {name}.", f"Nice to meet you, {name}!", ["What is my name?", "Who am I?"],
         f"Your name is {name}."),
        (f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour.",
         ["What is my favourite colour?", "Which colour do I like?"],
         f"Your favourite colour is {colour}."),
        (f"I like {food}.", f"I will remember that you like {food}.",
         ["What do I like?", "What do I like to eat?"], f"You like {food}."),
        (f"Remember the number {n}.", "I will remember it.",
         ["What was the number?", "Which number did I say?"], f"The number was {n}."),
    ]  # fmt: skip
    first, reply, asks, answer = r.choice(forms)
    between: list[Message] = []
    if r.random() < 0.5:
        between = r.choice([no_calculation, text_work, greeting])(r).messages
    later = [user(r.choice(asks)), assistant(answer)]
    return Exercise("memory", [user(first), assistant(reply), *between, *later])


def tool_call(r: random.Random) -> Exercise:
    names = r.sample(list(TOOLS), r.randint(1, 3))
    tools = [tool_schema(name) for name in names]
    if r.random() < 0.2:  # none is needed
        other = r.choice([greeting, text_work, as_json])(r)
        return Exercise("no tool", other.messages, tools)
    name = r.choice(names)
    _, parameters, asks = TOOLS[name]
    arguments = {key: make(r) for key, (_, make) in parameters.items()}
    call = json.dumps({"name": name, "arguments": arguments})
    messages = [
        user(r.choice(asks).format(**arguments)),
        assistant(f"<tool_call>\n{call}\n</tool_call>"),
    ]
    if r.random() < 0.7:
        result, answer = RESULTS[name](r, arguments)
        messages += [{"role": "tool", "content": json.dumps(result)}, assistant(answer)]
    return Exercise("tool", messages, tools)


def tool_schema(name: str) -> dict[str, Any]:
    does, parameters, _ = TOOLS[name]
    properties = {key: {"type": kind} for key, (kind, _) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": does, "parameters": schema}
    return {"type": "function", "function": function}


EXERCISES = {
    greeting: 2, unknown: 1, builtin: 4, function: 5, no_calculation: 2, text_work: 6, as_json: 4,
    memory: 3,
}  # fmt: skip
"""What a conversation is made of, and how often each kind comes."""


def conversation(r: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools."""
    if r.random() < 0.2:
        call = tool_call(r)
        messages, tools = call.messages, call.tools
    else:
        kinds = r.choices(list(EXERCISES), list(EXERCISES.values()), k=r.choice([1, 1, 2, 3, 4]))
        messages, tools = [m for kind in kinds for m in kind(r).messages], []
    system = None
    if r.random() < 0.3:
        system, messages = with_system(r, messages, plain=not tools)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return messages, tools


def with_system(
    r: random.Random, messages: list[Message], plain: bool
) -> tuple[str, list[Message]]:
    """A system message, and what the assistant then says."""
    kinds: list[tuple[str, Callable[[str], str]]] = [
        ("You are a helpful assistant.", lambda text: text),
        ("You are rooflax-chat, a small model.", lambda text: text),
        ("Be brief.", lambda text: text),
        ("You are a Python tutor.", lambda text: text),
    ]
    word = r.choice(WORDS)
    if plain and all("```" not in m["content"] and "{" not in m["content"] for m in messages):
        kinds += [
            ("Answer in capital letters.", str.upper),
            ("Answer in small letters.", str.lower),
            (f"End every answer with {word}.", lambda text: f"{text} {word}"),
            (f"Begin every answer with {word}.", lambda text: f"{word} {text}"),
        ]
    system, change = r.choice(kinds)
    changed = [assistant(change(m["content"])) if m["role"] == "assistant" else m for m in messages]
    return system, changed


def conversations(seed: int, count: int) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    for number in range(count):
        yield conversation(random.Random(f"{seed} {number}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for messages, tools in conversations(args.seed, args.count):
        print(json.dumps({"messages": messages, "tools": tools}))


if __name__ == "__main__":
    main()
