"""`draftwire serve`: options to settings."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from service.cli.serve import serve_command
from service.settings import ServeSettings


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Invokes `serve` with a server that only notes its settings and exits with 7."""
    served: list[ServeSettings] = []
    fake = types.ModuleType("service.app")

    def serve(settings: ServeSettings) -> int:
        served.append(settings)
        return 7

    fake.run = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service.app", fake)
    app = typer.Typer()
    app.command()(serve_command())

    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, Any]:
        served.clear()
        result = CliRunner().invoke(app, list(arguments), env=env)
        return result.exit_code, result.output, served[0] if served else None

    return run


def test_without_options_the_defaults_are_served(invoke: Any) -> None:
    code, _, settings = invoke()
    assert code == 7  # the server's exit status is the command's
    assert settings == ServeSettings.load()


def test_every_setting_has_an_option(invoke: Any) -> None:
    _, text, _ = invoke("--help", env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    for name, field in ServeSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert str(field.description)[:30] in text


def test_options_of_the_issue(invoke: Any) -> None:
    code, output, settings = invoke(
        *("--listen", "127.0.0.1:0", "--model", "some/dir", "--draft", "ngram,model:other"),
        *("--max-draft-tokens", "3", "--max-seqs", "5", "--max-step-rows", "99"),
        *("--kv-cache-mib", "77", "--dtype", "float32", "--device", "cpu", "--trust-tenant"),
    )
    assert code == 7, output
    assert settings.model_dump(
        include={"listen", "model", "draft", "max_draft_tokens", "max_seqs", "max_step_rows"}
        | {"kv_cache_mib", "dtype", "device", "trust_tenant"}
    ) == {
        "listen": "127.0.0.1:0",
        "model": "some/dir",
        "draft": "ngram,model:other",
        "max_draft_tokens": 3,
        "max_seqs": 5,
        "max_step_rows": 99,
        "kv_cache_mib": 77,
        "dtype": "float32",
        "device": "cpu",
        "trust_tenant": True,
    }


def test_command_line_over_environment_over_file(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "draftwire.toml"
    file.write_text("max_seqs = 11\nthreads = 12\nkv_cache_mib = 13\ntrust_tenant = true\n")
    _, output, settings = invoke(
        *("--config", str(file), "--max-seqs", "31", "--no-trust-tenant"),
        env={"DRAFTWIRE_MAX_SEQS": "21", "DRAFTWIRE_THREADS": "22"},
    )
    assert settings is not None, output
    found = (settings.max_seqs, settings.threads, settings.kv_cache_mib, settings.trust_tenant)
    assert found == (31, 22, 13, False)


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (("--max-seqs", "0"), {}, "max_seqs"),
        (("--max-seqs", "many"), {}, "--max-seqs"),
        (("--max-sequences", "3"), {}, "--max-sequences"),
        (("--dtype", "int8"), {}, "--dtype"),
        (("--grace-s", "nan"), {}, "grace_s"),
        (("--config", "/nonexistent.toml"), {}, "/nonexistent.toml"),
        ((), {"DRAFTWIRE_MAX_SEQUENCES": "3"}, "DRAFTWIRE_MAX_SEQUENCES"),
        ((), {"DRAFTWIRE_MAX_SEQS": "many"}, "max_seqs"),
        (("extra",), {}, "extra"),
    ],
)
def test_what_is_wrong_is_named_with_status_2(
    invoke: Any, arguments: tuple[str, ...], env: dict[str, str], named: str
) -> None:
    code, output, settings = invoke(*arguments, env=env)
    assert (code, settings) == (2, None)
    assert named in output


def test_a_misspelt_key_of_the_file_is_named(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "draftwire.toml"
    file.write_text("max_seq = 3\n")
    code, output, _ = invoke("--config", str(file))
    assert code == 2
    assert "max_seq" in output


def test_help_lists_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("serve", "generate", "models"):
        assert command in done.stdout
