"""Whether code whose names have changed still decides what it decided under its old names.

In the tree of the old commit, with this file's folder on the path, as a plugin of pytest: records
each life of each core that a test makes, and its decisions beside it. Lives that the old code
itself does not repeat, because a test reached into the core, are left out.

    RECORD_TO=LIVES PYTHONPATH=.:FOLDER python -m pytest -p replay_of_old_code tests/sim ...

In the tree of the new one: writes the recordings with the new names, replays them, and compares
each decision. Exit status 1 when one differs.

    python -m benchmarks.replay_of_old_code LIVES
"""

import argparse
import hashlib
import json
import os
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

# Old name: new name, of d1fa280 and the commit that added this file. Later renames need rows too.
CLASSES = {
    "Woke": "TimerFired", "Reap": "KillEngine", "Tell": "LogEvent", "Reload": "LoadModel",
    "WakeAt": "SetTimer", "Waits": "Queued", "Probe": "RequestReading",
}  # fmt: skip
GONE = "lives_in"  # of tickets in another's process (ADR 13): lives with one are left out

# -- in the old tree ------------------------------------------------------------------------------


class Recorded:
    """One core, recorded from its first event on."""

    def __init__(
        self, path: Path, core: Any, made_with: tuple[Any, ...], then: dict[str, Any]
    ) -> None:
        self.core, self.path = core, path
        recording = import_module("arbiter.recording")
        settings, _, epoch, known, began = made_with
        heading = recording.Heading(
            recording.protocol_hash(), settings, epoch, tuple(sorted(known)),
            then.get("restore_learned"), began,
            then.get("restore_floors"), then.get("restore_accounts"),
        )  # fmt: skip
        self.recorder = recording.Recorder(path, heading)
        self.decisions: list[str] = []

    def close(self) -> None:
        """Keeps the life if the old code repeats it."""
        self.recorder.close()
        recording, policies = import_module("arbiter.recording"), import_module("policies")
        [life] = recording.read(self.path)
        steps = recording.again(life, policies.bundle(life.heading.settings))
        if [repr(step.decisions) for step in steps] == [text or "[]" for text in self.decisions]:
            self.path.with_suffix(".decisions").write_text(
                "".join(f"{text}\n" for text in self.decisions)
            )
        else:
            self.path.unlink()


class Plugin:
    """Wraps the core's methods, in place, so that each core a test makes is recorded."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, self.is_checking = folder, 0, False
        self.made: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self.lives: dict[int, Recorded] = {}
        core = import_module("arbiter.core").Arbiter
        self.init, self.handle = core.__init__, core.handle
        core.__init__ = lambda made, *args: self.on_init(made, args)
        core.handle = lambda *args: self.on_event(*args)  # noqa: PLW0108 -- so that it is bound
        for name in ("restore_learned", "restore_floors", "restore_accounts"):
            setattr(core, name, self.noting(name, getattr(core, name)))

    def noting(self, name: str, restore: Any) -> Any:
        def restored(core: Any, value: Any) -> None:
            if id(core) in self.made:
                self.made[id(core)][2][name] = value
            restore(core, value)

        return restored

    def on_init(self, core: Any, args: tuple[Any, ...]) -> None:
        self.init(core, *args)
        if not self.is_checking:
            self.made[id(core)] = (core, args, {})

    def on_event(self, core: Any, event: Any, now: Any) -> Any:
        made = self.made.get(id(core))
        if made is None or made[0] is not core:  # a copy of one, or one of an earlier test
            return self.handle(core, event, now)
        if id(core) not in self.lives:
            self.count += 1
            path = self.folder / f"{os.getpid()}-{self.count:06}.jsonl"
            self.lives[id(core)] = Recorded(path, *made)
        life = self.lives[id(core)]
        life.recorder.event(event, now)
        life.decisions.append("")  # the hash leaves out an event that is refused
        decided = self.handle(core, event, now)
        life.recorder.decided(decided)
        life.decisions[-1] = repr(decided)
        return decided

    def pytest_runtest_teardown(self) -> None:
        self.is_checking = True  # with cores of its own, which are not recorded
        self.made.clear()
        for life in self.lives.values():
            life.close()
        self.lives.clear()
        self.is_checking = False


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Plugin(Path(os.environ["RECORD_TO"])))


# -- in the new tree ------------------------------------------------------------------------------


def renamed(decisions: str) -> str:
    """The text of some decisions, in new names."""
    names = "|".join(CLASSES)
    return re.sub(rf"\b({names})\(", lambda match: f"{CLASSES[match[1]]}(", decisions)


def converted(path: Path) -> list[dict[str, Any]] | None:
    """The lines of a recording of old code, in new names and with the sums over these; None where
    the life needs what is gone."""
    from arbiter.protocol.messages import protocol_hash

    heading, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    settings = heading["heading"]["settings"]
    settings["timeouts"] = settings.pop("terms")
    heading["heading"]["protocol"] = protocol_hash()
    total = hashlib.blake2b(digest_size=6)  # as recording.DecisionHash computes it
    decisions = path.with_suffix(".decisions").read_text().splitlines()
    for line, decided in zip(lines, decisions, strict=True):
        holders_of_it = [line["event"], *line["event"].get("tickets", [])]
        if any(isinstance(one, dict) and one.pop(GONE, None) for one in holders_of_it):
            return None
        line["kind"] = CLASSES.get(line["kind"], line["kind"])
        line["so_far"] = total.hexdigest()
        total.update(renamed(decided).encode())
    return [heading, *lines]


def main() -> int:
    from arbiter.server import recording
    from policies import bundle

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lives", type=Path)
    counts: Counter[str] = Counter()
    for path in sorted(parser.parse_args().lives.glob("*.jsonl")):
        lines = converted(path)
        if lines is None:
            counts["lives left out"] += 1
            continue
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        [life] = recording.read(new)
        old = path.with_suffix(".decisions").read_text().splitlines()
        steps = list(recording.replay(life, bundle(life.heading.settings)))
        is_same = all(step.is_same for step in steps)
        is_same &= [repr(step.decisions) for step in steps] == [
            renamed(text) or "[]" for text in old
        ]
        counts.update({
            "lives": 1, "events": len(steps), "decisions": sum(len(s.decisions) for s in steps),
            "lives that differ": not is_same,
        })  # fmt: skip
        if not is_same:
            print(f"{path} differs")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(bool(counts["lives that differ"]))


if __name__ == "__main__":
    raise SystemExit(main())
