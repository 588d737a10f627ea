from pathlib import Path

import pytest

from varuna.core.errors import UsageError
from varuna.fleet.machine.budget import Used
from varuna.fleet.page.costs import check_budget
from varuna.fleet.state.run_events import Budgeted, Priced

HERE = Path("runs/a")
PRICE = Priced(per_hour=0.69)
USED = Used(wall_s=7200.0, dollars=12.5)


@pytest.mark.parametrize("price", [None, Priced(per_hour=0.0)])
def test_money_without_a_price_is_no_bound(price: Priced | None) -> None:
    with pytest.raises(UsageError, match=r"--max-cost needs what a worker costs .* give --price DOLLARS too"):
        check_budget(Budgeted(max_dollars=20.0), price, USED, HERE)
    check_budget(Budgeted(max_hours=20.0), price, USED, HERE)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            Budgeted(max_dollars=12.5),
            r"--max-cost 12.5: \$12.50 was already spent .* count anew \(this one is runs/a\)",
        ),
        (Budgeted(max_hours=1.5), r"--max-hours 1.5: this run has already taken 2h 00m. Give more than that"),
    ],
)
def test_a_budget_that_is_used_up_is_refused(budget: Budgeted, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_budget(budget, PRICE, USED, HERE)


def test_a_larger_one_is_not() -> None:
    check_budget(Budgeted(max_dollars=12.51, max_hours=2.01), PRICE, USED, HERE)
