"""What storage costs, by prices that were given."""

from __future__ import annotations

import math

import pytest

from weft.errors import ConfigError
from weft.machines.storage import (
    DEPLOYMENTS,
    GIB,
    MONTH_S,
    PRICED,
    SERVICES,
    Bill,
    bill,
    check_prices,
    with_prices,
)
from weft.plan.storage import serving


def test_each_storage_has_a_price_that_can_be_given():
    assert set(PRICED) == {*SERVICES, *DEPLOYMENTS}
    for name, paid in PRICED.items():
        found = bill(
            {name: dict.fromkeys(paid, 1.0)}, name, kept_gib=1, read_bytes=GIB, reads=1000, provisioned=1
        )
        assert found == Bill(
            sum(one.endswith("_month") for one in paid), sum(one[-5:] != "month" for one in paid)
        )


def test_bursting_pays_for_what_must_be_stored_to_be_fast():
    """2,048 GiB give 300 MiB/s of reads; 100 of them hold the data."""
    asked = {"data_bytes": 100 * GIB, "prices": {"EFS bursting": {"gib_month": 0.3}}}
    assert serving(SERVICES["EFS bursting"], 300 * 2**20, **asked).bill == Bill(
        pytest.approx(0.3 * 2048), 0.0
    )


def test_provisioned_pays_for_what_is_stored_and_for_its_rate():
    prices = {"EFS provisioned": {"gib_month": 0.3, "mib_s_month": 6.0}}
    found = serving(SERVICES["EFS provisioned"], 300 * 2**20, data_bytes=50 * GIB, prices=prices)
    assert found.units == 100 and found.bill == Bill(pytest.approx(50 * 0.3 + 100 * 6.0), 0.0)


def test_object_stores_pay_for_requests_and_a_run_for_its_epochs():
    """80 GB in reads of 8 MB are 10,000 requests an epoch; ten epochs of 73 hours are a month."""
    prices = {"S3": {"gib_month": 0.02, "thousand_reads": 0.5, "gib_read": 0.0}}
    epoch_s, data = MONTH_S / 10, 80e9
    found = serving(SERVICES["S3"], data / epoch_s, data_bytes=data, prices=prices, run_s=MONTH_S)
    month = 80e9 / GIB * 0.02
    assert found.bill == Bill(pytest.approx(month), pytest.approx(5.0), pytest.approx(month + 50.0))


def test_what_does_not_serve_or_has_no_price_costs_nothing_that_is_known():
    prices = {"EFS elastic": {"gib_month": 0.3}}
    assert serving(SERVICES["EFS elastic"], 1e12, prices=prices).bill is None
    assert serving(SERVICES["S3"], 1e9, prices=prices).bill is None


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["S3:gib_month=-1"], "gib_month of S3 is -1.0, it must be a number from 0 to 1,000,000,000,000"),
        (["S3:gib_month=1e308"], "gib_month of S3 is 1e.308, it must be a number from 0 to"),
        (["S3:gib_month=nan"], "gib_month of S3 is nan, it must be"),
        (["SCRATCH_2:gib_month=inf"], "gib_month of SCRATCH_2 is inf, it must be"),
        (["S4:gib_month=1"], '"S4" is no storage that is known; known are EFS bursting, .*SCRATCH_2'),
        (
            ["S3:mib_s_month=1"],
            'S3 has no price by "mib_s_month"; it has gib_month \\(a GiB kept for a month\\), ',
        ),
        (
            ["S3=1"],
            "'S3=1' is no price of storage: write name, what is paid for and price, as in 'S3:gib_month=0.02'",
        ),
        (["S3:gib_month=cheap"], "'S3:gib_month=cheap' is no price of storage"),
        (["S3:gib_month"], "'S3:gib_month' is no price of storage"),
        (["S3:gib_month=-1", "S4:gib_month=1"], 'gib_month of S3 is -1.0.*; "S4" is no storage'),
    ],
)
def test_prices_that_cannot_be_are_refused(texts, said):
    with pytest.raises(ConfigError, match=said):
        with_prices({}, texts)


def test_a_price_is_no_smaller_for_being_free():
    check_prices({"S3": {"gib_month": 0.0}})
    assert bill({"S3": {"gib_month": 0.0}}, "S3", kept_gib=1e9, read_bytes=0, reads=0) == Bill(0.0, 0.0)
    assert math.isfinite(bill({"S3": {"gib_month": 1e300}}, "S3", kept_gib=1, read_bytes=0, reads=0).month)
