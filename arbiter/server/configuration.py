"""What capabilities and settings there are: the table of the front's file, changes at runtime, and
capabilities registered from Python. Each is checked, fed to the core, and kept in the state
file for the next epoch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, LogEvent
from arbiter.core.records.registry import Registry
from arbiter.errors import RequestError, SettingsConflict
from arbiter.protocol import messages
from arbiter.server.hours_clock import HoursClock
from arbiter.server.shell import Shell
from arbiter.server.store import Store
from arbiter.units import Generation


class LiveConfiguration:
    """Takes changes of the table and the settings, and registrations from Python. `current` is what
    the core goes by; `begin_anew` begins another epoch, for a cause."""

    def __init__(
        self,
        current: messages.Configuration,
        shell: Shell,
        store: Store,
        hours: HoursClock,
        begin_anew: Callable[[str], None],
    ) -> None:
        self.current = current
        self._shell, self._store, self._hours = shell, store, hours
        self._begin_anew = begin_anew

    def begin(self) -> None:
        """Tells a new core of the table."""
        self._tell_hours(self.current.capabilities.capabilities)
        self._shell.feed(self.current.capabilities)

    def restore_registered(self) -> None:
        """Registers again what was registered in earlier epochs. A capability that the table names
        differently by now gives way to the table."""
        try:
            registered = self._store.registered()
        except ValueError as error:  # of other code, which is to register them again
            return self._tell_registration_lost(None, error)
        for capability in registered:
            try:
                self._tell_hours([capability])
                self._shell.feed(ev.CapabilityRegistered(capability))
            except RequestError as error:
                self._tell_registration_lost(capability.name, error)

    def _tell_hours(self, capabilities: Iterable[types.CapabilitySpec]) -> None:
        self._hours.tell_of(capabilities, self._shell.core.settings.batch_hours)

    def _tell_registration_lost(self, capability: str | None, cause: Exception) -> None:
        """Logs that a registration from Python is lost. `capability`: None where all of them
        are."""
        kind = EventKind.REGISTRATION_LOST
        event = LogEvent(kind, {"capability": capability, "cause": str(cause)})
        self._shell.tell(event)

    def configure(self, configuration: messages.Configuration) -> None:
        """Takes the table of the front's file, unless the file is unchanged (C12)."""
        if configuration.table != self.current.written:
            self._choose(configuration.numbered(self.current.generation + 1))

    def change(self, configuration: messages.Configuration, of: Generation) -> Generation:
        """Changes the settings, if they are still of that generation. Returns the new generation.
        Raises SettingsConflict. Repeated, it is done once."""
        now = self.current
        if now.table == configuration.table and now.generation == of + 1:
            return now.generation
        if now.generation != of:
            raise SettingsConflict(of, now.generation)
        self._choose(replace(configuration, written=now.written, generation=Generation(of + 1)))
        return self.current.generation

    def _choose(self, configuration: messages.Configuration) -> None:
        """Takes effect at once; other settings or policies begin a new epoch, in which holders
        rejoin with everything they hold. Raises CapabilityConflict or UnknownRole, having changed
        nothing."""
        old, core, table = self.current, self._shell.core, configuration.capabilities
        future = Registry(tuple(sorted(configuration.policies.roles)))
        for capability in core.registered:
            future.register(capability)
        future.replace(table.capabilities)  # first, because it may be refused
        if {spec.role for spec in table.capabilities} <= old.policies.roles.keys():
            self._tell_hours(table.capabilities)
            self._shell.feed(table)  # else the next epoch takes it, which has the new roles
        self.current = configuration
        self._store.save_configuration(configuration)
        model_names = {
            (spec.name, model.name) for spec in future.specs.values() for model in spec.models
        }
        floors = [row for row in core.export_floors() if (row[0], row[1]) in model_names]
        self._store.save_floors(floors)  # what was removed has none
        removed = [list(name) for name in core.model_names if name not in model_names]
        self._store.save_removing(core.export_removing() + removed)
        self._shell.command_all(messages.ConfigChanged(configuration.table))
        if (old.settings, old.policies) != (configuration.settings, configuration.policies):
            self._begin_anew("settings changed")

    def register(self, capability: types.CapabilitySpec) -> None:
        """Adds a capability from Python. Raises CapabilityConflict, UnknownRole; ValueError for
        hours that are none."""
        self._tell_hours([capability])
        self._shell.feed(ev.CapabilityRegistered(capability))
        self._store.save_registered(self._shell.core.registered)
        self._store.save_removing(self._shell.core.export_removing())

    def unregister(self, capability: str) -> None:
        """Removes a capability registered from Python. Raises UnknownCapability for a name that was
        not."""
        self._shell.feed(ev.CapabilityUnregistered(capability))
        self._store.save_registered(self._shell.core.registered)
        self._store.save_floors(self._shell.core.export_floors())  # what was removed has none
        self._store.save_removing(self._shell.core.export_removing())
