"""Pages in a headless Chromium: how wide they are, what they ask for, what they write to the console."""

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
# Each page in a frame as wide as a telephone, and in one of a laptop. What it says at the end: which are wider, what
# code is cut off, and what asks another host.
PROBE = """<!doctype html><title>probe</title><body><pre id="wrong">[]</pre><script>
const wrong = [], names = %s;
async function look(name, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 844px`;
  frame.src = name;
  await new Promise(done => { frame.onload = done; document.body.append(frame); });
  const page = frame.contentDocument;
  for (const part of [page.documentElement, ...page.querySelectorAll(".page, .main, .content")])
    if (part.scrollWidth > part.clientWidth)
      wrong.push(`${name}: ${part.className || part.localName} ${part.scrollWidth} of ${part.clientWidth}`);
  const code = width < 1000 ? ".highlight-python pre, .highlight-sh pre, .highlight-diff pre" : "div.highlight pre";
  for (const part of page.querySelectorAll(code))
    if (part.scrollWidth > part.clientWidth)
      wrong.push(`${name}: code of ${part.scrollWidth} in ${part.clientWidth}: ${part.textContent.slice(0, 60)}`);
  for (const asked of frame.contentWindow.performance.getEntriesByType("resource"))
    if (!asked.name.startsWith(location.origin)) wrong.push(`${name}: asks ${asked.name}`);
  frame.remove();
}
(async () => {
  for (const name of names) for (const width of [390, 1280]) await look(name, width);
  document.getElementById("wrong").textContent = JSON.stringify([names.length, wrong]);
})();
</script></body>"""


class Served(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args, asked, probe, folder, **kwargs):
        self.asked, self.probe = asked, probe
        super().__init__(*args, directory=str(folder), **kwargs)

    def do_GET(self):
        if self.path != "/probe.html":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.probe.encode())

    def send_error(self, code, *args, **kwargs):
        self.asked.append(f"{code} {self.path}")
        super().send_error(code, *args, **kwargs)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder, probe=""):
    """The folder on a port of this machine: its address, and what was asked for that is not there."""
    asked = []
    handler = functools.partial(Served, asked=asked, probe=probe, folder=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def shown(url, tmp_path):
    """The page as the browser has it after its scripts, and what it wrote to its console."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=60000", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", url]  # no other host can be reached
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, console


def wrong_pages(folder, names, tmp_path):
    """Pages that are wider than a screen, or cut code off, or ask another host; what is not there; the console."""
    with served(folder, PROBE % json.dumps(names)) as (address, missing):
        text, console = shown(f"{address}/probe.html", tmp_path)
    looked, wrong = json.loads(html.unescape(re.search(r'<pre id="wrong">(.*?)</pre>', text)[1]))
    assert looked == len(names)
    return wrong, [path for path in missing if not path.endswith("/favicon.ico")], console
