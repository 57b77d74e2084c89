"""The `ebbtide` command itself: version, completion, help in groups."""

import importlib.metadata

import pytest

from ebbtide._cli import main

COMMANDS = ("demo", "plan", "max-batch", "report", "doctor", "bench")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ebbtide {importlib.metadata.version('ebbtide')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_the_commands(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", shell])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert [command for command in (*COMMANDS, "--disk-dir") if command not in printed] == []


def test_help_has_every_command_and_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert [name for name in (*COMMANDS, "--version") if name not in printed] == []


def test_help_of_a_plan_has_groups(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed = capsys.readouterr().out
    titles = ("measure options", "goal options", "what-if options", "curve options")
    assert [title for title in titles if title not in printed] == []
    assert "None}" not in printed
