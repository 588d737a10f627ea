"""The calls that a script will make are read from its source."""

import sys

from varuna.job.script_calls import calls_of


class Subject:
    def measure(self) -> None: ...

    def never_called(self) -> None: ...


def test_a_call_later_in_the_function_is_seen_and_others_are_not() -> None:
    mine, other = Subject(), Subject()
    assert calls_of(mine, ["measure", "never_called"], sys._getframe()) == ["measure"]
    assert calls_of(other, ["measure", "never_called"], sys._getframe()) == []
    mine.measure()


def test_a_helper_of_the_same_file_is_seen_by_the_name_that_the_caller_has() -> None:
    helped = Subject()
    assert calls_of(helped, ["measure"], sys._getframe()) == ["measure"]
    _help(helped)


def _help(helped: Subject) -> None:
    helped.measure()


def test_code_without_a_file_is_no_trouble() -> None:
    scope = {"subject": Subject(), "calls_of": calls_of, "sys": sys}
    exec("found = calls_of(subject, ['measure'], sys._getframe()); subject.measure", scope)
    assert scope["found"] == []
