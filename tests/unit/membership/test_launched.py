from varuna.core.errors import DataError, UsageError
from varuna.membership.launched import explained


def test_the_lines_of_the_cause_are_told_too() -> None:
    def raise_it() -> None:
        raise KeyError("gone")  # the line that matters

    try:
        try:
            raise_it()
        except KeyError as error:
            raise DataError("dataset[3] cannot be read") from error
    except DataError as error:
        told = explained(error)
    assert told.startswith("varuna: dataset[3] cannot be read\n")
    assert 'raise KeyError("gone")' in told.splitlines()[-1]
    assert explained(UsageError("no frames yet")) == "varuna: no frames yet"
