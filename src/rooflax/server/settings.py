"""What the operator chose: where the server listens, for whom, and its limits."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field

from rooflax.errors import RequestError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_KEYS = 1024


@dataclass(frozen=True)
class Settings:
    """Of one server.

    Attributes:
        port: 0 takes a free one.
        api_keys: who has one of them may ask; none lets everybody.
        served_names: of the one model; the first is stated in answers.
        max_waiting: sequences that may wait beside those that run.
        max_per_key: answers that one key may have open; 0 is half of all places where there are
            several keys, else all.
        max_body_bytes: of a request.
        cors_origins: pages of these origins may ask; "localhost" means any port of this machine.
        reports_unknown_fields: unknown fields are named in a header, not rejected.
        reasoning_field: name of the field with the reasoning: "reasoning_content", "reasoning" or
            "both".
        request_s, drain_s, stall_s: the most that a request may take; that running requests may
            take after a signal to stop; without a step before the engine counts as stuck.
        stays: keep answering (with 503) after the engine has died.
        tells_tokenizer: answer /tokenizer_info, which shows the chat template.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_names: tuple[str, ...] = ()
    max_waiting: int = 64
    max_per_key: int = 0
    max_body_bytes: int = 4 * 2**20
    cors_origins: tuple[str, ...] = ()
    reports_unknown_fields: bool = False
    reasoning_field: str = "reasoning_content"
    request_s: float = 600.0
    drain_s: float = 30.0
    stall_s: float = 60.0
    stays: bool = False
    tells_tokenizer: bool = False
    allows_anyone: bool = False

    def __post_init__(self) -> None:
        if not self.is_local and not self.api_keys and not self.allows_anyone:
            raise RequestError(
                f"host is {self.host!r}, which others can reach, and there is no api_key; give "
                f"one, or say --insecure-no-auth.",
                param="host",
            )
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise RequestError("An api_key is empty or no printable ASCII.", param="api_key")
        if len(self.api_keys) > MAX_KEYS:
            raise RequestError(f"There are more than {MAX_KEYS} api_keys.", param="api_key")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOCAL_NAMES or _address_is(self.host, "is_loopback")


class Keys:
    """Compares keys in constant time; keeps their digests only."""

    def __init__(self, keys: tuple[str, ...]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, given: bytes | None) -> str | None:
        """A name of the key that was given, for isolation and limits; None if it is none of ours.

        Every key is compared, whether one fits or not.
        """
        digest = hashlib.sha256(given or b"").digest()
        fits = [hmac.compare_digest(digest, one) for one in self._digests]
        return digest.hex()[:16] if given is not None and any(fits) else None


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


def origin_is_allowed(settings: Settings, origin: str) -> bool:
    """Whether pages of this origin may read answers."""
    scheme, separator, rest = origin.partition("://")
    if "localhost" in settings.cors_origins and separator and scheme in ("http", "https"):
        return origin in settings.cors_origins or host_name(rest) in LOCAL_NAMES
    return origin in settings.cors_origins
