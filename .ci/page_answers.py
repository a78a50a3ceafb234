"""Starts the page as a person would and waits until it answers; prints how long that took."""
import subprocess
import sys
import time
import urllib.request

PORT, PATIENCE = 7871, 60

started = time.monotonic()
page = subprocess.Popen([sys.executable, "app.py", "--port", str(PORT)])
try:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=2).read()
            break
        except OSError:
            if page.poll() is not None or time.monotonic() - started > PATIENCE:
                sys.exit("error: the page did not answer")
            time.sleep(0.1)
    print(f"page answered after {time.monotonic() - started:.1f} s")
finally:
    page.terminate()
    page.wait()
