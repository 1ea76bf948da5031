"""`outrider chat`: turns, commands, and how an answer is stopped."""

from __future__ import annotations

import signal

from reciting import SONG


def roles(messages) -> list[str]:
    return [message["role"] for message in messages]


def test_each_piped_line_is_a_turn_and_the_conversation_is_kept(cli, stage):
    ran = cli("chat", "--system", "Sing.", piped="first\n\nsecond\n")
    assert ran.code == 0
    assert ran.out == f"{SONG}\n{SONG}\n"
    one, two = stage.tokenizer.chats
    assert roles(one) == ["system", "user"]
    assert roles(two) == ["system", "user", "assistant", "user"]
    assert two[2]["content"] == SONG
    assert two[3]["content"] == "second"


def test_clear_forgets_all_but_the_system_message(cli, stage):
    cli("chat", "--system", "Sing.", piped="first\n/clear\nsecond\n")
    assert roles(stage.tokenizer.chats[1]) == ["system", "user"]


def test_quit_leaves_at_once(cli, stage):
    ran = cli("chat", piped="/quit\nnever asked\n")
    assert (ran.code, ran.out) == (0, "")
    assert stage.tokenizer.chats == []


def test_figures_come_on_request(cli, stage):
    quiet = cli("chat", piped="hello\n")
    assert "tok/s" not in quiet.out + quiet.err
    asked = cli("chat", piped="/stats\nhello\n/stats\n")
    assert "no answer yet" in asked.err
    assert "tok/s" in asked.err


def test_help_lists_every_command_and_a_typo_gets_a_hint(cli, stage):
    ran = cli("chat", piped="/help\n/stat\n")
    for command in ("/help", "/stats", "/clear", "/drafter", "/quit", "Ctrl-C"):
        assert command in ran.err
    assert "did you mean /stats?" in ran.err


def test_the_drafter_can_change_in_mid_conversation(cli, stage):
    ran = cli(
        "chat", "--drafter", "none", piped="/drafter\nhi\n/stats\n/drafter ngram:k=4\nhi\n/stats\n/drafter nogram\n"
    )
    assert "drafter: none" in ran.err
    assert "nothing was drafted" in ran.err
    assert "drafter: ngram:k=4" in ran.err
    assert "chance that a draft token is accepted" in ran.err
    assert "error: no drafter called 'nogram'" in ran.err
    assert ran.out == f"{SONG}\n{SONG}\n"
    assert roles(stage.tokenizer.chats[1]) == ["user", "assistant", "user"]


def test_a_conversation_that_outgrows_the_context_goes_on_after_clear(cli, stage):
    stage.context = 200
    ran = cli("chat", piped=f"{'x' * 50}\n{'y' * 150}\n/clear\nshort\n")
    assert ran.code == 2, "a script learns that a turn failed"
    assert "error: the prompt has" in ran.err
    assert "/clear" in ran.err
    assert ran.out == f"{SONG}\n{SONG}\n"
    assert roles(stage.tokenizer.chats[2]) == ["user"]


def test_an_answer_cut_by_the_context_says_so(cli, stage):
    stage.context = 60
    ran = cli("chat", piped="12345\n")
    assert "context of 60 tokens is full" in ran.err
    assert SONG.startswith(ran.out.strip())
    assert ran.code == 0


def test_one_interrupt_stops_the_answer_and_keeps_the_conversation(cli, stage):
    before = signal.getsignal(signal.SIGINT)
    stage.before_score = lambda passes: signal.raise_signal(signal.SIGINT) if passes == 5 else None
    ran = cli("chat", piped="first\nsecond\n")
    assert ran.code == 0
    first, second = ran.out.splitlines()
    assert 0 < len(first) < len(SONG)
    assert SONG.startswith(first)
    assert second == SONG
    assert stage.tokenizer.chats[1][1] == {"role": "assistant", "content": first}
    assert signal.getsignal(signal.SIGINT) is before


def test_two_interrupts_leave(cli, stage):
    def twice(passes: int) -> None:
        if passes == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    stage.before_score = twice
    assert cli("chat", piped="first\nsecond\n").code == 130
    assert len(stage.tokenizer.chats) == 1


def typing(monkeypatch, *keys) -> None:
    """A terminal at which these are typed."""
    typed = iter(keys)

    def asked(prompt: str) -> str:
        key = next(typed)
        if isinstance(key, BaseException):
            raise key
        return key

    monkeypatch.setattr("builtins.input", asked)


def test_at_a_terminal_ctrl_c_twice_in_a_row_leaves(cli, stage, monkeypatch):
    typing(monkeypatch, KeyboardInterrupt(), "hello", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    ran = cli("chat")
    assert ran.code == 0
    assert len(stage.tokenizer.chats) == 1
    assert "once more leaves" in ran.err


def test_at_a_terminal_ctrl_c_clears_the_line_and_ctrl_d_leaves(cli, stage, monkeypatch):
    typing(monkeypatch, KeyboardInterrupt(), "  ", "hello", EOFError())
    ran = cli("chat")
    assert ran.code == 0
    assert len(stage.tokenizer.chats) == 1
    assert SONG in ran.out


def test_a_terminal_gets_colours_and_one_legend(cli, stage, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = cli("chat", piped="first\nsecond\n")
    assert ran.out.count("accepted draft") == 1
    assert "\x1b[38;5;" in ran.out


def test_a_request_that_fails_midway_leaves_the_conversation_as_it_was(cli, stage):
    ran = cli("chat", "--allowed-token-ids", "5", "--banned-token-ids", "5", piped="first\nsecond\n")
    assert ran.code == 1
    assert ran.err.count("error: ") == 2
    assert roles(stage.tokenizer.chats[1]) == ["user"]
