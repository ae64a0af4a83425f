"""All checks for one device and store, in the order in which a person would make them."""

from kvworker.doctor.ascend import check_ascend, check_lease
from kvworker.doctor.card import check_card
from kvworker.doctor.host import check_host
from kvworker.doctor.report import Finding, Surroundings, Verdict
from kvworker.doctor.store import check_store


def examine(
    around: Surroundings, *, mooncake: bool, mooncake_file: str, probe: bool
) -> list[Finding]:
    """Make the checks.

    Args:
        around: The machine; its ``device`` says which checks apply.
        mooncake: The store is Mooncake.
        mooncake_file: Its configuration; empty: as the environment says.
        probe: Open the card and share memory with another process; ask the store's master.
    """
    findings = list(check_host(around))
    npu = around.device.startswith("npu")
    if npu:
        findings += check_ascend(around)
        ready = all(each.verdict is not Verdict.FAIL for each in findings if each.name in _NEEDED)
        if not ready or not probe:
            why = "needs what failed above" if not ready else "not asked for"
            findings.append(Finding("card", Verdict.SKIP, why))
        else:
            findings += check_card(around)
    elif around.device.startswith("cuda") and probe:
        findings += check_card(around)
    if mooncake:
        config, found = check_store(around, mooncake_file, probe=probe)
        findings += found
        if npu and config is not None and config.protocol == "ascend":
            findings.append(check_lease(around, config.store_lease_ms))
    return findings


#: Without these the card cannot be opened at all.
_NEEDED = frozenset({"libascendcl.so", "torch_npu"})
