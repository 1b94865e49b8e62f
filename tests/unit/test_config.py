"""Settings from flags and YAML, and the one line that says what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from bloombee import __version__
from bloombee.config.client import ClientSettings
from bloombee.config.directories import cache_directory, state_directory
from bloombee.config.environment import (
    child_environment,
    use_passive_threads,
    use_quiet_grpc,
    variable,
)
from bloombee.config.files import config_path, read_settings, read_yaml
from bloombee.config.flags import parse, read
from bloombee.config.plan import PlanSettings
from bloombee.config.settings import (
    DemoSettings,
    DhtSettings,
    GenerateSettings,
    NetworkSettings,
    ServerSettings,
    StatusSettings,
)
from bloombee.core import Span
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from bloombee.config.base import Settings

PEER = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWAbCdEfGhJkLmNpQrStUv"
OTHER = "/ip6/::1/tcp/31337/p2p/QmAbCdEfGhJkLmNpQrStUvWxYz"
NEW = ("--model", "smollm2", "--new-swarm")
ALL = (
    NetworkSettings,
    DhtSettings,
    ServerSettings,
    StatusSettings,
    GenerateSettings,
    DemoSettings,
    PlanSettings,
)


def _server(*argv: str) -> ServerSettings:
    return read(ServerSettings, argv)


def _complaint(model: type[Settings], *argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(model, argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _file(folder: Path, text: str) -> str:
    path = folder / "swarm.yaml"
    path.write_text(text)
    return str(path)


def test_flags_become_typed_settings() -> None:
    settings = _server(
        *NEW, "--blocks", "10:20", "--port", "80", "--kv-tokens", "4096", "--identity", "key"
    )
    assert settings.blocks == Span(10, 20)
    assert settings.port == 80
    assert settings.kv_tokens == 4096
    assert settings.identity == Path("key")
    assert settings.dtype == "auto"
    assert _server(*NEW).kv_tokens == "auto"


def test_settings_never_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        _server(*NEW).port = 1


def test_a_list_takes_several_values_and_may_be_repeated() -> None:
    for argv in (
        ["--initial-peers", PEER, OTHER],
        [f"--initial-peers={PEER}", "--initial-peers", OTHER],
    ):
        assert read(NetworkSettings, argv).initial_peers == (PEER, OTHER)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "m", "--initial-peers", PEER, OTHER, "why bees"],
        ["why bees", "--model", "m", "--initial-peers", PEER, OTHER],
        ["--initial-peers", PEER, OTHER, "--model", "m", "why bees"],
        ["--model", "m", "--initial-peers", PEER, OTHER, "--", "why bees"],
    ],
)
def test_a_prompt_is_never_taken_for_a_peer(argv: list[str]) -> None:
    settings = read(GenerateSettings, argv)
    assert settings.prompt == "why bees"
    assert settings.initial_peers == (PEER, OTHER)


def test_after_two_dashes_nothing_is_a_flag() -> None:
    assert read(DemoSettings, ["--json", "--", "--help"]).prompt == "--help"
    assert _complaint(DemoSettings, "a", "--", "b") == "unexpected argument 'b'; see --help"


def test_a_positional_setting_has_a_default() -> None:
    assert read(DemoSettings, ["--servers", "2"]).prompt.startswith("In three sentences")
    assert (
        _complaint(GenerateSettings, "--model", "m", "--initial-peers", PEER)
        == "prompt is required"
    )


def test_a_dht_node_takes_no_key_that_it_would_not_use() -> None:
    assert "servers and clients" in _complaint(DhtSettings, "--swarm-key", "file")


def test_switches_have_two_directions() -> None:
    assert read(DemoSettings, ["--json"]).json_output
    assert not read(DemoSettings, ["--no-chat"]).chat


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = _file(
        tmp_path, "model: smollm2\nnew_swarm: true\nport: 1\nblocks: 10:20\ndtype: float16\n"
    )
    settings = _server("--config", file, "--port", "2")
    assert settings.port == 2
    assert settings.blocks == Span(10, 20)
    assert settings.dtype == "float16"
    assert read(DemoSettings, ["--config", _file(tmp_path, "json: true")]).json_output


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--blocks", "3"], "--blocks: blocks are written START:END, for example 0:10, got '3'"),
        (["--blocks", "5:5"], "--blocks: a span needs 0 <= start < end, got 5:5"),
        (["--port", "x"], "--port: should be a valid integer, got 'x'"),
        (["--port", "70000"], "--port: should be less than or equal to 65535, got '70000'"),
        (["--kv-tokens", "many"], "--kv-tokens: should be a valid integer or 'auto', got 'many'"),
        (
            ["--dtype", "int8"],
            "--dtype: should be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'",
        ),
        (["--device", "gpu"], "--device: devices are auto, cpu, cuda, cuda:0 and so on, got 'gpu'"),
        (["--block", "0:3"], "unknown flag --block; did you mean --blocks?"),
        (["-x"], "unknown flag -x; see --help"),
        (["0:10"], "unexpected argument '0:10'; see --help"),
        (["--port"], "--port: expected one argument"),
        (
            ["--blocks", "0:3", "--num-blocks", "3"],
            "--blocks and --num-blocks exclude each other; leave one out",
        ),
        (
            ["--initial-peers", PEER],
            "--new-swarm and --initial-peers exclude each other; leave one out",
        ),
        (
            ["--announce", "http://bees"],
            "--announce: an announced address is HOST or HOST:PORT, got 'http://bees'",
        ),
    ],
)
def test_complaints_about_flags(argv: list[str], complaint: str) -> None:
    assert _complaint(ServerSettings, *NEW, *argv) == complaint


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("hi", "--temperature", "inf"), "--temperature: should be a finite number"),
        (("hi", "--seed", str(2**64)), "--seed: should be less than 18446744073709551616"),
        (("\udcff",), "prompt: a prompt is text in UTF-8"),
    ],
)
def test_what_sampling_cannot_take_is_refused(words: tuple[str, ...], named: str) -> None:
    told = _complaint(GenerateSettings, *words, "--model", "m", "--initial-peers", PEER)
    assert told.startswith(named)


def test_complaints_about_what_is_missing() -> None:
    assert _complaint(ServerSettings, "--new-swarm") == "--model is required"
    assert _complaint(ServerSettings, "--model", "m").startswith("give --initial-peers MADDR ...")
    assert _complaint(GenerateSettings, "hi", "--model", "m").startswith("give --initial-peers")


def test_complaints_about_peers_name_which_one() -> None:
    complaint = _complaint(NetworkSettings, "--initial-peers", PEER, "10.0.0.1:31337")
    assert complaint.startswith(
        "--initial-peers[1]: peers are written as multiaddresses, such as /ip4"
    )
    assert complaint.endswith("got '10.0.0.1:31337'")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("block: 0:3", ": unknown key block; did you mean blocks?"),
        ("zzz: 1", ": unknown key zzz; known are announce, blocks, "),
        ("blocks: 7", ": blocks: blocks are written START:END, for example 0:10, got '7'"),
        ("port: [1]", ": port: should be a valid integer, got [1]"),
        ("port: 1\nport: 2", ":2: the key 'port' appears twice"),
        ("port: [1", ":1: "),
        ("- port", ": should hold `key: value` lines, not a list"),
        ("port", ": should hold `key: value` lines, not a single value"),
    ],
)
def test_complaints_about_the_file_name_it(tmp_path: Path, text: str, complaint: str) -> None:
    file = _file(tmp_path, text)
    assert _complaint(ServerSettings, *NEW, "--config", file).startswith(file + complaint)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert (
        _complaint(ServerSettings, "--config", missing)
        == f"{missing}: can't be read: No such file or directory"
    )
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert _complaint(ServerSettings, "--config", str(binary)).endswith("is no text file in UTF-8")


def test_a_command_ends_with_one_line_and_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(ServerSettings, ["--new-swarm"], prog="bloombee-server", description="Serve.")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "bloombee-server: --model is required\n"


@pytest.mark.parametrize("model", ALL)
def test_help_tells_every_setting(
    model: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(model, ["--help"], prog="bee", description="Serves.")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for name, field in model.model_fields.items():
        assert (field.alias or name).replace("_", "-") in shown
        assert field.description, f"{name} has no description"


def test_help_shows_how_values_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(ServerSettings, ["--help"], prog="bee", description="Serves.")
    shown = capsys.readouterr().out
    for words in (
        "--blocks START:END",
        "--kv-tokens N|auto",
        "--initial-peers MADDR ...",
        "--identity FILE",
    ):
        assert words in shown


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(DhtSettings, ["--version"], prog="bee", description="")
    assert capsys.readouterr().out == f"bloombee {__version__}\n"


def test_yaml_keeps_ranges_as_text_and_reads_integers(tmp_path: Path) -> None:
    file = Path(_file(tmp_path, "a: 10:20\nb: -12\nc: 0x10\nd: 1.5\ne: true\nf: 007\n"))
    assert read_yaml(file) == {"a": "10:20", "b": -12, "c": 16, "d": 1.5, "e": True, "f": "007"}
    assert read_yaml(Path(_file(tmp_path, ""))) == {}


def test_yaml_builds_no_python_objects(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="could not determine a constructor"):
        read_yaml(Path(_file(tmp_path, "a: !!python/object/apply:os.getcwd []")))


def test_a_settings_file_alone(tmp_path: Path) -> None:
    assert (
        read_settings(NetworkSettings, Path(_file(tmp_path, "log_level: debug"))).log_level
        == "debug"
    )
    with pytest.raises(SettingsError, match="log_level: should be 'debug', 'info'"):
        read_settings(NetworkSettings, Path(_file(tmp_path, "log_level: loud")))


def test_configs_are_found() -> None:
    assert config_path("models").is_dir()
    assert config_path("models", "llama.yaml").suffix == ".yaml"


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of other platforms ignore XDG")
def test_directories_follow_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/bee")
    assert cache_directory() == Path("/somewhere/cache/bloombee")
    assert state_directory() == Path("/home/bee/.local/state/bloombee")


def test_a_user_without_a_home_gets_folders_that_only_root_can_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory().parent.parent == Path("/")


def test_children_get_passive_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    child = child_environment(threads=2)
    assert child["OMP_WAIT_POLICY"] == "PASSIVE"
    assert child["GOMP_SPINCOUNT"] == "7"
    assert child["OMP_NUM_THREADS"] == "2"
    assert variable("OMP_WAIT_POLICY") is None
    use_passive_threads()
    assert variable("OMP_WAIT_POLICY") == "PASSIVE"
    assert variable("GOMP_SPINCOUNT") == "7"
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    use_quiet_grpc()
    assert variable("GRPC_VERBOSITY") == "ERROR"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"recovery_s": 0}, "recovery_s: should be greater than 0"),
        ({"silence_s": float("nan")}, "silence_s: should be a finite number"),
        ({"request_s": float("inf")}, "request_s: should be a finite number"),
        ({"codec": "zip"}, "codec: should be 'auto', 'raw', 'split', 'lossy-int8'"),
        ({"patience": 1}, "patience: "),
        ({"heartbeat_s": 3}, "more than half of silence_s=4"),
    ],
)
def test_client_settings_that_can_not_be_are_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        ClientSettings(**values)
    assert "\n" not in str(caught.value)
