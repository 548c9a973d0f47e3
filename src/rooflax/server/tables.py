"""Fields of every route: the tables that parse, document and describe requests."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta

from rooflax.fields.declaration import Api
from rooflax.fields.kinds import Flag, Kind, Number, Several, Text, Whole
from rooflax.fields.sampling import MAX_INT32, SAMPLING, Bias, StopTexts
from rooflax.server.fields import Field, FieldTable

MAX_PROMPTS, MAX_TEXTS, MAX_TOOLS = 128, 2048, 128

Id = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
# \Z: before a last line break there is a match of $ as well.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
TokenIds = list[Id]
JsonObject = dict[str, Any]


def label(name: str, text: str = "accepted; it changes no token") -> Field:
    return Field(name, Any, text, "label")


def rejected(name: str, why: str, *harmless: Any) -> Field:
    return Field(name, Any, why, "rejected", harmless)


STREAM_OPTIONS = FieldTable(
    Field("include_usage", bool, "a last chunk without choices states the usage"),
    Field("continuous_usage_stats", bool, "every chunk states the usage so far"),
    label("include_obfuscation"),
    passes_others=True,
)
STREAMING = (
    Field("stream", bool, "answer in server-sent events"),
    Field(
        "stream_options", STREAM_OPTIONS, "of a stream, which it needs; other keys change nothing"
    ),
)
JSON_SCHEMA = FieldTable(
    Field("name", Name, "a name of the schema", required=True),
    Field("schema", JsonObject, "the JSON schema", required=True),
    Field("strict", bool, "false is constrained too", "label"),
    label("description"),
)
RESPONSE_FORMAT = FieldTable(
    Field("type", str, "text, json_object or json_schema", required=True),
    Field("json_schema", JSON_SCHEMA, "of json_schema"),
)
STRUCTURED = FieldTable(
    Field("json", JsonObject | str, "a JSON schema"),
    Field("regex", str, "a regular expression for the whole text"),
    Field("grammar", str, "a Lark grammar"),
    Field("choice", Annotated[list[StopString], Meta(min_length=1, max_length=128)], "literals"),
)


def msgspec_type(kind: Kind) -> Any:
    """A kind of values as msgspec checks it."""
    match kind:
        case Whole(low, high):
            return Annotated[int, Meta(ge=low, le=MAX_INT32 if high is None else high)]
        case Number():
            ends = {"gt" if kind.above else "ge": kind.low, "lt" if kind.below else "le": kind.high}
            ends = {name: end for name, end in ends.items() if math.isfinite(end)}
            return Annotated[float, Meta(**ends)] if ends else float
        case Flag():
            return bool
        case Text():
            return str
        case Several(Whole()):
            return TokenIds
        case StopTexts():
            text: Any = Annotated[str, Meta(min_length=1, max_length=kind.each)]
            several: Any = Annotated[list[text], Meta(max_length=kind.most)]
            return text | several if kind.takes_one else several
        case Bias(value, most):
            return Annotated[dict[int, msgspec_type(value)], Meta(max_length=most)]
    raise NotImplementedError(kind)


def sampling(api: Api) -> list[Field]:
    """The fields of sampling that an API has, as fields/sampling.py declares them."""
    return [
        Field(
            http.name or one.name,
            msgspec_type(http.kind or one.kind),
            http.help or one.sentence,
            required=http.required,
        )
        for one in SAMPLING.values()
        for http in one.http_of(api)
    ]


OPENAI = (
    Field("return_token_ids", bool, "token ids of prompt and answer in each choice"),
    Field("timings_per_token", bool, "timings so far, named as llama.cpp's, in every object"),
    Field("cache_salt", str, "only requests of the same salt share cached prompts"),
    Field(
        "request_id", Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")],
        "the end of the answer's id",
    ),
    Field("structured_outputs", STRUCTURED, "what the text must look like"),
    Field("response_format", RESPONSE_FORMAT, "text, JSON, or JSON of a schema"),
    rejected("priority", "requests are served in the order of their arrival", 0),
    rejected("include_stop_str_in_output", "stop strings are never part of the text", False),
    rejected("skip_special_tokens", "special tokens are never part of the text", True),
    rejected("truncate_prompt_tokens", "prompts are never cut"),
    rejected("bad_words", "use logit_bias"),
    rejected("logits_processors", "the server runs no code of a request"),
    rejected("vllm_xargs", "it is another server's"),
    rejected("kv_transfer_params", "it is another server's"),
    rejected("guided_json", "use structured_outputs.json"),
    rejected("guided_regex", "use structured_outputs.regex"),
    rejected("guided_grammar", "use structured_outputs.grammar"),
    rejected("guided_choice", "use structured_outputs.choice"),
)  # fmt: skip
MODEL = Field("model", str, "a served name; without it the one model")

COMPLETIONS = FieldTable(
    MODEL,
    Field(
        "prompt", str | Annotated[list[str | Id | TokenIds], Meta(min_length=1)],
        "text, token ids, or a list of either; at most 128", required=True,
    ),
    Field("echo", bool, "the prompt comes before the answer"),
    Field("best_of", Count, "must equal n"),
    Field("add_special_tokens", bool, "what the tokenizer puts around a text; default true"),
    Field("use_beam_search", bool, "beam search with n beams"),
    *STREAMING,
    *sampling("completions"),
    *OPENAI,
    rejected("suffix", "the model fills no gaps"),
    rejected("prompt_embeds", "prompts are text or token ids"),
    label("user"),
)  # fmt: skip

CALL_FUNCTION = FieldTable(
    Field("name", str, "of the function", required=True),
    Field("arguments", str | JsonObject, "an object, or its JSON; nothing is no arguments"),
    label("parsed_arguments"),
)
TOOL_CALL = FieldTable(
    Field("id", str, "of the call", required=True),
    Field("type", Literal["function"], "function"),
    Field("function", CALL_FUNCTION, "what is called", required=True),
    label("index"),
)
MESSAGE = FieldTable(
    Field("role", str, "system, developer, user, assistant, tool or function", required=True),
    Field("content", str | list[JsonObject], "text, or a list of text parts"),
    Field("name", str, "of who speaks, for templates that read it"),
    Field("tool_calls", [TOOL_CALL], "of an assistant"),
    Field("tool_call_id", str, "of a tool's answer"),
    Field("reasoning_content", str, "of an assistant"),
    Field("reasoning", str, "as reasoning_content"),
    Field("thinking", str, "as reasoning_content"),
    label("refusal"),
    label("annotations"),
    label("parsed"),
    Field("function_call", CALL_FUNCTION, "of an assistant, as tool_calls of one"),
    rejected("audio", "the model reads text only"),
)
FUNCTION = FieldTable(
    Field("name", Name, "of the function", required=True),
    Field("description", str, "what it does"),
    Field("parameters", JsonObject, "a JSON schema of its arguments"),
    Field("strict", bool, "arguments must be valid by the schema"),
)
TOOL = FieldTable(
    Field("type", Literal["function"], "function", required=True),
    Field("function", FUNCTION, "what may be called", required=True),
)
RENDERING = (
    Field("messages", [MESSAGE], "the conversation, oldest first", required=True),
    Field("tools", [TOOL], "functions that the model may call"),
    Field("chat_template_kwargs", JsonObject, "further variables that the template reads"),
    Field("documents", list[JsonObject], "for templates that read documents"),
    Field(
        "reasoning_effort", Literal["none", "minimal", "low", "medium", "high"],
        "for templates that tell efforts apart",
    ),
    Field("add_generation_prompt", bool, "default true; false with continue_final_message only"),
    Field("continue_final_message", bool, "go on with the last message, an assistant's"),
    rejected("chat_template", "the server's template is used"),
)  # fmt: skip
CHAT = FieldTable(
    MODEL,
    *RENDERING,
    Field("tool_choice", str | JsonObject, "auto, none, required, or a function"),
    Field("parallel_tool_calls", bool, "false allows one call an answer"),
    Field("include_reasoning", bool, "false leaves reasoning_content out of the answer"),
    *STREAMING,
    *sampling("chat"),
    *OPENAI,
    rejected("functions", "use tools"),
    rejected("function_call", "use tool_choice"),
    rejected("store", "nothing is stored", False),
    rejected("modalities", "the model writes text only", ["text"]),
    rejected("audio", "the model writes text only"),
    rejected("prediction", "the engine drafts by itself"),
    rejected("web_search_options", "the server searches nothing"),
    rejected("thinking_token_budget", "reasoning has no budget of its own; use max_tokens"),
    label("user"),
    label("metadata"),
    Field("service_tier", Literal["auto", "default"], "accepted; it changes no token", "label"),
    label("safety_identifier"),
    label("prompt_cache_key"),
    label("prompt_cache_retention"),
    label("verbosity"),
)

TEXT_FORMAT = FieldTable(
    Field("type", Literal["text", "json_object", "json_schema"], "of the text", required=True),
    Field("name", Name, "of the schema"),
    Field("schema", JsonObject, "the JSON schema"),
    Field("strict", bool, "false is constrained too", "label"),
    label("description"),
)
RESPONSES = FieldTable(
    MODEL,
    Field("input", str | list[JsonObject], "text, or messages, calls, their answers and reasoning"),
    Field("instructions", str, "a system message before the input"),
    Field("tools", list[JsonObject], "functions; tools of other types are reported"),
    Field("tool_choice", str | JsonObject, "auto, none, required, or a function"),
    Field("parallel_tool_calls", bool, "false allows one call an answer"),
    *sampling("responses"),
    Field("include", list[str], "message.output_text.logprobs; others change nothing"),
    Field("stream", bool, "answer in server-sent events"),
    Field(
        "text",
        FieldTable(Field("format", TEXT_FORMAT, "as response_format of chat"), label("verbosity")),
        "what the text must look like",
    ),
    Field(
        "reasoning", FieldTable(Field("effort", str, "where the template tells efforts apart, else "
        "reported"), label("summary"), label("generate_summary")), "how much to reason",
    ),
    Field("metadata", dict[str, str], "stated again in the answer"),
    rejected("truncation", "a conversation is never cut silently", "disabled"),
    rejected("max_tool_calls", "the server calls no tools"),
    rejected("previous_response_id", "nothing is stored; send the whole conversation"),
    rejected("conversation", "nothing is stored; send the whole conversation"),
    rejected("prompt", "nothing is stored"),
    rejected("background", "nothing runs behind a client's back", False),
    label("store", "nothing is stored, and the answer says so"),
    label("stream_options"),
    label("user"),
    label("safety_identifier"),
    label("prompt_cache_key"),
    label("prompt_cache_retention"),
    label("service_tier"),
    label("client_metadata"),
)  # fmt: skip
INPUT_TOKENS = FieldTable(
    *(
        RESPONSES.fields[name]
        for name in (
            "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text",
            "reasoning", "truncation", "previous_response_id", "conversation",
        )
    )
)  # fmt: skip
SYSTEM = str | list[JsonObject]
OUTPUT_CONFIG = FieldTable(
    Field("effort", str, "where the template tells efforts apart, else reported"),
    Field("format", FieldTable(
        Field("type", Literal["json_schema"], "of the text", required=True),
        Field("schema", JsonObject, "the JSON schema", required=True),
    ), "what the text must look like"),
)  # fmt: skip
ANTHROPIC_COUNTED = (
    MODEL,
    Field("messages", list[JsonObject], "the conversation, oldest first", required=True),
    Field("system", SYSTEM, "a system message"),
    Field("tools", list[JsonObject], "functions; tools of other types are reported"),
    Field("tool_choice", JsonObject, "type auto, any, tool or none"),
    Field("thinking", JsonObject, "type enabled, adaptive or disabled; more of it is reported"),
    Field("output_config", OUTPUT_CONFIG, "how much to reason, and what the text must look like"),
)
COUNT_TOKENS = FieldTable(*ANTHROPIC_COUNTED)
MESSAGES = FieldTable(
    *ANTHROPIC_COUNTED,
    *sampling("messages"),
    Field("stream", bool, "answer in server-sent events"),
    rejected("container", "the server runs no code"),
    rejected("mcp_servers", "the server calls no tools"),
    label("metadata"),
    label("service_tier"),
)  # fmt: skip

TOKENIZE = FieldTable(
    MODEL,
    Field("prompt", str, "the text; this, content or messages"),
    Field("content", str, "as prompt"),
    Field("add_special_tokens", bool, "what the tokenizer puts around a text; default true"),
    Field("return_token_strs", bool, "also the text of each token"),
    *(Field(f.name, f.type, f.text, f.policy) for f in RENDERING),
)
TRUNCATE = Field(
    "truncate_prompt_tokens",
    int,
    "cut what is longer to so many tokens; -1 is as many as the model takes; default reject it",
)
EMBEDDINGS = FieldTable(
    MODEL,
    Field("input", str | list[Any], "a text, token ids, or a list of either", required=True),
    Field("dimensions", Count, "keep the first so many numbers; default as many as the checkpoint"),
    Field("encoding_format", Literal["float", "base64"], "base64 is float32, little-endian"),
    Field(
        "prompt_name",
        str,
        "which of the checkpoint's prompts stands before each text; not with token ids",
    ),
    TRUNCATE,
    Field("cache_salt", str, "only requests of the same salt share cached prompts"),
    label("user"),
)
RERANK = FieldTable(
    MODEL,
    Field("query", str, "what is looked for", required=True),
    Field("documents", list[str | JsonObject], "texts, or objects with text", required=True),
    Field("top_n", Count, "how many of the best; default all"),
    Field("return_documents", bool, "also the texts; default false"),
    Field("instruction", str, "what makes a document relevant; default the model's own"),
    Field("max_tokens_per_doc", Count, "the first so many tokens of each document; default all"),
    TRUNCATE,
    Field("cache_salt", str, "only requests of the same salt share cached prompts"),
    label("user"),
)
LORA_NAME = Field("lora_name", str, "what requests call the adapter", required=True)
LOAD_LORA = FieldTable(
    LORA_NAME,
    Field(
        "lora_path",
        str,
        "its folder or .gguf file, inside --allow-lora-loading, where a relative path begins",
        required=True,
    ),
)
UNLOAD_LORA = FieldTable(LORA_NAME)
DETOKENIZE = FieldTable(MODEL, Field("tokens", TokenIds, "token ids", required=True))
TEMPLATE = FieldTable(MODEL, *RENDERING)
