"""Where the `cacheblend` command begins."""

import signal


def main() -> None:
    """Runs `cbcli.main`. Ctrl-C while that is imported just ends the process: nothing has begun,
    and all Python would have to show is a traceback of imports."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, say
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cbcli.main import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
