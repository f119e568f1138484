"""Contexts by registry and by DNS, with a real resolver on one host and agents with keys on the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.network.conftest import ASKS, PATIENCE_S, PLACE, SPARE, Site
from tests.network.fleet import ADMIN_PORT, REGISTRY_PORT
from tests.support.polling import until

EVERY = pytest.mark.parametrize("site", ["nixl", "nixl ipv6"], indirect=True, scope="module")
pytestmark = pytest.mark.skipif(shutil.which("dnsmasq") is None, reason="not installed: dnsmasq (Debian: dnsmasq-base)")

ZONE = "fleet"


class Resolver:
    """dnsmasq on the spare host; the host on which kvctl runs asks it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._host = site.network[SPARE]
        self.address = self._host.ipv6 if site.fleet.ipv6 else self._host.ipv4
        self.name({})
        self._process = subprocess.Popen(
            self._host.program(
                [
                    "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts",
                    "--user=root", f"--addn-hosts={folder}/hosts", f"--listen-address={self.address}",
                    "--bind-interfaces", f"--pid-file={folder}/pid", f"--local=/{ZONE}/",
                ]
            ),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: (folder / "pid").exists(), "dnsmasq does not run", PATIENCE_S)
        (folder / "resolv.conf").write_text(f"nameserver {self.address}\nsearch {ZONE}\n")
        site.network[ASKS].run("mount", "--bind", f"{folder}/resolv.conf", "/etc/resolv.conf")

    def name(self, places: Mapping[str, str]) -> None:
        """Makes `kv.fleet` the name of the hosts of these ranks, each of which has a name of its own, too."""
        address = self._site.fleet.address
        lines = [f"{address(place).strip('[]')} {rank}.{ZONE} kv.{ZONE}\n" for rank, place in places.items()]
        (self._folder / "hosts").write_text("".join(lines))
        if (self._folder / "pid").exists():
            self._host.run("sh", "-c", f"kill -HUP $(cat {self._folder}/pid)")

    def close(self) -> None:
        self._site.network[ASKS].run("umount", "/etc/resolv.conf")
        self._host.run("sh", "-c", f"kill $(cat {self._folder}/pid)")
        self._process.wait(60)


@pytest.fixture
def resolver(site: Site, tmp_path: Path) -> Iterator[Resolver]:
    made = Resolver(site, tmp_path)
    made.name(PLACE)
    yield made
    made.close()


def agents(site: Site, *urls: str) -> list[str]:
    """Returns the names of the agents that answer."""
    done = site.fleet.run_kvctl(urls, "agents")
    rows = json.loads(done.stdout)["data"] if done.stdout else []
    return sorted(row["agent"] for row in rows if row["state"] == "ok")


def until_named(site: Site, url: str, names: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := agents(site, url)) != names:
        assert time.monotonic() < deadline, f"{url} names {found}, not {names}"


@EVERY
def test_registry_and_dns_name_the_same_agents_once(site: Site, resolver: Resolver) -> None:
    registry = f"registry://{site.fleet.address(PLACE['prefill-0'])}:{REGISTRY_PORT}"
    urls = (f"dns://kv.{ZONE}:{ADMIN_PORT}", f"dns://kv:{ADMIN_PORT}", registry)
    for url in urls:
        until_named(site, url, sorted(PLACE))
    assert agents(site, *urls) == sorted(PLACE)


@EVERY
def test_a_name_with_fewer_addresses_names_fewer_agents(site: Site, resolver: Resolver) -> None:
    url = f"dns://kv.{ZONE}:{ADMIN_PORT}"
    until_named(site, url, sorted(PLACE))
    resolver.name({rank: place for rank, place in PLACE.items() if rank != "decode-1"})
    until_named(site, url, ["decode-0", "prefill-0", "prefill-1"])


@EVERY
def test_a_port_behind_which_nobody_is_costs_nobody_else(site: Site, resolver: Resolver) -> None:
    url = f"dns://kv.{ZONE}:{ADMIN_PORT}+2"
    until_named(site, url, sorted(PLACE))
    done = site.fleet.run_kvctl([url], "agents")
    assert done.returncode == 7
    assert done.stderr.count("nobody listens there") == 1


@EVERY
def test_errors_of_the_resolver_are_named(site: Site, resolver: Resolver) -> None:
    unknown = site.fleet.run_kvctl([f"dns://nobody.{ZONE}:{ADMIN_PORT}"], "status")
    assert (unknown.returncode, f"no address is known for nobody.{ZONE}" in unknown.stderr) == (3, True)


@EVERY
def test_a_resolver_that_is_cut_off_costs_a_time_limit(site: Site, resolver: Resolver) -> None:
    url = f"dns://kv.{ZONE}:{ADMIN_PORT}"
    until_named(site, url, sorted(PLACE))
    site.network.part(ASKS, SPARE)
    assert agents(site, url) == sorted(PLACE)
    done = site.fleet.run_kvctl([url], "status")
    assert (done.returncode, "asking the 4 agents that it named" in done.stderr) == (7, True), done.stderr
    shutil.rmtree(site.fleet.directory / "kvctl")  # what kvctl remembers of its sources
    done = site.fleet.run_kvctl([url], "status")
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    # An agent that is named otherwise answers nevertheless.
    done = site.fleet.run_kvctl([url, site.fleet.admin("decode-0")], "agents")
    assert done.returncode == 7
    assert [row["agent"] for row in json.loads(done.stdout)["data"]] == ["decode-0"]
    site.network.heal()
    until_named(site, f"dns://kv.{ZONE}:{ADMIN_PORT}", sorted(PLACE))
