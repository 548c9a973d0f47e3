"""Settings of the operator: address, keys and limits."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from functools import partial

from rooflax.errors import RequestError
from rooflax.fields.declaration import declare, documented, read_fields
from rooflax.fields.kinds import Choice, Flag, Number, Several, Text, Whole

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_KEYS = 1024


_asking = partial(declare, group="who may ask")
_answers = partial(declare, group="answers")
_limits = partial(declare, group="limits")
SECONDS = Number(0, 1e9, above=True, below=True)


# fmt: off
@documented
@dataclass(frozen=True)
class Settings:
    """Settings of one server, from flags and ROOFLAX_* variables."""

    host: str = _asking(Text(), "address to listen at", default="127.0.0.1", metavar="ADDRESS")
    port: int = _asking(
        Whole(0, 65535), "port to listen at; 0 takes a free one", default=8000, metavar="N")
    api_keys: tuple[str, ...] = _asking(
        Several(Text()), "key that requests must have; by default none is needed; ROOFLAX_API_KEY "
        "keeps it out of the process list", default=(), repr=False, flags=("--api-key",),
        metavar="KEY")
    api_key_file: str | None = _asking(
        Text(), "keys, one a line; # begins a comment", metavar="FILE")
    allows_anyone: bool = _asking(
        Flag(), "accept requests without a key on any --host", default=False,
        flags=("--insecure-no-auth",))
    cors_origins: tuple[str, ...] = _asking(
        Several(Text()), "origins that may send requests; localhost is any port here, * is all",
        default=(), metavar="ORIGIN")
    served_names: tuple[str, ...] = _answers(
        Several(Text()), "names of the model in place of its own; responses use the first",
        default=(), flags=("--served-model-name",), metavar="NAME")
    chat_template: str | None = _answers(
        Text(), "Jinja2 chat template, in place of the model's own", metavar="FILE")
    unknown_fields: str = _answers(
        Choice(("reject", "report")), "report names them in the header x-rooflax-ignored",
        default="reject", metavar="HOW")
    reasoning_field: str = _answers(
        Choice(("reasoning_content", "reasoning", "both")), "name of the field with the reasoning",
        default="reasoning_content", metavar="NAME")
    tells_tokenizer: bool = _answers(
        Flag(), "answer /tokenizer_info, with the chat template", default=False,
        flags=("--tokenizer-info",))
    lora_root: str | None = _answers(
        Text(), "folder from which requests may load LoRA adapters",
        flags=("--allow-lora-loading",), metavar="DIR")
    training_folder: str | None = _answers(
        Text(), "train LoRA adapters by the Tinker API, and save them there; nothing else is "
        "answered", flags=("--train",), metavar="DIR")
    max_waiting: int = _limits(
        Whole(1), "requests that may wait beside those that run", default=64,
        flags=("--max-num-queued-seqs",), metavar="N")
    max_per_key: int = _limits(
        Whole(), "answers a key may have open", default=0,
        shown_default="half with several keys, else all", flags=("--max-inflight-per-key",),
        metavar="N")
    max_body_bytes: int = _limits(
        Whole(1), "of a request", default=4 * 2**20, shown_default="4 MiB", metavar="N")
    request_s: float = _limits(
        SECONDS, "seconds that a request may take", default=600.0, flags=("--request-timeout",),
        metavar="S")
    drain_s: float = _limits(
        SECONDS, "seconds for open answers after a signal to stop", default=30.0,
        flags=("--drain-timeout",), metavar="S")
    stall_s: float = _limits(
        SECONDS, "seconds without a step before /health fails", default=60.0, flags=("--watchdog",),
        metavar="S")
    stays: bool = _limits(
        Flag(), "answer 503 when the engine has died; else exit 1", default=False,
        flags=("--stay",))
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if not self.is_local and not self.api_keys and not self.allows_anyone:
            raise RequestError(
                f"host is {self.host!r}, which others can reach, and api_keys is empty; give "
                f"one, or say --insecure-no-auth.",
                param="host",
            )
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise RequestError("One of api_keys is not printable ASCII.", param="api_keys")
        if len(self.api_keys) > MAX_KEYS:
            raise RequestError(f"There are more than {MAX_KEYS} api_keys.", param="api_keys")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOCAL_NAMES or _address_is(self.host, "is_loopback")

    @property
    def reports_unknown_fields(self) -> bool:
        return self.unknown_fields == "report"


class Keys:
    """Compares keys in constant time; keeps their digests only."""

    def __init__(self, keys: tuple[str, ...]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes | None) -> str | None:
        """A name of the key that was given, for isolation and limits; None if it is none of ours.

        Every key is compared, whether one fits or not.
        """
        digest = hashlib.sha256(key or b"").digest()
        fits = [hmac.compare_digest(digest, one) for one in self._digests]
        return digest.hex()[:16] if key is not None and any(fits) else None


def host_is_allowed(settings: Settings, header: str) -> bool:
    """Whether a Host header names this machine; a page of another site cannot forge it.

    Where there is a key and others can reach the server, any host is. Without a key it is an
    address or a name without a dot, which a site of the internet cannot have.
    """
    if not settings.is_local and settings.api_keys:
        return True
    name = host_name(header)
    if name in LOCAL_NAMES or name == settings.host.lower() or _address_is(name, "is_private"):
        return True
    return not settings.is_local and (_is_address(name) or (name != "" and "." not in name))


def host_name(header: str) -> str:
    """The name in a Host header, without its port; empty where it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, closed, rest = text[1:].partition("]")
        return name if closed and _is_port(rest) else ""
    name, colon, port = text.partition(":")
    fits = name.replace(".", "").replace("-", "").isalnum() and name.isascii()
    return name if fits and _is_port(colon + port) else ""


def _is_port(text: str) -> bool:
    return text == "" or (text[0] == ":" and text[1:].isascii() and text[1:].isdigit())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _address_is(name: str, what: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(name), what))
    except ValueError:
        return False


def allowed_origin(settings: Settings, origin: str) -> str | None:
    """Value of Access-Control-Allow-Origin for pages of an allowed origin, else None.

    No answer allows credentials, which "*" could not: a key is a header of the page's own.
    """
    if origin and "*" in settings.cors_origins:
        return "*"
    scheme, separator, rest = origin.partition("://")
    is_listed = origin in settings.cors_origins
    if "localhost" in settings.cors_origins and separator and scheme in ("http", "https"):
        is_listed = is_listed or host_name(rest) in LOCAL_NAMES
    return origin if origin and is_listed else None
