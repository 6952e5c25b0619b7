"""`arbiter top`: rows and bars of the view model, one frame, rich and textual."""

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType
from textual.widgets import DataTable, Static, TabbedContent

from arbiter.core.reports.snapshot import CooldownView
from arbiter.units import seconds
from deployments.cli.output import CommandError
from deployments.cli.see.top import rows as top_rows
from deployments.cli.see.top import watch as top_watch
from deployments.cli.see.top.rows import Selection
from deployments.cli.see.top.screen import Screen
from deployments.cli.see.top.watch import Watch
from deployments.monitoring.followed import FollowedStream
from deployments.monitoring.story import event_row
from deployments.monitoring.view import Facts, SlabRow, View, to_plain, view_of
from tests.support.arbiter_states import Books
from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront
from tests.support.terminal import Terminal
from tests.support.waits import eventually

NOW = 1_000_000.0
EVENT: dict[str, Any] = {
    "seq": 1_000_001, "epoch": 1, "unix_s": NOW - 5, "kind": "eviction", "ticket": "b-1",
    "size_bytes": 1 << 30, "took_s": None, "capability": "chat", "model": "b", "reason": "swap",
}  # fmt: skip


def books() -> Books:
    """On 1,000 MiB: 400 granted, of which 360 are measured, 100 coming back, 250 foreign."""
    made = Books(foreign={"n1/gpu:0": {"Xorg": 250}})
    made.works("batch-1", 2, 7)
    made.holds("big-chat", 400, inflight=3)
    made.holds("old-chat", 100, "reclaiming")
    made.holds("soft-chat", 200, "asleep", device="n1/host")
    made.waits("next-chat", 700, left_s=2.0)
    made.leases("training", 50)
    made.pressure["n1/gpu:0"] = "low"
    made.cooldowns.append(CooldownView("chat", "bad-chat", "no such file", 2, seconds(30.0)))
    return made


@pytest.fixture
def view() -> View:
    return view_of(books().state(), Facts({"cold-chat": "chat"}), NOW)


def text(*parts: RenderableType, width: int = 160) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return captured.get()


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.spec("K4")
def test_a_bar_shares_its_width_out_by_bytes(view: View) -> None:
    device = view.devices[0]
    sums = top_rows.amounts(device)
    mib = {kind: round(amount / (1 << 20)) for kind, amount in sums.items()}
    assert mib == {"measured": 405, "granted": 45, "coming_back": 100, "foreign": 250, "free": 200}
    drawn = top_rows.bar(sums, 40).plain
    assert drawn == "█" * 16 + "▓" * 2 + "░" * 4 + "▒" * 10 + "·" * 8


@pytest.mark.spec("K4")
@pytest.mark.parametrize("width", [1, 7, 40, 121])
def test_a_bar_is_as_wide_as_it_should_be_whatever_it_shows(view: View, width: int) -> None:
    one = {"measured": 1, "granted": 1, "coming_back": 1, "foreign": 1, "free": 1}
    nothing = dict.fromkeys(one, 0)
    for sums in (*(top_rows.amounts(device) for device in view.devices), one, nothing):
        assert len(top_rows.bar(sums, width).plain) == width


@pytest.mark.spec("K4")
def test_memory_of_an_overcommitted_device_fills_its_bar() -> None:
    made = Books()
    made.holds("big-chat", 1_200)
    drawn = text(top_rows.memory(view_of(made.state(), Facts(), NOW).devices))
    assert "free -200.0 MiB" in drawn
    assert "·" not in drawn.splitlines()[1]


