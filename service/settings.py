"""Settings of `draftwire serve`: command line > environment > settings file > default.

A variable is `DRAFTWIRE_` and the name in capitals; the file is TOML with the names as keys. An
unknown name in either is an error, so that a misspelt setting is never silently without effect.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engine.config import EngineConfig
from engine.errors import ConfigError

PREFIX = "DRAFTWIRE_"
# Variables with the prefix that are not settings of `serve`.
OTHER_VARIABLES = frozenset({"DRAFTWIRE_CONFIG", "DRAFTWIRE_HOME", "DRAFTWIRE_ISA"})
# Settings handed to the engine under the same name.
ENGINE_SETTINGS = (
    "model",
    "draft",
    "max_draft_tokens",
    "max_seqs",
    "max_step_rows",
    "draft_rows",
    "step_ms",
    "kv_cache_mib",
    "prefix_cache",
    "dtype",
    "weights",
    "kv_dtype",
    "device",
    "threads",
    "max_context",
    "verification",
    "numerics",
)
_ENGINE = EngineConfig()


class ServeSettings(BaseSettings):
    """Every setting, with its default and what it means. Made by `load`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    listen: str = Field("127.0.0.1:50051", description="HOST:PORT to serve on; port 0 takes any.")
    port_file: Path | None = Field(None, description="File to write the bound HOST:PORT to.")

    model: str = Field(_ENGINE.model, description="Model: a name, directory, GGUF file or hub id.")
    draft: str = Field(
        _ENGINE.draft,
        description="Draft sources: none, auto, or any of ngram, suffix, table:DIR, head:DIR, "
        "model:ID.",
    )
    max_draft_tokens: int = Field(
        _ENGINE.max_draft_tokens, description="Most draft tokens per sequence and step."
    )
    max_seqs: int = Field(_ENGINE.max_seqs, description="Most sequences computed at a time.")
    max_step_rows: int = Field(_ENGINE.max_step_rows, description="Most tokens fed in one step.")
    draft_rows: int = Field(
        _ENGINE.draft_rows, description="Drafts are spent where they pay, and up to so many rows."
    )
    step_ms: int = Field(
        _ENGINE.step_ms, description="A step shall take no longer, drafts and prompts included."
    )
    kv_cache_mib: int = Field(
        _ENGINE.kv_cache_mib, description="Memory for KV, target and draft together, in MiB."
    )
    prefix_cache: bool = Field(
        _ENGINE.prefix_cache, description="Keep KV of earlier requests for those that begin alike."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Number type of weights and KV."
    )
    weights: Literal["auto", "native", "q4", "q8"] = Field(
        "auto",
        description="native: the GGUF file's own blocks, the same bits; q4, q8: quantised on load.",
    )
    kv_dtype: Literal["auto", "bfloat16", "float32", "int8"] = Field(
        "auto", description="Number type of KV: the model's own (auto), or int8."
    )
    device: str = Field(_ENGINE.device, description="auto, cpu or cuda.")
    threads: int = Field(_ENGINE.threads, description="Compute threads; 0 is one per core.")
    max_context: int = Field(
        _ENGINE.max_context, description="Longest prompt plus output; 0 is the model's own limit."
    )
    verification: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="How drafts are checked. rejection: not the same bytes, only the same law.",
    )
    numerics: Literal["auto", "strict", "fast"] = Field(
        "auto",
        description="strict: the same bytes in any company, or no start; auto: where possible.",
    )
    watchdog_s: float = Field(
        10.0, gt=0, description="An engine with work and no step for so long is restarted."
    )

    trust_tenant: bool = Field(
        False, description="Take the tenant from the metadata key draftwire-tenant."
    )
    grace_s: float = Field(
        30.0, ge=0, description="Time for running generations when the server is told to stop."
    )
    max_message_mib: float = Field(4.0, gt=0, le=1024, description="Largest request, in MiB.")
    max_prompt_bytes: int = Field(
        1 << 20, ge=1, description="Longest prompt in bytes of UTF-8, checked before tokenizing."
    )
    max_generations_per_session: int = Field(
        256, ge=1, description="Most live generations on one session."
    )
    max_streams: int = Field(
        1024, ge=1, description="Most Session, Generate and Complete calls open at a time."
    )
    max_waiting: int = Field(
        1024, ge=1, description="Most requests that wait for their first token; more are refused."
    )
    max_waiting_tokens: int = Field(
        1 << 18, ge=1, description="Most prompt tokens that wait; more are refused."
    )
    max_stop_strings: int = Field(16, ge=0, description="Most stop strings of a request.")
    max_stop_length: int = Field(256, ge=1, description="Longest stop string, in characters.")
    min_ping_interval_s: float = Field(
        5.0, gt=0, description="Keepalive pings may come this often without cutting the connection."
    )
    reflection: bool = Field(True, description="Serve gRPC reflection.")

    record: Path | None = Field(
        None, description="Folder to record requests and results in, text included; unset: none."
    )
    record_mib: int = Field(
        256, ge=1, description="Most MiB of records per tenant; the oldest are deleted."
    )

    telemetry: Literal["none", "console", "otlp"] = Field(
        "none", description="Where traces and metrics go."
    )
    otlp_endpoint: str = Field(
        "", description="OTLP/gRPC collector; empty: what the OTEL_EXPORTER_OTLP_* variables say."
    )
    metrics_interval_s: float = Field(15.0, gt=0, description="How often metrics are exported.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines that are written."
    )
    log_format: Literal["json", "console"] = Field("json", description="Form of log lines.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"must be HOST:PORT, got {listen!r}")
        return listen

    @model_validator(mode="after")
    def _engine_agrees(self) -> ServeSettings:
        try:
            self.to_engine_config()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @classmethod
    def load(cls, config: Path | None = None, **given: Any) -> ServeSettings:
        """Settings from all sources. `given` are those of the command line, without unset ones.

        `config` defaults to $DRAFTWIRE_CONFIG. Raises ConfigError that names every bad setting.
        """
        _refuse_unknown_variables(os.environ)
        named = config or os.environ.get("DRAFTWIRE_CONFIG") or None
        if named is not None and not Path(named).is_file():
            raise ConfigError(f"settings file {str(named)!r} does not exist")

        class FromFile(cls):  # type: ignore[misc, valid-type]
            model_config = SettingsConfigDict(toml_file=named)

        try:
            settings = FromFile(**given)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"settings file {str(named)!r}: {error}") from None
        except ValidationError as error:
            raise ConfigError(_describe(error)) from None
        return cls.model_construct(**settings.model_dump())

    def to_engine_config(self) -> EngineConfig:
        """The part that is the engine's."""
        return EngineConfig(**{name: getattr(self, name) for name in ENGINE_SETTINGS})

    def redacted(self) -> dict[str, Any]:
        """All settings for the log, without credentials."""
        shown = self.model_dump(mode="json")
        shown["otlp_endpoint"] = _without_credentials(self.otlp_endpoint)
        return shown


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {f"{PREFIX}{name.upper()}" for name in ServeSettings.model_fields} | OTHER_VARIABLES
    unknown = sorted(n for n in environ if n.upper().startswith(PREFIX) and n.upper() not in known)
    if unknown:
        raise ConfigError(f"unknown environment variables: {', '.join(unknown)}")


def _describe(error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, item["loc"]))
        what = "unknown setting" if item["type"] == "extra_forbidden" else item["msg"]
        what = what.removeprefix("Value error, ")
        problems.append(f"{where}: {what}" if where else what)
    return "; ".join(problems)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}"))
