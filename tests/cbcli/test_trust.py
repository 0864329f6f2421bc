"""What a project's file may say only in a folder that the user trusts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.errors import UsageError
from cbcli.settings import Settings, load_settings

RISKY = {
    "retriever": ('retriever = "mine.py:find"', "own.py:find"),
    "pager": ('pager = "less; touch here"', "cat"),
    "vllm": ('vllm = ["trust_remote_code=true"]', "worker_cls=mine.Worker"),
    "remote": ('remote = "redis://elsewhere:6379/0"', "redis://here:6379/0"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "projects" / "one"
    folder.mkdir(parents=True)
    return folder


def load(project: Path, user: str = "", **env: str) -> Settings:
    file = project.parents[1] / "user.toml"
    file.write_text(user)
    return load_settings(env={"CACHEBLEND_CONFIG": str(file), **env}, cwd=project)


@pytest.mark.parametrize("name", RISKY)
def test_what_runs_code_or_sends_data_is_refused_in_a_projects_file(
    name: str, project: Path
) -> None:
    line, own = RISKY[name]
    for text in (line, f'[profile]\nuse = "p"\n[profile.p]\n{line}'):
        (project / "cacheblend.toml").write_text(text)
        with pytest.raises(UsageError, match=f"sets {name}") as caught:
            load(project)
        assert str(project / "cacheblend.toml") in caught.value.message
        assert f'trust = ["{project}"]' in caught.value.hint
        for trusted in (project, project.parent, "projects/one"):
            user = f'trust = ["elsewhere", "{trusted}"]'
            assert load(project, user).origin(name).kind == "project"
            assert load(project, CACHEBLEND_TRUST=str(project)).origin(name).kind == "project"
        with pytest.raises(UsageError):
            load(project, f'trust = ["{project}x", "{project}/below"]')
        # What is stronger than the file isn't the file's.
        assert load(project, **{f"CACHEBLEND_{name.upper()}": own}).origin(name).kind != "project"
    (project / "cacheblend.toml").unlink()
    assert load(project, line).origin(name).kind == "user"


def test_a_projects_file_does_not_trust_itself(project: Path) -> None:
    for line in ("", RISKY["pager"][0]):
        (project / "cacheblend.toml").write_text(f'trust = ["."]\n{line}')
        for user in ("", f'trust = ["{project}"]'):
            with pytest.raises(UsageError, match="sets trust"):
                load(project, user)


def test_a_link_to_a_folder_is_trusted_as_the_folder_is(project: Path, tmp_path: Path) -> None:
    (project / "cacheblend.toml").write_text(RISKY["pager"][0])
    link = tmp_path / "link"
    link.symlink_to(project)
    assert load(project, f'trust = ["{link}"]').pager == "less; touch here"


def test_what_is_harmless_is_heeded(project: Path) -> None:
    text = 'retriever = "hybrid"\npager = false\nvllm = []\nremote = "none"\n'
    (project / "cacheblend.toml").write_text(text)
    assert {load(project).origin(name).kind for name in RISKY} == {"project"}
