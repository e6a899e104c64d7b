"""Which runs share a line of a chart, and the values of that line."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.report.data import RunLog

_MANY = 5  # more runs than this are drawn as one line per folder
_FOLDERS = 8  # most of these lines, times 3 keys of a chart: as many as there are styles; more go to the folders above
_SMOOTH = 40  # series longer than this are drawn as a moving mean over a twentieth of their length


@dataclass(frozen=True)
class Line:
    """Values over steps; with several runs their mean, and the lowest and highest of them."""

    x: list[int]
    y: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Curve:
    """The runs behind one line of every chart: one run, or those of a folder."""

    name: str
    runs: tuple[RunLog, ...]

    @property
    def averaged(self) -> bool:
        return len(self.runs) > 1

    def line(self, key: str) -> Line:
        """``key`` at every step that at least one run logged it."""
        at: dict[int, list[float]] = {}
        for run in self.runs:
            x, y = run.series(key)
            for step, value in zip(x, _smooth(y), strict=True):
                at.setdefault(step, []).append(value)
        steps = sorted(at)
        mean = [sum(at[s]) / len(at[s]) for s in steps]
        return Line(steps, mean, [min(at[s]) for s in steps], [max(at[s]) for s in steps])


def curves(runs: list[RunLog]) -> list[Curve]:
    """One curve per run; of many runs, one per folder, the deepest folders of which there are few enough."""
    if len(runs) <= _MANY:
        return [Curve(r.name, (r,)) for r in runs]
    parts = {r.path: tuple(r.name.split("/")) for r in runs}
    for depth in range(max(map(len, parts.values())) - 1, -1, -1):
        folders: dict[tuple[str, ...], list[RunLog]] = {}
        for r in runs:
            folders.setdefault(parts[r.path][: min(depth, len(parts[r.path]) - 1)], []).append(r)
        if len(folders) <= _FOLDERS:
            break
    return [Curve(_folder(of[0], path) if len(of) > 1 else of[0].name, tuple(of)) for path, of in folders.items()]


def _folder(run: RunLog, path: tuple[str, ...]) -> str:
    """The folder ``path``, of those in which ``run`` lies; the one that holds all runs by its own name."""
    return "/".join(path) or run.path.resolve().parents[run.name.count("/")].name


def reading_note(runs: list[RunLog]) -> str:
    """How the lines are to be read."""
    long = "Long curves are moving means over a twentieth of the run. " if _steps(runs) > _SMOOTH else ""
    many = (
        "Lines are means over the runs of a folder that logged the step; bands go from the lowest of these runs to the highest."
        if any(c.averaged for c in curves(runs))
        else ""
    )
    return long + many


def _steps(runs: list[RunLog]) -> int:
    return max(len(r.metrics) for r in runs)


def _smooth(values: list[float]) -> list[float]:
    """Moving mean over the last twentieth (at least 5 values) of a long series; a short one as it is."""
    if len(values) <= _SMOOTH:
        return values
    w = max(5, len(values) // 20)
    return [sum(values[max(0, i - w + 1) : i + 1]) / min(i + 1, w) for i in range(len(values))]
