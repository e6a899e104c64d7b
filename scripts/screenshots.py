"""Pictures of reports for the docs, taken by a headless Chromium, and a check of any page in it.

    python scripts/screenshots.py runs/demo/alone/node_0 runs/demo/sharing/node_0   # writes docs/images/report*.png
    python scripts/screenshots.py --check page.html                                 # console errors, overflow, charts

Speaks the DevTools protocol over a pipe (``--remote-debugging-pipe``), so it needs Chromium and nothing else.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTHS = {"phone": 390, "desktop": 1280}
_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--hide-scrollbars",
    "--mute-audio",
)
# What a reader would stumble over: text outside the screen, charts without labels or units or with a legend over them, letters
# too small to read.
_LOOK = """(() => {
  const text = e => e ? e.textContent.trim() : '';
  const title = c => text(c.querySelector('.gtitle'));
  const over = (a, b) => a && b && a.getBoundingClientRect().top < b.getBoundingClientRect().bottom;
  const charts = [...document.querySelectorAll('.js-plotly-plot')];
  const drawings = [...document.querySelectorAll('svg')].filter(s => !s.closest('.js-plotly-plot'));
  const small = [...document.querySelectorAll('body *')].filter(e => e.children.length === 0 && text(e)
    && e.getClientRects().length && parseFloat(getComputedStyle(e).fontSize) < 10.5);
  return JSON.stringify({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    charts: charts.length,
    empty: charts.filter(c => !c.querySelector('.scatterlayer path, .barlayer path')).map(title),
    untitled: charts.filter(c => !text(c.querySelector('.gtitle'))).length,
    unlabelled: charts.filter(c => !text(c.querySelector('.xtitle')) || !text(c.querySelector('.ytitle'))).length,
    covered: charts.filter(c => over(c.querySelector('.legend'), c.querySelector('.xtitle'))).map(title),
    cut: charts.filter(c => c.getBoundingClientRect().right > innerWidth + 1).length,
    clipped: drawings.filter(s => s.getBBox().x + s.getBBox().width > s.clientWidth + 1).map(s => text(s).slice(0, 30)),
    small: small.map(e => text(e).slice(0, 30)).slice(0, 5),
  });
})()"""


class Browser:
    """A headless Chromium. A context manager."""

    def __init__(self, binary: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="chromium-")
        (child_in, self._to), (self._from, child_out) = _pipe(), _pipe()
        flags = [*_FLAGS, f"--user-data-dir={self._home.name}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        command = [sys.executable, "-c", _EXEC, str(child_in), str(child_out), binary, *flags, "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(child_in, child_out), stderr=subprocess.DEVNULL)
        os.close(child_in)
        os.close(child_out)
        self._left, self._number, self.events = b"", 0, list[dict[str, Any]]()
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has gone")
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path, width: int, height: int = 1000) -> None:
        """Load a page at that width, as a phone would below 600 pixels, and wait until its charts are drawn."""
        if not page.is_file():
            raise SystemExit(f"{page}: no such file")
        self.events.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def errors(self) -> list[str]:
        """Exceptions, console.error and failed loads since the page was opened."""
        out = []
        for e in self.events:
            p = e.get("params", {})
            if e.get("method") == "Runtime.exceptionThrown":
                out.append(p["exceptionDetails"].get("exception", {}).get("description", p["exceptionDetails"]["text"]))
            elif e.get("method") == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
                out.append(" ".join(str(a.get("value", a.get("description"))) for a in p["args"]))
            elif e.get("method") == "Log.entryAdded" and p["entry"]["level"] == "error":
                out.append(p["entry"]["text"])
        return out

    def shot(self, out: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        out.write_bytes(base64.b64decode(data))


def problems(browser: Browser, page: Path, width: int) -> list[str]:
    """What is wrong with ``page`` at ``width`` pixels; an empty list if nothing is."""
    browser.open(page, width)
    seen = json.loads(browser.run(_LOOK))
    wrong = [f"console: {e}" for e in browser.errors()]
    wrong += [f"{seen['overflow']} px wider than the screen"] if seen["overflow"] > 0 else []
    kinds = ("empty", "untitled", "unlabelled", "covered", "cut", "clipped", "small")
    wrong += [f"{kind}: {seen[kind]}" for kind in kinds if seen[kind]]
    wrong += [f"laid out {seen['width']} px wide"] if seen["width"] != width else []
    return wrong


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for n in names if (path := shutil.which(n))), None)


def pictures(browser: Browser, runs: Sequence[Path]) -> None:
    """One picture at each width of a report of ``runs``, and one of its transcripts."""
    from coterie.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        page = write_report(runs, Path(folder) / "report.html")
        for width in WIDTHS.values():
            if wrong := problems(browser, page, width):
                raise SystemExit(f"{width} px: {'; '.join(wrong)}")
        browser.open(page, WIDTHS["desktop"], 900)
        browser.shot(IMAGES / "report.png")
        browser.run("[...document.querySelectorAll('h2')].find(h => h.textContent === 'Transcripts')?.scrollIntoView()")
        browser.shot(IMAGES / "report-transcripts.png")
        browser.open(page, WIDTHS["phone"], 844)
        browser.shot(IMAGES / "report-phone.png")


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are above 9, out of the way of the two that Chromium reads."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


def main() -> None:
    binary = chromium()
    if binary is None:
        raise SystemExit("no Chromium found; on Debian: apt install chromium")
    args = sys.argv[1:]
    with Browser(binary) as browser:
        if args[:1] == ["--check"]:
            bad = {
                f"{p} at {w} px": found
                for p in args[1:]
                for w in WIDTHS.values()
                if (found := problems(browser, Path(p), w))
            }
            raise SystemExit("\n".join(f"{where}: {'; '.join(what)}" for where, what in bad.items()) or 0)
        pictures(browser, [Path(a) for a in args])


if __name__ == "__main__":
    main()
