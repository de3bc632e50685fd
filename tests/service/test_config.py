"""Settings: flag over environment over file over default, each value with its origin, each mistake with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.service.config import DEFAULT_PORT, load_settings
from rota.service.process.assembly import check_with_owners
from rota.service.process.joined import join
from rota.spec.errors import BadInput


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('port = 1\nhost = "127.0.0.2"\nprofile = "pool"\n')
    environ = {"ROTA_HOME": str(tmp_path), "ROTA_PORT": "2", "ROTA_HOST": "127.0.0.3"}
    settings = load_settings({"port": 3}, environ)
    assert (settings.port, settings.host, settings.profile) == (3, "127.0.0.3", "pool")
    assert {name: settings.origins[name] for name in ("port", "host", "profile", "db_url")} == {
        "port": "flag",
        "host": "ROTA_HOST",
        "profile": "config.toml",
        "db_url": "default",
    }


def test_the_home_that_a_process_of_the_service_is_given_has_the_origin_that_it_had(tmp_path: Path) -> None:
    def origin(given: str, **environ: str) -> str:
        return load_settings({"home": given}, environ).origins["home"]

    assert origin(str(tmp_path), ROTA_HOME=str(tmp_path)) == "ROTA_HOME"
    assert origin(load_settings({}, {}).home) == "default"
    assert origin(str(tmp_path)) == origin(str(tmp_path), ROTA_HOME="/elsewhere") == "flag"


def test_without_anything_the_service_is_on_the_loopback_address(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path)}, {})
    assert (settings.host, settings.port, settings.url) == ("127.0.0.1", DEFAULT_PORT, "http://127.0.0.1:7700")


def test_stores_are_a_table_of_the_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[stores]\nsets = "s3://team/sets"\nruns = "file:///runs"\n')
    settings = load_settings({"home": str(tmp_path)}, {})
    assert settings.store_urls == {"sets": "s3://team/sets", "runs": "file:///runs"}
    environ = {"ROTA_STORES": "sets=s3://other/a=b"}
    assert load_settings({"home": str(tmp_path)}, environ).store_urls == {"sets": "s3://other/a=b"}
    assert load_settings({"home": str(tmp_path), "stores": settings.stores}, {}).stores == settings.stores


def test_settings_of_several_names_may_be_lists_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('device_families = ["a.b:C", "d:E"]\nwebhook_hosts = ["in.side", "other"]\n')
    settings = load_settings({"home": str(tmp_path)}, environ={})
    assert (settings.device_families, settings.webhook_hosts) == ("a.b:C d:E", "in.side,other")


def test_flags_that_were_not_given_do_not_count(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path), "port": None, "host": ""}, {"ROTA_PORT": "9"})
    assert (settings.port, settings.host) == (9, "127.0.0.1")


@pytest.mark.parametrize(
    ("file", "environ", "said"),
    [
        ("prot = 1\n", {}, "unknown setting 'prot'"),
        ("port = \n", {}, "config.toml"),
        ("", {"ROTA_PORT": "many"}, r"port='many' \(from ROTA_PORT\)"),
        ("", {"ROTA_PORT": "70000"}, "between 0 and 65535"),
        ("", {"ROTA_PRETEND": "3by4"}, "3by4"),
        ("", {"ROTA_RAY_ADDRESS": "ray://x"}, r"ray_address=ray://x \(from ROTA_RAY_ADDRESS\) is not HOST:PORT"),
        ("", {"ROTA_RAY_ADDRESS": "x:65536"}, r"ray_address=x:65536 .* has a port that is not between 1 and 65535"),
        ("pretend = '1x2x4'", {"ROTA_RAY_ADDRESS": "head:6379"}, "has real machines; those of pretend=1x2x4 are not"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_origin(
    tmp_path: Path, file: str, environ: dict[str, str], said: str
) -> None:
    (tmp_path / "config.toml").write_text(file)
    with pytest.raises(BadInput, match=said):
        load_settings({}, {"ROTA_HOME": str(tmp_path), **environ})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("port = 'many'", "port='many' (from {file}) is not a number"),
        ("port = 7.5", "port=7.5 (from {file}) is not a whole number"),
        ("spares = true", "spares=True (from {file}) is not a whole number"),
        ("poll_s = -1", "poll_s=-1 (from {file}) is not a number from 0"),
        ("poll_s = nan", "poll_s=nan (from {file}) is not a number"),
        ("poll_s = inf", "poll_s=inf (from {file}) is not a number from 0"),
        ("poll_s = 0", "poll_s=0 (from {file}) is below 0.001: the service would never rest"),
        ('stores = "a=s3://k:secret@h/x b"', "stores=a=s3://k:***@h/x b (from {file})"),
        ("host = 5", "host=5 (from {file}) is not a text"),
        ("log_level = 'LOUD'", "log_level=LOUD (from {file}) is not a level of logging"),
        ("device_families = ['a.b']", "device_families=a.b (from {file}) has 'a.b', which is not MODULE:CLASS"),
        ("device_families = [1]", "device_families=[1] (from {file}) is not a list of texts"),
        ("[stores]\ndata = '/mnt/x'", "stores=data=/mnt/x (from {file}) has 'data=/mnt/x', which is not NAME=URL"),
        ("stores = 'a:b=s3://x'", "has 'a:b=s3://x', which is not NAME=URL"),
        ("pretend = '3by4'", "pretend=3by4 (from {file}) is not a cluster"),
    ],
)
def test_a_wrong_value_in_the_file_names_file_key_and_remedy(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(line)
    with pytest.raises(BadInput) as caught:
        load_settings({}, {"ROTA_HOME": str(tmp_path)})
    assert said.format(file=file) in str(caught.value)
    assert caught.value.hint.startswith(
        ("change or remove", "write ", "[stores]", "in config.toml: device_families = [")
    )


def test_a_profile_that_does_not_exist_is_refused_at_start_with_its_origin_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('profile = "poool"\n')
    with pytest.raises(BadInput) as refused:
        check_with_owners(load_settings({"home": str(tmp_path)}, {}))
    assert refused.value.message.startswith(f"profile=poool (from {tmp_path}/config.toml) cannot be used: ")
    assert "pool" in refused.value.hint


@pytest.mark.parametrize("variable", ["ROTA_DATA_CACHE", "ROTA_IMAGE_CACHE"])
def test_the_size_of_a_cache_is_checked_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "many")
    with pytest.raises(BadInput, match=f"{variable}=many"):
        check_with_owners(load_settings({"home": str(tmp_path)}, {}))
    with pytest.raises(BadInput, match=f"{variable}=many"):
        join(load_settings({"home": str(tmp_path)}, {}), "127.0.0.1:9", token="rota_x")
    monkeypatch.setenv(variable, "500GiB")
    check_with_owners(load_settings({"home": str(tmp_path)}, {}))


def test_no_document_of_settings_shows_a_password(tmp_path: Path) -> None:
    given = {
        "server": "http://u:hushhush@h:7700",
        "stores": "a=s3://k:hushhush@h/x",
        "db_url": "postgresql://u:hushhush@h/d",
    }
    settings = load_settings({**given, "home": str(tmp_path)}, {})
    shown = {row["name"]: row["value"] for row in settings.document()["items"]}
    assert "hushhush" not in str(shown) and shown["server"] == "http://u:***@h:7700"


def test_a_wrong_flag_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"port=99999 \(from flag\) is not between 0 and 65535") as caught:
        load_settings({"port": 99999, "home": str(tmp_path)}, {})
    assert caught.value.hint == "give that flag another value"