@pytest.mark.spec("K4")
def test_a_frame_says_what_the_view_says(view: View) -> None:
    drawn = text(*top_rows.frame(view, [event_row(EVENT)]))
    for words in (
        "arbiter 0.1, epoch 1, policy cost_aware; 4 of 5 models, 1 queued",
        "! Memory pressure on n1/gpu:0 is low",
        "bad-chat failed to load 2 times: no such file",
        "n1/gpu:0: 1000.0 MiB to lend, free 200.0 MiB, pressure low",
        "granted 450.0 MiB, measured 495.0 MiB, foreign 250.0 MiB, coming back 100.0 MiB",
        "big-chat 400.0 MiB, foreign Xorg 250.0 MiB, leaving old-chat 100.0 MiB, training 50.0 MiB",
        "eviction  b is asked to leave (swap), 1.0 GiB",
    ):
        assert words in " ".join(drawn.split("\n")), words
    lines = [line.split() for line in drawn.splitlines()]
    assert ["big-chat", "chat", "resident", "10.0", "s", "3", "400.0", "MiB"] in [
        line[:8] for line in lines
    ]
    assert ["cold-chat", "chat", "cold", "-"] in [line[:4] for line in lines]
    queued = next(line for line in lines if line[:2] == ["1", "next-chat-1"])
    assert queued == "1 next-chat-1 next-chat 700.0 MiB 2.0 s 4.0 s 2.0 s".split()
    leased = next(line for line in lines if line[:2] == ["training-1", "training"])
    assert leased[-2:] == ["2", "min"]


@pytest.mark.spec("E1", "K4")
def test_pool_has_a_row_for_each_slab(view: View) -> None:
    assert "no engine keeps anything" in text(top_rows.pool(()).drawn())
    row = SlabRow("n1/1", "kv", "chat/tiny", (), 3 << 20, 9 << 20, 7, 5, 2, "a1b2c3")
    rows = (row, replace(row, slab="n1/2", users=("tiny-1",), namespace=""))
    drawn = text(top_rows.chosen(replace(view, slabs=rows), [], Selection("pool"), NOW).drawn())
    first, second = (line.split() for line in drawn.splitlines()[-2:])
    assert first == "n1/1 kv chat/tiny idle a1b2c3 3.0 MiB 9.0 MiB 7 5 2".split()
    assert second == "n1/2 kv chat/tiny tiny-1 - 3.0 MiB 9.0 MiB 7 5 2".split()


@pytest.mark.spec("K4")
def test_models_are_sorted_by_what_was_chosen(view: View) -> None:
    choice, orders = Selection(), []
    for _ in top_rows.ORDERS:
        rows = top_rows.models(view, choice.order, NOW).rows
        orders.append((choice.order, [row[0] for row in rows][:2]))
        choice = choice.next_order()
    assert choice == Selection()
    assert orders == [
        ("state", ["big-chat", "next-chat"]),
        ("name", ["big-chat", "cold-chat"]),
        ("memory", ["big-chat", "soft-chat"]),
        ("requests", ["big-chat", "cold-chat"]),
    ]


@pytest.mark.spec("K4")
def test_what_others_chose_cannot_steer_the_terminal() -> None:
    made = Books()
    made.holds("bad\x1b[2Jname\nline", 100)
    drawn = text(*top_rows.frame(view_of(made.state(), Facts(), NOW), []))
    assert "\x1b" not in drawn
    assert "bad [2Jname line" in drawn


@pytest.mark.spec("K4")
def test_500_models_are_drawn_in_the_room_that_there_is(view: View) -> None:
    row = view.models[0]
    many = replace(view, models=tuple(replace(row, model=f"m{n:03}") for n in range(500)))
    drawn = text(top_watch.screenful(watched(many), Selection(), NOW, 30), width=140)
    assert 20 < len(drawn.splitlines()) <= 30
    assert "m000" in drawn


# -- one frame -------------------------------------------------------------------------------------


@pytest.mark.spec("K4")
def test_once_prints_a_frame_and_json_the_view(run: Run, front: ScriptedFront, view: View) -> None:
    front.says("GET", "/arbiter/view", to_plain(view))
    front.says("GET", "/arbiter/events/recent", {"events": [EVENT]})
    done = run("top", "--once")
    assert done.exit_code == 0
    assert "big-chat" in done.stdout and "eviction" in done.stdout
    assert "\x1b" not in done.stdout
    assert run("top").stdout == done.stdout  # in a pipe
    assert json.loads(run("top", "--json").stdout)["epoch"] == 1


