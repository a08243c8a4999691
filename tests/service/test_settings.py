"""Settings: where they come from, which one wins, and that an unknown one is never ignored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from service.server import server_options
from service.settings import ENGINE_SETTINGS, ServeSettings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DRAFTWIRE_")]:
        monkeypatch.delenv(name)


def test_command_line_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "draftwire.toml"
    file.write_text('max_seqs = 8\nmax_waiting = 9\nlisten = "0.0.0.0:1"\nreflection = false\n')
    monkeypatch.setenv("DRAFTWIRE_MAX_WAITING", "10")
    monkeypatch.setenv("DRAFTWIRE_LISTEN", "0.0.0.0:2")
    settings = ServeSettings.load(file, listen="0.0.0.0:3")
    assert (settings.max_seqs, settings.max_waiting, settings.listen) == (8, 10, "0.0.0.0:3")
    assert (settings.reflection, settings.grace_s) == (False, 30)


def test_the_file_may_be_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "draftwire.toml"
    file.write_text("grace_s = 3")
    monkeypatch.setenv("DRAFTWIRE_CONFIG", str(file))
    assert ServeSettings.load().grace_s == 3
    monkeypatch.setenv("DRAFTWIRE_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        ServeSettings.load()


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"int": "77", "float": "7.5"}
    skip = {"listen", "max_draft_tokens"}
    for name, field in ServeSettings.model_fields.items():
        kind = getattr(field.annotation, "__name__", "")
        if name not in skip:
            value = str(not field.default) if kind == "bool" else odd.get(kind, "odd")
            if kind == "Literal":
                # The last one: the first other than the default might not go with the others.
                value = get_args(field.annotation)[-1]
            monkeypatch.setenv(f"DRAFTWIRE_{name.upper()}", value)
    settings = ServeSettings.load()
    for name, field in ServeSettings.model_fields.items():
        if name not in skip:
            assert getattr(settings, name) != field.default, name


def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWIRE_MAX_SEQ", "3")
    with pytest.raises(ConfigError, match="DRAFTWIRE_MAX_SEQ"):
        ServeSettings.load()


def test_variables_of_other_parts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "ISA"):
        monkeypatch.setenv(f"DRAFTWIRE_{name}", "x")
    ServeSettings.load()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_seq = 3", "max_seq: unknown setting"),
        ("max_seqs = 'many'", "max_seqs"),
        ("max_seqs = 0", "max_seqs"),
        ("max_draft_tokens = 99", "max_draft_tokens"),
        ("max_step_rows = 1", "max_step_rows"),
        ("listen = 'nowhere'", "listen"),
        ("listen = 'host:99999'", "listen"),
        ("listen = 'host:'", "listen"),
        ("grace_s = nan", "grace_s"),
        ("watchdog_s = inf", "watchdog_s"),
        ("dtype = 'int4'", "dtype"),
        ("[table]\nmax_seqs = 3", "table"),
        ("max_seqs =", "bad.toml"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_setting(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        ServeSettings.load(file)


def test_all_bad_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSettings.load(max_waiting=0, max_streams=0)
    assert "max_waiting" in str(caught.value)
    assert "max_streams" in str(caught.value)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWIRE_PORT_FILE", "")
    monkeypatch.setenv("DRAFTWIRE_MAX_SEQS", "")
    assert ServeSettings.load().max_seqs == EngineConfig().max_seqs


def test_the_engine_gets_its_part() -> None:
    settings = ServeSettings.load(model="m", draft="ngram", max_seqs=3, threads=2)
    config = settings.to_engine_config()
    assert (config.model, config.draft, config.max_seqs, config.threads) == ("m", "ngram", 3, 2)
    own = set(EngineConfig.__dataclass_fields__) - {"block_size", "model_name", "cache_dir"}
    assert own == set(ENGINE_SETTINGS)
    assert ServeSettings.load().to_engine_config() == EngineConfig()


def test_credentials_are_not_shown() -> None:
    settings = ServeSettings.load(otlp_endpoint="http://user:secret@collector:4317/x")
    assert settings.redacted()["otlp_endpoint"] == "http://***@collector:4317/x"
    assert "secret" not in str(settings.redacted())


def test_the_keepalive_option_is_spelt_as_grpc_reads_it() -> None:
    """A misspelt channel argument is silently ignored."""
    options = dict(server_options(ServeSettings.load(min_ping_interval_s=5, max_message_mib=0.5)))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 5000
    assert options["grpc.max_receive_message_length"] == 1 << 19
    assert options["grpc.so_reuseport"] == 0
