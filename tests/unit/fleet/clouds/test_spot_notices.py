"""Spot notices, against a local server that speaks IMDSv2."""

import json
import queue
from collections.abc import Iterator

import pytest

from tests.unit.fleet.metadata import Metadata, metadata_service
from varuna.fleet.clouds.spot_notices import SpotNotice, SpotNotices


@pytest.fixture
def url() -> Iterator[str]:
    with metadata_service() as url:
        yield url


ACTION = json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"})
AT_S = 1505722920.0


def poller(url: str, now_s: float = AT_S - 120) -> SpotNotices:
    return SpotNotices(lambda notice: None, url=url, now=lambda: now_s)


def test_without_a_notice_there_is_none_and_one_token_serves_many_questions(url: str) -> None:
    asking = poller(url)
    assert [asking.poll() for _ in range(3)] == [None] * 3
    assert Metadata.tokens_given == 1


def test_a_notice_says_what_will_happen_and_when(url: str) -> None:
    Metadata.action = ACTION
    assert poller(url).poll() == SpotNotice("terminate", 120.0)
    assert poller(url, AT_S + 5).poll() == SpotNotice("terminate", 0.0)


def test_an_expired_token_is_renewed(url: str) -> None:
    asking = poller(url)
    asking.poll()
    Metadata.token, Metadata.action = "t1", ACTION
    assert asking.poll() == SpotNotice("terminate", 120.0)
    assert Metadata.tokens_given == 2


@pytest.mark.parametrize("body", ["", "{", "[]", '{"action": "stop"}', '{"action": "stop", "time": 3}', '"x"'])
def test_an_answer_that_makes_no_sense_is_no_notice(url: str, body: str) -> None:
    Metadata.action = body
    assert poller(url).poll() is None


def test_a_machine_without_the_service_has_no_notices() -> None:
    assert poller("http://127.0.0.1:9").poll() is None


def test_the_thread_tells_once_and_ends(url: str) -> None:
    told: queue.Queue[SpotNotice] = queue.Queue()
    asking = SpotNotices(told.put, url=url, every_s=0.01, now=lambda: AT_S - 60)
    asking.start()
    Metadata.action = ACTION
    assert told.get(timeout=5) == SpotNotice("terminate", 60.0)
    asking.close()
    assert told.empty()
    assert not asking._thread.is_alive()
