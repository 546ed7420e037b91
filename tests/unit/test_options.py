"""Options: every way in (flag, environment, dict), every refusal, and that values survive the way to a worker."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_sm120 import options as opt
from sglang_sm120.options import DECLARED, OptionError, Options

BY_NAME = {item.name: item for item in DECLARED}


def parse(*argv: str, environ: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    opt.add_arguments(parser)
    return opt.from_namespace(parser.parse_args(argv), environ or {})


def test_nothing_given_is_the_defaults_and_off():
    assert parse() == Options()
    assert not parse().enabled


def test_flags_reach_their_fields():
    options = parse(
        "--enable-sm120-fusion",
        "--sm120-backend=host",
        "--sm120-islands=0-3;4-7",
        "--sm120-wire=int8",
        "--sm120-timeout-ms=700",
        "--sm120-nccl=keep",
        "--sm120-verify=off",
        "--sm120-plan-cache=/tmp/plans",
    )
    assert options == Options(
        enabled=True,
        backend="host",
        islands="0-3;4-7",
        wire="int8",
        timeout_ms=700,
        nccl="keep",
        verify="off",
        plan_cache="/tmp/plans",
    )
    assert options.island_ranks == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_flag_wins_over_environment_and_environment_over_default():
    environ = {"SGLANG_SM120_TIMEOUT_MS": "900", "SGLANG_SM120_WIRE": "int8"}
    options = parse("--sm120-timeout-ms", "800", environ=environ)
    assert (options.timeout_ms, options.wire) == (800, "int8")


@pytest.mark.parametrize("text, value", [("1", True), ("true", True), ("0", False), ("", False)])
def test_switch_from_environment(text: str, value: bool):
    assert opt.from_environment({"SGLANG_SM120_ENABLE": text}).enabled is value


WRONG = [
    ("backend", "cuda", "must be one of auto, host, native, mailbox, flashinfer, nccl"),
    ("wire", "fp4", "must be one of bf16, int8"),
    ("nccl", "big", "must be one of compact, keep"),
    ("verify", "maybe", "must be one of auto, off"),
    ("timeout_ms", "soon", "must be a whole number from 50 to 600000 milliseconds"),
    ("timeout_ms", "1", "must be from 50 to 600000 milliseconds"),
    ("capacity_mib", "0", "must be from 1 to 1024 MiB"),
    ("islands", "0,1;1,2", "name every rank from 0 once"),
    ("islands", "0,2", "name every rank from 0 once"),
    ("islands", "a;b", "groups of ranks"),
    ("islands", "3-0", "groups of ranks"),
    ("islands", "", "groups of ranks"),
    ("nccl_config", "{", "a JSON object"),
    ("nccl_config", '{"tp": 4}', "a JSON object"),
]


@pytest.mark.parametrize("name, text, sentence", WRONG)
def test_wrong_value_names_the_flag_what_it_accepts_and_what_it_got(name, text, sentence):
    flag = BY_NAME[name].option.flag
    with pytest.raises(OptionError) as caught:
        parse(f"{flag}={text}")
    message = str(caught.value)
    assert message.startswith(flag) and sentence in message and f'"{text}"' in message
    assert "\n" not in message


@pytest.mark.parametrize("name, text, sentence", WRONG)
def test_wrong_value_in_the_environment_names_the_variable(name, text, sentence):
    variable = BY_NAME[name].option.env
    with pytest.raises(OptionError, match=variable):
        opt.from_environment({variable: text})


def test_wrong_switch_in_the_environment():
    with pytest.raises(OptionError, match="SGLANG_SM120_ENABLE must be 1 or 0"):
        opt.from_environment({"SGLANG_SM120_ENABLE": "perhaps"})


def test_every_option_has_its_own_flag_and_variable_and_a_default_that_passes_its_check():
    flags = [item.option.flag for item in DECLARED]
    variables = [item.option.env for item in DECLARED]
    assert len(set(flags)) == len(flags) and len(set(variables)) == len(variables)
    for item in DECLARED:
        assert item.parse(item.default, "default") == item.default
        assert item.option.help.endswith(".")


def test_only_actions_that_the_config_file_reader_knows():
    parser = argparse.ArgumentParser()
    opt.add_arguments(parser)
    before = len(parser._actions)
    opt.add_arguments(parser)
    assert len(parser._actions) == before
    kinds = {type(action).__name__ for action in parser._actions if action.dest != "help"}
    assert kinds == {"_StoreAction", "_StoreTrueAction"}


def test_help_is_a_group_of_its_own():
    parser = argparse.ArgumentParser()
    opt.add_arguments(parser)
    text = parser.format_help()
    assert opt.GROUP_TITLE in text
    for item in DECLARED:
        assert item.option.flag in text and item.option.env in text


def _text(item: opt.Declared) -> st.SearchStrategy:
    if item.option.choices:
        return st.sampled_from(item.option.choices)
    if item.type is bool:
        return st.booleans()
    return {
        "islands": st.sampled_from(["auto", "0,1;2,3", "0-3;4-7", "0;1;2", "0,2;1,3"]),
        "nccl_config": st.sampled_from(["", '{"tp":{"max_ctas":4}}']),
    }.get(
        item.name,
        st.integers(50, 1024)
        if item.type is int
        else st.from_regex(r"[a-z/]{0,9}", fullmatch=True),
    )


@given(st.fixed_dictionaries({item.name: _text(item) for item in DECLARED}))
def test_any_valid_options_survive_pickle_and_both_environments(values):
    options = opt.from_dict(values)
    assert opt.from_dict(pickle.loads(pickle.dumps(opt.to_dict(options)))) == options
    handed: dict[str, str] = {}
    opt.hand_down(options, handed)
    assert opt.from_environment(handed) == (options if options.enabled else Options())
    single: dict[str, str] = {opt.CONFIG_ENV: "stale"}
    enabled = opt.enable(single, **{k: v for k, v in values.items() if k != "enabled"})
    assert opt.from_environment(single) == enabled and enabled.enabled


def test_enable_refuses_before_it_writes():
    environ: dict[str, str] = {}
    with pytest.raises(OptionError):
        opt.enable(environ, backend="nothing")
    with pytest.raises(OptionError, match="unknown sm120 option 'speed'"):
        opt.enable(environ, speed=3)
    assert environ == {}


def test_handed_down_text_that_cannot_be_read_says_so():
    with pytest.raises(OptionError, match=opt.CONFIG_ENV):
        opt.from_environment({opt.CONFIG_ENV: "{"})
    with pytest.raises(OptionError, match="unknown sm120 option"):
        opt.from_environment({opt.CONFIG_ENV: '{"speed": 3}'})


def test_handing_down_disabled_options_removes_a_stale_variable():
    environ = {opt.CONFIG_ENV: '{"enabled": true}'}
    opt.hand_down(Options(), environ)
    assert environ == {}


def test_islands_must_fit_the_group():
    Options(islands="0,1;2,3").check_world(4)
    Options().check_world(5)
    with pytest.raises(OptionError, match="ranks 0 to 3, but .* ranks 0 to 7"):
        Options(islands="0,1;2,3").check_world(8)


@pytest.mark.parametrize(
    "environ, off",
    [({}, False), ({"SGLANG_PLUGINS": ""}, True), ({"SGLANG_PLUGINS": "sm120"}, False)],
)
def test_an_empty_plugin_list_means_none(environ, off):
    assert opt.plugins_switched_off(environ) is off


def documented_table() -> str:
    rows = ["| flag | environment | default | what it does |", "|---|---|---|---|"]
    for item in DECLARED:
        flag = (
            item.option.flag
            if item.type is bool
            else f"{item.option.flag} {item.option.placeholder}"
        )
        default = "off" if item.type is bool else item.default
        shown = f"`{default}`" if default != "" else ""
        rows.append(f"| `{flag}` | `{item.option.env}` | {shown} | {item.option.help} |")
    return "\n".join(rows)


def test_documentation_lists_every_option_as_declared():
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    between = page.split("options.py) -->")[1].split("<!-- options: end")[0].strip()
    assert between == documented_table(), f"paste this into docs/options.md:\n{documented_table()}"