@pytest.mark.spec("K4")
def test_a_view_of_another_version_is_said(run: Run, front: ScriptedFront) -> None:
    front.says("GET", "/arbiter/view", {"epoch": 1})
    front.says("GET", "/arbiter/events/recent", {"events": []})
    done = run("top", "--once")
    assert done.exit_code == 1
    assert "another version" in done.stderr


# -- following -------------------------------------------------------------------------------------


def messages(view: View) -> list[dict[str, Any]]:
    """What the front sends: all, then a change of one model, then that another has gone."""
    plain = to_plain(view)
    models = plain.pop("models")
    changed = {**models[0], "state": "draining"}
    return [
        {"view": plain, "models": models, "events": [to_event(EVENT)]},
        {"models": [changed]},
        {"gone": ["chat/cold-chat"], "away_unix_s": NOW},
    ]


def to_event(event: dict[str, Any]) -> dict[str, Any]:
    row = event_row(event)
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


@pytest.mark.spec("K4")
def test_messages_add_up_to_the_view(view: View) -> None:
    followed = FollowedStream()
    first, second, third = messages(view)
    assert followed.take({}) is None
    assert followed.take(first) == view
    assert followed.last_event == EVENT["seq"]
    changed = followed.take(second)
    assert changed and changed.models[0].state == "draining"
    assert changed.models[1:] == view.models[1:]
    last = followed.take(third)
    assert last and [row.model for row in last.models] == [row.model for row in view.models[:-1]]
    assert followed.away_unix_s == NOW
    followed.begin_anew()
    assert followed.take({"events": []}) is None
    assert followed.away_unix_s is None
    assert followed.last_event == EVENT["seq"]


def streamed(view: View) -> str:
    return "".join(f"event: view\ndata: {json.dumps(m)}\n\n" for m in messages(view))


def is_followed(front: ScriptedFront, view: View) -> None:
    """The front streams the view, and nothing more behind its last event. A watch asks for that a
    second after the stream has ended, and would end itself with an address that is not known."""
    front.streams(f"/arbiter/view/stream?after={EVENT['seq']}", "")
    front.streams("/arbiter/view/stream?after=0", streamed(view))


@pytest.mark.spec("K4")
def test_a_watch_has_the_view_and_goes_on_behind_its_last_event(
    front: ScriptedFront, view: View
) -> None:
    front.streams("/arbiter/view/stream?after=0", streamed(view))
    front.refuses("GET", f"/arbiter/view/stream?after={EVENT['seq']}", 403, "scope_missing", "no")
    with top_watch.watching("http://127.0.0.1:1") as watch:
        assert watch.ended.wait(60)
    assert watch.view and len(watch.events) == 1
    with pytest.raises(CommandError, match="scope_missing"):
        watch.check()


@pytest.mark.spec("K4")
async def test_a_front_that_is_away_is_asked_again(front: ScriptedFront, view: View) -> None:
    path = "/arbiter/view/stream?after=0"
    front.refuses("GET", path, 503, "starting", "not yet")
    with top_watch.watching("http://127.0.0.1:1") as watch:
        await eventually(lambda: "not yet" in watch.trouble)
        assert "not yet" in text(top_watch.screenful(watch, Selection(), NOW, 30))
        is_followed(front, view)
        await eventually(lambda: watch.view)
    assert watch._failure is None


# -- screens ---------------------------------------------------------------------------------------


def watched(view: View) -> Watch:
    """A watch that has this view, and follows nothing."""
    made = Watch("http://127.0.0.1:1")
    made.view, made.trouble, made.events = view, "", (event_row(EVENT),)
    return made


def first_cells(table: "DataTable[Any]") -> list[str]:
    return [str(table.get_row_at(n)[0]) for n in range(table.row_count)]


