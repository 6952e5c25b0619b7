# ruff: noqa: E501 -- a table of quotations from the code
"""Do the tests bite? Plants one bug at a time in a copy and names the first tier that fails.

    python -m tests.mutate            stops at the first tier that catches a bug
    python -m tests.mutate --all      runs every tier on every bug
    python -m tests.mutate NAME ...   only these

Exit status 1 when fewer than nine tenths are caught, or when a bug no longer applies to the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = ("unit", "model", "sim", "style")
# The unit tests of the core and the policies; the others test what lies outside them.
CORE = (
    "admission eviction explain floors forecast gangs granting growth holders idle leases nodes "
    "parts policies preload pressure reclaim sleep urgency victims"
).split()
FILES = {"unit": [f"tests/unit/test_{name}.py" for name in CORE]}
SEEDS = "60"
LEAST_CAUGHT = 0.9
PER_TIER_S = 300  # an endless loop is caught as well


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    path: str
    old: str
    new: str


BUGS = [
    Mutant("bytes freed on Released", "arbiter/rules/reclaim.py",
           "        reclaim(mind, entry, REASONS.get(event.reason, Reason.MANUAL))",
           "        reclaim(mind, entry, REASONS.get(event.reason, Reason.MANUAL))\n        gone(mind, entry)"),
    Mutant("bytes freed when the holder dies", "arbiter/rules/holders.py",
           "            reclaim(mind, entry, Reason.LOST)\n\n\ndef tend",
           "            reclaim(mind, entry, Reason.LOST)\n            mind.close(entry)\n\n\ndef tend"),
    Mutant("bytes freed before they are seen back", "arbiter/rules/nodes.py",
           "    if event.bytes_back:\n        gone(", "    if True:\n        gone("),
    Mutant("LOADING not charged", "arbiter/ledger.py",
           "CHARGED = frozenset({State.LOADING, ", "CHARGED = frozenset({"),
    Mutant("RECLAIMING not charged", "arbiter/ledger.py",
           "State.ASLEEP, State.RECLAIMING})\nUNCH", "State.ASLEEP})\nUNCH"),
    Mutant("measured bytes ignored", "arbiter/ledger.py",
           "return Bytes(max(granted, held))", "return Bytes(granted)"),
    Mutant("foreign bytes ignored", "arbiter/rules/nodes.py", "Bytes(eats + orphans + ", "Bytes(orphans + "),
    Mutant("unclaimed engines ignored", "arbiter/rules/nodes.py", "Bytes(eats + orphans + ", "Bytes(eats + "),
    Mutant("admission off by one byte", "arbiter/rules/granting.py",
           "self.room(device)) >= need\n", "self.room(device)) >= need - 1\n"),
    Mutant("admission strict by one byte", "arbiter/rules/granting.py",
           "self.room(device)) >= need\n", "self.room(device)) > need\n"),
    Mutant("never fits off by one", "arbiter/rules/granting.py",
           "    if need > look.most_bytes and", "    if need >= look.most_bytes and"),
    Mutant("overtaken once too often", "arbiter/rules/line.py",
           "if waiting.overtaken_count >= most_count:", "if waiting.overtaken_count > most_count:"),
    Mutant("overtaken for ever", "arbiter/rules/granting.py",
           "    if mind.now >= due_at:", "    if False:"),
    Mutant("who is due holds nothing", "arbiter/rules/granting.py",
           "        if waiting.is_due:\n            self.held", "        if False:\n            self.held"),
    Mutant("who is due is not first", "arbiter/rules/line.py",
           "(not waiting.is_due, *place)", "(waiting.is_due, *place)"),
    Mutant("who is due asks for itself alone", "arbiter/rules/granting.py",
           "    if not waiting.is_due:\n        return waiting.waiter.priority\n", "    return waiting.waiter.priority\n"),
    Mutant("promised bytes are lent", "arbiter/rules/granting.py",
           " - self.promised[device]\n", "\n"),
    Mutant("one that cannot load holds up the rest", "arbiter/rules/granting.py",
           "        look.hopeless.append((need, entry.priority))", "        look.held.update(look.books)"),
    Mutant("a change of the books is not looked at", "arbiter/ledger.py",
           "        self.changed.add(book.node)\n", ""),
    Mutant("a load does not warm those that wait", "arbiter/rules/line.py",
           "        if is_warm != was_warm:", "        if False:"),
    Mutant("a victim more urgent than the asker", "arbiter/rules/eviction.py",
           "    if its_own < urgent:\n        return Obstacle.URGENT\n", ""),
    Mutant("urgent for ever", "arbiter/rules/urgency.py",
           "mind.now < fades_at else Priority.BATCH", "True else Priority.BATCH"),
    Mutant("hurry is not heard", "arbiter/rules/admission.py",
           "event.priority < entry.priority:", "event.priority > entry.priority:"),
    Mutant("dear ranks do not come first", "arbiter/rules/victims.py",
           "for group in reversed(groups):", "for group in groups:"),
    Mutant("no search beyond the greedy", "arbiter/rules/victims.py",
           "    return _Search(group, greedy).best(short)", "    return greedy"),
    Mutant("a group is not exclusive", "arbiter/rules/groups.py", "    return bool(others)", "    return False"),
    Mutant("deadlines are not foreseen", "arbiter/rules/forecast.py",
           "waiting.predicted_at > waiting.deadline:", "False:"),
    Mutant("a constant predictor", "arbiter/rules/predictor.py",
           "mean_y + slope * (x - mean_x)", "mean_y"),
    Mutant("no overhead is learned", "arbiter/rules/estimates.py",
           "said + beyond)", "said)"),
    Mutant("replicas share a device", "policies/place_best_fit.py", "s.copies_count, ", ""),
    Mutant("asking again queues twice", "arbiter/rules/admission.py",
           "        elif entry.ticket not in mind.line:\n", "        else:\n"),
    Mutant("asking again charges again", "arbiter/rules/admission.py",
           "        _asked_again(mind, entry, event)\n        return\n", "        pass\n"),
    Mutant("a restarted arbiter grants at once", "arbiter/rules/mind.py",
           "return not self.awaited or self.now >= self.settled_at", "return True"),
    Mutant("grants before the first reading", "arbiter/rules/sites.py",
           "    if node.heard is None or since", "    if node.heard is not None and since"),
    Mutant("grants beside an engine nobody claimed", "arbiter/rules/sites.py",
           " and now >= _unclaimed_until(mind, node, device)", ""),
    Mutant("revokes pinned", "arbiter/rules/eviction.py", "        and not entry.pinned\n", ""),
    Mutant("ignores minimum residency", "arbiter/rules/eviction.py",
           "    if its_own == urgent and mind.now < min_residency_ends(mind, entry):", "    if False:"),
    Mutant("evicts again for bytes already coming back", "arbiter/rules/granting.py",
           "book.free_bytes + coming_back(book)", "book.free_bytes"),
    Mutant("counts on a quarantined holder", "arbiter/rules/eviction.py",
           "        if e.state is State.DRAINING or not e.alarmed\n", ""),
    Mutant("evicts for what still would not fit", "arbiter/rules/victims.py",
           "    if cheaper < missing:\n        return []\n", ""),
    Mutant("spares nobody", "arbiter/rules/victims.py",
           "        if missing + option.freed_bytes <= 0:", "        if False:"),
    Mutant("asks at once who just refused", "arbiter/rules/eviction.py",
           "        and mind.now >= entry.refused_until\n", ""),
    Mutant("takes a model in use for want of memory", "arbiter/rules/eviction.py",
           "    return _is_lawful(mind, entry) and entry.inflight == 0", "    return _is_lawful(mind, entry)"),
    Mutant("believes a sleeper", "arbiter/rules/eviction.py",
           "    if fallen < share(entry.home_bytes, mind.settings.slept_fraction):\n        return\n", ""),
    Mutant("never doubts a sleeper", "arbiter/rules/eviction.py",
           "    if mind.now < believe_by:", "    if True:"),
    Mutant("no bed for a sleeper", "arbiter/rules/eviction.py",
           "    return {**entry.granted, host.device: bed}", "    return {**entry.granted, host.device: Bytes(0)}"),
    Mutant("host copy off the books at the wake", "arbiter/rules/granting.py",
           "granted={**entry.granted, **home}", "granted=dict(home)"),
    Mutant("no timer for a lost answer", "arbiter/rules/eviction.py",
           "    elif mind.now >= answer_by and mind.is_silent(entry.holder):", "    elif False:"),
    Mutant("waits for an unload for ever", "arbiter/rules/eviction.py",
           "        if mind.now >= unload_by:", "        if False:"),
    Mutant("no timer at all", "arbiter/core.py", "    if (at := mind.alarms.next()) is not None:",
           "    if (at := mind.alarms.next()) is None:"),
    Mutant("alarms ring late", "arbiter/rules/alarms.py", "if armed is None or at < armed:", "if armed is None or at > armed:"),
    Mutant("reap is not repeated", "arbiter/rules/reclaim.py",
           "    if mind.now >= entry.reap_at:\n        _reap(mind, entry)\n", ""),
    Mutant("no quarantine", "arbiter/rules/reclaim.py", "    entry.alarmed = True\n", ""),
    Mutant("a heartbeat under way denies a grant", "arbiter/rules/holders.py",
           "entry.state in HOLDING and _is_confirmed(mind, entry):", "entry.state in HOLDING:"),
    Mutant("a forgotten ticket stays for ever", "arbiter/rules/holders.py",
           " if ticket not in listed]:", " if False]:"),
    Mutant("a lost Loaded never heals", "arbiter/rules/holders.py",
           "    if held.phase is ev.Phase.RESIDENT and (not is_wake", "    if False and (not is_wake"),
    Mutant("a dead holder keeps its place", "arbiter/rules/holders.py",
           "        if entry.state is State.QUEUED:\n            mind.refuse(entry.ticket, StaleEpoch",
           "        if entry.state is State.QUEUED:\n            continue\n            mind.refuse(entry.ticket, StaleEpoch"),
    Mutant("an old heartbeat revives a closed ticket", "arbiter/rules/holders.py",
           " and held.ticket not in mind.answers:", ":"),
    Mutant("a failed load does not cool down", "arbiter/rules/loads.py", "    _cool_down(mind, entry, cause)\n", ""),
    Mutant("success does not clear the cool-down", "arbiter/rules/loads.py",
           "    mind.failures.pop((entry.capability, entry.model), None)\n    mind.displaced.pop((entry.holder, entry.model), None)\n    if len",
           "    mind.displaced.pop((entry.holder, entry.model), None)\n    if len"),
    Mutant("a failed switch restores nothing", "arbiter/rules/loads.py",
           "            mind.say(Reload(holder, model))", "            pass"),
    Mutant("attempt 2 asks no more", "arbiter/rules/estimates.py",
           "        if corrected > said:", "        if corrected < said:"),
    Mutant("a lower peak replaces a higher", "arbiter/rules/estimates.py",
           "        if peak > self._peak.get(key, Bytes(0)):", "        if True:"),
    Mutant("in use is forgotten at the load", "arbiter/rules/loads.py", "    entry.inflight = 1\n", "    entry.inflight = 0\n"),
    Mutant("keep-warm ignores use", "arbiter/rules/watch.py",
           "    if entry.inflight > 0 or entry.ticket in mind.line:\n        return\n", ""),
    Mutant("a dead node keeps its devices", "arbiter/rules/nodes.py",
           "    for device in node.devices:\n        mind.ledger.drop_device(device)\n", ""),
    Mutant("policy order reversed", "policies/evict_priority_lru.py", "c.last_used, c.ticket)", "-c.last_used, c.ticket)"),
    Mutant("busy before idle", "arbiter/rules/ranking.py", "entry.inflight > 0, -urgent", "entry.inflight == 0, -urgent"),
    Mutant("worst fit", "policies/place_best_fit.py", "abs(left)", "-abs(left)"),
    Mutant("last come, first served", "policies/admit_fifo.py", "(w.asked, w.turn)", "(-w.asked, -w.turn)"),
    Mutant("keep-warm evicts pinned", "policies/keep_warm.py", "idler.pinned or ", ""),
    Mutant("a policy reads the clock", "policies/keep_warm.py",
           "from arbiter.units import Instant, after", "import time\n\nfrom arbiter.units import Instant, after"),
    Mutant("the core rolls dice", "arbiter/core.py", "from typing import Any", "import random\nfrom typing import Any"),
    Mutant("a transition that is not drawn", "arbiter/ledger.py",
           "State.ASLEEP: frozenset({State.LOADING,", "State.ASLEEP: frozenset({State.RESIDENT, State.LOADING,"),
    Mutant("wiggle forgotten", "arbiter/rules/budget.py", "ours - share(ours, settings.wiggle_fraction)", "ours"),
    Mutant("an error loses a field in transit", "arbiter/errors.py",
           "super().__init__(what, waiting, bound, retry_after_s)", "super().__init__(what, waiting, bound)"),
    Mutant("news in a heartbeat overlooked", "arbiter/rules/holders.py",
           "        and held.uses_count == entry.uses_count\n", ""),
    Mutant("what fades keeps its place", "arbiter/rules/ranking.py",
           "        if fades_at is not None and fades_at > mind.now:", "        if False:"),
    Mutant("prices are never made anew", "arbiter/rules/ranking.py",
           "            changed.update(self._in_turn(mind))\n", ""),
    Mutant("what changed keeps its place", "arbiter/ledger.py",
           "            self.stale.add(ticket)\n", ""),
    Mutant("the urgent are hidden behind the hopeless", "arbiter/rules/granting.py",
           "        if any(count > 0 and urgent < priority for", "        if any(False and count > 0 and urgent < priority for"),
    Mutant("the small are hidden behind the hopeless", "arbiter/rules/line.py",
           "        return is_known and self.least_bytes >= need", "        return is_known"),
    Mutant("who may not load for pressure counts as too large", "arbiter/rules/granting.py",
           "    elif sites and found == sites:", "    elif found == sites:"),
    Mutant("no net under the heartbeats", "arbiter/rules/watch.py",
           '        if ("ticket", entry.ticket) not in mind.alarms:', "        if False:"),
    Mutant("a gang in parts", "arbiter/rules/gangs.py",
           "    return there if len(there) == len(entry.gang) else None", "    return there"),
    Mutant("an equal split rounds down", "arbiter/rules/gangs.py",
           "Bytes(-(-need // ways))", "Bytes(need // ways)"),
    Mutant("growth waits on growth", "arbiter/rules/growth.py",
           "    if not all(_can_wait(mind, e) for e in (*_growing(mind), entry)):", "    if False:"),
    Mutant("growth evicts for what still would not do", "arbiter/rules/growth.py",
           "    for victim in chosen if short <= 0 else []:", "    for victim in chosen:"),
    Mutant("a tenant leases all there is", "arbiter/rules/leases_held.py",
           "    if has + wants <= bound:", "    if True:"),
    Mutant("a lease is given no notice", "arbiter/rules/eviction.py",
           "    notice = entry.lease.notice if entry.lease else ", "    notice = "),
    Mutant("pressure takes text", "arbiter/rules/pressure.py",
           "    return spec is not None and mind.policies.roles[spec.role].is_spared", "    return False"),
    Mutant("a pushed level lasts for ever", "arbiter/rules/pressure.py",
           " and mind.now < felt.pushed_until", ""),
    Mutant("loads begin under critical pressure", "arbiter/rules/pressure.py",
           "    return level_of(mind, device) is Level.CRITICAL and not is_spared(mind, entry)", "    return False"),
    Mutant("guesses while somebody waits", "arbiter/rules/preload.py",
           " and not len(mind.line)\n", "\n"),
    Mutant("a guess keeps its bytes", "arbiter/rules/eviction.py",
           "    if guesses and short <= guessed:", "    if False:"),
    Mutant("a floor does not hold", "arbiter/rules/floors.py",
           "        mind.ledger.pin(entry, spec.pinned or event.floor is Floor.DEVICE)", "        mind.ledger.pin(entry, spec.pinned)"),
    Mutant("loads what is managed from outside", "arbiter/rules/floors.py",
           "    if spec is None or not spec.is_external:", "    if True:"),
    Mutant("what was removed is remembered", "arbiter/rules/floors.py",
           "        mind.estimates.forget_model(*name)\n", ""),
    Mutant("the oversized loads beside others", "arbiter/rules/oversize.py",
           "    left = [e for e in book.entries.values() if _comes_back(e)]", "    left: list[Entry] = []"),
    Mutant("who stands before is not foreseen", "arbiter/rules/forecast.py",
           "* ahead_count // len(sample)", "* 0"),
]  # fmt: skip


def plant(mutant: Mutant, copy: Path) -> None:
    path = copy / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.path}")
    path.write_text(text.replace(mutant.old, mutant.new))


def files_of(tier: str, mutant: Mutant | None) -> list[str]:
    """The test that is named after the file comes first: most bugs are caught by it."""
    near = f"test_{Path(mutant.path).stem}.py" if mutant else ""
    return sorted(FILES.get(tier, [f"tests/{tier}"]), key=lambda name: not name.endswith(near))


def fails(tier: str, copy: Path, mutant: Mutant | None) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", *files_of(tier, mutant)]
    env = {**os.environ, "SIM_SEEDS": SEEDS, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, timeout=PER_TIER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def copy_tree(to: Path) -> None:
    for package in ("arbiter", "policies", "deployments"):
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "tests").mkdir()
    for name in ("__init__.py", *TIERS):
        source = ROOT / "tests" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, to / "tests" / name)
    (to / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "states.md", to / "docs")
    shutil.copy(ROOT / "pyproject.toml", to)


def judge(mutant: Mutant | None, run_all: bool) -> list[str]:
    """The tiers that fail; with no mutant, on the code as it is."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        if mutant:
            plant(mutant, copy)
        caught: list[str] = []
        for tier in TIERS:
            if fails(tier, copy, mutant):
                caught.append(tier)
                if not run_all:
                    break
        return caught


def main() -> int:
    run_all = "--all" in sys.argv
    names = [a for a in sys.argv[1:] if a != "--all"]
    bugs = [b for b in BUGS if not names or b.name in names]
    if broken := judge(None, run_all=True):
        print(f"without any bug these tiers fail: {broken}")
        return 1
    print("| bug | " + " | ".join(TIERS) + " |")
    print("|---|" + "---|" * len(TIERS))
    caught_count = 0
    for bug in bugs:
        caught = judge(bug, run_all)
        caught_count += bool(caught)
        marks = " | ".join("x" if tier in caught else " " for tier in TIERS)
        print(f"| {bug.name} | {marks} |{'' if caught else '  <- not caught'}", flush=True)
    print(f"{caught_count} of {len(bugs)} caught ({caught_count / len(bugs):.0%})")
    return int(caught_count < LEAST_CAUGHT * len(bugs))


if __name__ == "__main__":
    raise SystemExit(main())
