"""Each prerequisite of an Ascend host, broken in turn: the fault is named, and what to do."""

import socket
from pathlib import Path

import pytest

from kvworker.doctor import ascend
from kvworker.doctor.ascend import check_ascend, check_lease
from kvworker.doctor.report import Finding, Surroundings, Verdict


def host(root: Path, driver: str = "26.0.RC1", cann: str = "9.0.0") -> None:
    """Files of a host on which all is well."""
    files = {
        "usr/local/Ascend/driver/version.info": f"Version={driver}\n",
        "cann/version.cfg": f"toolkit_running_version=[{cann}:CANN]\n",
        "etc/hccn.conf": "address_0=10.0.0.1\n",
        "proc/sys/vm/nr_hugepages": "1024\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def examined(root: Path, **environ: str) -> dict[str, Finding]:
    around = Surroundings({"ASCEND_HOME_PATH": "/cann", **environ}, root, "npu:0")
    return {each.name: each for each in check_ascend(around)}


def test_a_good_host_has_nothing_to_complain_about_but_what_this_machine_lacks(
    tmp_path: Path,
) -> None:
    host(tmp_path)
    found = examined(tmp_path)
    bad = {name for name, each in found.items() if each.verdict is not Verdict.OK}
    assert bad <= {"libascendcl.so", "torch_npu"}
    assert found["driver"].found == "26.0"
    assert found["CANN"].found == "9.0"


@pytest.mark.parametrize(
    ("broken", "name", "verdict", "remedy"),
    [
        ({"driver": "24.1.0"}, "driver", Verdict.FAIL, r"25.3.RC1"),
        ({"driver": "25.3.RC1"}, "driver", Verdict.WARN, r"26.0.RC1"),
        ({"driver": "none"}, "driver", Verdict.FAIL, r"/dev/davinci"),
        ({"cann": "8.0.0"}, "CANN", Verdict.FAIL, r"8.3.RC1"),
        ({"cann": "?"}, "CANN", Verdict.WARN, r"ASCEND_HOME_PATH"),
    ],
)
def test_old_software(
    tmp_path: Path, broken: dict[str, str], name: str, verdict: Verdict, remedy: str
) -> None:
    host(tmp_path, **broken)
    found = examined(tmp_path)[name]
    assert found.verdict is verdict
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("environ", "name", "verdict", "remedy"),
    [
        ({"ASCEND_HOME_PATH": ""}, "CANN", Verdict.FAIL, "set_env.sh"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:32, expandable_segments:True"},
            "PYTORCH_NPU_ALLOC_CONF",
            Verdict.WARN,
            "expandable_segments:False",
        ),
        (
            {"ASCEND_ENABLE_USE_FABRIC_MEM": "0"},
            "ASCEND_ENABLE_USE_FABRIC_MEM",
            Verdict.FAIL,
            "unset",
        ),
    ],
)
def test_traps_of_the_environment(
    tmp_path: Path, environ: dict[str, str], name: str, verdict: Verdict, remedy: str
) -> None:
    host(tmp_path)
    found = examined(tmp_path, **environ)[name]
    assert found.verdict is verdict
    assert remedy in found.remedy


def test_the_network_of_the_cards(tmp_path: Path) -> None:
    host(tmp_path)
    (tmp_path / "etc/hccn.conf").unlink()
    (tmp_path / "proc/sys/vm/nr_hugepages").write_text("0\n", encoding="utf-8")
    assert "huge pages" not in examined(tmp_path)
    found = examined(tmp_path, HCCL_INTRA_ROCE_ENABLE="1")
    assert found["/etc/hccn.conf"].verdict is Verdict.WARN
    assert found["huge pages"].verdict is Verdict.FAIL
    assert "nr_hugepages" in found["huge pages"].remedy


def test_ports_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "_PORTS_PER_CARD", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = examined(tmp_path, ASCEND_BASE_PORT=str(port))["ports"]
        assert found.verdict is Verdict.FAIL
        assert "ASCEND_BASE_PORT" in found.remedy
    assert examined(tmp_path, ASCEND_BASE_PORT=str(port))["ports"].verdict is Verdict.OK


def test_a_lease_outlasts_every_transfer() -> None:
    assert check_lease(Surroundings({}), 10_000).verdict is Verdict.OK
    found = check_lease(Surroundings({"ASCEND_TRANSFER_TIMEOUT": "10000"}), 10_000)
    assert found.verdict is Verdict.FAIL
    assert "--default_kv_lease_ttl" in found.remedy