@pytest.mark.spec("K4")
async def test_keys_change_tab_and_order_and_quit(view: View) -> None:
    screen = Screen(watched(view))
    async with screen.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        names = first_cells(screen.query_one("#models-rows", DataTable))
        assert names == [row.model for row in view.models]
        assert "n1/gpu:0" in text(screen.query_one("#memory", Static).content)  # type: ignore[arg-type]
        for _ in range(2):
            await pilot.press("s")
        assert first_cells(screen.query_one("#models-rows", DataTable))[1] == "soft-chat"
        await pilot.press("tab")
        assert screen.query_one(TabbedContent).active == "queue"
        assert first_cells(screen.query_one("#queue-rows", DataTable)) == ["1"]
        await pilot.press("tab")
        assert first_cells(screen.query_one("#jobs-rows", DataTable)) == ["batch-1"]
        await pilot.press("tab", "tab")
        assert screen.query_one(TabbedContent).active == "pool"
        await pilot.press("tab")
        assert first_cells(screen.query_one("#events-rows", DataTable))[0].count(":") == 2
        await pilot.press("tab")
        assert first_cells(screen.query_one("#adapters-rows", DataTable)) == [
            "no adapter was found"
        ]
        await pilot.press("q")
    assert not screen.is_running


@pytest.mark.spec("K4")
async def test_adapters_are_asked_for_while_their_tab_is_shown(
    front: ScriptedFront, view: View
) -> None:
    path = f"/arbiter/view/adapters?most={top_watch.ADAPTERS_MOST}"
    said = {"count": 2, "adapters": ["talk:b", "talk:a"], "tiers": {"talk:b": "hot"}}
    front.says("GET", path, said)
    is_followed(front, view)
    with top_watch.watching("http://127.0.0.1:1") as watch:
        await eventually(lambda: watch.view)
        assert ("GET", path) not in front.asked()
        shown = Selection(top_rows.ADAPTERS)
        top_watch.screenful(watch, shown, NOW, 30)
        await eventually(lambda: watch.adapters)
        lines = text(top_watch.screenful(watch, shown, NOW, 30)).splitlines()
    assert [line.split() for line in lines[-2:]] == [["talk:b", "hot"], ["talk:a", "-"]]


@pytest.mark.spec("K4")
async def test_a_table_follows_its_rows(view: View) -> None:
    """Cells change in place; rows that come and go leave no other behind."""
    watch = watched(view)
    screen = Screen(watch)
    async with screen.run_test(size=(120, 40)):
        table = screen.query_one("#models-rows", DataTable)
        watch.view = replace(view, models=(replace(view.models[0], inflight=7), *view.models[1:]))
        screen.look()
        assert str(table.get_row_at(0)[4]) == "7"
        watch.view = replace(view, models=view.models[1:])
        screen.look()
        assert first_cells(table) == [row.model for row in view.models[1:]]
        watch.view = replace(view, models=())
        screen.look()
        assert first_cells(table) == ["no models"]
        watch.view = view
        screen.look()
        assert first_cells(table) == [row.model for row in view.models]


@pytest.mark.spec("K4")
async def test_the_screen_ends_with_its_watch(view: View) -> None:
    watch = watched(view)
    screen = Screen(watch)
    async with screen.run_test() as pilot:
        watch.ended.set()
        screen.draw()
        await pilot.pause()
    assert not screen.is_running


WITHOUT_TEXTUAL = (
    "import sys, importlib.util as u; find = u.find_spec;"
    "u.find_spec = lambda name, *a: None if name == 'textual' else find(name, *a);"
    "from deployments.cli.main import main; code = main(sys.argv[1:]);"
    "assert 'textual' not in sys.modules; sys.exit(code)"
)


@pytest.mark.spec("K4")
@pytest.mark.parametrize(
    "program", [["-c", WITHOUT_TEXTUAL], ["-m", "deployments.cli"]], ids=["rich", "textual"]
)
def test_top_runs_in_a_terminal_until_q(
    front: ScriptedFront, view: View, program: list[str]
) -> None:
    is_followed(front, view)
    with front.serving() as url, Terminal([*program, "top", "--url", url]) as terminal:
        terminal.read_until("big-chat")
        terminal.write("\t")
        terminal.read_until("next-chat-1")
        terminal.write("q")
        assert terminal.exit_status() == 0, terminal.last_said[-3_000:]
